"""What the kernel says of a loop device: its file, by ioctl and in sysfs, and whether a process has a file open.

Owns: decoding of the status and of the paths that the kernel shows.
Start reading at: `read_status`, `backing_of`.
"""

import errno
import fcntl
import os
import signal
import struct
from pathlib import Path

from moorage.host.errors import host_error

SYS = "/sys/devices/virtual/block"  # what the links in /sys/block lead to
GET_STATUS64 = 0x4C05
# struct loop_info64: device, inode, rdevice, offset, sizelimit, number, encrypt_type,
# encrypt_key_size, flags, file_name, crypt_name, encrypt_key, init[2]
INFO = struct.Struct("=QQQQQIIII64s64s32sQQ")
_PAGE_BYTES = 4096  # no attribute in sysfs is longer
_F_SETSIG = 10


def read_status(number: int, fd: int) -> tuple[int, ...] | None:
    try:
        answer = fcntl.ioctl(fd, GET_STATUS64, bytes(INFO.size))
    except OSError as failed:
        if failed.errno == errno.ENXIO:
            return None
        raise host_error("read", f"/dev/loop{number}", failed) from failed
    return INFO.unpack(answer)


def file_of(status: tuple[int, ...]) -> tuple[int, int]:
    return (_decode_device(status[0]), status[1])


def _decode_device(encoded: int) -> int:
    """The kernel's 32-bit device encoding as os.stat gives it."""
    return os.makedev((encoded >> 8) & 0xFFF, (encoded & 0xFF) | ((encoded >> 12) & 0xFFF00))


def backing_of(number: int, directory: int | None = None) -> bytes | None:
    """The path of a device's file; None when it is not attached. `directory` is that of all devices, opened."""
    path = f"loop{number}/loop/backing_file" if directory is not None else f"{SYS}/loop{number}/loop/backing_file"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:  # not attached: the directory is not there
        return None
    try:
        return os.read(fd, _PAGE_BYTES).removesuffix(b"\n")
    except OSError:  # detached in the meantime
        return None
    finally:
        os.close(fd)


def plain_path(text: bytes | None) -> str:
    return os.fsdecode((text or b"").removesuffix(b" (deleted)"))


def is_open_elsewhere(path: str | Path) -> bool:
    """Whether anybody on this machine has the file open, in constant time.

    The kernel grants a write lease only on a file that no other process has open, and a loop device
    has its file open. Where leases are unknown, "perhaps" is the answer.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        # An opener in between would signal us with SIGIO, which kills; SIGURG is ignored.
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
