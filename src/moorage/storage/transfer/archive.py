"""Directory trees as a tar archive and back: what an export of a directory volume carries in its frames.

Owns: the archive (PAX, with GNU's sparse files and `SCHILY.xattr.` attributes, so that GNU tar reads it) and what may
come out of one.
Start reading at: `archived`, `unpack`.

The same tree gives the same bytes: names are sorted, and times of access, which reading would change, are left out.
Kept are hard links, holes, extended attributes (ACLs are among them), owners, modes, times of change to the nanosecond,
devices, FIFOs, and sockets, which tar does not know and which are empty files with `MOORAGE.type` here.
"""

import errno
import os
import stat
import tarfile
from collections.abc import Callable, Iterator

from moorage.host.dir_walk import DirWalk, Moment, MountInTheWay, held_path, hold, opened, walk
from moorage.host.extents import data_ranges
from moorage.storage.errors import StorageError
from moorage.storage.transfer.stream import FramedBytes, StreamDamaged
from moorage.storage.trees import make_socket

_READ_BYTES = 1 << 20
_XATTR = "SCHILY.xattr."
_TYPE = "MOORAGE.type"
_SPARSE = "GNU.sparse."
_LONGEST_PATH = 4095
_END = bytes(2 * tarfile.BLOCKSIZE)


class TreeChanged(StorageError):
    """A file was changed while it was archived."""

    code = "ABORTED"


class TreeTooDeep(StorageError):
    """A path in the tree is longer than a system call takes."""

    code = "FAILED_PRECONDITION"
    retryable = False


def tree_state(root: str) -> tuple[int, int]:
    """How many names there are, and the time of the last change of any: differs when anything was changed."""
    with opened(root) as top, DirWalk(top, named=root) as way:
        count, latest = 0, os.fstat(top).st_ctime_ns
        for moment, name in walk(way):
            if moment is Moment.LEAVING:
                continue
            count += 1
            is_entry = moment is Moment.ENTRY
            found = os.stat(name, dir_fd=way.fd, follow_symlinks=False) if is_entry else os.fstat(way.fd)
            latest = max(latest, found.st_ctime_ns)
        return count, latest


# --- out -----------------------------------------------------------------------------------


def archived(root: str) -> Iterator[bytes]:
    """The archive of everything below a directory, and of its own attributes, in pieces of at most 1 MiB.

    Raises TreeTooDeep for a path that no system call would take, as no archive of it could be unpacked.
    """
    links: dict[tuple[int, int], str] = {}
    with opened(root) as top, DirWalk(top, in_order=True, named=root) as way:
        yield from _entry(top, ".", links)
        for moment, name in walk(way):
            if moment is Moment.LEAVING:
                continue
            path = way.path if moment is Moment.ENTERED else f"{way.path}/{name}".lstrip("/")
            if len(os.fsencode(path)) > _LONGEST_PATH:
                raise TreeTooDeep(f"{way.shown(name)} has a path of more than {_LONGEST_PATH} bytes")
            if moment is Moment.ENTERED:
                yield from _entry(way.fd, path, links)
            else:
                yield from _held_entry(way, name, path, links)
    yield _END


def _held_entry(way: DirWalk, name: str, path: str, links: dict[tuple[int, int], str]) -> Iterator[bytes]:
    try:
        with hold(way.fd, name) as held:
            yield from _entry(held, path, links)
    except OSError as failed:
        if failed.errno == errno.EXDEV:
            raise MountInTheWay(way.shown(name), "read") from failed
        if failed.errno == errno.ENOENT:
            raise TreeChanged(f"{way.shown(name)} was removed while the tree was read") from failed
        raise


def _entry(held: int, name: str, links: dict[tuple[int, int], str]) -> Iterator[bytes]:
    """Archive what a descriptor holds."""
    found = os.fstat(held)
    info = tarfile.TarInfo(name)
    info.mode, info.uid, info.gid = stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid
    info.pax_headers = {"mtime": _time(found.st_mtime_ns)}
    key = (found.st_dev, found.st_ino)
    if not stat.S_ISDIR(found.st_mode) and found.st_nlink > 1:
        if key in links:
            info.type, info.linkname = tarfile.LNKTYPE, links[key]
            yield _head(info)
            return
        links[key] = name
    info.pax_headers = {**info.pax_headers, **_attributes(held_path(held))}
    if stat.S_ISREG(found.st_mode):
        yield from _file(held, info, found)
        return
    _describe(info, held, found)
    yield _head(info)


def _describe(info: tarfile.TarInfo, held: int, found: os.stat_result) -> None:
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink("", dir_fd=held)
    elif stat.S_ISSOCK(mode):
        info.pax_headers = {**info.pax_headers, _TYPE: "socket"}
    elif stat.S_ISFIFO(mode):
        info.type = tarfile.FIFOTYPE
    else:
        info.type = tarfile.CHRTYPE if stat.S_ISCHR(mode) else tarfile.BLKTYPE
        info.devmajor, info.devminor = os.major(found.st_rdev), os.minor(found.st_rdev)


def _file(held: int, info: tarfile.TarInfo, found: os.stat_result) -> Iterator[bytes]:
    fd = os.open(held_path(held), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pieces = [(piece.offset, piece.length) for piece in data_ranges(fd)]
        table = b""
        if pieces != [(0, found.st_size)] and found.st_size:
            table = _sparse(info, pieces, found.st_size)
        info.size = len(table) + sum(length for _, length in pieces)
        yield _head(info)
        if table:
            yield table
        for offset, length in pieces:
            yield from _content(fd, offset, length, info.name)
        yield bytes(-info.size % tarfile.BLOCKSIZE)
        now = os.fstat(fd)
        if (now.st_size, now.st_ctime_ns) != (found.st_size, found.st_ctime_ns):
            raise TreeChanged(f"{info.name} was changed while it was read")
    finally:
        os.close(fd)


def _sparse(info: tarfile.TarInfo, pieces: list[tuple[int, int]], size: int) -> bytes:
    """GNU's sparse format 1.0: the name and size in the head, the places of the data before the data."""
    info.pax_headers = {
        **info.pax_headers,
        f"{_SPARSE}major": "1",
        f"{_SPARSE}minor": "0",
        f"{_SPARSE}name": info.name,
        f"{_SPARSE}realsize": str(size),
    }
    ends = [*pieces, (size, 0)]  # the last one says where the file ends, as GNU tar does
    table = "".join(f"{number}\n" for number in (len(ends), *(number for piece in ends for number in piece))).encode()
    return table + bytes(-len(table) % tarfile.BLOCKSIZE)


def _content(fd: int, offset: int, length: int, name: str) -> Iterator[bytes]:
    while length:
        block = os.pread(fd, min(length, _READ_BYTES), offset)
        if not block:
            raise TreeChanged(f"{name} became shorter while it was read")
        yield block
        offset, length = offset + len(block), length - len(block)


def _attributes(path: str) -> dict[str, str]:
    found = {}
    for name in sorted(os.listxattr(path)):
        value = os.getxattr(path, name)
        key = name.replace("%", "%25").replace("=", "%3D")  # the sign ends a keyword
        found[_XATTR + key] = value.decode("utf-8", "surrogateescape")
    return found


def _head(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _time(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return f"{seconds}.{rest:09d}" if seconds >= 0 else str(seconds)


# --- in ------------------------------------------------------------------------------------


def unpack(archive: FramedBytes, target: str, progress: Callable[[int], None]) -> None:
    """Make what an archive holds in an empty directory; nothing is made outside of it, whatever the archive says.

    `progress` is told how many bytes of files are there.
    """
    try:
        with tarfile.open(
            fileobj=archive, mode="r|", bufsize=_READ_BYTES, encoding="utf-8", errors="surrogateescape"
        ) as tar:
            _Unpacking(tar, target, progress).run()
    except tarfile.TarError as failed:
        raise StreamDamaged(f"the archive in the stream cannot be read: {failed}") from failed


class _Unpacking:
    """One archive on its way into a directory."""

    def __init__(self, tar: tarfile.TarFile, target: str, progress: Callable[[int], None]) -> None:
        self._tar = tar
        self._target = target
        self._progress = progress
        self._folders: dict[str, tarfile.TarInfo] = {}
        self._others: set[str] = set()
        self._bytes = 0

    def run(self) -> None:
        for info in self._tar:
            self._member(info)
        for name in sorted(self._folders, reverse=True):  # what is inside changes a directory's time
            _set_attributes(self._path(name), self._folders[name])

    def _path(self, name: str) -> str:
        return self._target if name == "." else os.path.join(self._target, name)

    def _member(self, info: tarfile.TarInfo) -> None:
        name = info.name
        path = self._path(name)
        if name == ".":
            self._folders[name] = info
            return
        parent, _, last = name.rpartition("/")
        # Every directory on the way was made here, so no link of the archive leads out of the target.
        if (
            last in ("", ".", "..")
            or (parent or ".") not in self._folders
            or name in self._others
            or name in self._folders
        ):
            raise StreamDamaged(f"the archive in the stream has a member in the wrong place: {name!r}")
        if info.isdir():
            os.mkdir(path, 0o700)
            self._folders[name] = info
            return
        if info.islnk():
            if info.linkname not in self._others:
                raise StreamDamaged(f"the archive in the stream links {name!r} to something that is not in it")
            os.link(self._path(info.linkname), path, follow_symlinks=False)
        else:
            self._make(path, info)
            _set_attributes(path, info)
        self._others.add(name)

    def _make(self, path: str, info: tarfile.TarInfo) -> None:
        if info.pax_headers.get(_TYPE) == "socket":
            with opened(os.path.dirname(path)) as parent:
                make_socket(parent, os.path.basename(path))
        elif info.isreg():
            self._write(path, info)
        elif info.issym():
            os.symlink(info.linkname, path)
        elif info.isfifo():
            os.mkfifo(path, 0o600)
        elif info.ischr() or info.isblk():
            kind = stat.S_IFCHR if info.ischr() else stat.S_IFBLK
            os.mknod(path, kind | 0o600, os.makedev(info.devmajor, info.devminor))
        else:
            raise StreamDamaged(f"the archive in the stream has a member of an unknown type: {info.name!r}")

    def _write(self, path: str, info: tarfile.TarInfo) -> None:
        source = self._tar.fileobj
        assert source is not None  # as long as the archive is open
        source.seek(info.offset_data)
        pieces: list[tuple[int, int]] = getattr(info, "sparse", None) or [(0, info.size)]
        with open(path, "xb", buffering=0) as file:
            for offset, length in pieces:
                file.seek(offset)
                while length:
                    block = source.read(min(length, _READ_BYTES))
                    if not block:
                        raise StreamDamaged(f"the archive in the stream ends inside of {info.name!r}")
                    file.write(block)
                    length -= len(block)
                    self._bytes += len(block)
                    self._progress(self._bytes)
            file.truncate(info.size)


def _set_attributes(path: str, info: tarfile.TarInfo) -> None:
    """Owner first (it clears set-id bits), then the mode, attributes, and times last."""
    os.chown(path, info.uid, info.gid, follow_symlinks=False)
    if not info.issym():
        os.chmod(path, info.mode)
    for key, value in info.pax_headers.items():
        if key.startswith(_XATTR):
            name = key.removeprefix(_XATTR).replace("%3D", "=").replace("%25", "%")
            try:
                os.setxattr(path, name, value.encode("utf-8", "surrogateescape"), follow_symlinks=False)
            except OSError as failed:
                # The security module of this machine decides about its own labels.
                if not (name.startswith("security.") and failed.errno in (errno.EPERM, errno.EOPNOTSUPP)):
                    raise
    when = _nanoseconds(info.pax_headers.get("mtime", str(int(info.mtime))))
    os.utime(path, ns=(when, when), follow_symlinks=False)


def _nanoseconds(text: str) -> int:
    seconds, _, fraction = text.partition(".")
    try:
        return int(seconds) * 1_000_000_000 + int(fraction.ljust(9, "0")[:9] or 0)
    except ValueError as failed:
        raise StreamDamaged(f"the archive in the stream has a time that is none: {text!r}") from failed
