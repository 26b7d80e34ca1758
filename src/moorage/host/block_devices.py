"""Block devices, whatever is below them.

Owns: opening one, its size, its read-ahead, and writing its cached blocks.
May not touch: how a device came to be (`loop`).
Start reading at: `size_of`.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from moorage.host.errors import host_error

_BLKRASET, _BLKGETSIZE64 = 0x1262, 0x80081272


def set_read_ahead(device: str | Path, kib: int) -> None:
    """How much the kernel reads ahead on a block device, in KiB."""
    with opened(device, os.O_RDONLY) as fd:
        try:
            fcntl.ioctl(fd, _BLKRASET, kib * 2)
        except OSError as failed:
            raise host_error("set read-ahead of", device, failed) from failed


def size_of(device: str | Path) -> int:
    """The size of a block device in bytes."""
    with opened(device, os.O_RDONLY) as fd:
        return size_behind(fd)


def flush(device: str | Path) -> None:
    """Write the device's cached blocks to what is below it."""
    with opened(device, os.O_RDONLY) as fd:
        os.fsync(fd)


def size_behind(fd: int) -> int:
    """The size in bytes of an open block device."""
    answer = fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8))
    return int(struct.unpack("=Q", answer)[0])


@contextlib.contextmanager
def opened(path: str | Path, flags: int) -> Iterator[int]:
    """A device, or another file of the kernel, open for as long as the block lasts."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as failed:
        raise host_error("open", path, failed) from failed
    try:
        yield fd
    finally:
        os.close(fd)
