"""Sockets: TLS on loopback, and where asked for a unix socket or plain HTTP on loopback.

Owns: binding, TLS settings, and taking connections: `places` says for which of them there is room.
May not touch: requests.
Start reading at: `Listener.open_tls`.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from moorage.apiserver.access.pki import ServerIdentity
from moorage.apiserver.errors import StatusError
from moorage.apiserver.http.places import Place, Places
from moorage.apiserver.limits import ServerLimits
from moorage.apiserver.store.store import encode
from moorage.log import get_logger

log = get_logger(__name__)

HandleRequest = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_AT_A_TIME = 50
_PAUSE_S = 0.2  # after a connection could not be taken, for want of descriptors


class Connection(RequestHandler):
    """A connection that must send its first request soon, and that has a place."""

    __slots__ = ("_deadline", "_listener", "place")

    def __init__(self, manager: Any, listener: "Listener", place: Place, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._listener = listener
        self._deadline: asyncio.TimerHandle | None = None
        self.place = place

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener.open[self] = transport
        self.place.cut = self.abort
        if self._listener.is_closing:
            self.force_close()
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._listener.limits.headers_s, self._close_if_silent)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.open.pop(self, None)
        self.place.leave()
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what is no HTTP, or an answer that failed, with a Status."""
        if status < 500:
            log.debug("malformed HTTP", peer=str(self.peername), error=str(exc)[:200])
        else:
            log.error("a request failed", peer=str(self.peername), error=repr(exc)[:500])
        if request.writer.output_size:
            raise ConnectionError("the answer has begun already")
        error = StatusError(status, "BadRequest" if status < 500 else "InternalError", (message or "")[:200])
        response = web.Response(body=encode(error.status()), status=status, content_type="application/json")
        response.force_close()
        return response

    def abort(self) -> None:
        """Cut the connection, without waiting for its peer."""
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()

    def _close_if_silent(self) -> None:
        if self._current_request is None and self._request_count == 0:
            self.force_close()


class _Server(web.Server):
    def __init__(self, handler: HandleRequest, listener: "Listener", **kwargs: Any) -> None:
        super().__init__(handler, **kwargs)
        self._listener = listener

    def connection(self, place: Place) -> Connection:
        return Connection(self, self._listener, place, loop=self._loop, **self._kwargs)


class Listener:
    """The open sockets of one server."""

    def __init__(self, handler: HandleRequest, limits: ServerLimits) -> None:
        self.limits = limits
        self.open: dict[RequestHandler, asyncio.BaseTransport] = {}
        self.places = Places(limits)
        self.is_closing = False
        self._server = _Server(
            handler,
            self,
            handler_cancellation=True,  # a watch ends when its client has gone, not at its next event
            access_log=None,
            keepalive_timeout=limits.idle_s,
            max_line_size=limits.line_bytes,
            max_headers=128,
            max_field_size=limits.line_bytes,
            auto_decompress=False,
            lingering_time=2.0,
        )
        self._sockets: list[socket.socket] = []
        self._opening: set[asyncio.Task[None]] = set()

    async def open_tls(self, host: str, port: int, identity: ServerIdentity) -> int:
        """Listen with TLS; the port that was bound."""
        return await self._open_tcp(host, port, _tls(identity))

    async def open_plain(self, host: str, port: int) -> int:
        return await self._open_tcp(host, port, None)

    async def open_unix(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(1024)
        self._serve(listening, None)

    async def _open_tcp(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listening = socket.create_server(address[:2], family=family, backlog=1024)
        self._serve(listening, tls)
        return int(listening.getsockname()[1])

    def _serve(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        listening.setblocking(False)
        self._sockets.append(listening)
        asyncio.get_running_loop().add_reader(listening, self._accept, listening, tls)

    def _accept(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Take the connections that wait; a flood of them leaves room for requests."""
        for _ in range(_AT_A_TIME):
            try:
                taken, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("a connection could not be taken", error=str(error))
                self.places.evict()
                self._pause(listening, tls)
                return
            place = self.places.take(address[0] if isinstance(address, tuple) else "")
            if place is None:
                taken.close()
                continue
            taken.setblocking(False)
            task = asyncio.create_task(self._open(taken, tls, place), name="apiserver-connection")
            place.cut = task.cancel
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _pause(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        loop.call_later(_PAUSE_S, lambda: self.is_closing or loop.add_reader(listening, self._accept, listening, tls))

    async def _open(self, taken: socket.socket, tls: ssl.SSLContext | None, place: Place) -> None:
        """Make a connection of a socket; with TLS its handshake comes first."""
        loop = asyncio.get_running_loop()
        times = {"ssl_handshake_timeout": self.limits.handshake_s, "ssl_shutdown_timeout": 3.0} if tls else {}
        try:
            await loop.connect_accepted_socket(lambda: self._server.connection(place), taken, ssl=tls, **times)
        except BaseException as error:
            place.leave()
            taken.close()
            if not isinstance(error, OSError | asyncio.CancelledError):
                raise

    @property
    def connections(self) -> int:
        return len(self.open)

    async def close(self) -> None:
        """Stop listening, and return when every connection is closed; one whose peer does not answer is cut."""
        self.is_closing = True
        while self._sockets:
            listening = self._sockets.pop()
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        if self._opening:
            await asyncio.wait(self._opening, timeout=1.0)  # they are closed as soon as they are there
        for task in list(self._opening):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await self._server.shutdown(1.0)
        for attempt in range(200):
            if not self.open:
                return
            if attempt == 20:
                for transport in list(self.open.values()):
                    if isinstance(transport, asyncio.WriteTransport):
                        transport.abort()
            await asyncio.sleep(0.01)


def _tls(identity: ServerIdentity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(*identity.server)
    context.load_verify_locations(identity.ca)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context
