"""The GroupController service: snapshots of several volumes at one point in time.

Owns: CSI messages in, domain calls out. A group lives in one pool.
Start reading at: `GroupService`.
"""

from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.errors import InvalidRequest, MoorageError
from moorage.log import get_logger
from moorage.plugin.context import PluginContext, group_key
from moorage.plugin.parameters import SnapshotParameters
from moorage.plugin.services import wire
from moorage.plugin.services.capabilities import group_capabilities
from moorage.plugin.services.controller_volumes import persistent_pool
from moorage.storage import Group, ids

log = get_logger(__name__)


class SeveralPools(MoorageError):
    """Volumes of different pools have no common point in time."""

    code = "FAILED_PRECONDITION"
    retryable = False


class GroupService(csi_pb2_grpc.GroupControllerServicer):
    """CSI messages in, domain calls out."""

    def __init__(self, parts: PluginContext) -> None:
        self._parts = parts

    async def GroupControllerGetCapabilities(
        self, request: pb.GroupControllerGetCapabilitiesRequest, context: Any
    ) -> pb.GroupControllerGetCapabilitiesResponse:
        return pb.GroupControllerGetCapabilitiesResponse(capabilities=group_capabilities())

    async def CreateVolumeGroupSnapshot(
        self, request: pb.CreateVolumeGroupSnapshotRequest, context: Any
    ) -> pb.CreateVolumeGroupSnapshotResponse:
        name = wire.required("name", request.name)
        if not request.source_volume_ids or not all(request.source_volume_ids):
            raise InvalidRequest("source_volume_ids: at least one is needed, and none may be empty")
        with self._parts.in_flight.claim("CreateVolumeGroupSnapshot", group_key(ids.id_from(name))):
            group = await self._parts.work.run(_create, self._parts, request)
        return pb.CreateVolumeGroupSnapshotResponse(group_snapshot=wire.group_message(group, self._parts.settings))

    async def DeleteVolumeGroupSnapshot(
        self, request: pb.DeleteVolumeGroupSnapshotRequest, context: Any
    ) -> pb.DeleteVolumeGroupSnapshotResponse:
        group_id = wire.required("group_snapshot_id", request.group_snapshot_id)
        with self._parts.in_flight.claim("DeleteVolumeGroupSnapshot", group_key(group_id)):
            await self._parts.work.run(_delete, self._parts, group_id, tuple(request.snapshot_ids))
        return pb.DeleteVolumeGroupSnapshotResponse()

    async def GetVolumeGroupSnapshot(
        self, request: pb.GetVolumeGroupSnapshotRequest, context: Any
    ) -> pb.GetVolumeGroupSnapshotResponse:
        group_id = wire.required("group_snapshot_id", request.group_snapshot_id)
        group = await self._parts.work.run(_get, self._parts, group_id, set(request.snapshot_ids))
        return pb.GetVolumeGroupSnapshotResponse(group_snapshot=wire.group_message(group, self._parts.settings))


def _create(parts: PluginContext, request: pb.CreateVolumeGroupSnapshotRequest) -> Group:
    parameters = SnapshotParameters.parse(request.parameters)
    own = {key: value for key, value in request.parameters.items() if key == "snapshotInUse"}
    wanted = list(request.source_volume_ids)
    cut_before = parts.pools.of_group(ids.id_from(request.name))
    if cut_before is not None:  # it is found again also when its volumes have been deleted since
        return cut_before.create_group(request.name, wanted, own, parameters.in_use)
    pools = {pool.name: pool for pool in (persistent_pool(parts, each) for each in wanted)}
    if len(pools) > 1:
        raise SeveralPools(f"source_volume_ids are in several pools ({', '.join(sorted(pools))}); use one a group")
    pool = next(iter(pools.values()))
    group = pool.create_group(request.name, wanted, own, parameters.in_use)
    parts.copies.update(member.copy_path.value for member in group.snapshots)
    log.info("group snapshot taken", group=group.id, members=len(group.snapshots), held_ms=group.held_ms)
    return group


def _delete(parts: PluginContext, group_id: str, snapshot_ids: tuple[str, ...]) -> None:
    for pool in parts.pools:
        group = pool.find_group(group_id)
        if group is None:
            continue
        _check_members(group, set(snapshot_ids))
        if pool.delete_group(group_id, snapshot_ids):
            log.info("group snapshot deleted", group=group_id, pool=pool.name)


def _get(parts: PluginContext, group_id: str, snapshot_ids: set[str]) -> Group:
    group = parts.pool_of_group(group_id).group(group_id)
    _check_members(group, snapshot_ids)
    return group


def _check_members(group: Group, snapshot_ids: set[str]) -> None:
    """Raise InvalidRequest unless the caller names exactly the members of an existing group."""
    if not snapshot_ids:
        raise InvalidRequest(f"snapshot_ids: the members of group snapshot {group.id} are needed")
    if snapshot_ids != {member.id for member in group.snapshots}:
        raise InvalidRequest(f"snapshot_ids are not the members of group snapshot {group.id}")
