"""Giving a file's blocks back without changing its size.

Owns: fallocate(2) with FALLOC_FL_PUNCH_HOLE.
May not touch: anything else.
"""

import ctypes
import errno
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def punch(fd: int, offset: int, length: int) -> bool:
    """Turn a range into a hole that reads as zeros; False where the filesystem cannot."""
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number))
