"""How many connections an aiohttp server holds: a client that sends nothing must not keep others out.

Owns: the bound, and who gives way. Signing in is the server's business; it then calls `trust`.
Start reading at: `FewConnections`.
"""

import asyncio

from aiohttp import web
from aiohttp.web_protocol import RequestHandler


class FewConnections:
    """Closes the oldest connection that is not trusted, or else the oldest, when there are more than `most`."""

    def __init__(self, server: web.Server | None, most: int) -> None:
        assert server is not None, "the runner is set up first"
        self._most = most
        self._open: dict[RequestHandler, asyncio.Transport] = {}  # the oldest first
        self._trusted: set[RequestHandler] = set()
        self._made, self._lost = server.connection_made, server.connection_lost
        server.connection_made = self._add  # type: ignore[method-assign]
        server.connection_lost = self._drop  # type: ignore[method-assign]

    def trust(self, request: web.Request) -> None:
        """Close the connection of this request only when no other can be closed."""
        if request.protocol in self._open:
            self._trusted.add(request.protocol)

    def _add(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        self._made(handler, transport)
        self._open[handler] = transport
        if len(self._open) > self._most:
            others = list(self._open)[:-1]
            oldest = next((one for one in others if one not in self._trusted), others[0])
            self._trusted.discard(oldest)
            self._open.pop(oldest).abort()

    def _drop(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        self._trusted.discard(handler)
        self._open.pop(handler, None)
        self._lost(handler, exc)
