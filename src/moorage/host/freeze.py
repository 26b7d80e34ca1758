"""Freezing mounted filesystems for a moment, and never for longer.

Owns: FIFREEZE and FITHAW, the bound on a freeze, and the guard process that thaws when the
process that froze has died or hangs. The kernel thaws nothing by itself, so a freeze is armed
with the guard before it happens.
May not touch: pools; the caller chooses the filesystems.
Start reading at: `frozen`.
"""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from moorage.host import libc
from moorage.host.errors import FreezeBroken, HostError, host_error
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")
_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878

# Runs as `python -I -S -c`: small, and independent of anything that may change below it.
# It opens each mount point before the freeze, acknowledges, and thaws what is still armed at
# the deadline or when its standard input ends, which it does when the parent dies.
_GUARD = r"""
import fcntl, os, select, sys, time
armed, pending = {}, b""
def thaw(key):
    fd, _ = armed.pop(key)
    try:
        fcntl.ioctl(fd, 0xC0045878, 0)
    except OSError:
        pass
    os.close(fd)
while True:
    now = time.monotonic()
    for key in [k for k, (_, end) in armed.items() if end <= now]:
        thaw(key)
    wait = min((end for _, end in armed.values()), default=None)
    ready, _, _ = select.select([0], [], [], None if wait is None else max(0.0, wait - now))
    if not ready:
        continue
    got = os.read(0, 65536)
    if not got:
        break
    pending += got
    while b"\n" in pending:
        line, pending = pending.split(b"\n", 1)
        word, key, rest = line.split(b" ", 2)
        answer = b"ok\n"
        if word == b"arm":
            seconds, path = rest.split(b" ", 1)
            try:
                fd = os.open(bytes.fromhex(path.decode()), os.O_RDONLY)
                armed[key] = (fd, time.monotonic() + float(seconds))
            except OSError as failed:
                answer = b"error %d\n" % failed.errno
        elif key in armed:
            os.close(armed.pop(key)[0])
        os.write(1, answer)
for key in list(armed):
    thaw(key)
"""


class Guard:
    """The child process that outlives us by one thaw. One per process, started when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._count = 0

    def arm(self, path: str, bound_s: float) -> str:
        """Promise a thaw of `path` after `bound_s`, or when this process dies; returns a key."""
        with self._lock:
            self._count += 1
            key = str(self._count)
            self._ask(f"arm {key} {bound_s:.3f} {os.fsencode(path).hex()}", path)
            return key

    @property
    def pid(self) -> int:
        """The guard's process id; 0 when none runs."""
        return self._process.pid if self._process is not None and self._owner == os.getpid() else 0

    def disarm(self, key: str) -> None:
        with self._lock:
            process = self._process
            if process is not None and self._owner == os.getpid() and process.poll() is None:
                self._ask(f"drop {key} -", key)

    def stop(self) -> None:
        """End the guard; what is still armed is thawed first."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            process.wait(timeout=30)

    def _ask(self, line: str, about: str) -> None:
        process = self._process
        # A forked child must not lean on its parent's guard, which waits for the parent's death.
        if process is None or self._owner != os.getpid() or process.poll() is not None:
            process = self._process = _start_guard()
            self._owner = os.getpid()
        if process.stdin is None or process.stdout is None:
            raise HostError(f"freeze {about}: the guard has no pipes")
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline().decode().split()
        if answer[:1] == ["error"]:
            raise host_error("freeze", about, OSError(int(answer[1]), ""))
        if answer != ["ok"]:
            raise HostError(f"freeze {about}: the guard process died")


_guard = Guard()


def guard_pid() -> int:
    """The process id of the guard; 0 when none was started."""
    return _guard.pid


def stop_guard() -> None:
    """End the guard process, if one was started; for an orderly shutdown."""
    _guard.stop()


@dataclass(slots=True)
class Hold:
    """How long writers were held, from the first freeze to the last thaw; known at the end."""

    held_ms: float = 0.0


@contextlib.contextmanager
def frozen(mountpoints: Sequence[str | Path], bound_s: float = 10.0) -> Iterator[Hold]:
    """Hold all these filesystems still for the block: all of them, or none.

    Their dirty data is written first, while writers still run, so that the hold is short. The
    guard thaws them at the bound or when this process dies; a block that ran longer than the
    bound gets FreezeBroken at its end, because what it did was not done on still filesystems.
    """
    paths = [os.fspath(path) for path in mountpoints]
    fds = [_opened(path) for path in paths]
    keys: list[str] = []
    held: list[tuple[str, int]] = []
    try:
        _each(libc.syncfs, fds)
        keys.extend(_guard.arm(path, bound_s) for path in paths)
        hold, started = Hold(), time.monotonic()
        _freeze_all(paths, fds, started + bound_s, held)
        try:
            yield hold
        finally:
            thawed = _each(thaw_fd, [fd for _, fd in held])
            hold.held_ms = (time.monotonic() - started) * 1000
            broken = [path for (path, _), was in zip(held, thawed, strict=True) if not was]
            held.clear()
        if broken:
            raise FreezeBroken(f"{', '.join(broken)} was thawed after {bound_s:g} s, before the work was done")
    finally:
        for _, fd in held:
            thaw_fd(fd)
        for key in keys:
            _guard.disarm(key)
        for fd in fds:
            os.close(fd)


def thaw(mountpoint: str | Path) -> bool:
    """Thaw a filesystem; False says that it was not frozen."""
    fd = _opened(os.fspath(mountpoint))
    try:
        return thaw_fd(fd)
    finally:
        os.close(fd)


def thaw_fd(fd: int) -> bool:
    """Thaw the filesystem that an open file lies on; False says that it was not frozen."""
    try:
        fcntl.ioctl(fd, _FITHAW, 0)
    except OSError as failed:
        if failed.errno == errno.EINVAL:
            return False
        raise
    return True


def _freeze_all(paths: Sequence[str], fds: Sequence[int], deadline: float, held: list[tuple[str, int]]) -> None:
    """Freeze side by side: each waits for readers of the kernel's locks to pass, and they wait together."""

    def one(index: int) -> HostError | None:
        try:
            _freeze(paths[index], fds[index], deadline)
        except HostError as failed:
            return failed
        held.append((paths[index], fds[index]))
        return None

    for failed in _each(one, range(len(fds))):
        if failed is not None:
            raise failed


def _freeze(path: str, fd: int, deadline: float) -> None:
    while True:
        try:
            fcntl.ioctl(fd, _FIFREEZE, 0)
        except OSError as failed:
            # Another process still holds it. Its freeze is bounded too, or that process ends it.
            if failed.errno == errno.EBUSY and time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            raise host_error("freeze", path, failed) from failed
        return


def _each(call: Callable[[int], T], items: Sequence[int]) -> list[T]:
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(max_workers=min(32, len(items))) as pool:
        return list(pool.map(call, items))


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as failed:
        raise host_error("open", path, failed) from failed


def _start_guard() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to our process group must not take the guard too
        bufsize=0,
    )
