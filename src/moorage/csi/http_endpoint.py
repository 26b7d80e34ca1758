"""Metrics and health over HTTP, in the fewest lines: the plugin's process must stay small.

Owns: `GET /metrics` (Prometheus text) and `GET /healthz`, on one address.
Start reading at: `HttpEndpoint`.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from moorage.csi.metrics import CONTENT_TYPE
from moorage.errors import UsageError

_REQUEST_TIMEOUT_S = 10.0
_LARGEST_REQUEST = 16 * 1024
_MOST_CLIENTS = 64


class HttpEndpoint:
    """Answers two paths and closes each connection; `address` is `HOST:PORT` or `:PORT`."""

    def __init__(self, address: str, metrics: Callable[[], str], healthy: Callable[[], bool]) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise UsageError(f"--http-endpoint {address}: must be HOST:PORT or :PORT")
        self._host = host.strip("[]") or None
        self.port = int(port)
        self._metrics = metrics
        self._healthy = healthy
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, self.port, limit=_LARGEST_REQUEST)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (
            len(self._clients) >= _MOST_CLIENTS
        ):  # anyone in the cluster may connect: a new probe counts more than an idle client
            oldest = next(iter(self._clients))
            del self._clients[oldest]
            oldest.transport.abort()
        self._clients[writer] = None
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head.split(b"\r\n", 1)[0].decode("latin-1")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return  # a client that does not speak HTTP, or went away
        finally:
            self._clients.pop(writer, None)
            writer.close()

    async def _answer(self, request_line: str) -> bytes:
        method, _, rest = request_line.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"only GET\n")
        if path == "/metrics":
            return _response("200 OK", CONTENT_TYPE, (await asyncio.to_thread(self._metrics)).encode())
        if path == "/healthz":
            healthy = self._healthy()
            status = "200 OK" if healthy else "503 Service Unavailable"
            return _response(status, "text/plain", b"ok\n" if healthy else b"not ready\n")
        return _response("404 Not Found", "text/plain", b"there is /metrics and /healthz\n")


def _response(status: str, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
