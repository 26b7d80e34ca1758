"""One volume through its whole life in a plugin of its own, each step shown and checked.

Owns: the walk that `python -m tests.support.plugin_walk` and `make demo` show, and that tests repeat.
May not touch: the plugin's insides; it is a caller like any other.
Start reading at: `walk`.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.errors import MoorageError
from moorage.host import mountinfo, mounts
from tests.support.plugin_process import PluginProcess

MIB = 1024 * 1024
_TEXT = "written before the snapshot\n"

Show = Callable[[str, str, float], None]


class StepFailed(MoorageError):
    """What a step left behind is not what it promised."""


@dataclass
class Walk:
    """One walk's places and wishes. `kind` is image or directory, `filesystem` an image's own or `block`."""

    client: CsiClient
    base: Path
    kind: str = "image"
    filesystem: str = "ext4"
    size_bytes: int = 512 * MIB
    name: str = "walk"
    show: Show = field(default=lambda name, found, seconds: None)

    @property
    def is_block(self) -> bool:
        return self.filesystem == "block"

    @property
    def staging(self) -> str:
        return str(self.base / "staging")

    @property
    def target(self) -> str:
        return str(self.base / "pod" / "target")

    def capability(self) -> pb.VolumeCapability:
        mode = pb.VolumeCapability.AccessMode(mode=pb.VolumeCapability.AccessMode.SINGLE_NODE_WRITER)
        if self.is_block:
            return pb.VolumeCapability(block=pb.VolumeCapability.BlockVolume(), access_mode=mode)
        fs_type = "" if self.kind == "directory" else self.filesystem
        return pb.VolumeCapability(mount=pb.VolumeCapability.MountVolume(fs_type=fs_type), access_mode=mode)


async def walk(plan: Walk) -> None:
    """Create, stage, publish, write, snapshot, restore, grow, unpublish, unstage, delete.

    What does not come out as promised raises, and nothing is left mounted then either.
    """
    for directory in (plan.base / "staging", plan.base / "pod"):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        await _walk(plan)
    finally:
        for path in (plan.target, plan.staging):
            mounts.unmount_all(path)


async def _walk(plan: Walk) -> None:
    volume = await _create(plan, plan.name)
    await _up(plan, volume)
    await _step(plan, "write", _write, plan)
    snapshot = await _snapshot_in_use(plan, volume)
    await _step(plan, "overwrite", _overwrite, plan)
    await _grow(plan, volume)
    await _down(plan, volume)
    restored = await _create(plan, f"{plan.name}-restored", snapshot)
    await _up(plan, restored)
    await _step(plan, "read the restored volume", _check_restored, plan)
    await _down(plan, restored)
    for each in (volume, restored):
        await _delete(plan, each)
    await plan.client.DeleteSnapshot(pb.DeleteSnapshotRequest(snapshot_id=snapshot))
    left = await plan.client.ListVolumes(pb.ListVolumesRequest())
    _check(not left.entries, "volumes are left")
    plan.show("delete", "no volume, snapshot or mount is left", 0.0)


async def _create(plan: Walk, name: str, snapshot: str = "") -> pb.Volume:
    started = time.perf_counter()
    request = pb.CreateVolumeRequest(
        name=name,
        capacity_range=pb.CapacityRange(required_bytes=plan.size_bytes),
        volume_capabilities=[plan.capability()],
        parameters={"kind": plan.kind},
    )
    if snapshot:
        request.volume_content_source.snapshot.snapshot_id = snapshot
    volume = (await plan.client.CreateVolume(request)).volume
    again = (await plan.client.CreateVolume(request)).volume
    _check(again.volume_id == volume.volume_id, "a repeated create made another volume")
    _check(volume.capacity_bytes >= plan.size_bytes, "the volume is smaller than asked")
    how = f", copied by {volume.volume_context['copyPath']}" if snapshot else ""
    name = "restore" if snapshot else "create"
    plan.show(name, f"{volume.volume_id}, {volume.capacity_bytes // MIB} MiB{how}", time.perf_counter() - started)
    return volume


async def _up(plan: Walk, volume: pb.Volume) -> None:
    started = time.perf_counter()
    await plan.client.NodeStageVolume(
        pb.NodeStageVolumeRequest(
            volume_id=volume.volume_id,
            staging_target_path=plan.staging,
            volume_capability=plan.capability(),
            volume_context=volume.volume_context,
        )
    )
    shown = "loop device attached" if plan.is_block else f"mounted at {plan.staging}"
    _check(plan.is_block or mountinfo.mount_at(plan.staging) is not None, "nothing is staged")
    plan.show("stage", shown, time.perf_counter() - started)
    started = time.perf_counter()
    await plan.client.NodePublishVolume(
        pb.NodePublishVolumeRequest(
            volume_id=volume.volume_id,
            staging_target_path=plan.staging,
            target_path=plan.target,
            volume_capability=plan.capability(),
            volume_context=volume.volume_context,
        )
    )
    _check(mountinfo.mount_at(plan.target) is not None, "nothing is published")
    plan.show("publish", f"bound at {plan.target}", time.perf_counter() - started)


def _write(plan: Walk) -> str:
    _put(plan, _TEXT)
    return f"{len(_TEXT)} bytes"


def _overwrite(plan: Walk) -> str:
    _put(plan, "written after it           \n")
    return "the snapshot must not see this"


def _check_restored(plan: Walk) -> str:
    found = _get(plan)
    _check(found == _TEXT, f"the restored volume holds {found!r}")
    return repr(found.strip())


async def _snapshot_in_use(plan: Walk, volume: pb.Volume) -> str:
    """A snapshot of the volume as it is; where the pool cannot, of the volume at rest."""
    try:
        return await _snapshot(plan, volume)
    except CsiError as error:
        if error.code != "FAILED_PRECONDITION":
            raise
        plan.show("snapshot", f"refused while in use: {error.message}", 0.0)
    await _down(plan, volume)
    snapshot = await _snapshot(plan, volume)
    await _up(plan, volume)
    return snapshot


async def _snapshot(plan: Walk, volume: pb.Volume) -> str:
    started = time.perf_counter()
    request = pb.CreateSnapshotRequest(
        name=f"{plan.name}-snapshot",
        source_volume_id=volume.volume_id,
        parameters={"snapshotInUse": "live" if plan.kind == "directory" else "freeze"},
    )
    snapshot = (await plan.client.CreateSnapshot(request)).snapshot
    _check(snapshot.ready_to_use, "the snapshot is not ready")
    plan.show("snapshot", f"{snapshot.snapshot_id}", time.perf_counter() - started)
    return snapshot.snapshot_id


async def _grow(plan: Walk, volume: pb.Volume) -> None:
    started = time.perf_counter()
    wanted = pb.CapacityRange(required_bytes=2 * plan.size_bytes)
    request = pb.ControllerExpandVolumeRequest(volume_id=volume.volume_id, capacity_range=wanted)
    answer = await plan.client.ControllerExpandVolume(request)
    how = "while in use"
    if answer.node_expansion_required:
        request_on_node = pb.NodeExpandVolumeRequest(
            volume_id=volume.volume_id, volume_path=plan.target, capacity_range=wanted
        )
        try:
            await plan.client.NodeExpandVolume(request_on_node)
        except CsiError as error:
            if error.code != "FAILED_PRECONDITION":
                raise
            plan.show("grow", f"not while mounted: {error.message}", 0.0)
            how = "when staged again"
            await _down(plan, volume)
            await _up(plan, volume)
    size = _shown_size(plan)
    _check(plan.kind == "directory" or size > plan.size_bytes * 1.5, f"the volume still shows {size} bytes")
    plan.show("grow", f"{size // MIB} MiB, {how}", time.perf_counter() - started)


async def _down(plan: Walk, volume: pb.Volume) -> None:
    started = time.perf_counter()
    await plan.client.NodeUnpublishVolume(
        pb.NodeUnpublishVolumeRequest(volume_id=volume.volume_id, target_path=plan.target)
    )
    _check(not os.path.lexists(plan.target), "the target is still there")
    await plan.client.NodeUnstageVolume(
        pb.NodeUnstageVolumeRequest(volume_id=volume.volume_id, staging_target_path=plan.staging)
    )
    _check(mountinfo.mount_at(plan.staging) is None, "the volume is still staged")
    plan.show("unpublish, unstage", "nothing is mounted", time.perf_counter() - started)


async def _delete(plan: Walk, volume: pb.Volume) -> None:
    for _ in range(2):
        await plan.client.DeleteVolume(pb.DeleteVolumeRequest(volume_id=volume.volume_id))


async def _step(plan: Walk, name: str, action: Callable[[Walk], str], argument: Walk) -> None:
    started = time.perf_counter()
    found = await asyncio.to_thread(action, argument)
    plan.show(name, found, time.perf_counter() - started)


def _put(plan: Walk, text: str) -> None:
    path = plan.target if plan.is_block else f"{plan.target}/file"
    fd = os.open(path, os.O_WRONLY | (0 if plan.is_block else os.O_CREAT | os.O_TRUNC), 0o644)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def _get(plan: Walk) -> str:
    with open(plan.target if plan.is_block else f"{plan.target}/file", "rb") as file:
        return file.read(len(_TEXT)).decode()


def _shown_size(plan: Walk) -> int:
    if plan.is_block:
        with open(plan.target, "rb") as device:
            return device.seek(0, os.SEEK_END)
    found = os.statvfs(plan.target)
    return found.f_blocks * found.f_frsize


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StepFailed(otherwise)


async def walk_in_new_plugin(pool: Path, base: Path, kind: str, filesystem: str, show: Show) -> None:
    """Start a plugin on the pool, walk, and stop it again."""
    async with PluginProcess({"default": pool}) as plugin:
        await walk(Walk(plugin.client, base, kind, filesystem, show=show))


def main() -> None:
    """Walk on a pool below a directory, and say what happens."""
    parser = argparse.ArgumentParser(description="Walk one volume through a plugin, and check each step.")
    parser.add_argument("--pool", type=Path, help="directory of the pool; a temporary one if left out")
    parser.add_argument("--kind", choices=("image", "directory"), default="image")
    parser.add_argument("--filesystem", choices=("ext4", "xfs", "btrfs", "block"), default="ext4")
    options = parser.parse_args()

    def show(name: str, found: str, seconds: float) -> None:
        os.write(1, f"{name:<26}{seconds * 1000:8.1f} ms   {found}\n".encode())

    with tempfile.TemporaryDirectory(prefix="moorage-walk-") as directory:
        pool = options.pool or Path(directory) / "pool"
        pool.mkdir(parents=True, exist_ok=True)
        asyncio.run(walk_in_new_plugin(pool, Path(directory), options.kind, options.filesystem, show))


if __name__ == "__main__":
    main()
