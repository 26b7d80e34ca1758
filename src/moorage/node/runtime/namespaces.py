"""The system calls that make namespaces, as Python calls them.

Those of a container's own process are in its plan instead: see `launch.py`.
Owns: the words of their errors.
Uses the standard library and `host.libc` only: the processes beside containers are forked from a bare interpreter.
Start reading at: `mount`.
"""

import ctypes
import os

from moorage.host import libc

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x20000, 0x4000000, 0x8000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 2, 4, 8, 4096, 16384
MS_PRIVATE, MS_SLAVE, MS_SHARED = 1 << 18, 1 << 19, 1 << 20
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NODEV = 1, 4  # of mount_setattr
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


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
    """The working directory, a mount of its own, becomes the root; the old one leaves this namespace."""
    _check(_libc.syscall(_SYS_PIVOT_ROOT.get(os.uname().machine, 41), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "leave the host's root")
    os.chdir("/")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
