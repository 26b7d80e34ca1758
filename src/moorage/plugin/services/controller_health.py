"""Controller calls about health (v1.13): what a pool can see of its volumes.

Owns: ControllerGetVolumeHealth and ControllerListVolumeHealth.
Start reading at: `HealthCalls`.
"""

from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.plugin.context import PluginContext
from moorage.plugin.services import wire
from moorage.plugin.services.paging import collect, shown
from moorage.storage import HealthEntry, VolumeHealth, errors, ids


class HealthCalls:
    """Mixed into the controller service."""

    _parts: PluginContext

    async def ControllerGetVolumeHealth(
        self, request: pb.ControllerGetVolumeHealthRequest, context: Any
    ) -> pb.ControllerGetVolumeHealthResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        entries = await self._parts.work.run(_get, self._parts, volume_id)
        return pb.ControllerGetVolumeHealthResponse(volume_health=wire.health_message(volume_id, entries))

    async def ControllerListVolumeHealth(
        self, request: pb.ControllerListVolumeHealthRequest, context: Any
    ) -> pb.ControllerListVolumeHealthResponse:
        found, token = await self._parts.work.run(_list, self._parts, request.max_entries, request.starting_token)
        entries = [wire.health_message(each.volume_id, each.entries) for each in found]
        return pb.ControllerListVolumeHealthResponse(entries=entries, next_token=token)


def _get(parts: PluginContext, volume_id: str) -> tuple[HealthEntry, ...]:
    """A record or a pool that cannot be read is an answer here, not an error."""
    pool = None if ids.is_ephemeral(volume_id) else parts.pools.of_sick_volume(volume_id)
    if pool is None:
        raise errors.VolumeNotFound(volume_id)
    return pool.health(volume_id)


def _list(parts: PluginContext, max_entries: int, token: str) -> tuple[list[VolumeHealth], str]:
    """Only volumes that something is wrong with."""
    return collect(
        parts.pools,
        shown(
            lambda pool, after, limit: pool.unhealthy(after=after, limit=limit),
            lambda health: not ids.is_ephemeral(health.volume_id),
        ),
        lambda health: health.volume_id,
        max_entries,
        token,
    )
