"""A tar archive from a stream as files in a directory.

Owns: reading what `archive` writes, and the limits on what an archive may say.
Start reading at: `unpack`.

A stream may come from anywhere, so memory is bounded: headers and tables have a largest size, nothing is kept of a
member once it is there, and of the directories only those on the way to the current one. Of tarfile only the reading of
one block is used: its reader keeps all members, recurses, and takes headers of any length.
"""

import errno
import os
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moorage.host.dir_walk import open_below, opened
from moorage.storage.transfer.archive import MOST_PIECES, READ_BYTES, SPARSE, TYPE, XATTR
from moorage.storage.transfer.stream import StreamDamaged
from moorage.storage.trees import make_socket

_BLOCK = tarfile.BLOCKSIZE
_LARGEST_HEAD = 8 << 20  # of the records before a member: names and extended attributes
_LARGEST_NUMBER = (1 << 63) - 1
_MOST_DIGITS = 19


class Readable(Protocol):
    """What gives the bytes of the archive in pieces of any length, and none at its end."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Member:
    info: tarfile.TarInfo
    records: dict[str, bytes]

    def text(self, key: str, default: str) -> str:
        return self.records[key].decode("utf-8", "surrogateescape") if key in self.records else default

    def number(self, key: str, default: int) -> int:
        found = _number(self.records[key]) if key in self.records else default
        if not 0 <= found <= _LARGEST_NUMBER:
            raise _damaged(f"has a number that is out of bounds: {key}")
        return found

    @property
    def name(self) -> str:
        found = self.text("path", self.info.name)
        return found.removesuffix("/") if self.info.isdir() else found

    @property
    def size(self) -> int:
        return self.number("size", self.info.size)


def unpack(archive: Readable, target: str, progress: Callable[[int], None], limit_bytes: int = _LARGEST_NUMBER) -> None:
    """Make what an archive holds in an empty directory; nothing is made outside of it, whatever the archive says.

    `progress` is called with the bytes of files that are there. Raises StreamDamaged for an archive that is malformed,
    or that holds more than `limit_bytes`.
    """
    _Unpacking(archive, target, progress, limit_bytes).run()


class _Unpacking:
    """One archive on its way into a directory. No other process writes there."""

    def __init__(self, archive: Readable, target: str, progress: Callable[[int], None], limit_bytes: int) -> None:
        self._archive = archive
        self._target = target
        self._progress = progress
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._open: list[tuple[str, _Member]] = []  # the directories on the way to the current one

    def run(self) -> None:
        while (member := self._next()) is not None:
            try:
                self._make_member(member)
            except (ValueError, OverflowError) as failed:  # a name with a NUL, an owner or device that is none
                raise _damaged(f"has a member that cannot be made: {member.name[:200]!r}: {failed}") from failed
        while self._open:
            self._leave()

    # --- reading ---

    def _next(self) -> _Member | None:
        """Read up to the content of the next member; None at the end of the archive."""
        records: dict[str, bytes] = {}
        info = self._head()
        if info is not None and info.type == tarfile.XHDTYPE:
            if not 0 <= info.size <= _LARGEST_HEAD:
                raise _damaged(f"has {info.size} bytes of records before a member")
            records = _records(self._padded(info.size))
            info = self._head()
            if info is None:
                raise _damaged("ends after the records of a member")
        return None if info is None else _Member(info, records)

    def _head(self) -> tarfile.TarInfo | None:
        block = self._exactly(_BLOCK)
        if block == bytes(_BLOCK):
            return None
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError, OverflowError) as failed:
            raise _damaged(f"cannot be read: {failed}") from failed

    def _padded(self, size: int) -> bytes:
        found = self._exactly(size)
        self._exactly(-size % _BLOCK)
        return found

    def _exactly(self, size: int) -> bytes:
        pieces, missing = [], size
        while missing:
            piece = self._archive.read(missing)
            if not piece:
                raise _damaged("ends early")
            pieces.append(piece)
            missing -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # --- making ---

    def _make_member(self, member: _Member) -> None:
        name, info = member.name, member.info
        if not info.isreg() and member.size:
            raise _damaged(f"has content where there can be none: {name[:200]!r}")
        if name == "." and not self._open and info.isdir():
            self._open.append((".", member))
            return
        path = self._place_of(name)
        if info.isdir():
            self._new(lambda: os.mkdir(path, 0o700), name)
            self._open.append((name, member))
        elif info.islnk():
            self._new(lambda: self._link(member.text("linkpath", info.linkname), path), name)
        else:
            self._new(lambda: self._make(path, member), name)
            _set_attributes(path, member)

    def _new(self, make: Callable[[], None], name: str) -> None:
        try:
            make()
        except FileExistsError as failed:
            raise _damaged(f"has a member twice: {name[:200]!r}") from failed

    def _place_of(self, name: str) -> str:
        """The path of a new member, whose directory must be the current one, or one above that.

        Every directory on the way was made here, so no link of the archive leads out of the target.
        """
        parent, _, last = name.rpartition("/")
        while self._open and self._open[-1][0] != (parent or "."):
            self._leave()
        if not self._open or last in ("", ".", ".."):
            raise _damaged(f"has a member in the wrong place: {name[:200]!r}")
        return os.path.join(self._target, name)

    def _leave(self) -> None:
        """Finish a directory: what is made inside changes its time."""
        name, member = self._open.pop()
        _set_attributes(self._target if name == "." else os.path.join(self._target, name), member)

    def _link(self, first: str, path: str) -> None:
        parent, _, last = first.rpartition("/")
        at = os.open(self._target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parent.split("/") if parent else ():
                if part in ("", ".", ".."):
                    raise _damaged(f"links to a place outside: {first[:200]!r}")
                at, above = open_below(at, part), at
                os.close(above)
            os.link(last, path, src_dir_fd=at, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as failed:
            raise _damaged(f"links to something that is not in it: {first[:200]!r}") from failed
        finally:
            os.close(at)

    def _make(self, path: str, member: _Member) -> None:
        info = member.info
        if member.records.get(TYPE) == b"socket":
            with opened(os.path.dirname(path)) as parent:
                make_socket(parent, os.path.basename(path))
        elif info.isreg():
            self._write(path, member)
        elif info.issym():
            os.symlink(member.text("linkpath", info.linkname), path)
        elif info.isfifo():
            os.mkfifo(path, 0o600)
        elif info.ischr() or info.isblk():
            kind = stat.S_IFCHR if info.ischr() else stat.S_IFBLK
            os.mknod(path, kind | 0o600, os.makedev(info.devmajor, info.devminor))
        else:
            raise _damaged(f"has a member of an unknown type: {member.name[:200]!r}")

    def _write(self, path: str, member: _Member) -> None:
        pieces, length = [(0, member.size)], member.size
        if f"{SPARSE}major" in member.records:
            length = member.number(f"{SPARSE}realsize", 0)
            pieces = self._sparse(member, length)
        with open(path, "xb", buffering=0) as file:
            for offset, size in pieces:
                file.seek(offset)
                self._copy(file.fileno(), size)
            file.truncate(length)
        self._exactly(-member.size % _BLOCK)

    def _copy(self, fd: int, size: int) -> None:
        self._bytes += size
        if self._bytes > self._limit_bytes:
            raise StreamDamaged(f"the archive in the stream holds more than its volume of {self._limit_bytes} bytes")
        while size:
            block = memoryview(self._archive.read(min(size, READ_BYTES)))
            if not block:
                raise _damaged("ends inside of a file")
            size -= len(block)
            while block:
                block = block[os.write(fd, block) :]
            self._progress(self._bytes - size)

    def _sparse(self, member: _Member, length: int) -> list[tuple[int, int]]:
        """The pieces of data of a file with holes: GNU's format 1.0, a table in whole blocks before the data."""
        if (member.records[f"{SPARSE}major"], member.records.get(f"{SPARSE}minor")) != (b"1", b"0"):
            raise _damaged("has a sparse file of an unknown format")
        numbers: list[int] = []
        rest, used, wanted = b"", 0, 1
        while len(numbers) < wanted:
            *whole, rest = (rest + self._exactly(_BLOCK)).split(b"\n")
            used += _BLOCK
            numbers += [_number(each) for each in whole]
            if numbers[:1] > [MOST_PIECES + 1] or (len(numbers) < wanted and len(rest) > _MOST_DIGITS):
                raise _damaged("has a table of holes that is too long")
            wanted = 1 + 2 * numbers[0] if numbers else 1
        pieces, end = list(zip(numbers[1::2], numbers[2::2], strict=True)), 0
        for offset, size in pieces:
            if offset < end or offset + size > length:
                raise _damaged("has a sparse file whose pieces overlap or lie outside")
            end = offset + size
        if len(numbers) != wanted or used + sum(size for _, size in pieces) != member.size:
            raise _damaged("has a table of holes that does not fit to its file")
        return pieces


def _records(raw: bytes) -> dict[str, bytes]:
    """The records of a PAX header: `LENGTH KEY=VALUE` and a newline, one after the other."""
    found, at = {}, 0
    while at < len(raw):
        space = raw.find(b" ", at, at + _MOST_DIGITS)
        end = at + _number(raw[at : max(at, space)])
        key, equals, value = raw[space + 1 : end - 1].partition(b"=")
        if not space < end <= len(raw) or raw[end - 1 : end] != b"\n" or not equals:
            raise _damaged("has a record that cannot be read")
        found[key.decode("utf-8", "surrogateescape")] = value
        at = end
    return found


def _number(text: bytes) -> int:
    if not text.isdigit() or len(text) > _MOST_DIGITS:
        raise _damaged(f"has a number that is none: {text[:32]!r}")
    return int(text)


def _set_attributes(path: str, member: _Member) -> None:
    """Owner first (it clears set-id bits), then the mode, attributes, and times last."""
    info = member.info
    os.chown(path, member.number("uid", info.uid), member.number("gid", info.gid), follow_symlinks=False)
    if not info.issym():
        os.chmod(path, stat.S_IMODE(info.mode))
    for key, value in member.records.items():
        if key.startswith(XATTR):
            name = key.removeprefix(XATTR).replace("%3D", "=").replace("%25", "%")
            try:
                os.setxattr(path, name, value, follow_symlinks=False)
            except OSError as failed:
                # The security module of this machine decides about its own labels.
                if not (name.startswith("security.") and failed.errno in (errno.EPERM, errno.EOPNOTSUPP)):
                    raise
    when = _nanoseconds(member.records.get("mtime", str(int(info.mtime)).encode()))
    os.utime(path, ns=(when, when), follow_symlinks=False)


def _nanoseconds(text: bytes) -> int:
    seconds, _, fraction = text.removeprefix(b"-").partition(b".")
    when = _number(seconds) * 1_000_000_000 + _number(fraction[:9].ljust(9, b"0"))
    return -when if text.startswith(b"-") else when


def _damaged(what: str) -> StreamDamaged:
    return StreamDamaged(f"the archive in the stream {what}")
