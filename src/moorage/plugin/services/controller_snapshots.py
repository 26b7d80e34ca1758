"""Controller calls on snapshots: create, delete, list, get.

Owns: CSI messages in, domain calls out.
Start reading at: `SnapshotCalls`.
"""

from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.log import get_logger
from moorage.plugin.context import PluginContext, snapshot_key
from moorage.plugin.parameters import SnapshotParameters
from moorage.plugin.services import wire
from moorage.plugin.services.controller_volumes import persistent_pool
from moorage.plugin.services.paging import check, collect
from moorage.plugin.topology import check_snapshot_place
from moorage.storage import CreateSnapshot, Snapshot, ids

log = get_logger(__name__)


class SnapshotCalls:
    """Mixed into the controller service."""

    _parts: PluginContext

    async def CreateSnapshot(self, request: pb.CreateSnapshotRequest, context: Any) -> pb.CreateSnapshotResponse:
        name = wire.required("name", request.name)
        wire.required("source_volume_id", request.source_volume_id)
        with self._parts.in_flight.claim("CreateSnapshot", snapshot_key(ids.id_from(name))):
            snapshot = await self._parts.work.run(_create, self._parts, request)
        return pb.CreateSnapshotResponse(snapshot=wire.snapshot_message(snapshot, self._parts.settings))

    async def DeleteSnapshot(self, request: pb.DeleteSnapshotRequest, context: Any) -> pb.DeleteSnapshotResponse:
        snapshot_id = wire.required("snapshot_id", request.snapshot_id)
        with self._parts.in_flight.claim("DeleteSnapshot", snapshot_key(snapshot_id)):
            await self._parts.work.run(_delete, self._parts, snapshot_id)
        return pb.DeleteSnapshotResponse()

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Any) -> pb.ListSnapshotsResponse:
        snapshots, token = await self._parts.work.run(_list, self._parts, request)
        settings = self._parts.settings
        entries = [pb.ListSnapshotsResponse.Entry(snapshot=wire.snapshot_message(each, settings)) for each in snapshots]
        return pb.ListSnapshotsResponse(entries=entries, next_token=token)

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Any) -> pb.GetSnapshotResponse:
        snapshot_id = wire.required("snapshot_id", request.snapshot_id)
        snapshot = await self._parts.work.run(lambda: self._parts.pool_of_snapshot(snapshot_id).snapshot(snapshot_id))
        return pb.GetSnapshotResponse(snapshot=wire.snapshot_message(snapshot, self._parts.settings))


def _create(parts: PluginContext, request: pb.CreateSnapshotRequest) -> Snapshot:
    parameters = SnapshotParameters.parse(request.parameters)
    # One that was cut before is found again also when its volume has been deleted since.
    cut_before = parts.pools.of_snapshot(ids.id_from(request.name))
    pool = cut_before or persistent_pool(parts, request.source_volume_id)
    requisite, _ = wire.topologies_from(request.accessibility_requirements)
    check_snapshot_place(requisite, parts.settings)
    wish = CreateSnapshot(name=request.name, volume_id=request.source_volume_id, in_use=parameters.in_use)
    snapshot = pool.create_snapshot(wish)
    if cut_before is not None:
        return snapshot
    parts.copies[snapshot.copy_path.value] += 1
    log.info("snapshot taken", snapshot=snapshot.id, volume=snapshot.volume_id, copied_by=snapshot.copy_path.value)
    return snapshot


def _delete(parts: PluginContext, snapshot_id: str) -> None:
    for pool in parts.pools:
        if pool.delete_snapshot(snapshot_id):
            log.info("snapshot deleted", snapshot=snapshot_id, pool=pool.name)


def _list(parts: PluginContext, request: pb.ListSnapshotsRequest) -> tuple[list[Snapshot], str]:
    """A filter that matches nothing is an empty list."""
    if request.snapshot_id:
        check(request.max_entries, request.starting_token)
        found = [pool.find_snapshot(request.snapshot_id) for pool in parts.pools]
        return [each for each in found if each is not None and request.source_volume_id in ("", each.volume_id)], ""
    return collect(
        parts.pools,
        lambda pool, after, limit: pool.snapshots(after=after, limit=limit, volume_id=request.source_volume_id),
        lambda snapshot: snapshot.id,
        request.max_entries,
        request.starting_token,
    )
