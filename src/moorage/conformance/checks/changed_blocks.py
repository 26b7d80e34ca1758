"""The SnapshotMetadata service: which blocks hold data, and which changed, proven with the bytes themselves.

Owns: the proof (apply the changed blocks to the old copy and compare it with the new one) and the rules of the streams.
"""

import os
from collections.abc import AsyncIterator
from functools import partial

from moorage.conformance import files
from moorage.conformance.bench import Bench, expect
from moorage.conformance.checks.basics import CREATE, NODE, SNAPSHOT
from moorage.conformance.model import check, fail, require
from moorage.conformance.place import Placed, place
from moorage.csi import csi_pb2 as pb

_METADATA = "plugin:SNAPSHOT_METADATA_SERVICE"
_NEEDS = (CREATE, NODE, SNAPSHOT, _METADATA, "run:block")
_STEP = 1 << 20
_CHANGED = ((0, 4096), (3 * _STEP + 512, 4096), (7 * _STEP - 4096, 8192), (12 * _STEP, _STEP))

Message = pb.GetMetadataAllocatedResponse | pb.GetMetadataDeltaResponse


async def _blocks(stream: AsyncIterator[Message], most: int = 0, offset: int = 0) -> list[pb.BlockMetadata]:
    """Return all blocks of a stream, and fail if they break a rule."""
    found: list[pb.BlockMetadata] = []
    sizes: set[int] = set()
    kinds: set[tuple[int, int]] = set()
    async for message in stream:
        if most:
            require(len(message.block_metadata) <= most, f"{len(message.block_metadata)} in a message", f"{most}")
        kinds.add((message.block_metadata_type, message.volume_capacity_bytes))
        for block in message.block_metadata:
            require(block.size_bytes > 0, f"a block at {block.byte_offset} has {block.size_bytes} bytes")
            end = found[-1].byte_offset + found[-1].size_bytes if found else 0
            in_order = not found or block.byte_offset >= end
            require(
                in_order, f"a block at {block.byte_offset} after one that ends at {end}", "ascending, not overlapping"
            )
            passed = block.byte_offset + block.size_bytes > offset
            require(passed, f"a block that ends at {block.byte_offset + block.size_bytes}", f"beyond {offset}")
            found.append(block)
            sizes.add(block.size_bytes)
    require(len(kinds) <= 1, "block_metadata_type or volume_capacity_bytes differs between messages")
    for kind, capacity in kinds:
        require(kind in (pb.FIXED_LENGTH, pb.VARIABLE_LENGTH), f"block_metadata_type is {kind}")
        require(capacity > 0, f"volume_capacity_bytes is {capacity}")
        require(kind != pb.FIXED_LENGTH or len(sizes) <= 1, f"blocks of {sorted(sizes)[:3]} bytes are FIXED_LENGTH")
    return found


def _allocated(bench: Bench, snapshot: pb.Snapshot, most: int = 0, offset: int = 0) -> AsyncIterator[Message]:
    return bench.client.GetMetadataAllocated(
        pb.GetMetadataAllocatedRequest(
            snapshot_id=snapshot.snapshot_id, max_results=most, starting_offset=offset, secrets=bench.config.secrets
        )
    )


def _delta(
    bench: Bench, base: pb.Snapshot, target: pb.Snapshot, most: int = 0, offset: int = 0
) -> AsyncIterator[Message]:
    return bench.client.GetMetadataDelta(
        pb.GetMetadataDeltaRequest(
            base_snapshot_id=base.snapshot_id,
            target_snapshot_id=target.snapshot_id,
            max_results=most,
            starting_offset=offset,
            secrets=bench.config.secrets,
        )
    )


async def _two_snapshots(bench: Bench) -> tuple[Placed, pb.Snapshot, pb.Snapshot]:
    placed = await place(bench)
    for offset in range(0, 10 * _STEP, 2 * _STEP):
        await placed.write(os.urandom(_STEP), offset)
    base = await placed.snapshot()
    for offset, size in _CHANGED:
        await placed.write(os.urandom(size), offset)
    return placed, base, await placed.snapshot()


def _apply(blocks: list[pb.BlockMetadata], source: str, target: str, capacity: int) -> None:
    for block in blocks:
        size = min(block.size_bytes, capacity - block.byte_offset)
        if size > 0:
            files.write(target, True, files.read(source, True, size, block.byte_offset), block.byte_offset)


async def _must_be_equal(bench: Bench, one: Placed, other: Placed, what: str) -> None:
    size = await one.size()
    sums = [await bench.in_time("reading", files.digest, placed.target, True, size) for placed in (one, other)]
    require(sums[0] == sums[1], f"{what} differs from the newer snapshot", "the same bytes")


@check(
    "GetMetadataDelta.is-complete",
    "The changed blocks, copied onto the older snapshot, make the newer one.",
    *_NEEDS,
)
async def delta_is_complete(bench: Bench) -> None:
    _, base, target = await _two_snapshots(bench)
    blocks = await _blocks(_delta(bench, base, target))
    if not blocks:
        fail("no block is named, and four ranges were written")
    old = await place(bench, await bench.restore(base.snapshot_id))
    new = await place(bench, await bench.restore(target.snapshot_id))
    await bench.in_time("copying the changed blocks", _apply, blocks, new.target, old.target, await new.size())
    await _must_be_equal(bench, new, old, "the older snapshot with the changed blocks")


@check(
    "GetMetadataAllocated.is-complete",
    "The allocated blocks, copied onto an empty volume, make the snapshot.",
    *_NEEDS,
)
async def allocated_is_complete(bench: Bench) -> None:
    _, _, target = await _two_snapshots(bench)
    blocks = await _blocks(_allocated(bench, target))
    new = await place(bench, await bench.restore(target.snapshot_id))
    blank = await place(bench)
    await bench.in_time("copying the blocks", _apply, blocks, new.target, blank.target, await new.size())
    await _must_be_equal(bench, new, blank, "an empty volume with the allocated blocks")


@check(
    "GetMetadataAllocated.resumes",
    "A stream that starts where the last block ended goes on there, in messages of at most max_results.",
    *_NEEDS,
)
async def resumes(bench: Bench) -> None:
    _, base, target = await _two_snapshots(bench)
    for call in (partial(_allocated, bench, target), partial(_delta, bench, base, target)):
        whole = await _blocks(call(most=1), most=1)
        middle = whole[len(whole) // 2]
        start = middle.byte_offset + middle.size_bytes
        rest = await _blocks(call(offset=start), offset=start)
        wanted = {one.byte_offset + one.size_bytes for one in whole if one.byte_offset >= start}
        got = {one.byte_offset + one.size_bytes for one in rest}
        require(wanted <= got, f"from offset {start} on, {len(wanted - got)} of {len(wanted)} blocks are missing")


@check(
    "GetMetadataDelta.other-volume",
    "Changed blocks of snapshots of two volumes are INVALID_ARGUMENT.",
    *_NEEDS,
)
async def other_volume(bench: Bench) -> None:
    one = await bench.snapshot((await bench.create()).volume_id)
    other = await bench.snapshot((await bench.create()).volume_id)
    await expect(_drained(_delta(bench, one, other)), "INVALID_ARGUMENT")


@check(
    "GetMetadataAllocated.bad-offset",
    "A starting_offset that is negative or beyond the volume is OUT_OF_RANGE.",
    *_NEEDS,
)
async def bad_offset(bench: Bench) -> None:
    volume = await bench.create()
    snapshot = await bench.snapshot(volume.volume_id)
    beyond = 2 * max(snapshot.size_bytes, volume.capacity_bytes, bench.config.size_bytes)
    for offset in (-1, beyond):
        await expect(_drained(_allocated(bench, snapshot, offset=offset)), "OUT_OF_RANGE", "INVALID_ARGUMENT")


async def _drained(stream: AsyncIterator[Message]) -> None:
    async for _ in stream:
        pass
