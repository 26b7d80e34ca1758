"""`kubectl exec` over a WebSocket.

Owns: the channel protocol (v5.channel.k8s.io and v4.channel.k8s.io) between a client and a program in a container.
Start reading at: `serve_exec`.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from moorage.host.read_only import read_only
from moorage.host.threads import in_thread
from moorage.log import get_logger
from moorage.node.runtime import ContainerFailed, ContainerRuntime, Reply, RunningContainer
from moorage.node.serve.peers import is_closed

log = get_logger(__name__)

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE, _CLOSE = 0, 1, 2, 3, 4, 255
_CHUNK = 1 << 15
_QUIET_S = 2.0
_LOOK_S = 1.0  # between looks at a client whose input is not read, because the program does not
# What a kubelet takes. kubectl sends 32 KiB at a time, the Python client whatever it is given as one message.
_LARGEST_MESSAGE = 32 << 20
NEEDS_WEB_SOCKET = (
    "kubectl 1.31 or later is needed to exec here (or another client that uses WebSocket with v5.channel.k8s.io or "
    "v4.channel.k8s.io): SPDY, which older ones use, is not served"
)

# Descriptors for the program, descriptors to close later, and (descriptor, channel) to read from.
_Streams = tuple[list[int], list[int], list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class ExecOptions:
    argv: tuple[str, ...]
    stdin: bool = False
    stdout: bool = True
    stderr: bool = True
    tty: bool = False


async def serve_exec(
    request: web.Request,
    runtime: ContainerRuntime,
    container: RunningContainer,
    spec: Mapping[str, Any],
    options: ExecOptions,
) -> web.StreamResponse:
    """Run one program in the container, its streams in the client's hands."""
    offered = [word.strip() for word in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
    usable = [protocol for protocol in PROTOCOLS if protocol in offered]
    if request.headers.get("Upgrade", "").lower() != "websocket" or not usable:
        return refused(400, NEEDS_WEB_SOCKET)
    # No heartbeat: a client that does not read for a while, such as a pager, does not answer it either.
    socket = _Channels(protocols=(usable[0],), max_msg_size=_LARGEST_MESSAGE)
    await socket.prepare(request)
    status: dict[str, Any]
    try:
        code = await _Session(socket, options).run(runtime, container, spec)
        status = _status_from(code)
    except ContainerFailed as error:
        status = _failure("InternalError", str(error), 500)
    except ConnectionError:
        return socket
    with contextlib.suppress(ConnectionError):
        await socket.tell(status)
        await socket.close()
    return socket


def refused(status: int, text: str) -> web.Response:
    """No connection, and why. As a Status: kubectl reads the answer as YAML, so a plain text with a colon in it would
    be taken for an object with an odd field, and shown as nothing at all."""
    reason = {400: "BadRequest", 501: "NotImplemented"}.get(status, "InternalError")
    body = {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": text, "reason": reason, "code": status,
    }  # fmt: skip
    return web.json_response(body, status=status)


class _Channels(web.WebSocketResponse):
    """A WebSocket that says so when a message is too long, instead of just closing."""

    async def tell(self, status: Mapping[str, Any]) -> None:
        await self.send_bytes(bytes((_ERROR,)) + json.dumps(status).encode())

    async def close(self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True) -> bool:
        if code == WSCloseCode.MESSAGE_TOO_BIG and not self.closed:
            text = f"a message of more than {_LARGEST_MESSAGE >> 20} MiB is not taken; send several"
            log.info("exec is ended", reason=text)
            message = text.encode()
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_QUIET_S):  # a client that is busy sending may not read
                    await self.tell(_failure("RequestEntityTooLarge", text, 413))
        return await super().close(code=code, message=message, drain=drain)


class _Session:
    def __init__(self, socket: web.WebSocketResponse, options: ExecOptions) -> None:
        self._socket = socket
        self._options = options
        self._input = -1
        self._terminal = -1
        self._sent = 0
        self._sending = 0

    async def run(self, runtime: ContainerRuntime, container: RunningContainer, spec: Mapping[str, Any]) -> int:
        theirs, ours, outputs = (
            await self._terminal_of(runtime, container, spec) if self._options.tty else self._pipes(spec)
        )
        kept = ("env", "uid", "gid", "groups", "cwd", "cgroups", "privileged", "no_new_privileges", "capabilities")
        request = {key: spec[key] for key in kept if key in spec}
        request |= {"argv": list(self._options.argv), "tty": self._options.tty}
        request.setdefault("env", {})
        try:
            reply = await runtime.exec(container, request, theirs)
        except BaseException:
            self._close(ours)
            raise
        finally:
            for fd in set(theirs):
                os.close(fd)
        pumps = [asyncio.create_task(self._pump(fd, channel)) for fd, channel in outputs]
        reader = asyncio.create_task(self._receive())
        # Unlike a kubelet, nothing is said before the program says something: kubectl before 1.34 may not have its
        # streams yet, and complains of what it then drops.
        try:
            return await self._until_end(reply, pumps, reader)
        finally:
            for task in (*pumps, reader):
                task.cancel()
            await asyncio.gather(*pumps, reader, return_exceptions=True)
            reply.close()
            self._close(ours)

    async def _until_end(self, reply: Reply, pumps: list["asyncio.Task[None]"], reader: "asyncio.Task[None]") -> int:
        answer = await reply.line()
        if "error" in answer:
            raise ContainerFailed(str(answer["error"]))
        ending = asyncio.create_task(reply.line())
        try:
            await asyncio.wait((ending, reader), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():  # the client is gone: the program loses its streams
                raise ConnectionResetError("client closed the connection")
            await self._last_words(pumps, reader)
            return int(ending.result().get("exit_code", 137))
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _last_words(self, pumps: list["asyncio.Task[None]"], reader: "asyncio.Task[None]") -> None:
        """What the program wrote before its end reaches the client, however slowly that reads. A process that it left
        behind may hold the streams open: once nothing comes any more, that is not waited for."""
        while pumps:
            sent = self._sent
            _, unfinished = await asyncio.wait(pumps, timeout=_QUIET_S)
            if not unfinished or reader.done() or (sent == self._sent and not self._sending):
                return

    async def _terminal_of(
        self, runtime: ContainerRuntime, container: RunningContainer, spec: Mapping[str, Any]
    ) -> _Streams:
        master, slave = await runtime.open_terminal(container, int(spec.get("uid") or 0))
        os.set_blocking(master, False)
        self._terminal = self._input = master
        return [slave, slave, slave], [master], [(master, _STDOUT)]

    def _pipes(self, spec: Mapping[str, Any]) -> _Streams:
        with read_only(os.devnull) as path:
            null = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        theirs, ours, outputs = [null, null, null], [], []
        if self._options.stdin:
            theirs[0], self._input = os.pipe()
            os.set_blocking(self._input, False)
        for number, wanted in ((_STDOUT, self._options.stdout), (_STDERR, self._options.stderr)):
            if wanted:
                read, theirs[number] = os.pipe()
                os.set_blocking(read, False)
                ours.append(read)
                outputs.append((read, number))
        if owner := int(spec.get("uid") or 0):  # who may then also open /dev/stdout; root may anyway
            for fd in set(theirs) - {null}:
                os.fchown(fd, owner, -1)
        if null not in theirs:
            os.close(null)
        return theirs, ours, outputs

    async def _pump(self, fd: int, channel: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await _ready(loop.add_reader, loop.remove_reader, fd)
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                continue
            except OSError:  # a terminal whose other side is closed
                return
            if not data:
                return
            self._sending += 1
            try:
                await self._socket.send_bytes(bytes((channel,)) + data)
            finally:
                self._sending -= 1
            self._sent += len(data)

    async def _receive(self) -> None:
        async for message in self._socket:
            if message.type is not WSMsgType.BINARY and message.type is not WSMsgType.TEXT:
                continue
            data = message.data if isinstance(message.data, bytes) else message.data.encode()
            if not data:
                continue
            if data[0] == _STDIN:
                await self._write_input(data[1:])
            elif data[0] == _RESIZE and self._terminal >= 0:
                _resize(self._terminal, data[1:])
            elif data[0] == _CLOSE and data[1:2] == bytes((_STDIN,)):
                self._close_input()

    async def _write_input(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and self._input >= 0:
            try:
                rest = rest[os.write(self._input, rest) :]
            except BlockingIOError:
                await self._wait_for_room()
            except OSError:
                self._close_input()

    async def _wait_for_room(self) -> None:
        """Nothing is read from the client meanwhile, so that its end would not be heard of: it is looked for."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    return await _ready(loop.add_writer, loop.remove_writer, self._input)
            except TimeoutError:
                if await in_thread(is_closed, self._socket):
                    raise ConnectionResetError("client closed the connection") from None

    def _close(self, ours: list[int]) -> None:
        self._close_input()
        for fd in ours:
            os.close(fd)

    def _close_input(self) -> None:
        """No more is typed. A terminal stays open: it is where the output comes from."""
        if self._input >= 0 and self._terminal < 0:
            os.close(self._input)
        self._input = -1


async def _ready(add: Any, remove: Any, fd: int) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(fd, _resolve, done)
    try:
        await done
    finally:
        remove(fd)


def _resolve(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)


def _resize(terminal: int, data: bytes) -> None:
    try:
        size = json.loads(data)
        packed = struct.pack("HHHH", int(size["Height"]), int(size["Width"]), 0, 0)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, packed)
    except (ValueError, KeyError, TypeError, OSError, struct.error) as error:
        log.debug("terminal size is not usable", reason=str(error))


def _failure(reason: str, message: str, code: int) -> dict[str, Any]:
    details = {"causes": [{"message": message}]}  # where the Python client looks for the exit code, and so shows it
    return {
        "metadata": {}, "status": "Failure", "reason": reason, "message": message, "details": details, "code": code,
    }  # fmt: skip


def _status_from(code: int) -> dict[str, Any]:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }
