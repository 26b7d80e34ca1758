"""A terminal for a program that is run in a container.

Owns: making one in the container's own `/dev/pts`, where the program finds it under its name.
Start reading at: `open_terminal`.
"""

import asyncio
import fcntl
import os
import pty
import signal
import struct

from moorage.host import libc
from moorage.host.threads import in_thread
from moorage.log import get_logger

log = get_logger(__name__)

_TIOCSPTLCK, _TIOCGPTPEER = 0x40045431, 0x5441
_PATIENCE_S = 5.0


async def open_terminal(pid: int, pidfd: int, owner: int) -> tuple[int, int]:
    """Both sides of a new terminal, the program's second, in the container with this first process. Where it has no
    `/dev/pts` that answers, it is one of the host's: the program can use it just as well, but not look it up."""
    try:
        return await _opened(_root_of(pid, pidfd), owner)
    except TimeoutError:
        reason = "it does not answer"
    except OSError as error:
        reason = str(error)
    log.info("terminal is one of the host's", pid=pid, reason=reason)
    master, slave = pty.openpty()
    if owner:
        os.fchown(slave, owner, -1)
    return master, slave


def _root_of(pid: int, pidfd: int) -> int:
    """A descriptor of a process's root directory."""
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        signal.pidfd_send_signal(pidfd, 0)  # it exists, so the number was not another process's when this was opened
    except OSError:
        os.close(root)
        raise
    return root


async def _opened(root: int, owner: int) -> tuple[int, int]:
    opening = asyncio.create_task(in_thread(_open_inside, root, owner))
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await asyncio.shield(opening)
    finally:
        if not opening.done():
            opening.add_done_callback(_close)


def _open_inside(root: int, owner: int) -> tuple[int, int]:
    """Closes `root`. No link is followed: the container has made its files, and they must not lead out of it."""
    flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
    try:
        master = libc.openat2(root, "dev/pts/ptmx", flags | os.O_NONBLOCK, libc.BENEATH | libc.NO_SYMLINKS)
    finally:
        os.close(root)
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        slave = fcntl.ioctl(master, _TIOCGPTPEER, flags)
    except BaseException:
        os.close(master)
        raise
    os.fchown(slave, owner, -1)
    return master, slave


def _close(opening: "asyncio.Task[tuple[int, int]]") -> None:
    """Called when the client no longer waits for it."""
    if not opening.cancelled() and opening.exception() is None:
        for fd in opening.result():
            os.close(fd)
