"""Directory trees as a tar archive: what an export of a directory volume carries in its frames.

Owns: the archive (PAX, with GNU's sparse files and `SCHILY.xattr.` attributes, so that GNU tar reads it).
Start reading at: `archived`. The way back is in `unpack`.

The same tree gives the same bytes: names are sorted, and times of access, which reading would change, are left out.
Kept are hard links, holes, extended attributes (ACLs are among them), owners, modes, times of change to the nanosecond,
devices, FIFOs, and sockets, which tar does not know and which are empty files with `MOORAGE.type` here.
"""

import errno
import os
import sqlite3
import stat
import tarfile
from collections.abc import Iterator
from contextlib import closing
from itertools import islice

from moorage.host.dir_walk import DirWalk, Moment, MountInTheWay, held_path, hold, opened, walk
from moorage.host.extents import data_ranges
from moorage.storage.errors import StorageError

READ_BYTES = 1 << 20
XATTR = "SCHILY.xattr."
TYPE = "MOORAGE.type"
SPARSE = "GNU.sparse."
MOST_PIECES = 1 << 18
"""How many pieces of data one file may have between its holes: their table is read as a whole."""
_LONGEST_PATH = 4095
_END = bytes(2 * tarfile.BLOCKSIZE)


class TreeChanged(StorageError):
    """A file was changed while it was archived."""

    code = "ABORTED"


class TreeTooDeep(StorageError):
    """A path in the tree is longer than a system call takes, or a file has too many holes."""

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
    with opened(root) as top, closing(_Links()) as links, DirWalk(top, in_order=True, named=root) as way:
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


class _Links:
    """The first path of each file with several names. A tenant may make millions, so they are kept in a file."""

    def __init__(self) -> None:
        self._paths = sqlite3.connect("")  # a temporary file without a name
        self._paths.execute("CREATE TABLE paths (device INT, inode INT, path BLOB, PRIMARY KEY (device, inode))")

    def first(self, found: os.stat_result, path: str) -> str:
        """Return the path that this file had first; if there was none, it is this one."""
        key = (found.st_dev, found.st_ino - (1 << 64) if found.st_ino >= 1 << 63 else found.st_ino)
        row = self._paths.execute("SELECT path FROM paths WHERE device = ? AND inode = ?", key).fetchone()
        if row is not None:
            return os.fsdecode(row[0])
        self._paths.execute("INSERT INTO paths VALUES (?, ?, ?)", (*key, os.fsencode(path)))
        return path

    def close(self) -> None:
        self._paths.close()


def _held_entry(way: DirWalk, name: str, path: str, links: _Links) -> Iterator[bytes]:
    try:
        with hold(way.fd, name) as held:
            yield from _entry(held, path, links)
    except OSError as failed:
        if failed.errno == errno.EXDEV:
            raise MountInTheWay(way.shown(name), "read") from failed
        if failed.errno == errno.ENOENT:
            raise TreeChanged(f"{way.shown(name)} was removed while the tree was read") from failed
        raise


def _entry(held: int, name: str, links: _Links) -> Iterator[bytes]:
    """Archive what a descriptor holds."""
    found = os.fstat(held)
    info = tarfile.TarInfo(name)
    info.mode, info.uid, info.gid = stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid
    info.pax_headers = {"mtime": _time(found.st_mtime_ns)}
    if not stat.S_ISDIR(found.st_mode) and found.st_nlink > 1 and (first := links.first(found, name)) != name:
        info.type, info.linkname = tarfile.LNKTYPE, first
        yield _head(info)
        return
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
        info.pax_headers = {**info.pax_headers, TYPE: "socket"}
    elif stat.S_ISFIFO(mode):
        info.type = tarfile.FIFOTYPE
    else:
        info.type = tarfile.CHRTYPE if stat.S_ISCHR(mode) else tarfile.BLKTYPE
        info.devmajor, info.devminor = os.major(found.st_rdev), os.minor(found.st_rdev)


def _file(held: int, info: tarfile.TarInfo, found: os.stat_result) -> Iterator[bytes]:
    fd = os.open(held_path(held), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pieces = [(piece.offset, piece.length) for piece in islice(data_ranges(fd), MOST_PIECES + 1)]
        if len(pieces) > MOST_PIECES:
            raise TreeTooDeep(f"{info.name} has more than {MOST_PIECES} pieces of data between holes")
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
        f"{SPARSE}major": "1",
        f"{SPARSE}minor": "0",
        f"{SPARSE}name": info.name,
        f"{SPARSE}realsize": str(size),
    }
    ends = [*pieces, (size, 0)]  # the last one says where the file ends, as GNU tar does
    table = "".join(f"{number}\n" for number in (len(ends), *(number for piece in ends for number in piece))).encode()
    return table + bytes(-len(table) % tarfile.BLOCKSIZE)


def _content(fd: int, offset: int, length: int, name: str) -> Iterator[bytes]:
    while length:
        block = os.pread(fd, min(length, READ_BYTES), offset)
        if not block:
            raise TreeChanged(f"{name} became shorter while it was read")
        yield block
        offset, length = offset + len(block), length - len(block)


def _attributes(path: str) -> dict[str, str]:
    found = {}
    for name in sorted(os.listxattr(path)):
        value = os.getxattr(path, name)
        key = name.replace("%", "%25").replace("=", "%3D")  # the sign ends a keyword
        found[XATTR + key] = value.decode("utf-8", "surrogateescape")
    return found


def _head(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _time(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return f"{seconds}.{rest:09d}" if seconds >= 0 else str(seconds)
