"""Sockets: TLS on loopback, and where asked for a unix socket or plain HTTP on loopback.

Owns: binding, TLS settings, the number of connections, and closing those that send nothing.
May not touch: requests.
Start reading at: `Listener.open`.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from moorage.apiserver.access.pki import ServerIdentity
from moorage.apiserver.limits import ServerLimits

HandleRequest = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Connection(RequestHandler):
    """A connection that must send its first request soon, and that is counted."""

    __slots__ = ("_deadline", "_listener")

    def __init__(self, manager: Any, *, loop: asyncio.AbstractEventLoop, listener: "Listener", **kwargs: Any) -> None:
        super().__init__(manager, loop=loop, **kwargs)
        self._listener = listener
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener.open[self] = transport
        if self._listener.is_closing or self._listener.connections > self._listener.limits.connections:
            self.force_close()
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._listener.limits.headers_s, self._close_if_silent)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.open.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self._current_request is None and self._request_count == 0:
            self.force_close()


class _Server(web.Server):
    def __init__(self, handler: HandleRequest, listener: "Listener", **kwargs: Any) -> None:
        super().__init__(handler, **kwargs)
        self._listener = listener

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, listener=self._listener, **self._kwargs)


class Listener:
    """The open sockets of one server."""

    def __init__(self, handler: HandleRequest, limits: ServerLimits) -> None:
        self.limits = limits
        self.open: dict[RequestHandler, asyncio.BaseTransport] = {}
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
        self._runner = web.ServerRunner(self._server, shutdown_timeout=1.0)
        self._sites: list[web.BaseSite] = []

    async def open_tls(self, host: str, port: int, identity: ServerIdentity) -> int:
        """Listen with TLS; the port that was bound."""
        return await self._open_tcp(host, port, _tls(identity))

    async def open_plain(self, host: str, port: int) -> int:
        return await self._open_tcp(host, port, None)

    async def open_unix(self, path: Path) -> None:
        await self._ready()
        path.unlink(missing_ok=True)
        site = web.UnixSite(self._runner, str(path), backlog=1024)
        await site.start()
        path.chmod(0o600)
        self._sites.append(site)

    async def _open_tcp(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        await self._ready()
        site = web.TCPSite(self._runner, host, port, ssl_context=tls, backlog=1024)
        await site.start()
        self._sites.append(site)
        return int(self._runner.addresses[-1][1])

    async def _ready(self) -> None:
        if self._runner.server is None:
            await self._runner.setup()

    @property
    def connections(self) -> int:
        return len(self.open)

    async def close(self) -> None:
        """Stop listening, and return when every connection is closed; one whose peer does not answer is cut."""
        self.is_closing = True
        await self._stop_accepting()
        await self._runner.cleanup()
        for attempt in range(200):
            if not self.open:
                return
            if attempt == 20:
                for transport in list(self.open.values()):
                    if isinstance(transport, asyncio.WriteTransport):
                        transport.abort()
            await asyncio.sleep(0.01)

    async def _stop_accepting(self) -> None:
        """Take no more connections, and let those that were just taken become ours, to be closed with the others:
        asyncio's own server drops one that it has taken in the turn in which it is closed, and its peer hears nothing
        until memory is cleaned up. The loop that the commands use does not."""
        loop = asyncio.get_running_loop()
        for site in self._sites:
            server = site._server  # aiohttp tells the addresses of its sockets, and not the sockets
            for taking in server.sockets if isinstance(server, asyncio.Server) else ():
                loop.remove_reader(taking.fileno())
        await asyncio.sleep(0)


def _tls(identity: ServerIdentity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(*identity.server)
    context.load_verify_locations(identity.ca)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context
