"""Where a file's bytes are: extents, holes, clones and sparse copies.

Owns: FICLONE, FIEMAP, SEEK_DATA/SEEK_HOLE and copy_file_range.
May not touch: pools; it is given open files or paths.
Start reading at: `clone_file`, `copy_sparse`, `data_ranges`, `extents_of`.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

CopyProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_FICLONE = 0x40049409
_FIEMAP = 0xC020660B
_FIEMAP_FLAG_SYNC = 1
_HEADER = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_BATCH = 1024
_CHUNK_BYTES = 64 * 1024 * 1024
_CANNOT_CLONE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS}

LAST, UNKNOWN, DELALLOC, ENCODED = 1, 2, 4, 8
NOT_ALIGNED, INLINE, TAIL, UNWRITTEN, SHARED = 0x100, 0x200, 0x400, 0x800, 0x2000
OPAQUE = UNKNOWN | DELALLOC | ENCODED | NOT_ALIGNED | INLINE | TAIL
"""Extents whose physical address says nothing about their content."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a file or device."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


Extent = tuple[int, int, int, int]
"""(logical, physical, length, flags): a plain tuple, because there can be millions."""


def clone_file(source_fd: int, target_fd: int) -> bool:
    """Share all of the source's blocks with the target; False where the filesystem cannot."""
    try:
        fcntl.ioctl(target_fd, _FICLONE, source_fd)
    except OSError as failed:
        if failed.errno in _CANNOT_CLONE:
            return False
        raise
    return True


def copy_sparse(source_fd: int, target_fd: int, progress: CopyProgress | None = None, *, share: bool = True) -> int:
    """Copy the data and keep the holes; returns how many bytes of data there were.

    The kernel may share blocks instead of copying them; without `share` it may not.
    """
    size = os.fstat(source_fd).st_size
    os.ftruncate(target_fd, size)
    total = min(size, os.fstat(source_fd).st_blocks * 512)
    done = 0
    for piece in data_ranges(source_fd):
        offset = piece.offset
        while offset < piece.end:
            length = min(_CHUNK_BYTES, piece.end - offset)
            step = _copy_range(source_fd, target_fd, offset, length, share)
            if step == 0:  # the file shrank under us
                break
            offset += step
            done += step
            if progress is not None:
                progress(done, max(total, done))
    return done


def data_ranges(fd: int, start: int = 0) -> Iterator[Range]:
    """The parts of a file that are not holes, in order, from `start` on."""
    offset = start
    while True:
        try:
            data = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as failed:
            if failed.errno == errno.ENXIO:
                return
            raise
        offset = os.lseek(fd, data, os.SEEK_HOLE)
        yield Range(data, offset - data)


def extents_of(fd: int, start: int = 0, *, sync: bool = True) -> Iterator[Extent]:
    """The file's extents from FIEMAP, in batches of bounded size."""
    buffer = bytearray(_HEADER.size + _BATCH * _EXTENT.size)
    view = memoryview(buffer)
    flags = _FIEMAP_FLAG_SYNC if sync else 0
    while True:
        _HEADER.pack_into(buffer, 0, start, (1 << 64) - 1 - start, flags, 0, _BATCH, 0)
        fcntl.ioctl(fd, _FIEMAP, buffer, True)
        count = _HEADER.unpack_from(buffer)[3]
        if count == 0:
            return
        last = 0
        records = view[_HEADER.size : _HEADER.size + count * _EXTENT.size]
        for logical, physical, length, _, _, last, _, _, _ in _EXTENT.iter_unpack(records):
            yield (logical, physical, length, last)
            start = logical + length
        if last & LAST:
            return
        flags = 0


def _copy_range(source_fd: int, target_fd: int, offset: int, length: int, share: bool) -> int:
    if share:
        try:
            return os.copy_file_range(source_fd, target_fd, length, offset, offset)
        except OSError as failed:
            if failed.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
    block = os.pread(source_fd, min(length, 1024 * 1024), offset)
    return os.pwrite(target_fd, block, offset) if block else 0
