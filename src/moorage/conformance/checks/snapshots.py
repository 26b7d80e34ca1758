"""Snapshots: repetition, conflicts, sizes of what is restored.

Owns: what CreateSnapshot and DeleteSnapshot promise about objects; `data` is about their content.
"""

from moorage.conformance.bench import Bench, expect, of_snapshot
from moorage.conformance.checks.basics import CREATE, SNAPSHOT
from moorage.conformance.model import Stage, check, require
from moorage.csi import csi_pb2 as pb


@check(
    "CreateSnapshot.repeated",
    "CreateSnapshot with the same name and source answers the same snapshot, made at the same time.",
    CREATE,
    SNAPSHOT,
    stage=Stage.QUICK,
)
async def repeated(bench: Bench) -> None:
    volume = await bench.create()
    request = bench.snapshot_request(volume.volume_id)
    with bench.given("CreateSnapshot.works"):
        first = await bench.make_snapshot(request)
    for _ in range(2):
        again = (await bench.client.CreateSnapshot(request)).snapshot
        if again.snapshot_id != first.snapshot_id:
            bench.on_end("DeleteSnapshot.works", lambda made=again.snapshot_id: bench.delete_snapshot(made))  # type: ignore[misc]
        require(again.snapshot_id == first.snapshot_id, f"{first.snapshot_id!r} and {again.snapshot_id!r} for one name")
        require(again.creation_time == first.creation_time, "creation_time differs between two answers")
        require(again.ready_to_use, "a snapshot that was ready is not ready any more")


@check(
    "CreateSnapshot.other-source",
    "CreateSnapshot with a name that is used and another source is ALREADY_EXISTS.",
    CREATE,
    SNAPSHOT,
    stage=Stage.QUICK,
)
async def other_source(bench: Bench) -> None:
    one, other = await bench.create(), await bench.create()
    await bench.snapshot(one.volume_id, name := bench.name("snap"))
    await expect(bench.client.CreateSnapshot(bench.snapshot_request(other.volume_id, name)), "ALREADY_EXISTS")


@check("CreateSnapshot.long-name", "A snapshot's name may have 128 characters.", CREATE, SNAPSHOT, stage=Stage.QUICK)
async def long_name(bench: Bench) -> None:
    volume = await bench.create()
    name = bench.name("snap").ljust(127, "x")
    ids = {
        (await bench.make_snapshot(bench.snapshot_request(volume.volume_id, name + end))).snapshot_id for end in "ab"
    }
    require(len(ids) == 2, "two names that differ in their last character have one snapshot")


@check("DeleteSnapshot.repeated", "DeleteSnapshot of a deleted snapshot succeeds.", CREATE, SNAPSHOT, stage=Stage.QUICK)
async def delete_repeated(bench: Bench) -> None:
    snapshot = await bench.snapshot((await bench.create()).volume_id)
    with bench.given("DeleteSnapshot.works"):
        await bench.delete_snapshot(snapshot.snapshot_id)
    await bench.delete_snapshot(snapshot.snapshot_id)


@check(
    "DeleteSnapshot.is-gone",
    "After DeleteSnapshot no volume can be made of the snapshot.",
    CREATE,
    SNAPSHOT,
    stage=Stage.QUICK,
)
async def is_gone(bench: Bench) -> None:
    snapshot = await bench.snapshot((await bench.create()).volume_id)
    with bench.given("DeleteSnapshot.works"):
        await bench.delete_snapshot(snapshot.snapshot_id)
    request = bench.create_request(volume_content_source=of_snapshot(snapshot.snapshot_id))
    await expect(bench.make(request), "NOT_FOUND")


@check(
    "CreateVolume.restore-too-small",
    "CreateVolume of a snapshot with a limit below its size is OUT_OF_RANGE.",
    CREATE,
    SNAPSHOT,
    stage=Stage.QUICK,
)
async def too_small(bench: Bench) -> None:
    volume = await bench.create(capacity_range=pb.CapacityRange(required_bytes=bench.config.grown_bytes))
    snapshot = await bench.snapshot(volume.volume_id)
    if snapshot.size_bytes <= bench.config.size_bytes:
        return  # the size is unknown, or smaller than that of the volume
    small = pb.CapacityRange(limit_bytes=bench.config.size_bytes)
    source = of_snapshot(snapshot.snapshot_id)
    request = bench.create_request(volume_content_source=source, capacity_range=small)
    await expect(bench.make(request), "OUT_OF_RANGE", "INVALID_ARGUMENT")


@check(
    "CreateVolume.restore-repeated",
    "CreateVolume of a snapshot with the same name answers the same volume.",
    CREATE,
    SNAPSHOT,
    stage=Stage.QUICK,
)
async def restore_repeated(bench: Bench) -> None:
    snapshot = await bench.snapshot((await bench.create()).volume_id)
    request = bench.create_request(volume_content_source=of_snapshot(snapshot.snapshot_id))
    with bench.given("CreateVolume.restore"):
        first = await bench.make(request)
    again = (await bench.client.CreateVolume(request)).volume
    require(again.volume_id == first.volume_id, f"{first.volume_id!r} and {again.volume_id!r} for one name")
    require(again.content_source == first.content_source, "content_source is missing in the second answer")
