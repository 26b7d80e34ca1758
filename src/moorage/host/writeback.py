"""Sending a file's dirty pages to the disk early, so that the fsync at the end has little left to do.

Owns: sync_file_range(2).
May not touch: anything else. It promises nothing about durability; only an fsync does.
"""

import ctypes
import errno
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_WRITE = 2


def begin(fd: int, offset: int, length: int) -> bool:
    """Start to write a range out and do not wait for it; False where the kernel or the file cannot."""
    if _libc.sync_file_range(fd, offset, length, _WRITE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number))
