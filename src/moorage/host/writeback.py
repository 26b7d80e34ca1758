"""Sending a file's dirty pages to the disk early, so that the fsync at the end has little left to do.

May not touch: anything else. It promises nothing about durability; only an fsync does.
"""

import errno

from moorage.host import libc

_WRITE = 2


def begin(fd: int, offset: int, length: int) -> bool:
    """Start to write a range out and do not wait for it; False where the kernel or the file cannot."""
    try:
        libc.sync_file_range(fd, offset, length, _WRITE)
    except OSError as failed:
        if failed.errno in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP):
            return False
        raise
    return True
