"""Checks of group snapshots."""

from moorage.conformance.suite import Bench, check, expect, require
from moorage.csi import csi_pb2 as pb

SERVICE = "Groups"

_GROUP = "group:CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT"


@check(SERVICE, "Group calls check their fields and the group", _GROUP)
async def fields(bench: Bench) -> None:
    client = bench.client
    empty = pb.CreateVolumeGroupSnapshotRequest()
    await expect("INVALID_ARGUMENT", client.CreateVolumeGroupSnapshot(empty), "a group without name and members")
    nameless = pb.GetVolumeGroupSnapshotRequest()
    await expect("INVALID_ARGUMENT", client.GetVolumeGroupSnapshot(nameless), "Get without an id")
    unknown = pb.GetVolumeGroupSnapshotRequest(group_snapshot_id="no-such-group")
    await expect("NOT_FOUND", client.GetVolumeGroupSnapshot(unknown), "Get of an unknown group")
    gone = pb.DeleteVolumeGroupSnapshotRequest()
    await expect("INVALID_ARGUMENT", client.DeleteVolumeGroupSnapshot(gone), "Delete without an id")
    await client.DeleteVolumeGroupSnapshot(pb.DeleteVolumeGroupSnapshotRequest(group_snapshot_id="no-such-group"))


@check(SERVICE, "A group holds one snapshot of each member, and twice is once", _GROUP)
async def life(bench: Bench) -> None:
    members = [await bench.create() for _ in range(2)]
    ids = [volume.volume_id for volume in members]
    request = pb.CreateVolumeGroupSnapshotRequest(name=bench.fresh_name("group"), source_volume_ids=ids)
    first = (await bench.client.CreateVolumeGroupSnapshot(request)).group_snapshot
    snapshots = [snapshot.snapshot_id for snapshot in first.snapshots]
    delete = pb.DeleteVolumeGroupSnapshotRequest(group_snapshot_id=first.group_snapshot_id, snapshot_ids=snapshots)
    bench.cleanup.push_async_callback(bench.client.DeleteVolumeGroupSnapshot, delete)
    sources = sorted(snapshot.source_volume_id for snapshot in first.snapshots)
    require(sources == sorted(ids), f"snapshots of {sources}, expected {sorted(ids)}")
    linked = all(snapshot.group_snapshot_id == first.group_snapshot_id for snapshot in first.snapshots)
    require(linked, "a member does not carry its group_snapshot_id")
    second = (await bench.client.CreateVolumeGroupSnapshot(request)).group_snapshot
    require(second.group_snapshot_id == first.group_snapshot_id, "two groups for one name")
    again = pb.GetVolumeGroupSnapshotRequest(group_snapshot_id=first.group_snapshot_id, snapshot_ids=snapshots)
    got = (await bench.client.GetVolumeGroupSnapshot(again)).group_snapshot
    require(got.group_snapshot_id == first.group_snapshot_id, "Get gave another group")
