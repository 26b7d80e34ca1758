"""Sending watches to their clients.

Owns: the number of open watches, and dropping a client that does not read.
Start reading at: `WatchStreams.send`.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web

from moorage.apiserver.documents.metrics import ServerMetrics
from moorage.apiserver.errors import StatusError, too_many
from moorage.apiserver.limits import ServerLimits
from moorage.apiserver.reading.watch import WatchStream
from moorage.log import get_logger

log = get_logger(__name__)

_HEADERS = {"Content-Type": "application/json", "Cache-Control": "no-cache, private"}
_SMALL_BYTES = 32 << 10


class WatchStreams:
    """The open watches of one server; they end when `is_stopping` is set."""

    def __init__(self, limits: ServerLimits, metrics: ServerMetrics) -> None:
        self.is_stopping = asyncio.Event()
        self._limits = limits
        self._metrics = metrics

    async def send(self, request: web.BaseRequest, begin: Callable[[], WatchStream]) -> web.StreamResponse:
        """Stream a watch until it ends. Raises 429 if too many are open."""
        if self._metrics.watches >= self._limits.watches:
            raise too_many("too many watches, please try again later", 5)
        response = web.StreamResponse(headers=_HEADERS)
        try:
            watch = begin()
        except StatusError as error:
            if error.http != 410:
                raise
            await response.prepare(request)
            await response.write(WatchStream.error_line(error))
            await response.write_eof()
            return response
        self._metrics.watches += 1
        try:
            await response.prepare(request)
            await self._pump(watch, response, request)
        finally:
            self._metrics.watches -= 1
        return response

    async def _pump(self, watch: WatchStream, response: web.StreamResponse, request: web.BaseRequest) -> None:
        """Send lines until the watch ends, the server stops, or the client does not keep up."""
        stop = asyncio.create_task(self.is_stopping.wait())
        send = asyncio.create_task(self._send(watch, response, request))
        try:
            await asyncio.wait([stop, send], return_when=asyncio.FIRST_COMPLETED)
            if send.done():
                send.result()
        except TimeoutError:
            log.info("slow watcher dropped", path=request.path)
            if request.transport is not None:
                request.transport.abort()
        except ConnectionResetError:
            log.debug("watcher disconnected", path=request.path)
        finally:
            for task in (stop, send):
                task.cancel()
            await asyncio.gather(stop, send, return_exceptions=True)

    async def _send(self, watch: WatchStream, response: web.StreamResponse, request: web.BaseRequest) -> None:
        async for chunk in watch.lines():
            transport = request.transport
            if transport is not None and transport.get_write_buffer_size() == 0 and len(chunk) < _SMALL_BYTES:
                await response.write(chunk)  # there is room for it, so it cannot stall
                continue
            async with asyncio.timeout(self._limits.stalled_s):
                await response.write(chunk)
        await response.write_eof()
