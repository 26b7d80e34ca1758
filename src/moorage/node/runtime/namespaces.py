"""The system calls of a container's first process that neither `os` nor `host.libc` offers.

Owns: their ctypes declarations and the texts of their errors.
Uses the standard library and `host.libc` only: the processes beside containers are forked from a bare interpreter.
Start reading at: `mount`.
"""

import ctypes
import os
from itertools import pairwise

from moorage.host import libc

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x20000, 0x4000000, 0x8000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 2, 4, 8, 4096, 16384
MS_PRIVATE, MS_SLAVE, MS_SHARED = 1 << 18, 1 << 19, 1 << 20
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NODEV = 1, 4  # of mount_setattr
LAST_FD = 0x7FFFFFFF
_LAST_STREAM = 2
_CLOSE_AT_EXEC = 4
# The number of a system call on x86-64, and on machines that came later.
_IS_LATER = os.uname().machine != "x86_64"
_SYS_PIVOT_ROOT, _SYS_KEYCTL, _SYS_SECCOMP = ((155, 41)[_IS_LATER], (250, 219)[_IS_LATER], (317, 277)[_IS_LATER])
_SYS_SIGACTION = (13, 134)[_IS_LATER]
_DEFAULT_ACTION, _SIGNALS_BYTES = bytes(32), 8
_SYS_CLOSE_RANGE = 436

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def set_namespace(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, fstype: str, flags: int, data: str = "") -> None:
    try:
        libc.mount(source, target, fstype, flags, data)
    except OSError as failed:
        raise OSError(failed.errno, f"mount {fstype or source} at {target}: {failed.strerror}") from failed


def take_root() -> None:
    """Make the working directory, which is a mount, the root. The old root leaves this namespace."""
    _check(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "leave the host's root")
    os.chdir("/")


def close_range(first: int, last: int, *, at_exec: bool = False) -> None:
    """Close descriptors, now or when the program is executed."""
    done = _libc.syscall(_SYS_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), _CLOSE_AT_EXEC * at_exec)
    _check(done, "close files")


def close_all_but(*kept: int) -> None:
    """Close every descriptor except the streams and these."""
    for below, above in pairwise((_LAST_STREAM, *sorted(kept), LAST_FD + 1)):
        if below + 1 < above:
            close_range(below + 1, above - 1)


def reset_signal(number: int) -> None:
    """Give a signal its default action. Also for the C library's own signals, which it does not let programs set."""
    _check(_libc.syscall(_SYS_SIGACTION, number, _DEFAULT_ACTION, None, ctypes.c_size_t(_SIGNALS_BYTES)), "sigaction")


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), "prctl")


def capset(head: bytes, sets: bytes) -> None:
    _check(_libc.capset(head, sets), "keep capabilities")


def keyctl(operation: int) -> None:
    _check(_libc.syscall(_SYS_KEYCTL, ctypes.c_long(operation), None), "keyctl")


def seccomp(operation: int, flags: int, program: bytes) -> None:
    _check(_libc.syscall(_SYS_SECCOMP, ctypes.c_uint(operation), ctypes.c_uint(flags), program), "filter system calls")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
