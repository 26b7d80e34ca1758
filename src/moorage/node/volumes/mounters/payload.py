"""Files of a secret, configMap or projected volume, replaced all at once.

Owns: the `..data` link that makes an update atomic for readers. A process that can write to the directory may
rename and link what it likes there: everything is reached from the directory's own descriptor, one name at a time,
and no link is followed.
Start reading at: `write_payload`.
"""

import contextlib
import errno
import itertools
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moorage.errors import InvalidRequest, MoorageError
from moorage.host.dir_walk import DirWalk
from moorage.host.safe_remove import remove_tree_in

_DATA, _NEXT_DATA = "..data", "..data_tmp"
_VERSION = "..2"  # how the names of directories begin that hold one version of the files: with the year
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FRESH_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOUND_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONGEST_PATH, _LONGEST_NAME = 4096, 255  # in bytes; as a kubelet has it

PathParts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    mode: int
    uid: int | None = None  # the agent's own


def write_payload(directory: Path, files: Mapping[str, File], gid: int | None = None) -> bool:
    """Make the directory show exactly these files; False when it already did. Readers see old or new, never both."""
    wanted = _by_parts(files)
    top = os.open(directory, _DIRECTORY)
    try:
        return _Payload(directory, top, gid).write(wanted)
    finally:
        os.close(top)


def _by_parts(files: Mapping[str, File]) -> dict[PathParts, File]:
    """The files by the parts of their paths, without those that say nothing: `./a//b/` is `a/b`. They are in order, so
    that those of a directory follow each other."""
    found = {_parts(path): file for path, file in files.items()}
    for above, below in itertools.pairwise(sorted(found)):
        if below[: len(above)] == above:
            file_path, path = _shortened("/".join(above)), _shortened("/".join(below))
            raise InvalidRequest(f"{file_path!r} cannot be a file, for {path!r} lies below it")
    return {parts: found[parts] for parts in sorted(found)}


def _parts(path: str) -> PathParts:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise InvalidRequest(f"{_shortened(path)!r} is longer than {_LONGEST_PATH} bytes")
    if "\0" in path:
        raise InvalidRequest(f"{_shortened(path)!r} contains a zero byte")
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if not parts or path.startswith("/") or parts[0].startswith("..") or ".." in parts:
        raise InvalidRequest(f"{_shortened(path)!r} is no path that a volume's file can have")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        raise InvalidRequest(f"{_shortened(path)!r} has a name of more than {_LONGEST_NAME} bytes in it")
    return parts


def _shortened(path: str) -> str:
    return path if len(path) <= _LONGEST_NAME else f"{path[:_LONGEST_NAME]}…"


class _Payload:
    """One directory, held by its descriptor."""

    def __init__(self, shown: Path, top: int, gid: int | None) -> None:
        self._shown = shown
        self._top = top
        self._gid = gid

    def write(self, files: Mapping[PathParts, File]) -> bool:
        version = self._version()
        self._remove_leftovers(version)
        is_new = version is None or not self._holds(version, files)
        if is_new:
            version = self._write_version(files)
        is_changed = _link_names(self, {parts[0] for parts in files})
        if is_new:
            self._remove_leftovers(version)
        return is_new or is_changed

    def entries(self) -> list[str]:
        return os.listdir(self._top)

    def link_at(self, name: str) -> str | None:
        """Where a link leads; None if it is no link."""
        try:
            return os.readlink(name, dir_fd=self._top)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            raise

    def link(self, name: str, target: str) -> None:
        os.symlink(target, name, dir_fd=self._top)

    def remove(self, name: str) -> None:
        remove_tree_in(self._top, name, self._shown / name)

    def _version(self) -> str | None:
        """The name of the directory that `..data` leads to, if it leads to one of ours."""
        name = self.link_at(_DATA)
        return name if name is not None and name.startswith(_VERSION) and "/" not in name else None

    def _remove_leftovers(self, version: str | None) -> None:
        """Remove older versions, and what a write that came to no end has left."""
        for name in self.entries():
            if name == _NEXT_DATA or (name.startswith(_VERSION) and name != version):
                self.remove(name)

    # What is there.

    def _holds(self, version: str, files: Mapping[PathParts, File]) -> bool:
        others = 1  # names in the directories that are entered, less those that lead on or are looked at

        def enter(above: int, name: str) -> int:
            nonlocal others
            with _or_closed(_enter(above, name)) as fd:
                others += len(os.listdir(fd)) - 1
                return fd

        try:
            with DirWalk(self._top, enter, _leave) as way:
                way.down(version)
                for name, file in _walk(files, way):
                    if not self._holds_file(way.fd, name, file):
                        return False
                    others -= 1
        except OSError:  # something else has one of the names
            return False
        return others == 0

    def _holds_file(self, directory: int, name: str, file: File) -> bool:
        fd = os.open(name, _FOUND_FILE, dir_fd=directory)
        try:
            status = os.fstat(fd)
            return (
                status.st_mode == stat.S_IFREG | self._mode(file)
                and status.st_uid == (status.st_uid if file.uid is None else file.uid)
                and status.st_gid == (status.st_gid if self._gid is None else self._gid)
                and status.st_size == len(file.content)
                and _read(fd, status.st_size) == file.content
            )
        finally:
            os.close(fd)

    # What is made.

    def _write_version(self, files: Mapping[PathParts, File]) -> str:
        """Write the files into a directory of their own and let `..data` lead to it; or leave all as it was."""
        fresh = f"..{time.strftime('%Y_%m_%d_%H_%M_%S')}.{time.monotonic_ns()}"
        try:
            with DirWalk(self._top, _make, _leave) as way:
                way.down(fresh)
                for name, file in _walk(files, way):
                    self._write_file(way.fd, name, file)
            self.link(_NEXT_DATA, fresh)
            if self.link_at(_DATA) is None:
                self.remove(_DATA)  # a directory cannot be replaced by a link
            os.replace(_NEXT_DATA, _DATA, src_dir_fd=self._top, dst_dir_fd=self._top)
        except BaseException:
            with contextlib.suppress(OSError, MoorageError):  # the next write removes it
                self.remove(fresh)
            raise
        return fresh

    def _write_file(self, directory: int, name: str, file: File) -> None:
        fd = os.open(name, _FRESH_FILE, 0o600, dir_fd=directory)
        with open(fd, "wb") as opened:
            opened.write(file.content)
            if file.uid is not None or self._gid is not None:
                os.fchown(fd, -1 if file.uid is None else file.uid, -1 if self._gid is None else self._gid)
            os.fchmod(fd, self._mode(file))

    def _mode(self, file: File) -> int:
        return file.mode | (0o040 if self._gid is not None else 0)


def _link_names(payload: _Payload, names: set[str]) -> bool:
    """Let each name lead into `..data`, and no other; whether one did not. A crash may have come just before."""
    is_changed = False
    for name in payload.entries():
        if not name.startswith("..") and name not in names and payload.link_at(name) is not None:
            payload.remove(name)
            is_changed = True
    for name in names:
        if payload.link_at(name) != f"{_DATA}/{name}":
            payload.remove(name)
            payload.link(name, f"{_DATA}/{name}")
            is_changed = True
    return is_changed


def _walk(files: Mapping[PathParts, File], way: DirWalk) -> Iterator[tuple[str, File]]:
    """Each file's name while the way leads to its directory. They are in order, so that each directory is entered once,
    from the one above it: an entry costs the same however deep that is."""
    here: PathParts = ()
    for parts, file in files.items():
        above = parts[:-1]
        shared = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(here, above, strict=False)))
        for _ in here[shared:]:
            way.up()
        for part in above[shared:]:
            way.down(part)
        here = above
        yield parts[-1], file


def _enter(above: int, name: str) -> int:
    return os.open(name, _DIRECTORY, dir_fd=above)


def _leave(below: int) -> int:
    return _enter(below, "..")


def _make(above: int, name: str) -> int:
    os.mkdir(name, 0o755, dir_fd=above)
    with _or_closed(_enter(above, name)) as fd:
        os.fchmod(fd, 0o755)  # whatever the umask
        return fd


@contextlib.contextmanager
def _or_closed(fd: int) -> Iterator[int]:
    try:
        yield fd
    except BaseException:
        os.close(fd)
        raise


def _read(fd: int, size: int) -> bytes:
    pieces = []
    while size > 0 and (piece := os.read(fd, size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
