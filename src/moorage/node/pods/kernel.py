"""The system calls that make containers, as Python calls them.

Owns: those of namespaces and identity, and the words of all their errors. Which are made, and in which order, is said
in `rootfs.py` and `sandbox.py`.
Uses the standard library and `host.libc` only: the processes beside containers are forked from a bare interpreter.
Start reading at: `open_tree`, `attach`.
"""

import ctypes
import os
import signal

from moorage.host import libc

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x20000, 0x4000000, 0x8000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 2, 4, 8, 4096, 16384
MS_PRIVATE, MS_SLAVE, MS_SHARED = 1 << 18, 1 << 19, 1 << 20
_MNT_DETACH = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_ATTR_RDONLY = 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38

_libc = ctypes.CDLL(None, use_errno=True)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.signal.restype = ctypes.c_void_p


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def set_namespace(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, fstype: str, flags: int, data: str = "") -> None:
    try:
        libc.mount(source, target, fstype, flags, data)
    except OSError as failed:
        raise _while(f"mount {fstype or source} at {target}", failed) from failed


def take_root() -> None:
    """The working directory, a mount of its own, becomes the root; the old one leaves this namespace."""
    _check(_libc.syscall(_SYS_PIVOT_ROOT.get(os.uname().machine, 41), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "leave the host's root")
    os.chdir("/")


def open_tree(entry: int, shown: str) -> int:
    """A detached copy of the mounts at a descriptor and below it; it stays a peer of what it was copied from."""
    try:
        return libc.open_tree("", recursive=True, at=entry)
    except OSError as failed:
        raise _while(f"open volume {shown}", failed) from failed


def attach(tree: int, target: str) -> None:
    """Mount a detached tree; its descriptor is closed."""
    try:
        libc.move_mount(tree, target, follow_links=False)
    except OSError as failed:
        raise _while(f"mount volume at {target}", failed) from failed
    os.close(tree)


def set_propagation(tree: int, propagation: int, *, read_only: bool = False) -> None:
    """For a detached tree and every mount in it."""
    attributes = _ATTR_RDONLY if read_only else 0
    libc.mount_setattr("", attributes, propagation=propagation, recursive=True, at=tree)


def make_read_only(path: str, *, recursive: bool) -> None:
    libc.mount_setattr(path, _ATTR_RDONLY, recursive=recursive)


def open_beneath(base: int, path: str, flags: int) -> int:
    """Open a path below a directory; no link on the way may lead out of it."""
    return libc.openat2(base, path, flags | os.O_CLOEXEC, libc.BENEATH | libc.NO_MAGICLINKS)


def set_host_name(name: bytes) -> None:
    _check(_libc.sethostname(name, len(name)), "set the host name")


def drop_capability(number: int) -> None:
    """From the bounding set; the kernel may not know every number."""
    _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)


def forbid_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def die_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")


def reset_signals() -> None:
    """A program must find every signal as a fresh one does; what is ignored now would stay ignored in it."""
    for number in range(1, 32):  # straight to the C library: Python's own way makes an enum of each
        _libc.signal(number, None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _while(what: str, failed: OSError) -> OSError:
    return OSError(failed.errno, f"{what}: {failed.strerror}")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
