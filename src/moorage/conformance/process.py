"""The process of the driver: killing it and starting it again, for checks of what survives that.

Owns: who listens on the socket (asked of the kernel), SIGKILL through a pidfd, and the command that starts it again.
Start reading at: `Control`, `CommandControl`.
"""

import asyncio
import os
import shlex
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from moorage.csi.endpoint import is_live
from moorage.errors import MoorageError, UsageError

_GONE_S = 15.0
_BACK_S = 60.0


class CannotRestart(MoorageError):
    """The driver could not be killed, or did not come back."""


class Control(Protocol):
    """How a run kills the driver and starts it again."""

    async def kill(self) -> None:
        """End the driver as a power failure would. Returns when its socket is dead."""

    async def start(self) -> None:
        """Start the driver again. Returns when its socket is alive."""


class CommandControl:
    """A driver that the operator's command starts again. The command returns, or is the driver itself."""

    def __init__(self, path: Path, command: str) -> None:
        self._path = path
        self._started: list[subprocess.Popen[bytes]] = []  # the last one is the driver, which goes on after the run
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"--restart-command {command!r}: {error}") from error
        if not self._words:
            raise UsageError("--restart-command is empty")

    async def kill(self) -> None:
        pid = listener_of(self._path)
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
        await _until(lambda: not is_live(self._path), _GONE_S, f"the driver (pid {pid}) was killed and still answers")

    async def start(self) -> None:
        try:
            process = await asyncio.to_thread(self._spawned)
        except OSError as error:
            raise CannotRestart(f"--restart-command: {self._words[0]}: {error.strerror}") from error
        self._started.append(process)
        text = "--restart-command did not bring the driver back"
        await _until(lambda: is_live(self._path) or bool(process.poll()), _BACK_S, text)
        if not is_live(self._path):
            raise CannotRestart(f"--restart-command ended with {process.returncode}, and {self._path} is dead")

    def _spawned(self) -> "subprocess.Popen[bytes]":
        """Start the command in a session of its own, so that Ctrl-C does not reach the driver."""
        null = subprocess.DEVNULL
        return subprocess.Popen(self._words, stdin=null, stdout=null, stderr=null, start_new_session=True)


def listener_of(path: Path) -> int:
    """Return the process that listens on a socket. Raises CannotRestart if it cannot be known, or is this one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(5)
        try:
            peer.connect(os.fspath(path))
            raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError as error:
            raise CannotRestart(f"{path} cannot be asked who listens there: {error.strerror}") from error
    pid = int(struct.unpack("3i", raw)[0])
    if pid <= 1 or pid in (os.getpid(), os.getppid()):
        raise CannotRestart(f"the process behind {path} is not visible from here, so that it cannot be killed")
    return pid


async def _until(condition: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise CannotRestart(otherwise)
        await asyncio.sleep(0.02)
