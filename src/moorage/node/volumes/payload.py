"""Files of a secret, configMap or projected volume, replaced all at once.

Owns: the `..data` link that makes an update atomic for readers. Whoever else can write to the directory may rename and
link what it likes there: everything is reached from the directory's own descriptor, one name at a time, and no link is
followed.
Start reading at: `write_payload`.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moorage.errors import InvalidRequest, MoorageError
from moorage.node.removal import remove_tree_in

_DATA, _NEXT_DATA = "..data", "..data_tmp"
_VERSION = "..2"  # how the names of directories begin that hold one version of the files: with the year
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FRESH_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOUND_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Parts = tuple[str, ...]


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


def _by_parts(files: Mapping[str, File]) -> dict[Parts, File]:
    """The files by the parts of their paths, without those that say nothing: `./a//b/` is `a/b`."""
    found = {}
    for path, file in files.items():
        parts = tuple(part for part in path.split("/") if part not in ("", "."))
        if not parts or path.startswith("/") or parts[0].startswith("..") or ".." in parts:
            raise InvalidRequest(f"{path!r} is no path that a volume's file can have")
        found[parts] = file
    for parts in found:
        for length in range(1, len(parts)):
            if parts[:length] in found:
                file_path, path = "/".join(parts[:length]), "/".join(parts)
                raise InvalidRequest(f"{file_path!r} cannot be a file, for {path!r} lies below it")
    return found


class _Payload:
    """One directory, held by its descriptor."""

    def __init__(self, shown: Path, top: int, gid: int | None) -> None:
        self._shown = shown
        self._top = top
        self._gid = gid

    def write(self, files: Mapping[Parts, File]) -> bool:
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

    def _holds(self, version: str, files: Mapping[Parts, File]) -> bool:
        names: dict[Parts, set[str]] = {(): set()}
        for parts in files:
            for length, part in enumerate(parts):
                names.setdefault(parts[:length], set()).add(part)
        try:
            for parts, expected in names.items():
                with _opened(self._top, (version, *parts)) as directory:
                    if set(os.listdir(directory)) != expected:
                        return False
            return all(self._holds_file((version, *parts), file) for parts, file in files.items())
        except OSError:  # something else has one of the names
            return False

    def _holds_file(self, parts: Parts, file: File) -> bool:
        with _opened(self._top, parts[:-1]) as directory:
            fd = os.open(parts[-1], _FOUND_FILE, dir_fd=directory)
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

    def _write_version(self, files: Mapping[Parts, File]) -> str:
        """Write the files into a directory of their own and let `..data` lead to it; or leave all as it was."""
        fresh = f"..{time.strftime('%Y_%m_%d_%H_%M_%S')}.{time.monotonic_ns()}"
        try:
            with _opened(self._top, (fresh,), make=True) as version:
                for parts, file in files.items():
                    with _opened(version, parts[:-1], make=True) as directory:
                        self._write_file(directory, parts[-1], file)
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


@contextlib.contextmanager
def _opened(base: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """A directory below another one, opened one name after the other; those that are missing are made if need be."""
    fd = os.dup(base)
    try:
        for part in parts:
            is_made = make and _make_directory(fd, part)
            below = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
            if is_made:
                os.fchmod(fd, 0o755)  # whatever the umask
        yield fd
    finally:
        os.close(fd)


def _make_directory(parent: int, name: str) -> bool:
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        return False
    return True


def _read(fd: int, size: int) -> bytes:
    pieces = []
    while size > 0 and (piece := os.read(fd, size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
