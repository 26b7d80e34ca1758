"""Walk through a directory tree that its owner may change meanwhile, by descriptors only.

Owns: opening one entry below an open directory without following a link or crossing a mount, and which levels of a
walk are open. Copying, measuring, changing owners, archiving and removing all go through here.
Start reading at: `walk`, `DirWalk`, `hold`.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType

from moorage.errors import MoorageError
from moorage.host import libc

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HOLD = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_BELOW = libc.NO_XDEV | libc.NO_MAGICLINKS | libc.BENEATH | libc.NO_SYMLINKS
_ABOVE = libc.NO_XDEV | libc.NO_MAGICLINKS | libc.NO_SYMLINKS
_NO_OPENAT2 = frozenset({errno.ENOSYS, errno.EPERM})  # an old kernel, or a seccomp profile that is older than the call
_MOST_OPEN = 64  # levels: deeper than what people make, far from what a process may have open
_LONGEST_SHOWN = 512

Opener = Callable[[int, str], int]


class MountInTheWay(MoorageError):
    """A mount point lies in a tree. Nothing at or below the mount was touched."""

    code = "FAILED_PRECONDITION"

    def __init__(self, path: str | os.PathLike[str], what: str = "removed") -> None:
        super().__init__(f"{os.fspath(path)} is a mount point, so nothing at or below it is {what}")


# --- one entry ----------------------------------------


def open_below(directory: int, name: str) -> int:
    """Open a directory in another one.

    Raises OSError: EXDEV if any mount lies between, NotADirectoryError for a link and for anything else.
    """
    return _opened(directory, name, DIRECTORY, _BELOW)


def open_above(directory: int) -> int:
    """Open the parent of a directory; EXDEV if a mount lies between, or was made over it."""
    return _opened(directory, "..", DIRECTORY, _ABOVE)


@contextlib.contextmanager
def hold(directory: int, name: str) -> Iterator[int]:
    """Hold one entry of a directory, whatever it is, by an O_PATH descriptor: a link itself, never its target.

    Raises OSError: EXDEV if something is mounted on the entry. `/proc/self/fd/N` then names what is held.
    """
    fd = _opened(directory, name, _HOLD, _BELOW)
    try:
        yield fd
    finally:
        os.close(fd)


def held_path(fd: int) -> str:
    """A path that leads to what a descriptor holds, for calls that take no O_PATH descriptor."""
    return f"/proc/self/fd/{fd}"


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open the top of a tree. Its own path is trusted up to the last name, which must not be a link."""
    fd = os.open(path, DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def _opened(directory: int, name: str, flags: int, resolve: int) -> int:
    try:
        return libc.openat2(directory, name, flags, resolve)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from error
        if error.errno not in _NO_OPENAT2:
            raise
    return _opened_by_mount_id(directory, name, flags)


def _opened_by_mount_id(directory: int, name: str, flags: int) -> int:
    """Open without openat2: one name cannot hold a link or leave the directory, so only the mount is compared."""
    fd = os.open(name, flags, dir_fd=directory)
    if mount_id(fd) != mount_id(directory):
        os.close(fd)
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    return fd


def mount_id(fd: int) -> int:
    """The mount that a descriptor was opened through: two binds of one filesystem differ."""
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key == "mnt_id":
                return int(value)
    raise OSError(errno.EIO, "the kernel does not report the mount of a descriptor", f"fd {fd}")


# --- a tree ----------------------------------------


@dataclass(slots=True)
class _Level:
    name: str
    fd: int  # -1 while it is not open
    identity: tuple[int, int]
    names: list[tuple[str, int]] | None = None  # read but not returned yet, last first, each with the position after it
    position: int = 0  # after the last name that was returned


@dataclass(slots=True)
class DirWalk:
    """The path from an open directory down to where a walk is. Few descriptors are open, however deep that is.

    Only the deepest levels stay open. One above them is opened again as `..` of the level below it, and must be the
    directory that the walk came from. If the tree was moved meanwhile, `up` raises ESTALE.
    Names are read in batches and a closed level keeps only its position, so memory is bounded too, unless names are
    read `in_order`.
    """

    base: int  # the caller closes it
    open_below: Opener = open_below
    open_above: Callable[[int], int] = open_above
    in_order: bool = False
    named: str = ""  # what messages call the base
    _levels: list[_Level] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._levels.append(_Level("", self.base, _identity(self.base)))

    def __enter__(self) -> "DirWalk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for level in self._levels[1:]:
            if level.fd >= 0:
                os.close(level.fd)

    @property
    def fd(self) -> int:
        """The directory where the walk is."""
        return self._levels[-1].fd

    @property
    def depth(self) -> int:
        """How many levels the walk is below its base."""
        return len(self._levels) - 1

    @property
    def path(self) -> str:
        """Where the walk is, relative to its base; empty at the base. It may be longer than any path can be."""
        return "/".join(level.name for level in self._levels[1:])

    def shown(self, name: str = "") -> str:
        """The path of an entry for a message, shortened in the middle."""
        path = "/".join(part for part in (self.named, self.path, name) if part)
        return path if len(path) <= _LONGEST_SHOWN else f"{path[: _LONGEST_SHOWN // 2]}…{path[-_LONGEST_SHOWN // 2 :]}"

    def next_name(self) -> str | None:
        """The next name in the current directory, or None after the last one."""
        level = self._levels[-1]
        if not level.names:
            if self.in_order and level.names is not None:
                return None
            level.names = self._read(level)
            if not level.names:
                return None
        name, level.position = level.names.pop()
        return name

    def down(self, name: str) -> None:
        fd = self.open_below(self.fd, name)
        self._levels.append(_Level(name, fd, _identity(fd)))
        if len(self._levels) > _MOST_OPEN + 1:
            above = self._levels[-1 - _MOST_OPEN]
            if above is not self._levels[0] and above.fd >= 0:
                os.close(above.fd)
                above.fd = -1
                if not self.in_order:
                    above.names = None

    def up(self) -> str:
        """Go back to the level above; returns the name of the level that was left."""
        level, above = self._levels.pop(), self._levels[-1]
        try:
            if above.fd < 0:
                self._reopen(above, level.fd)
        finally:
            os.close(level.fd)
        return level.name

    def _read(self, level: _Level) -> list[tuple[str, int]]:
        if self.in_order:
            return [(name, 0) for name in sorted(os.listdir(level.fd), reverse=True)]
        os.lseek(level.fd, level.position, os.SEEK_SET)
        try:
            return libc.getdents(level.fd)[::-1]
        except FileNotFoundError:  # removed since it was opened
            return []

    def _reopen(self, level: _Level, below: int) -> None:
        fd = self.open_above(below)
        if _identity(fd) != level.identity:
            os.close(fd)
            raise OSError(errno.ESTALE, "directory was moved while it was walked through", self.shown())
        level.fd = fd


class Moment(Enum):
    """What a walk does: it entered a directory, it is at another entry, it is about to leave a directory."""

    ENTERED = "entered"
    ENTRY = "entry"
    LEAVING = "leaving"


def walk(way: DirWalk, *, skip_mounts: bool = False) -> Iterator[tuple[Moment, str]]:
    """Go through everything below the base, depth first. `way.fd` is the directory that was entered or holds the entry.

    An entry is named, not opened: what has the name may be replaced at any time, so callers use `hold`. Names that are
    gone are passed over. Raises MountInTheWay at a directory that is a mount point, unless these are skipped.
    """
    while True:
        name = way.next_name()
        if name is None:
            if way.depth == 0:
                return
            yield Moment.LEAVING, ""
            way.up()
            continue
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=way.fd, follow_symlinks=False).st_mode):
                way.down(name)
                yield Moment.ENTERED, name
                continue
        except (FileNotFoundError, NotADirectoryError):  # removed, or replaced by something that is no directory
            continue
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            if not skip_mounts:
                raise MountInTheWay(way.shown(name), "read") from error
            continue
        yield Moment.ENTRY, name


def tree_bytes(top: int) -> Iterator[int]:
    """Yield the bytes that each entry of a tree takes on disk. Mounts do not count.

    Each name of a file counts for its part of it, so that all together are one file: a table of the files with several
    names could be made as large as the tree's owner likes.
    """
    with DirWalk(top) as way:
        for moment, name in walk(way, skip_mounts=True):
            if moment is Moment.LEAVING:
                continue
            with contextlib.suppress(FileNotFoundError):
                is_entry = moment is Moment.ENTRY
                found = os.stat(name, dir_fd=way.fd, follow_symlinks=False) if is_entry else os.fstat(way.fd)
                yield found.st_blocks * 512 // (max(1, found.st_nlink) if is_entry else 1)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
