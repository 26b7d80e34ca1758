"""Real data: what is written through the published path is there again, wherever the volume goes.

Owns: checksums over restaging, snapshots, restores and clones.
"""

import os

from moorage.conformance.bench import Bench
from moorage.conformance.checks.basics import CLONE, CREATE, NODE, SNAPSHOT, grown_bytes
from moorage.conformance.checks.growing import must_have_grown
from moorage.conformance.model import NotMet, check, require
from moorage.conformance.place import place
from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError

_SIZE = 1 << 20


@check("Data.survives-restage", "Data survives unpublish, unstage, stage and publish.", CREATE, NODE)
async def restage(bench: Bench) -> None:
    placed = await place(bench)
    content = os.urandom(_SIZE)
    await placed.write(content)
    for _ in range(2):
        await placed.down()
        await placed.up()
        await placed.must_hold(content, "after the volume was staged again")


@check(
    "Data.survives-reattach",
    "Data survives detaching and attaching.",
    CREATE,
    NODE,
    "controller:PUBLISH_UNPUBLISH_VOLUME",
)
async def reattach(bench: Bench) -> None:
    placed = await place(bench)
    content = os.urandom(_SIZE)
    await placed.write(content)
    await placed.leave()
    await placed.come_back()
    await placed.must_hold(content, "after the volume was attached again")


@check(
    "Data.volumes-are-separate",
    "What is written to one volume is not in another one, also not in one made later.",
    CREATE,
    NODE,
)
async def separate(bench: Bench) -> None:
    one, other = await place(bench), await place(bench)
    first, second = os.urandom(_SIZE), os.urandom(_SIZE)
    await one.write(first)
    await other.write(second)
    await one.must_hold(first, "after another volume was written")
    await one.leave()
    with bench.given("DeleteVolume.works"):
        await bench.delete(one.volume.volume_id)
    fresh = await place(bench)
    if bench.is_block:
        require(await fresh.read(_SIZE) != first, "a new volume holds the data of a deleted one")
    await other.must_hold(second, "after another volume was deleted")


@check(
    "Data.snapshot-keeps",
    "A snapshot keeps what it saw: later writes to its source are not in its restore, and the source keeps them.",
    CREATE,
    NODE,
    SNAPSHOT,
)
async def snapshot_keeps(bench: Bench) -> None:
    placed = await place(bench)
    before, after = os.urandom(_SIZE), os.urandom(_SIZE)
    await placed.write(before)
    snapshot = await placed.snapshot()
    await placed.write(after)
    restored = await place(bench, await bench.restore(snapshot.snapshot_id))
    await restored.must_hold(before, "in the restore of a snapshot")
    await placed.must_hold(after, "in the source, after a snapshot was taken")


@check(
    "Data.restore-is-separate",
    "Two restores of one snapshot, and the snapshot itself, do not share later writes.",
    CREATE,
    NODE,
    SNAPSHOT,
)
async def restores(bench: Bench) -> None:
    placed = await place(bench)
    content, other = os.urandom(_SIZE), os.urandom(_SIZE)
    await placed.write(content)
    await placed.leave()
    snapshot = await bench.snapshot(placed.volume.volume_id)
    first = await place(bench, await bench.restore(snapshot.snapshot_id))
    await first.write(other)
    second = await place(bench, await bench.restore(snapshot.snapshot_id))
    await second.must_hold(content, "in a second restore, after the first was written")
    await first.must_hold(other, "in the first restore")


@check(
    "Data.clone-is-a-copy",
    "A clone holds the data of its source, and later writes are not shared.",
    CREATE,
    NODE,
    CLONE,
)
async def clone(bench: Bench) -> None:
    placed = await place(bench)
    content, other = os.urandom(_SIZE), os.urandom(_SIZE)
    await placed.write(content)
    await placed.leave()
    copy = await place(bench, await bench.clone(placed.volume.volume_id))
    await copy.must_hold(content, "in the clone")
    await copy.write(other)
    await placed.come_back()
    await placed.must_hold(content, "in the source, after its clone was written")


@check(
    "Data.restore-larger",
    "A restore that asks for more than the snapshot has is larger, and holds its data; or it is OUT_OF_RANGE.",
    CREATE,
    NODE,
    SNAPSHOT,
)
async def restore_larger(bench: Bench) -> None:
    placed = await place(bench)
    content = os.urandom(_SIZE)
    await placed.write(content)
    before = await placed.size()
    await placed.leave()
    snapshot = await bench.snapshot(placed.volume.volume_id)
    wanted = grown_bytes(bench, placed.volume)
    try:
        larger = await bench.restore(snapshot.snapshot_id, capacity_range=pb.CapacityRange(required_bytes=wanted))
    except NotMet as unmet:
        if isinstance(unmet.cause, CsiError) and unmet.cause.code in ("OUT_OF_RANGE", "INVALID_ARGUMENT"):
            return
        raise
    told = larger.capacity_bytes
    require(told == 0 or told >= wanted, f"capacity_bytes is {told}", f"{wanted}")
    restored = await place(bench, larger)
    await restored.must_hold(content, "in the larger restore")
    must_have_grown(bench, placed, before, await restored.size())


@check(
    "Data.snapshot-of-idle-volume",
    "A snapshot of a volume that is on no node holds all that was written before.",
    CREATE,
    NODE,
    SNAPSHOT,
)
async def idle(bench: Bench) -> None:
    placed = await place(bench)
    content = os.urandom(_SIZE)
    await placed.write(content)
    await placed.leave()
    snapshot = await bench.snapshot(placed.volume.volume_id)
    restored = await place(bench, await bench.restore(snapshot.snapshot_id))
    await restored.must_hold(content, "in the restore of an idle volume's snapshot")
