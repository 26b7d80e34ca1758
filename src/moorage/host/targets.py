"""Paths that a caller names for a volume: checked, made, held and removed without following links.

Owns: staging and target paths up to the moment something is mounted there. The last two parts of a
path are never followed when they are symbolic links, so no other process can redirect a mount.
May not touch: mounts themselves, pools.
Start reading at: `Target`.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moorage.errors import InvalidRequest, MoorageError
from moorage.host import mountinfo, mounts
from moorage.host.errors import host_error

_DIRECTORY_MODE = 0o750
_FILE_MODE = 0o640
_LONGEST_PATH, _LONGEST_NAME, _LONGEST_SHOWN = 4095, 255, 256
_KERNEL = frozenset({"proc", "sys"})


class TargetRefused(MoorageError):
    """Something at a target path that is not ours to replace or to follow."""

    code = "FAILED_PRECONDITION"


@dataclass(frozen=True, slots=True)
class Target:
    """A path without symbolic links, as mountinfo shows it."""

    path: str

    @classmethod
    def from_request(cls, field: str, path: str, below: str = "") -> "Target":
        """The path with its grandparent resolved; InvalidRequest or TargetRefused names the field.

        With `below`, the path must lie below that directory, wherever links on the way lead.
        """
        check_path(field, path)
        parent, name = os.path.split(os.path.normpath(path))
        grandparent, parent_name = os.path.split(parent)
        real_parent = os.path.join(os.path.realpath(grandparent), parent_name) if parent_name else "/"
        if os.path.islink(real_parent):
            raise TargetRefused(f"{field} {path}: {real_parent} is a symbolic link; it is not followed")
        check_below(field, path, real_parent, below)
        return cls(os.path.join(real_parent, name))

    @property
    def parent(self) -> str:
        return os.path.dirname(self.path)

    def mounted(self) -> mountinfo.Mount | None:
        return mountinfo.mount_at(self.path) if mountinfo.is_mounted(self.path) else None

    def exists(self) -> bool:
        try:
            os.lstat(self.path)
        except FileNotFoundError:
            return False
        except OSError as failed:
            # A dead mount answers with its own errors, and it is there.
            return failed.errno not in (errno.ENOTDIR, errno.ELOOP)
        return True

    def ensure_directory(self, field: str) -> None:
        """Make the directory, not its parents; anything else at the path is refused."""
        self._make(field, lambda: os.mkdir(self.path, _DIRECTORY_MODE))
        if not stat.S_ISDIR(self._mode(field)):
            raise TargetRefused(f"{field} {self.path}: there is something that is not a directory")

    def ensure_file(self, field: str) -> None:
        """Make an empty file for a device to be mounted on; anything else at the path is refused."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._make(field, lambda: os.close(os.open(self.path, flags, _FILE_MODE)))
        mode = self._mode(field)
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise TargetRefused(f"{field} {self.path}: there is something that is not a file")

    @contextlib.contextmanager
    def held(self, field: str) -> Iterator[str]:
        """The path of an open handle on the target: what is mounted there lands on what was checked."""
        try:
            fd = os.open(self.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as failed:
            raise TargetRefused(f"{field} {self.path}: {os.strerror(failed.errno or 0)}") from failed
        try:
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                raise TargetRefused(f"{field} {self.path}: it is a symbolic link; it is not followed")
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def bind(self, field: str, source: str | Path, words: Iterable[str] = ()) -> None:
        """Show `source` here, with options such as `ro`; all of it or nothing."""
        with self.held(field) as handle:
            mounts.bind(source, handle, sorted(words), shown=self.path)

    def unmount(self) -> int:
        """Take away every mount at the path, dead ones included; returns how many there were."""
        return mounts.unmount_all(self.path)

    def remove(self) -> None:
        """Remove the mount point. What is not empty is left alone and reported: it is not ours."""
        try:
            mode = os.lstat(self.path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            if stat.S_ISDIR(mode):
                os.rmdir(self.path)
            elif stat.S_ISLNK(mode) or os.lstat(self.path).st_size == 0:
                os.unlink(self.path)
            else:
                raise TargetRefused(f"{self.path} is a file with data in it; it is left alone")
        except FileNotFoundError:
            return
        except OSError as failed:
            if failed.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise TargetRefused(f"{self.path} is not mounted and not empty; it is left alone") from failed
            raise

    def _make(self, field: str, make: Callable[[], None]) -> None:
        try:
            make()
        except FileExistsError:
            return
        except FileNotFoundError as failed:
            raise InvalidRequest(f"{field} {self.path}: the directory {self.parent} does not exist") from failed
        except NotADirectoryError as failed:
            raise InvalidRequest(f"{field} {self.path}: {self.parent} is not a directory") from failed
        except OSError as failed:
            raise host_error(f"make {field}", self.path, failed) from failed

    def _mode(self, field: str) -> int:
        mode = os.lstat(self.path).st_mode
        if stat.S_ISLNK(mode):
            raise TargetRefused(f"{field} {self.path}: it is a symbolic link; it is not followed")
        return mode


def check_path(field: str, path: str) -> None:
    """Raise InvalidRequest unless a mount point can have this path and a message can show it.

    It must be absolute, without `..` and control characters, not the root, and not in the kernel's own filesystems.
    """
    if not path:
        raise InvalidRequest(f"{field} is needed")
    shown = repr(path if len(path) <= _LONGEST_SHOWN else f"{path[:_LONGEST_SHOWN]}…")
    parts = path.split("/")
    if not path.isprintable():
        raise InvalidRequest(f"{field} {shown} contains control characters, such as NUL, or others that do not print")
    if not path.startswith("/"):
        raise InvalidRequest(f"{field} {shown} must be an absolute path")
    if ".." in parts:
        raise InvalidRequest(f"{field} {shown} must not contain ..")
    if len(path.encode()) > _LONGEST_PATH or max(len(part.encode()) for part in parts) > _LONGEST_NAME:
        raise InvalidRequest(f"{field} {shown} is longer than the kernel allows, or a part of it is")
    names = [part for part in parts if part not in ("", ".")]
    if not names:
        raise InvalidRequest(f"{field} {shown} must not be the root directory")
    if names[0] in _KERNEL:
        raise InvalidRequest(f"{field} {shown} lies in a filesystem of the kernel")


def check_below(field: str, path: str, real_parent: str, below: str) -> None:
    """Raise InvalidRequest unless a path, whose parent is resolved, lies below a directory; "" is no condition."""
    if below and not f"{real_parent}/".startswith(f"{os.path.realpath(below).rstrip('/')}/"):
        raise InvalidRequest(f"{field} {path[:_LONGEST_SHOWN]!r} does not lie below {below}")
