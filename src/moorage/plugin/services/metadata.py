"""The SnapshotMetadata service: which blocks a snapshot holds, and which differ between two.

Owns: streaming ranges in bounded messages. A clean end promises that everything was sent.
Start reading at: `MetadataService`.
"""

from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.errors import InvalidRequest
from moorage.log import get_logger
from moorage.plugin.context import PluginContext
from moorage.plugin.services import wire
from moorage.storage import BlockDiff, Snapshot
from moorage.storage.errors import SizeOutOfRange

log = get_logger(__name__)

_MOST_RANGES = 4096
"""In one message, where the caller does not ask for fewer: some 80 KiB."""


class MetadataService(csi_pb2_grpc.SnapshotMetadataServicer):
    """CSI messages in, domain calls out."""

    def __init__(self, parts: PluginContext) -> None:
        self._parts = parts

    async def GetMetadataAllocated(
        self, request: pb.GetMetadataAllocatedRequest, context: Any
    ) -> AsyncIterator[pb.GetMetadataAllocatedResponse]:
        wire.required("snapshot_id", request.snapshot_id)
        diff = await self._parts.work.run(_allocated, self._parts, request)
        async for blocks in self._batches(diff, request.starting_offset, request.max_results):
            yield pb.GetMetadataAllocatedResponse(
                block_metadata_type=pb.VARIABLE_LENGTH,
                volume_capacity_bytes=diff.size_bytes,
                block_metadata=blocks,
            )

    async def GetMetadataDelta(
        self, request: pb.GetMetadataDeltaRequest, context: Any
    ) -> AsyncIterator[pb.GetMetadataDeltaResponse]:
        wire.required("base_snapshot_id", request.base_snapshot_id)
        wire.required("target_snapshot_id", request.target_snapshot_id)
        diff = await self._parts.work.run(_changed, self._parts, request)
        async for blocks in self._batches(diff, request.starting_offset, request.max_results):
            yield pb.GetMetadataDeltaResponse(
                block_metadata_type=pb.VARIABLE_LENGTH,
                volume_capacity_bytes=diff.size_bytes,
                block_metadata=blocks,
            )
        log.info("changed blocks told", base=request.base_snapshot_id, method=diff.method)

    async def _batches(self, diff: BlockDiff, start: int, max_results: int) -> AsyncIterator[list[pb.BlockMetadata]]:
        size = min(max_results or _MOST_RANGES, _MOST_RANGES)
        is_first = True
        while True:
            blocks = await self._parts.work.run(_next_blocks, diff, start, size)
            # The first message goes out even when it is empty: it tells the capacity.
            if blocks or is_first:
                yield blocks
            if len(blocks) < size:
                return
            is_first = False


def _next_blocks(diff: BlockDiff, start: int, count: int) -> list[pb.BlockMetadata]:
    found = (each for each in diff.ranges if each.offset + each.length > start and each.length > 0)
    return [pb.BlockMetadata(byte_offset=each.offset, size_bytes=each.length) for each in islice(found, count)]


def _allocated(parts: PluginContext, request: pb.GetMetadataAllocatedRequest) -> BlockDiff:
    pool = parts.pool_of_snapshot(request.snapshot_id)
    snapshot = pool.snapshot(request.snapshot_id)
    _check_block("snapshot_id", snapshot)
    _check_position(request.starting_offset, request.max_results, snapshot.size_bytes)
    return pool.allocated(request.snapshot_id, request.starting_offset)


def _changed(parts: PluginContext, request: pb.GetMetadataDeltaRequest) -> BlockDiff:
    pool = parts.pool_of_snapshot(request.base_snapshot_id)
    base = pool.snapshot(request.base_snapshot_id)
    target = parts.pool_of_snapshot(request.target_snapshot_id).snapshot(request.target_snapshot_id)
    _check_block("base_snapshot_id", base)
    _check_block("target_snapshot_id", target)
    if base.volume_id != target.volume_id or base.pool != target.pool:
        raise InvalidRequest(
            f"base_snapshot_id is of volume {base.volume_id}, target_snapshot_id of volume {target.volume_id}"
        )
    _check_position(request.starting_offset, request.max_results, target.size_bytes)
    return pool.changed(base.id, target.id, request.starting_offset)


def _check_block(field: str, snapshot: Snapshot) -> None:
    if snapshot.kind != "image" or snapshot.filesystem:
        raise InvalidRequest(f"{field}: snapshot {snapshot.id} is of a filesystem volume; only block volumes have this")


def _check_position(offset: int, max_results: int, size_bytes: int) -> None:
    if max_results < 0:
        raise InvalidRequest(f"max_results is {max_results}; it must not be negative")
    if not 0 <= offset <= size_bytes:
        raise SizeOutOfRange(f"starting_offset {offset} is not within the volume's {size_bytes} bytes")
