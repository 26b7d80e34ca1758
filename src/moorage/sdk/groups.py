"""The GroupController and SnapshotMetadata services: requests checked, operations called, answers written.

Owns: the checks of group requests, and cutting a stream of ranges into messages.
Start reading at: `GroupService`, `MetadataService`.
"""

from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.csi.inflight import group_key
from moorage.errors import InvalidRequest
from moorage.sdk import wire
from moorage.sdk.errors import NotFound, OutOfRange
from moorage.sdk.identity import group_capabilities
from moorage.sdk.model import Block, Group, Secrets, Snapshot
from moorage.sdk.operations import Blocks, ControllerOperations, GroupRequest
from moorage.sdk.service import Service
from moorage.storage.ids import id_from

_MOST_RANGES = 4096
"""In one message, if the caller does not ask for fewer: some 80 KiB."""


class GroupService(Service[ControllerOperations], csi_pb2_grpc.GroupControllerServicer):
    """Snapshots of several volumes at one moment."""

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
            raise InvalidRequest("source_volume_ids: at least one is needed, and none may be empty")
        wanted = GroupRequest(
            name=name,
            group_id=id_from(name),
            volume_ids=sources,
            parameters=dict(request.parameters),
            secrets=Secrets(request.secrets),
        )
        with self._claim(request, group_key(wanted.group_id)):
            group = await self._run(request, self._operations.create_group, wanted)
        return pb.CreateVolumeGroupSnapshotResponse(group_snapshot=wire.group_message(group))

    async def DeleteVolumeGroupSnapshot(
        self, request: pb.DeleteVolumeGroupSnapshotRequest, context: Any
    ) -> pb.DeleteVolumeGroupSnapshotResponse:
        group_id = wire.required("group_snapshot_id", request.group_snapshot_id)
        with self._claim(request, group_key(group_id)):
            group = await self._run(request, self._operations.find_group, group_id)
            if group is not None:
                _check_members(group, set(request.snapshot_ids))
                await self._run(request, self._operations.delete_group, group)
        return pb.DeleteVolumeGroupSnapshotResponse()

    async def GetVolumeGroupSnapshot(
        self, request: pb.GetVolumeGroupSnapshotRequest, context: Any
    ) -> pb.GetVolumeGroupSnapshotResponse:
        group_id = wire.required("group_snapshot_id", request.group_snapshot_id)
        group = await self._run(request, self._operations.find_group, group_id)
        if group is None:
            raise NotFound(f"group snapshot {group_id} does not exist")
        _check_members(group, set(request.snapshot_ids))
        return pb.GetVolumeGroupSnapshotResponse(group_snapshot=wire.group_message(group))


def _check_members(group: Group, given: set[str]) -> None:
    """Raise InvalidArgument unless the caller names exactly the members of an existing group."""
    if not given:
        raise InvalidRequest(f"snapshot_ids: the members of group snapshot {group.id} are needed")
    if given != {member.id for member in group.snapshots}:
        raise InvalidRequest(f"snapshot_ids are not the members of group snapshot {group.id}")


class MetadataService(Service[ControllerOperations], csi_pb2_grpc.SnapshotMetadataServicer):
    """Which ranges of a snapshot hold data, and which changed since an earlier one. A clean end says: that was all."""

    async def GetMetadataAllocated(
        self, request: pb.GetMetadataAllocatedRequest, context: Any
    ) -> AsyncIterator[pb.GetMetadataAllocatedResponse]:
        self._need("allocated_blocks")
        snapshot = await self._snapshot(request, "snapshot_id")
        _check_position(request, snapshot)
        blocks: Blocks = await self._run(request, self._operations.allocated_blocks, snapshot, request.starting_offset)
        async for ranges in self._batches(request, blocks):
            yield pb.GetMetadataAllocatedResponse(
                block_metadata_type=pb.VARIABLE_LENGTH, volume_capacity_bytes=snapshot.size_bytes, block_metadata=ranges
            )

    async def GetMetadataDelta(
        self, request: pb.GetMetadataDeltaRequest, context: Any
    ) -> AsyncIterator[pb.GetMetadataDeltaResponse]:
        self._need("changed_blocks")
        wire.required("target_snapshot_id", request.target_snapshot_id)  # before any snapshot is looked up
        base = await self._snapshot(request, "base_snapshot_id")
        target = await self._snapshot(request, "target_snapshot_id")
        if base.volume_id != target.volume_id:
            raise InvalidRequest(
                f"base_snapshot_id is of volume {base.volume_id}, target_snapshot_id of volume {target.volume_id}"
            )
        _check_position(request, target)
        blocks: Blocks = await self._run(
            request, self._operations.changed_blocks, base, target, request.starting_offset
        )
        async for ranges in self._batches(request, blocks):
            yield pb.GetMetadataDeltaResponse(
                block_metadata_type=pb.VARIABLE_LENGTH, volume_capacity_bytes=target.size_bytes, block_metadata=ranges
            )

    async def _snapshot(self, request: Any, field: str) -> Snapshot:
        snapshot_id = wire.required(field, getattr(request, field))
        return await self._run(request, self._operations.get_snapshot, snapshot_id)

    async def _batches(self, request: Any, blocks: Blocks) -> AsyncIterator[list[pb.BlockMetadata]]:
        """Yield the ranges from the offset on in messages, at least one, so that the size is always reported."""
        size = min(request.max_results or _MOST_RANGES, _MOST_RANGES)
        wanted = _from(request.starting_offset, blocks)
        is_first = True
        while True:
            found = (
                await _take(wanted, size)
                if isinstance(wanted, AsyncIterator)
                else await self._work.run(lambda: list(islice(wanted, size)))
            )
            if found or is_first:
                yield [pb.BlockMetadata(byte_offset=each.offset, size_bytes=each.size) for each in found]
            if len(found) < size:
                return
            is_first = False


def _from(start: int, blocks: Blocks) -> Blocks:
    """Return the ranges that are not empty and end after an offset."""
    if isinstance(blocks, AsyncIterator):
        return (each async for each in blocks if each.size > 0 and each.offset + each.size > start)
    return (each for each in blocks if each.size > 0 and each.offset + each.size > start)


async def _take(blocks: AsyncIterator[Block], count: int) -> list[Block]:
    found: list[Block] = []
    async for block in blocks:
        found.append(block)
        if len(found) == count:
            break
    return found


def _check_position(request: Any, snapshot: Snapshot) -> None:
    if request.max_results < 0:
        raise InvalidRequest(f"max_results is {request.max_results}; it must not be negative")
    if not 0 <= request.starting_offset <= snapshot.size_bytes:
        raise OutOfRange(
            f"starting_offset {request.starting_offset} is not within the volume's {snapshot.size_bytes} bytes"
        )
