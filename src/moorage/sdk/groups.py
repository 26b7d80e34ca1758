"""The GroupController and SnapshotMetadata services, for drivers that define groups and block ranges.

Owns: the checks of group requests, and cutting a stream of ranges into messages.
Start reading at: `GroupService`, `MetadataService`.
"""

from collections.abc import AsyncIterator
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.csi.inflight import InFlight
from moorage.errors import InvalidRequest
from moorage.sdk import wire
from moorage.sdk.driver import Driver
from moorage.sdk.errors import AlreadyExists, NotFound
from moorage.sdk.identity import group_capabilities
from moorage.sdk.model import Block, CreateGroup, Group, Secrets, Snapshot
from moorage.sdk.records import Records
from moorage.storage.ids import GroupId, id_from, member_id

_BLOCKS_PER_MESSAGE = 256


class GroupService(csi_pb2_grpc.GroupControllerServicer):
    """Snapshots of several volumes at one moment."""

    def __init__(self, driver: Driver, records: Records, in_flight: InFlight) -> None:
        self._driver = driver
        self._records = records
        self._in_flight = in_flight

    async def GroupControllerGetCapabilities(
        self, request: pb.GroupControllerGetCapabilitiesRequest, context: Any
    ) -> pb.GroupControllerGetCapabilitiesResponse:
        return pb.GroupControllerGetCapabilitiesResponse(capabilities=group_capabilities())

    async def CreateVolumeGroupSnapshot(
        self, request: pb.CreateVolumeGroupSnapshotRequest, context: Any
    ) -> pb.CreateVolumeGroupSnapshotResponse:
        name = wire.required("name", request.name)
        sources = list(request.source_volume_ids)
        if not sources or not all(sources):
            raise InvalidRequest("source_volume_ids is missing")
        if len(set(sources)) != len(sources):
            raise InvalidRequest("source_volume_ids names a volume twice")
        group_id = GroupId(id_from(name))
        with self._in_flight.claim("CreateVolumeGroupSnapshot", f"group {group_id}"):
            found = self._records.find_group(group_id)
            if found is not None and {each.volume_id for each in found.snapshots} != set(sources):
                raise AlreadyExists(f"group {name!r} exists, of other volumes")
            if found is None:
                wanted = CreateGroup(
                    name=name,
                    group_id=group_id,
                    volumes=[await self._records.volume(source) for source in sources],
                    snapshot_ids=[member_id(group_id, index) for index in range(len(sources))],
                    parameters=dict(request.parameters),
                    secrets=Secrets(request.secrets),
                )
                found = await self._driver.call("create_group", wanted)
                self._records.keep_group(found)
        return pb.CreateVolumeGroupSnapshotResponse(group_snapshot=wire.group_message(found))

    async def DeleteVolumeGroupSnapshot(
        self, request: pb.DeleteVolumeGroupSnapshotRequest, context: Any
    ) -> pb.DeleteVolumeGroupSnapshotResponse:
        group_id = wire.required("group_snapshot_id", request.group_snapshot_id)
        with self._in_flight.claim("DeleteVolumeGroupSnapshot", f"group {group_id}"):
            found = self._records.find_group(group_id)
            if found is not None:
                _check_members(found, list(request.snapshot_ids))
                await self._driver.call("delete_group", group_id, [each.id for each in found.snapshots])
                self._records.drop_group(found)
        return pb.DeleteVolumeGroupSnapshotResponse()

    async def GetVolumeGroupSnapshot(
        self, request: pb.GetVolumeGroupSnapshotRequest, context: Any
    ) -> pb.GetVolumeGroupSnapshotResponse:
        group_id = wire.required("group_snapshot_id", request.group_snapshot_id)
        found = self._records.find_group(group_id)
        if found is None:
            raise NotFound(f"there is no group snapshot {group_id}")
        _check_members(found, list(request.snapshot_ids))
        return pb.GetVolumeGroupSnapshotResponse(group_snapshot=wire.group_message(found))


def _check_members(found: Group, given: list[str]) -> None:
    """Raise InvalidArgument if the caller names other snapshots than the members of the group."""
    if given and set(given) != {each.id for each in found.snapshots}:
        raise InvalidRequest(f"snapshot_ids are not the members of group {found.id}")


class MetadataService(csi_pb2_grpc.SnapshotMetadataServicer):
    """Which ranges of a snapshot hold data, and which changed since an earlier one."""

    def __init__(self, driver: Driver, records: Records) -> None:
        self._driver = driver
        self._records = records

    async def GetMetadataAllocated(
        self, request: pb.GetMetadataAllocatedRequest, context: Any
    ) -> AsyncIterator[pb.GetMetadataAllocatedResponse]:
        snapshot = self._snapshot("snapshot_id", request.snapshot_id)
        _check_range(request.starting_offset, request.max_results, snapshot)
        blocks = self._driver.allocated_blocks(snapshot, request.starting_offset)
        async for ranges in _batches(blocks, request.max_results):
            yield pb.GetMetadataAllocatedResponse(
                block_metadata_type=pb.VARIABLE_LENGTH, volume_capacity_bytes=snapshot.size_bytes, block_metadata=ranges
            )

    async def GetMetadataDelta(
        self, request: pb.GetMetadataDeltaRequest, context: Any
    ) -> AsyncIterator[pb.GetMetadataDeltaResponse]:
        base = self._snapshot("base_snapshot_id", request.base_snapshot_id)
        target = self._snapshot("target_snapshot_id", request.target_snapshot_id)
        if base.volume_id != target.volume_id:
            raise InvalidRequest("base_snapshot_id and target_snapshot_id are of different volumes")
        _check_range(request.starting_offset, request.max_results, target)
        blocks = self._driver.changed_blocks(base, target, request.starting_offset)
        async for ranges in _batches(blocks, request.max_results):
            yield pb.GetMetadataDeltaResponse(
                block_metadata_type=pb.VARIABLE_LENGTH, volume_capacity_bytes=target.size_bytes, block_metadata=ranges
            )

    def _snapshot(self, field: str, snapshot_id: str) -> Snapshot:
        found = self._records.find_snapshot(wire.required(field, snapshot_id))
        if found is None:
            raise NotFound(f"there is no snapshot {snapshot_id}")
        return found


def _check_range(offset: int, most: int, snapshot: Snapshot) -> None:
    if most < 0:
        raise InvalidRequest(f"max_results is {most}; it must not be negative")
    if not 0 <= offset < max(1, snapshot.size_bytes):
        raise InvalidRequest(f"starting_offset {offset} is outside of the snapshot, {snapshot.size_bytes} bytes")


async def _batches(blocks: AsyncIterator[Block], most: int) -> AsyncIterator[list[pb.BlockMetadata]]:
    """Yield the ranges in messages. There is at least one message, so that the size is always reported."""
    size = most or _BLOCKS_PER_MESSAGE
    ranges: list[pb.BlockMetadata] = []
    is_first = True
    async for block in blocks:
        ranges.append(pb.BlockMetadata(byte_offset=block.offset, size_bytes=block.size))
        if len(ranges) == size:
            yield ranges
            ranges, is_first = [], False
    if ranges or is_first:
        yield ranges
