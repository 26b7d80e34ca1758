"""The HTTP endpoint of a process that works against the API server: /metrics, /healthz and what else it can say.

Owns: the listener. What is healthy is said by the checks that it is given, and what a scrape gets by `page`.
Start reading at: `serve`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import REGISTRY
from prometheus_client.exposition import generate_latest

from moorage.connections import FewConnections
from moorage.errors import UsageError
from moorage.log import get_logger

log = get_logger(__name__)

_MOST_CLIENTS = 64  # anyone in the cluster may connect

ProbeCheck = Callable[[], Awaitable[tuple[int, str]]]  # status and text
ProbePage = Callable[[], bytes]  # in Prometheus' text format


def shared_page() -> bytes:
    """What the Kubernetes layer counts (queues, requests, leases), and the process itself."""
    return generate_latest(REGISTRY)


def address_from(text: str) -> tuple[str, int]:
    """`:8080` or `host:8080` as host and port."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError(f"{text!r}: want an address such as :8080 or 127.0.0.1:8080")
    return host.strip("[]") or "0.0.0.0", int(port)


@asynccontextmanager
async def serve(
    host: str,
    port: int,
    checks: Mapping[str, ProbeCheck],
    page: ProbePage | None = None,
    metrics_path: str = "/metrics",
) -> AsyncIterator[int]:
    """Listen while the block runs; gives the port, which matters when 0 was asked for."""
    app = web.Application()
    for path, check in checks.items():
        app.router.add_get(path, _answering(check))
    if page is not None:
        app.router.add_get(metrics_path, _showing(page))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    FewConnections(runner.server, _MOST_CLIENTS)
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        listening = int(runner.addresses[0][1])
        log.info("listening", address=f"{host}:{listening}")
        yield listening
    finally:
        await runner.cleanup()


async def all_healthy(checks: Mapping[str, ProbeCheck]) -> tuple[int, str]:
    """200 when every check says so, otherwise the first that does not."""
    for name, check in checks.items():
        status, text = await check()
        if status != 200:
            return status, f"{name}: {text}"
    return 200, "ok"


def _answering(check: ProbeCheck) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        status, text = await check()
        return web.Response(status=status, text=text)

    return answer


def _showing(page: ProbePage) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=page(), headers={"Content-Type": "text/plain; version=0.0.4"})

    return answer
