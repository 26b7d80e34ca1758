"""The system calls that Python's standard library does not offer.

Owns: the ctypes declarations of mount, umount2, syncfs, sync_file_range and quotactl.
May not touch: policy; every function is one system call and raises OSError as `os` does.
"""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.syncfs.argtypes = (ctypes.c_int,)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.quotactl.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)


def _check(result: int, path: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


def mount(source: str, target: str, fstype: str, flags: int, data: str) -> None:
    _check(
        _libc.mount(os.fsencode(source), os.fsencode(target), fstype.encode(), flags, data.encode() or None),
        target,
    )


def umount2(target: str, flags: int) -> None:
    _check(_libc.umount2(os.fsencode(target), flags), target)


def syncfs(fd: int) -> None:
    _check(_libc.syncfs(fd), f"fd {fd}")


def sync_file_range(fd: int, offset: int, length: int, flags: int) -> None:
    _check(_libc.sync_file_range(fd, offset, length, flags), f"fd {fd}")


def quotactl(command: int, device: str, ident: int, data: ctypes.Structure) -> None:
    _check(_libc.quotactl(command, os.fsencode(device), ident, ctypes.byref(data)), device)
