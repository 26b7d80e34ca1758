"""What all other checks rely on: each call does its work once, for one volume.

Owns: one check for each step. If it fails, the checks that need the step are not run and name this one.
"""

import os
from pathlib import Path

from moorage.conformance import files
from moorage.conformance.bench import Bench, of_snapshot, of_volume
from moorage.conformance.model import Stage, check, fail, require
from moorage.conformance.place import ATTACHES, STAGES, Placed, place
from moorage.csi import csi_pb2 as pb

CREATE = "controller:CREATE_DELETE_VOLUME"
SNAPSHOT = "controller:CREATE_DELETE_SNAPSHOT"
CLONE = "controller:CLONE_VOLUME"
EXPAND = "controller:EXPAND_VOLUME"
GROUP = "group:CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT"
NODE = "node:SERVICE"


def unplaced(bench: Bench, volume: pb.Volume) -> Placed:
    folder = bench.folder()
    return Placed(bench, volume, os.fspath(folder / "staging"), os.fspath(folder / "target"))


@check(
    "CreateVolume.works",
    "CreateVolume makes a volume with an id of its own for each name.",
    CREATE,
    stage=Stage.BASIC,
)
async def create(bench: Bench) -> None:
    one, other = await bench.make(bench.create_request()), await bench.make(bench.create_request())
    require(one.volume_id != other.volume_id, f"volume_id {one.volume_id!r} for two names")


@check("DeleteVolume.works", "DeleteVolume removes a volume.", CREATE, stage=Stage.BASIC)
async def delete(bench: Bench) -> None:
    volume = await bench.create()
    await bench.delete(volume.volume_id)


@check(
    "ControllerPublishVolume.works",
    "ControllerPublishVolume attaches a volume to the node that NodeGetInfo names.",
    CREATE,
    ATTACHES,
    stage=Stage.BASIC,
)
async def attach(bench: Bench) -> None:
    await unplaced(bench, await bench.create()).attach()


@check(
    "ControllerUnpublishVolume.works",
    "ControllerUnpublishVolume detaches a volume.",
    CREATE,
    ATTACHES,
    stage=Stage.BASIC,
)
async def detach(bench: Bench) -> None:
    placed = unplaced(bench, await bench.create())
    with bench.given("ControllerPublishVolume.works"):
        await placed.attach()
    await placed.detach()


@check(
    "NodeStageVolume.works",
    "NodeStageVolume prepares a volume in a directory that the caller made.",
    CREATE,
    NODE,
    STAGES,
    stage=Stage.BASIC,
)
async def stage(bench: Bench) -> None:
    placed = unplaced(bench, await bench.create())
    with bench.given("ControllerPublishVolume.works"):
        await placed.attach()
    await placed.stage()


@check(
    "NodePublishVolume.works",
    "NodePublishVolume leaves a mount at target_path, or a block device if one was asked for.",
    CREATE,
    NODE,
    stage=Stage.BASIC,
)
async def publish(bench: Bench) -> None:
    placed = await place(bench, publish=False)
    await placed.publish()


@check(
    "NodeUnpublishVolume.works",
    "NodeUnpublishVolume unmounts target_path and removes it.",
    CREATE,
    NODE,
    stage=Stage.BASIC,
)
async def unpublish(bench: Bench) -> None:
    placed = await place(bench)
    await placed.unpublish()
    require(files.mount_at(placed.target) is None, f"{placed.target} is still mounted")
    kind = files.kind_of(placed.target)
    require(kind == "nothing", f"{placed.target} is still there, {kind}")


@check(
    "NodeUnstageVolume.works",
    "NodeUnstageVolume unmounts staging_target_path and leaves the directory empty.",
    CREATE,
    NODE,
    STAGES,
    stage=Stage.BASIC,
)
async def unstage(bench: Bench) -> None:
    placed = await place(bench, publish=False)
    await placed.unstage()
    require(files.mount_at(placed.staging) is None, f"{placed.staging} is still mounted")
    staging = Path(placed.staging)
    left = sorted(os.listdir(staging))[:5] if staging.is_dir() else []
    require(not left, f"{staging} holds {', '.join(left)}")


@check(
    "CreateSnapshot.works",
    "CreateSnapshot takes a snapshot with an id, its source, a creation time, and is ready in the end.",
    CREATE,
    SNAPSHOT,
    stage=Stage.BASIC,
)
async def snapshot(bench: Bench) -> None:
    volume = await bench.create()
    made = await bench.make_snapshot(bench.snapshot_request(volume.volume_id))
    require(made.source_volume_id == volume.volume_id, f"source_volume_id is {made.source_volume_id!r}")
    require(made.creation_time.seconds > 0, "creation_time is missing")


@check("DeleteSnapshot.works", "DeleteSnapshot removes a snapshot.", CREATE, SNAPSHOT, stage=Stage.BASIC)
async def delete_snapshot(bench: Bench) -> None:
    volume = await bench.create()
    made = await bench.snapshot(volume.volume_id)
    await bench.delete_snapshot(made.snapshot_id)


@check(
    "CreateVolume.restore",
    "CreateVolume of a snapshot repeats content_source and gives at least the snapshot's size.",
    CREATE,
    SNAPSHOT,
    stage=Stage.BASIC,
)
async def restore(bench: Bench) -> None:
    volume = await bench.create()
    made = await bench.snapshot(volume.volume_id)
    source = of_snapshot(made.snapshot_id)
    restored = await bench.make(bench.create_request(volume_content_source=source))
    require(restored.content_source == source, "content_source is missing or names another source")
    enough = restored.capacity_bytes == 0 or restored.capacity_bytes >= made.size_bytes
    require(enough, f"the snapshot has {made.size_bytes} bytes, the volume {restored.capacity_bytes}")


@check(
    "CreateVolume.clone",
    "CreateVolume of a volume repeats content_source and makes another volume.",
    CREATE,
    CLONE,
    stage=Stage.BASIC,
)
async def clone(bench: Bench) -> None:
    origin = await bench.create()
    source = of_volume(origin.volume_id)
    copy = await bench.make(bench.create_request(volume_content_source=source))
    require(copy.volume_id != origin.volume_id, "the clone has the id of its source")
    require(copy.content_source == source, "content_source is missing or names another source")


@check(
    "ControllerExpandVolume.works",
    "ControllerExpandVolume makes a volume at least as large as required_bytes.",
    CREATE,
    EXPAND,
    stage=Stage.BASIC,
)
async def expand(bench: Bench) -> None:
    volume = await bench.create()
    answer = await bench.client.ControllerExpandVolume(expand_request(bench, volume))
    wanted = grown_bytes(bench, volume)
    require(answer.capacity_bytes >= wanted, f"capacity_bytes is {answer.capacity_bytes}", f"at least {wanted}")


def grown_bytes(bench: Bench, volume: pb.Volume) -> int:
    """Return the size to grow a volume to: more than it has, also if the driver gave it more than was asked for."""
    return max(bench.config.grown_bytes, 2 * volume.capacity_bytes)


def expand_request(bench: Bench, volume: pb.Volume) -> pb.ControllerExpandVolumeRequest:
    return pb.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=pb.CapacityRange(required_bytes=grown_bytes(bench, volume)),
        volume_capability=bench.capability(),
        secrets=bench.config.secrets,
    )


@check(
    "CreateVolumeGroupSnapshot.works",
    "A group snapshot has one member for each source, and each member names the group.",
    CREATE,
    GROUP,
    stage=Stage.BASIC,
)
async def group(bench: Bench) -> None:
    ids = [(await bench.create()).volume_id for _ in range(2)]
    made = await make_group(bench, ids)
    sources = sorted(snapshot.source_volume_id for snapshot in made.snapshots)
    require(sources == sorted(ids), f"snapshots of {sources}", f"one of each of {sorted(ids)}")
    linked = all(snapshot.group_snapshot_id == made.group_snapshot_id for snapshot in made.snapshots)
    require(linked, "a member has no group_snapshot_id, or another one")
    require(made.creation_time.seconds > 0, "creation_time is missing")


async def make_group(bench: Bench, ids: list[str], name: str = "") -> pb.VolumeGroupSnapshot:
    """Take a group snapshot, which is deleted at the end."""
    request = pb.CreateVolumeGroupSnapshotRequest(
        name=name or bench.name("group"),
        source_volume_ids=ids,
        secrets=bench.config.secrets,
        parameters=bench.config.snapshot_parameters,
    )
    made = (await bench.client.CreateVolumeGroupSnapshot(request)).group_snapshot
    if not made.group_snapshot_id:
        fail("the answer has no group_snapshot_id")
    for snapshot in made.snapshots:
        bench.session.own("snapshot", snapshot.snapshot_id, f"{request.name}/{snapshot.source_volume_id}")
        bench.session.sizes[snapshot.snapshot_id] = snapshot.size_bytes
    delete = pb.DeleteVolumeGroupSnapshotRequest(
        group_snapshot_id=made.group_snapshot_id,
        snapshot_ids=[snapshot.snapshot_id for snapshot in made.snapshots],
        secrets=bench.config.secrets,
    )
    bench.on_end("DeleteVolumeGroupSnapshot.repeated", lambda: bench.client.DeleteVolumeGroupSnapshot(delete))
    return made
