"""The plugin's process: pools opened, services served, stopped in order.

Owns: the wiring. It decides nothing; open it first.
Start reading at: `serve`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from moorage.csi import csi_pb2_grpc
from moorage.csi.http_endpoint import HttpEndpoint
from moorage.csi.metrics import CallMetrics
from moorage.csi.server import CsiServer
from moorage.log import get_logger
from moorage.plugin.context import PluginContext
from moorage.plugin.metrics import copy_metrics, pool_metrics
from moorage.plugin.node import ephemeral, recovery
from moorage.plugin.node.tuning import keep_limits
from moorage.plugin.services.controller import ControllerService
from moorage.plugin.services.group_controller import GroupService
from moorage.plugin.services.identity import IdentityService
from moorage.plugin.services.metadata import MetadataService
from moorage.plugin.services.node import NodeService
from moorage.plugin.settings import DEFAULT_POOL, PluginSettings
from moorage.process import stop_event
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
    identity = IdentityService(settings)
    server = CsiServer(settings.endpoint, driver_name=settings.driver_name, metrics=metrics)
    csi_pb2_grpc.add_IdentityServicer_to_server(identity, server.grpc)
    server.check_free()
    async with contextlib.AsyncExitStack() as stack:
        pools = await asyncio.to_thread(open_pools, settings)
        stack.callback(close_pools, pools)
        parts = PluginContext(settings, pools)
        stack.callback(parts.work.close)
        _add_services(server, parts)
        await server.start()
        stack.push_async_callback(server.stop, settings.stop_grace_s)
        if settings.http_endpoint:
            http = HttpEndpoint(
                settings.http_endpoint,
                lambda: metrics.render() + pool_metrics(pools) + copy_metrics(parts.copies),
                lambda: identity.is_ready,
            )
            await stack.enter_async_context(http)
        await parts.work.run(_prepare, parts)
        if settings.serves_node:
            keeper = asyncio.create_task(keep_limits(parts), name="io-limits")
            stack.push_async_callback(_cancelled, keeper)
        identity.is_ready = True
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


def _add_services(server: CsiServer, parts: PluginContext) -> None:
    if parts.settings.serves_controller:
        csi_pb2_grpc.add_ControllerServicer_to_server(ControllerService(parts), server.grpc)
        csi_pb2_grpc.add_GroupControllerServicer_to_server(GroupService(parts), server.grpc)
        csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(MetadataService(parts), server.grpc)
    if parts.settings.serves_node:
        csi_pb2_grpc.add_NodeServicer_to_server(NodeService(parts), server.grpc)


def _prepare(parts: PluginContext) -> None:
    """What has to be done before the first call: make this node known, sweep what pods left."""
    if not parts.settings.serves_node:
        return
    if parts.settings.is_shared:
        for pool in parts.pools:
            pool.register_node(parts.settings.node_id, parts.settings.max_volumes_per_node)
    ephemeral.sweep(parts)
    recovery.release_loops(parts)


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
