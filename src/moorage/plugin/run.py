"""The plugin's process: pools opened, services served, stopped in order.

Owns: the wiring. It decides nothing; open it first.
Start reading at: `serve`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from moorage import __version__
from moorage.csi.metrics import CallMetrics
from moorage.csi.server import CsiServer
from moorage.log import get_logger
from moorage.plugin.context import PluginContext
from moorage.plugin.metrics import copy_metrics, pool_metrics
from moorage.plugin.node import ephemeral, recovery
from moorage.plugin.node.tuning import keep_limits
from moorage.plugin.services.controller import PoolController
from moorage.plugin.services.node import PoolNode
from moorage.plugin.settings import DEFAULT_POOL, PluginSettings
from moorage.process import stop_event
from moorage.sdk.identity import Identity
from moorage.sdk.serving import serving
from moorage.storage import Pool, PoolConfig, Pools, PoolScope

log = get_logger(__name__)


async def run(settings: PluginSettings, ready: Callable[[], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; running operations are let finish."""
    stop = stop_event()
    async with serve(settings):
        if ready is not None:
            ready()
        await stop.wait()
        log.info("plugin stopping")


@contextlib.asynccontextmanager
async def serve(settings: PluginSettings) -> AsyncIterator[PluginContext]:
    """The plugin, answering on its endpoint, for the length of the block."""
    settings.checked()
    metrics = CallMetrics()
    server = CsiServer(settings.endpoint, driver_name=settings.driver_name, metrics=metrics)
    server.check_free()
    async with contextlib.AsyncExitStack() as stack:
        pools = await asyncio.to_thread(open_pools, settings)
        stack.callback(close_pools, pools)
        parts = PluginContext(settings, pools)
        stack.callback(parts.work.close)
        started = serving(
            server,
            identity_of(settings),
            PoolController(parts) if settings.serves_controller else None,
            PoolNode(parts) if settings.serves_node else None,
            in_flight=parts.in_flight,
            work=parts.work,
            metrics=lambda: metrics.render() + pool_metrics(pools) + copy_metrics(parts.copies),
            http_endpoint=settings.http_endpoint,
            stop_grace_s=settings.stop_grace_s,
        )
        identity = await stack.enter_async_context(started)
        await parts.work.run(_prepare, parts)
        if settings.serves_node:
            keeper = asyncio.create_task(keep_limits(parts), name="io-limits")
            stack.push_async_callback(_cancelled, keeper)
        identity.is_started = True
        log.info(
            "plugin ready",
            endpoint=str(server.path),
            driver=settings.driver_name,
            scope=settings.scope,
            pools=sorted(settings.pools),
        )
        yield parts


def open_pools(settings: PluginSettings) -> Pools:
    """Every pool, or none: what was opened is closed again when a later one fails."""
    opened: dict[str, Pool] = {}
    try:
        for name, directory in settings.pools.items():
            opened[name] = Pool.open(_config(settings, name, directory))
    except BaseException:
        for pool in opened.values():
            pool.close()
        raise
    default = DEFAULT_POOL if DEFAULT_POOL in opened else next(iter(opened))
    return Pools(opened, default)


def close_pools(pools: Pools) -> None:
    for pool in pools:
        pool.close()


def _config(settings: PluginSettings, name: str, directory: Path) -> PoolConfig:
    return PoolConfig(
        name=name,
        directory=directory,
        scope=PoolScope(settings.scope),
        reserve_fraction=settings.reserve_fraction,
        overcommit=settings.overcommit,
        trash_retention_s=settings.trash_retention_s,
        freeze_bound_s=settings.largest_freeze_s,
    )


def identity_of(settings: PluginSettings) -> Identity:
    services = ["CONTROLLER_SERVICE", "GROUP_CONTROLLER_SERVICE", "SNAPSHOT_METADATA_SERVICE"]
    if not settings.is_shared:
        services.append("VOLUME_ACCESSIBILITY_CONSTRAINTS")
        if settings.shows_alpha:
            services.append("SNAPSHOT_ACCESSIBILITY_CONSTRAINTS")
    manifest = {"scope": settings.scope, "csi": settings.csi_version}
    return Identity(settings.driver_name, __version__, services, expands=True, manifest=manifest)


def _prepare(parts: PluginContext) -> None:
    """What has to be done before the first call: make this node known, sweep what pods left."""
    if not parts.settings.serves_node:
        return
    if parts.settings.is_shared:
        for pool in parts.pools:
            pool.attachments.register_node(parts.settings.node_id, parts.settings.max_volumes_per_node)
    ephemeral.sweep(parts)
    recovery.release_loops(parts)


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
