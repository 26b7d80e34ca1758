"""The agent's connection to its supervisor, the process whose children the containers are.

Owns: starting supervisors, sending requests to the current one, and following the end of each.
Start reading at: `Supervisors.ask`.
"""

import array
import asyncio
import json
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moorage.host.read_only import read_only
from moorage.log import get_logger
from moorage.node.runtime import NotCreated, container_state

log = get_logger(__name__)

_LONGEST_MESSAGE = 1 << 15


class Supervisors:
    """The supervisor that starts containers now, and earlier ones that still have some."""

    def __init__(self, hide: Sequence[str], open_files: int | None, on_end: Callable[[int], None]) -> None:
        self.current: SupervisorClient | None = None
        self._earlier: list[SupervisorClient] = []
        self._hide = hide
        self._open_files = open_files
        self._on_end = on_end  # called with the pid of a supervisor that has ended

    def connect(self) -> "SupervisorClient":
        """Return the current supervisor. A new one is started if there is none that runs."""
        if self.current is not None and self.current.is_over:
            self.leave(self.current)
        if self.current is None:
            self.current = SupervisorClient(self._hide, self._open_files, self._on_end)
        return self.current

    async def ask(self, request: Mapping[str, Any], given: list[int]) -> "ReplyPipe":
        """Send a request with descriptors. Raises NotCreated if no supervisor can be reached."""
        data = json.dumps(request).encode()
        read, write = os.pipe()
        os.set_blocking(read, False)
        fds = [*given, write]
        try:
            if len(data) > _LONGEST_MESSAGE:
                fds.insert(-1, _in_memory(data))
                data = json.dumps({"op": container_state.ELSEWHERE}).encode()
            for attempt in (1, 2):
                supervisor = self.connect()
                try:
                    await supervisor.send(data, fds)
                    break
                except OSError as error:
                    if attempt == 2:
                        raise NotCreated(f"the process that starts containers cannot be reached: {error}") from error
                    self.leave(supervisor)
        except BaseException:
            os.close(read)
            raise
        finally:
            for fd in fds[len(given) :]:
                os.close(fd)
        return ReplyPipe(read)

    def leave(self, supervisor: "SupervisorClient") -> None:
        """Send nothing more to a supervisor. It ends once it has no container."""
        supervisor.hang_up()
        if supervisor is self.current:  # else another task has left it already, and there may be a new one
            self.current = None
            self._earlier = [one for one in (*self._earlier, supervisor) if not one.is_over]

    async def close(self, patience_s: float) -> None:
        """Leave the current supervisor, and wait a little for those without containers to end."""
        if self.current is not None:
            self.leave(self.current)
        await asyncio.gather(*(one.leave(patience_s) for one in self._earlier))


class SupervisorClient:
    """The process whose children the containers are. It outlives this one."""

    def __init__(self, hide: Sequence[str], open_files: int | None, on_end: Callable[[int], None]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        try:
            self.pid = self._spawn(theirs, hide, open_files)
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._control.close()
            raise
        finally:
            theirs.close()
        self.is_over = False
        self._over = asyncio.Event()
        self._on_end = on_end
        self._sending = asyncio.Lock()
        self._ready: asyncio.Future[None] | None = None  # when it may take another message
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    async def send(self, data: bytes, fds: list[int]) -> None:
        """One message; waits without holding up anything else while it is busy forking. Raises OSError once it is gone,
        or was left."""
        rights = array.array("i", fds).tobytes()
        async with self._sending:
            while True:
                try:
                    self._control.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                    return
                except BlockingIOError:
                    await self._writable()

    def hang_up(self) -> None:
        """Close the control socket and wake the tasks that wait to send: a closed socket would not wake them."""
        if self._ready is not None:
            asyncio.get_running_loop().remove_writer(self._control)
            _resolve(self._ready)
            self._ready = None
        self._control.close()

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        self._ready = ready = loop.create_future()
        loop.add_writer(self._control, _resolve, ready)
        try:
            await ready
        finally:
            if self._ready is ready:
                loop.remove_writer(self._control)
                self._ready = None

    @staticmethod
    def _spawn(control: socket.socket, hide: Sequence[str], open_files: int | None) -> int:
        control.set_inheritable(True)
        script = str(Path(__file__).with_name("supervisor.py"))
        numbers = (control.fileno(), os.getpid(), open_files or resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        arguments = ("-I", "-S", "-B", script, *map(str, numbers), *hide)
        nothing = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        # Forks of the interpreter enter containers, and a container can make them execute /proc/self/exe.
        with read_only(sys.executable) as executed:
            return os.posix_spawn(executed, [sys.executable, *arguments], os.environ, file_actions=nothing)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        os.waitpid(self.pid, 0)
        self.is_over = True
        self._over.set()
        self._on_end(self.pid)

    async def leave(self, patience_s: float) -> None:
        """Wait a little for its end; it goes on for as long as its containers do."""
        try:
            async with asyncio.timeout(patience_s):
                await self._over.wait()
        except TimeoutError:
            log.debug("the supervisor of containers goes on", pid=self.pid)
        if not self.is_over:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)


class ReplyPipe:
    """Lines of JSON from a forked process; `{}` when it has no more to say."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = b""
        self._is_over = False

    async def line(self) -> dict[str, Any]:
        while b"\n" not in self._buffer and not self._is_over:
            await self._more()
        text, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(text)) if text else {}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def _more(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._fd, _resolve, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self._fd)
        data = os.read(self._fd, 65536)
        self._buffer += data
        self._is_over = not data


def _in_memory(data: bytes) -> int:
    fd = os.memfd_create("request")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def _resolve(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)
