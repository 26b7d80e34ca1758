"""Removing directories without ever reaching through a mount.

Owns: the only recursive removal of the agent, which the kernel itself keeps from crossing a mount point, and the
removal of empty directories for everything that a driver may have mounted.
May not touch: mounts.
Start reading at: `remove_tree`, `remove_empty`.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path

from moorage.errors import MoorageError
from moorage.host import libc
from moorage.host.dir_walk import DirWalk

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class MountInTheWay(MoorageError):
    """Something is mounted below a directory that was to be removed; nothing below the mount was touched."""

    code = "FAILED_PRECONDITION"

    def __init__(self, path: str | Path) -> None:
        super().__init__(f"{path} is a mount point, so nothing at or below it is removed")


def open_directory(parent: int, name: str, *, links: bool = False) -> int:
    """Open a directory below another one; EXDEV when a mount (of any kind) lies between, ELOOP for a link."""
    resolve = libc.NO_XDEV | libc.NO_MAGICLINKS | libc.BENEATH | (0 if links else libc.NO_SYMLINKS)
    return libc.openat2(parent, name, _DIRECTORY, resolve)


def _open_above(directory: int) -> int:
    """Open the directory above another one; EXDEV when a mount lies between, or has been made over it."""
    return libc.openat2(directory, "..", _DIRECTORY, libc.NO_XDEV | libc.NO_MAGICLINKS | libc.NO_SYMLINKS)


def remove_tree(path: Path) -> None:
    """Remove a directory that the agent filled, with all that is in it; MountInTheWay if anything is mounted there.

    Every directory is opened by openat2 with RESOLVE_NO_XDEV: even a bind mount of the same filesystem, made between
    two of our steps, is refused by the kernel.
    """
    _remove(path, only_empty=False)


def remove_tree_in(parent: int, name: str, shown: Path) -> None:
    """The same for whatever has this name in a directory that is open; errors call it `shown`."""
    _remove_in(parent, name, shown, only_empty=False)


def _remove(path: Path, *, only_empty: bool) -> None:
    try:
        parent = os.open(path.parent, _DIRECTORY)
    except FileNotFoundError:
        return
    try:
        _remove_in(parent, path.name, path, only_empty)
    finally:
        os.close(parent)


def _remove_in(parent: int, name: str, shown: Path, only_empty: bool) -> None:
    levels = [[name]]  # what is to be removed of each, from the top down to where the walk is
    with DirWalk(parent, open_directory, _open_above) as way:
        try:
            while levels:
                if levels[-1]:
                    name = levels[-1].pop()
                    names = _take(way, name, shown, only_empty)
                    if names is not None:
                        levels.append(names)
                    continue
                levels.pop()
                if levels:
                    name = way.up()
                    with contextlib.suppress(FileNotFoundError):
                        os.rmdir(name, dir_fd=way.fd)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EBUSY):
                raise MountInTheWay(shown.parent / way.path / name) from error
            raise


def _take(way: DirWalk, name: str, shown: Path, only_empty: bool) -> list[str] | None:
    """Unlink what is no directory; go into one that is, and say what is in it. What is gone already is fine."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=way.fd, follow_symlinks=False).st_mode):
            if only_empty:
                left = shown.parent / way.path / name
                raise MoorageError(f"{left} is left in a directory that should be empty")
            os.unlink(name, dir_fd=way.fd)
            return None
        way.down(name)
    except FileNotFoundError:
        return None
    try:
        return os.listdir(way.fd)
    except FileNotFoundError:  # removed since it was opened
        return []


def remove_empty(path: Path) -> None:
    """Remove a directory if it is there; NotEmpty is an error, a mount is an error, absence is fine."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise MountInTheWay(path) from error
        raise MoorageError(f"directory {path} cannot be removed: {os.strerror(error.errno or 0)}") from error


def remove_empty_up_to(path: Path, stop: Path) -> None:
    """Remove a directory and its parents below `stop`, as long as they are empty."""
    while path != stop and stop in path.parents:
        try:
            path.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return
        path = path.parent


def remove_empty_tree(path: Path) -> None:
    """Remove a tree of directories that hold nothing; the first thing found in it is an error, and so is a mount: even
    the empty directories behind it are somebody's data."""
    _remove(path, only_empty=True)
