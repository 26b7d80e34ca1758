"""Checks of snapshots: making, listing, restoring and deleting them."""

from moorage.conformance.suite import Bench, check, expect, require
from moorage.csi import csi_pb2 as pb

SERVICE = "Snapshots"

_SNAPSHOT = "controller:CREATE_DELETE_SNAPSHOT"
_LIST = "controller:LIST_SNAPSHOTS"


@check(SERVICE, "CreateSnapshot checks its fields", _SNAPSHOT)
async def needs_fields(bench: Bench) -> None:
    call = bench.client.CreateSnapshot
    await expect("INVALID_ARGUMENT", call(pb.CreateSnapshotRequest(source_volume_id="v")), "without a name")
    await expect("INVALID_ARGUMENT", call(pb.CreateSnapshotRequest(name="n")), "without a source_volume_id")


@check(SERVICE, "CreateSnapshot twice with one name is one snapshot, made at one time", _SNAPSHOT)
async def idempotent(bench: Bench) -> None:
    volume, name = await bench.create(), bench.fresh_name("snap")
    first, second = await bench.snapshot(volume.volume_id, name), await bench.snapshot(volume.volume_id, name)
    require(first.snapshot_id == second.snapshot_id, "two ids for one name")
    require(first.creation_time == second.creation_time, "creation_time changed between two answers")
    require(first.source_volume_id == volume.volume_id, f"source_volume_id is {first.source_volume_id!r}")


@check(SERVICE, "CreateSnapshot with a used name and another source is ALREADY_EXISTS", _SNAPSHOT)
async def name_conflict(bench: Bench) -> None:
    one, other, name = await bench.create(), await bench.create(), bench.fresh_name("snap")
    await bench.snapshot(one.volume_id, name)
    request = pb.CreateSnapshotRequest(source_volume_id=other.volume_id, name=name)
    await expect("ALREADY_EXISTS", bench.client.CreateSnapshot(request), "the same name for another volume")


@check(SERVICE, "DeleteSnapshot needs an id; an unknown one, and twice, succeed", _SNAPSHOT)
async def deletion(bench: Bench) -> None:
    await expect("INVALID_ARGUMENT", bench.delete_snapshot(""), "DeleteSnapshot without snapshot_id")
    await bench.delete_snapshot("no-such-snapshot")
    volume = await bench.create()
    snapshot = await bench.snapshot(volume.volume_id)
    await bench.delete_snapshot(snapshot.snapshot_id)
    await bench.delete_snapshot(snapshot.snapshot_id)


@check(SERVICE, "A restore echoes its source and has at least its size", _SNAPSHOT)
async def restore(bench: Bench) -> None:
    volume = await bench.create()
    snapshot = await bench.snapshot(volume.volume_id)
    source = pb.VolumeContentSource(snapshot=pb.VolumeContentSource.SnapshotSource(snapshot_id=snapshot.snapshot_id))
    restored = await bench.create(volume_content_source=source)
    require(restored.content_source == source, "content_source is missing or another one in the answer")
    enough = restored.capacity_bytes == 0 or restored.capacity_bytes >= snapshot.size_bytes
    require(enough, f"the snapshot has {snapshot.size_bytes} bytes, the restore {restored.capacity_bytes}")


@check(SERVICE, "A restore of an unknown snapshot is NOT_FOUND", _SNAPSHOT)
async def restore_of_nothing(bench: Bench) -> None:
    source = pb.VolumeContentSource(snapshot=pb.VolumeContentSource.SnapshotSource(snapshot_id="no-such-snapshot"))
    request = bench.create_request(bench.fresh_name(), volume_content_source=source)
    await expect("NOT_FOUND", bench.client.CreateVolume(request), "restore of an unknown snapshot")


@check(SERVICE, "ListSnapshots filters by id and by source; a filter that matches nothing is empty", _SNAPSHOT, _LIST)
async def filters(bench: Bench) -> None:
    volume = await bench.create()
    snapshot = await bench.snapshot(volume.volume_id)
    for request in (
        pb.ListSnapshotsRequest(snapshot_id=snapshot.snapshot_id),
        pb.ListSnapshotsRequest(source_volume_id=volume.volume_id),
    ):
        found = [entry.snapshot.snapshot_id for entry in (await bench.client.ListSnapshots(request)).entries]
        require(found == [snapshot.snapshot_id], f"expected only {snapshot.snapshot_id}, got {found}")
    for request in (
        pb.ListSnapshotsRequest(snapshot_id="no-such-snapshot"),
        pb.ListSnapshotsRequest(source_volume_id="no-such-volume"),
    ):
        require(not (await bench.client.ListSnapshots(request)).entries, "a filter that matches nothing gave entries")


@check(SERVICE, "ListSnapshots pages; without max_entries a token gives all the rest", _SNAPSHOT, _LIST)
async def pages(bench: Bench) -> None:
    volume = await bench.create()
    made = {(await bench.snapshot(volume.volume_id)).snapshot_id for _ in range(4)}
    first = await bench.client.ListSnapshots(pb.ListSnapshotsRequest(max_entries=2))
    require(len(first.entries) == 2 and bool(first.next_token), "max_entries 2 of 4 should give 2 and a token")
    rest = await bench.client.ListSnapshots(pb.ListSnapshotsRequest(starting_token=first.next_token))
    seen = {entry.snapshot.snapshot_id for entry in (*first.entries, *rest.entries)}
    require(made <= seen, f"not on any page: {sorted(made - seen)}")


@check(SERVICE, "GetSnapshot finds a snapshot, and only one that exists", _SNAPSHOT, "controller:GET_SNAPSHOT")
async def get(bench: Bench) -> None:
    volume = await bench.create()
    snapshot = await bench.snapshot(volume.volume_id)
    answer = await bench.client.GetSnapshot(pb.GetSnapshotRequest(snapshot_id=snapshot.snapshot_id))
    require(answer.snapshot.snapshot_id == snapshot.snapshot_id, "another snapshot came back")
    missing = bench.client.GetSnapshot(pb.GetSnapshotRequest(snapshot_id="no-such-snapshot"))
    await expect("NOT_FOUND", missing, "GetSnapshot of an unknown snapshot")
