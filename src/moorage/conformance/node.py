"""Checks of the Node service: staging, publishing, statistics, growing. They run on the node of the driver."""

import os
from dataclasses import dataclass
from pathlib import Path

from moorage.conformance.suite import Bench, check, expect, require
from moorage.csi import csi_pb2 as pb

SERVICE = "Node"

_NODE = "node:SERVICE"
_CREATE = "controller:CREATE_DELETE_VOLUME"


@dataclass
class Placed:
    """A volume on this node, and the paths it is at."""

    volume: pb.Volume
    staging: str
    target: str
    publish_context: dict[str, str]


async def place(bench: Bench, mode: str = "SINGLE_NODE_WRITER", publish: bool = True) -> Placed:
    """Create, attach, stage and publish a volume, as far as the driver has these steps. The check's end undoes them."""
    volume = await bench.create(volume_capabilities=[bench.capability(mode)])
    folder = bench.folder()
    placed = Placed(volume, str(folder / "staging"), str(folder / "target"), {})
    if bench.has("controller:PUBLISH_UNPUBLISH_VOLUME"):
        await _attach(bench, placed, mode)
    if bench.has("node:STAGE_UNSTAGE_VOLUME"):
        Path(placed.staging).mkdir()
        bench.cleanup.push_async_callback(unstage, bench, placed)
        await stage(bench, placed, mode)
    if publish:
        bench.cleanup.push_async_callback(unpublish, bench, placed)
        await bench.client.NodePublishVolume(publish_request(bench, placed, mode))
    return placed


async def stage(bench: Bench, placed: Placed, mode: str = "SINGLE_NODE_WRITER") -> None:
    await bench.client.NodeStageVolume(
        pb.NodeStageVolumeRequest(
            volume_id=placed.volume.volume_id,
            publish_context=placed.publish_context,
            staging_target_path=placed.staging,
            volume_capability=bench.capability(mode),
            secrets=bench.config.secrets,
            volume_context=placed.volume.volume_context,
        )
    )


def publish_request(bench: Bench, placed: Placed, mode: str = "SINGLE_NODE_WRITER") -> pb.NodePublishVolumeRequest:
    return pb.NodePublishVolumeRequest(
        volume_id=placed.volume.volume_id,
        publish_context=placed.publish_context,
        staging_target_path=placed.staging if bench.has("node:STAGE_UNSTAGE_VOLUME") else "",
        target_path=placed.target,
        volume_capability=bench.capability(mode),
        secrets=bench.config.secrets,
        volume_context=placed.volume.volume_context,
    )


async def unpublish(bench: Bench, placed: Placed) -> None:
    request = pb.NodeUnpublishVolumeRequest(volume_id=placed.volume.volume_id, target_path=placed.target)
    await bench.client.NodeUnpublishVolume(request)


async def unstage(bench: Bench, placed: Placed) -> None:
    request = pb.NodeUnstageVolumeRequest(volume_id=placed.volume.volume_id, staging_target_path=placed.staging)
    await bench.client.NodeUnstageVolume(request)


async def _attach(bench: Bench, placed: Placed, mode: str) -> None:
    volume_id, node_id = placed.volume.volume_id, bench.node.node_id
    detach = pb.ControllerUnpublishVolumeRequest(volume_id=volume_id, node_id=node_id)
    bench.cleanup.push_async_callback(bench.client.ControllerUnpublishVolume, detach)
    answer = await bench.client.ControllerPublishVolume(
        pb.ControllerPublishVolumeRequest(
            volume_id=volume_id,
            node_id=node_id,
            volume_capability=bench.capability(mode),
            volume_context=placed.volume.volume_context,
        )
    )
    placed.publish_context = dict(answer.publish_context)


@check(SERVICE, "NodeGetInfo gives an id, and a place when the driver has places", _NODE)
async def info(bench: Bench) -> None:
    require(bool(bench.node.node_id), "node_id is empty")
    require(len(bench.node.node_id.encode()) <= 256, "node_id is longer than 256 bytes")
    require(bench.node.max_volumes_per_node >= 0, "max_volumes_per_node is negative")
    if bench.has("plugin:VOLUME_ACCESSIBILITY_CONSTRAINTS"):
        require(bool(bench.node.accessible_topology.segments), "accessible_topology is empty")


@check(SERVICE, "NodePublishVolume checks its fields", _NODE)
async def publish_fields(bench: Bench) -> None:
    call, cap = bench.client.NodePublishVolume, bench.capability()
    for bad in (
        pb.NodePublishVolumeRequest(target_path="/t", volume_capability=cap),
        pb.NodePublishVolumeRequest(volume_id="v", volume_capability=cap),
        pb.NodePublishVolumeRequest(volume_id="v", target_path="/t"),
    ):
        await expect("INVALID_ARGUMENT", call(bad), "publish without a required field")


@check(SERVICE, "NodeStageVolume and NodeUnstageVolume check their fields", "node:STAGE_UNSTAGE_VOLUME")
async def stage_fields(bench: Bench) -> None:
    cap = bench.capability()
    for bad in (
        pb.NodeStageVolumeRequest(staging_target_path="/s", volume_capability=cap),
        pb.NodeStageVolumeRequest(volume_id="v", volume_capability=cap),
        pb.NodeStageVolumeRequest(volume_id="v", staging_target_path="/s"),
    ):
        await expect("INVALID_ARGUMENT", bench.client.NodeStageVolume(bad), "stage without a required field")
    for undo in (pb.NodeUnstageVolumeRequest(staging_target_path="/s"), pb.NodeUnstageVolumeRequest(volume_id="v")):
        await expect("INVALID_ARGUMENT", bench.client.NodeUnstageVolume(undo), "unstage without a required field")


@check(SERVICE, "NodeUnpublishVolume checks its fields", _NODE)
async def unpublish_fields(bench: Bench) -> None:
    for bad in (pb.NodeUnpublishVolumeRequest(target_path="/t"), pb.NodeUnpublishVolumeRequest(volume_id="v")):
        await expect("INVALID_ARGUMENT", bench.client.NodeUnpublishVolume(bad), "unpublish without a required field")


@check(SERVICE, "A volume is published where asked, and its target is gone after unpublish", _NODE, _CREATE)
async def life(bench: Bench) -> None:
    placed = await place(bench)
    target = Path(placed.target)
    kind = target.is_block_device() if bench.config.block else target.is_dir()
    require(kind, f"{target} is not a {'block device' if bench.config.block else 'directory'}")
    await unpublish(bench, placed)
    require(not os.path.lexists(target), f"{target} is still there after NodeUnpublishVolume")
    await unpublish(bench, placed)


@check(SERVICE, "Stage and publish may be repeated", _NODE, _CREATE)
async def repeated(bench: Bench) -> None:
    placed = await place(bench)
    for _ in range(3):
        if bench.has("node:STAGE_UNSTAGE_VOLUME"):
            await stage(bench, placed)
        await bench.client.NodePublishVolume(publish_request(bench, placed))


@check(SERVICE, "What is written is there after unpublish, unstage and publish again", _NODE, _CREATE)
async def data_stays(bench: Bench) -> None:
    placed = await place(bench)
    content = os.urandom(1024 * 1024)
    await _write(bench, placed, content)
    await unpublish(bench, placed)
    if bench.has("node:STAGE_UNSTAGE_VOLUME"):
        await unstage(bench, placed)
        Path(placed.staging).mkdir(exist_ok=True)
        await stage(bench, placed)
    await bench.client.NodePublishVolume(publish_request(bench, placed))
    require(_read(bench, placed, len(content)) == content, "the bytes read are not the bytes written")


@check(
    SERVICE,
    "A snapshot keeps what it saw, whatever is written later",
    _NODE,
    _CREATE,
    "controller:CREATE_DELETE_SNAPSHOT",
)
async def snapshot_keeps(bench: Bench) -> None:
    placed = await place(bench)
    before, after = os.urandom(65536), os.urandom(65536)
    await _write(bench, placed, before)
    snapshot = await bench.snapshot(placed.volume.volume_id)
    await _write(bench, placed, after)
    source = pb.VolumeContentSource(snapshot=pb.VolumeContentSource.SnapshotSource(snapshot_id=snapshot.snapshot_id))
    restored = await bench.create(volume_content_source=source)
    second = Placed(restored, placed.staging + "-restored", placed.target + "-restored", {})
    if bench.has("controller:PUBLISH_UNPUBLISH_VOLUME"):
        await _attach(bench, second, "SINGLE_NODE_WRITER")
    if bench.has("node:STAGE_UNSTAGE_VOLUME"):
        Path(second.staging).mkdir()
        bench.cleanup.push_async_callback(unstage, bench, second)
        await stage(bench, second)
    bench.cleanup.push_async_callback(unpublish, bench, second)
    await bench.client.NodePublishVolume(publish_request(bench, second))
    require(_read(bench, second, len(before)) == before, "the restore does not hold what was there at the snapshot")
    require(_read(bench, placed, len(after)) == after, "the source lost what was written after the snapshot")


@check(
    SERVICE,
    "A single-writer volume is not published at a second place",
    _NODE,
    _CREATE,
    "node:SINGLE_NODE_MULTI_WRITER",
    "controller:SINGLE_NODE_MULTI_WRITER",
)
async def single_writer(bench: Bench) -> None:
    mode = "SINGLE_NODE_SINGLE_WRITER"
    placed = await place(bench, mode)
    request = publish_request(bench, placed, mode)
    request.target_path += "-second"
    await expect("FAILED_PRECONDITION", bench.client.NodePublishVolume(request), "publish at a second target")


@check(
    SERVICE,
    "NodeGetVolumeStats gives figures, and refuses what it cannot find",
    _NODE,
    _CREATE,
    "node:GET_VOLUME_STATS",
)
async def stats(bench: Bench) -> None:
    placed = await place(bench)
    call, volume_id = bench.client.NodeGetVolumeStats, placed.volume.volume_id
    answer = await call(pb.NodeGetVolumeStatsRequest(volume_id=volume_id, volume_path=placed.target))
    require(any(usage.total > 0 for usage in answer.usage), "no usage with a total")
    await expect("INVALID_ARGUMENT", call(pb.NodeGetVolumeStatsRequest(volume_path="/p")), "without volume_id")
    await expect("INVALID_ARGUMENT", call(pb.NodeGetVolumeStatsRequest(volume_id=volume_id)), "without volume_path")
    unknown = pb.NodeGetVolumeStatsRequest(volume_id="no-such-volume", volume_path="some/path")
    await expect("NOT_FOUND", call(unknown), "with an unknown volume")


@check(
    SERVICE,
    "A volume grows while it is published",
    _NODE,
    _CREATE,
    "node:EXPAND_VOLUME",
    "controller:EXPAND_VOLUME",
    "expansion:ONLINE",
)
async def grows(bench: Bench) -> None:
    placed = await place(bench)
    grown = pb.CapacityRange(required_bytes=bench.config.grown_bytes)
    before = _size(bench, placed)
    await bench.client.ControllerExpandVolume(
        pb.ControllerExpandVolumeRequest(
            volume_id=placed.volume.volume_id, capacity_range=grown, volume_capability=bench.capability()
        )
    )
    await bench.client.NodeExpandVolume(
        pb.NodeExpandVolumeRequest(
            volume_id=placed.volume.volume_id,
            volume_path=placed.target,
            capacity_range=grown,
            staging_target_path=placed.staging if bench.has("node:STAGE_UNSTAGE_VOLUME") else "",
            volume_capability=bench.capability(),
        )
    )
    require(_size(bench, placed) > before, f"the volume still shows {before} bytes after growing")


async def _write(bench: Bench, placed: Placed, content: bytes) -> None:
    path = placed.target if bench.config.block else f"{placed.target}/check-data"
    descriptor = os.open(path, os.O_WRONLY if bench.config.block else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(bench: Bench, placed: Placed, size: int) -> bytes:
    path = placed.target if bench.config.block else f"{placed.target}/check-data"
    with open(path, "rb") as file:
        return file.read(size)


def _size(bench: Bench, placed: Placed) -> int:
    if bench.config.block:
        with open(placed.target, "rb") as device:
            return device.seek(0, os.SEEK_END)
    figures = os.statvfs(placed.target)
    return figures.f_blocks * figures.f_frsize
