"""Remove directories without following a link and without reaching through a mount.

Owns: the only recursive removal of the product, which the kernel itself keeps from crossing a mount point, and the
removal of empty directories for everything that a driver may have mounted. Immutable files and nested btrfs subvolumes
are removed as well.
Start reading at: `remove_tree`, `remove_empty`.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from moorage.errors import MoorageError
from moorage.host import subvolumes
from moorage.host.dir_walk import DirWalk, MountInTheWay, hold
from moorage.log import get_logger

log = get_logger(__name__)

_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_STUCK_FLAGS = 0x10 | 0x20  # immutable, append-only
_MOST_PASSES = 100  # through one directory that another process keeps filling


def remove_tree(path: str | Path) -> None:
    """Remove a file or a directory with all that is in it. If nothing is there, that is fine.

    Raises MountInTheWay if anything is mounted there. Every directory is opened by openat2 with RESOLVE_NO_XDEV: even a
    bind mount of the same filesystem, made between two of our steps, is refused by the kernel.
    """
    _remove(Path(path), only_empty=False)


def remove_tree_in(parent: int, name: str, shown: Path) -> None:
    """Remove what has this name in an open directory, as `remove_tree` does; errors call it `shown`."""
    _Removal(parent, shown, only_empty=False).run(name)


def _remove(path: Path, *, only_empty: bool) -> None:
    try:
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _Removal(parent, path, only_empty).run(path.name)
    finally:
        os.close(parent)


@contextlib.contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """A private directory for the length of the block, also for drivers that mount there and may leave a mount.

    If anything is still mounted in it, it is left with a warning: what lies behind a mount is not removed.
    """
    path = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield path
    finally:
        try:
            remove_tree(path)
        except (MoorageError, OSError) as error:
            log.warning("temporary directory is left", path=str(path), error=str(error))


class _Removal:
    """The removal of one entry of an open directory."""

    def __init__(self, parent: int, shown: Path, only_empty: bool) -> None:
        self._only_empty = only_empty
        self._way = DirWalk(parent, named=str(shown.parent))

    def run(self, name: str) -> None:
        passes = [1]  # through each level that the walk is in
        with self._way:
            try:
                if not self._goes_down(name):
                    return
                while self._way.depth:
                    below = self._way.next_name()
                    if below is not None:
                        name = below
                        if self._goes_down(name):
                            passes.append(1)
                        continue
                    name, count = self._way.up(), passes.pop()
                    # Another process may have put something into it meanwhile.
                    if not self._is_gone(name, last=count == _MOST_PASSES) and self._goes_down(name):
                        passes.append(count + 1)
            except OSError as error:
                if error.errno in (errno.EXDEV, errno.EBUSY):
                    raise MountInTheWay(self._way.shown(name)) from error
                if error.errno == errno.ENOTEMPTY:
                    raise MoorageError(f"{self._way.shown(name)} is filled faster than it can be removed") from error
                raise OSError(error.errno, error.strerror, self._way.shown(name)) from error

    def _goes_down(self, name: str) -> bool:
        """Go into a directory; remove anything else. If it is gone already, that is fine."""
        try:
            status = os.stat(name, dir_fd=self._way.fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                return not self._is_destroyed(name, status) and self._enter(name)
            if self._only_empty:
                raise MoorageError(f"{self._way.shown(name)} is left in a directory that should be empty")
            self._retried(os.unlink, name)
        except FileNotFoundError:
            pass
        return False

    def _enter(self, name: str) -> bool:
        try:
            self._way.down(name)
        except NotADirectoryError:  # replaced since it was looked at: what is there now is removed with the next pass
            return False
        return True

    def _is_gone(self, name: str, last: bool) -> bool:
        """Remove an emptied directory. If it is not empty any more, return False, or raise after the last pass."""
        try:
            self._retried(os.rmdir, name)
        except FileNotFoundError:
            pass
        except OSError as error:
            if last or error.errno != errno.ENOTEMPTY:
                raise
            return False
        return True

    def _retried(self, remove: Callable[..., None], name: str) -> None:
        try:
            remove(name, dir_fd=self._way.fd)
        except PermissionError:
            _clear_flags(self._way.fd)
            with contextlib.suppress(OSError), hold(self._way.fd, name) as held:
                _clear_flags_of(held)
            remove(name, dir_fd=self._way.fd)

    def _is_destroyed(self, name: str, status: os.stat_result) -> bool:
        """Remove a nested btrfs subvolume at once; one that holds others is made writable and emptied instead."""
        if self._only_empty or not subvolumes.is_subvolume_root(status, os.fstat(self._way.fd)):
            return False
        with contextlib.suppress(OSError), hold(self._way.fd, name):  # EXDEV: something is mounted on it
            try:
                subvolumes.destroy_in(self._way.fd, name)
                return True
            except OSError:
                subvolumes.make_writable(self._way.fd, name)
        return False


def _clear_flags_of(held: int) -> None:
    """Clear the flags of what an O_PATH descriptor holds. Only files and directories have them, and opening others may
    have an effect."""
    if stat.S_ISREG(mode := os.fstat(held).st_mode) or stat.S_ISDIR(mode):
        fd = os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _clear_flags(fd)
        finally:
            os.close(fd)


def _clear_flags(fd: int) -> None:
    with contextlib.suppress(OSError):
        flags = struct.unpack("=l", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8))[:4])[0]
        if flags & _STUCK_FLAGS:
            fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("=q", flags & ~_STUCK_FLAGS))


def remove_empty(path: Path) -> None:
    """Remove a directory if it is there. Raises if it is not empty or is a mount point."""
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
    """Remove a tree of directories that hold nothing.

    Raises at the first file, and at a mount: even the empty directories behind it are data of its owner.
    """
    _remove(path, only_empty=True)
