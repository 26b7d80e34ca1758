"""Volumes that are image files behind loop devices: sizes are enforced by the kernel.

Snapshots, clones, growth and raw block. Copies are reflinks where the filesystem can, else full copies.
Run it: python examples/drivers/images.py --endpoint unix:///tmp/images/csi.sock --state-dir /tmp/images/state
"""

import os
from pathlib import Path

from moorage.sdk import (
    Capacity,
    CreateSnapshot,
    CreateVolume,
    Driver,
    Expanded,
    NodeVolume,
    PublishTarget,
    SizeRange,
    Snapshot,
    StagingTarget,
    Volume,
)
from moorage.sdk.backends import (
    building,
    copy_file,
    grow_filesystem,
    grow_loop_devices,
    loop_device,
    release_loop_devices,
)

MIB = 1 << 20
LARGEST = 8 << 40  # what a file can have on every filesystem


class Images(Driver):
    """A CSI driver whose volumes are image files of this machine."""

    name = "images.example.org"
    supports_block = True

    async def setup(self) -> None:
        self.root = Path(self.environment.options.get("root", self.environment.state_dir / "data"))
        for folder in ("volumes", "snapshots"):
            (self.root / folder).mkdir(parents=True, exist_ok=True, mode=0o700)

    def image(self, volume_id: str) -> Path:
        return self.root / "volumes" / volume_id

    def snapshot(self, snapshot_id: str) -> Path:
        return self.root / "snapshots" / snapshot_id

    # --- the controller ---------------------------------------------------------------------------------------------

    def create_volume(self, request: CreateVolume) -> Volume:
        size = request.size.choose(default=self.default_size_bytes, step=MIB, least=64 * MIB, most=LARGEST)
        with building(self.image(request.volume_id)) as image:
            os.truncate(image, size)
        return request.volume(size, topology=[self.topology()])

    def copy_volume(self, request: CreateVolume) -> Volume:
        assert request.source is not None
        is_snapshot = request.source.kind == "snapshot"
        source = (self.snapshot if is_snapshot else self.image)(request.source.id)
        size = request.size.choose(default=source.stat().st_size, step=MIB, most=LARGEST)
        with building(self.image(request.volume_id)) as image:
            copy_file(source, image)
            os.truncate(image, size)
        return request.volume(size, topology=[self.topology()])

    def delete_volume(self, volume_id: str) -> None:
        self.image(volume_id).unlink(missing_ok=True)

    def expand_volume(self, volume: Volume, size: SizeRange) -> Expanded:
        chosen = size.choose(default=volume.size_bytes, step=MIB, most=LARGEST)
        os.truncate(self.image(volume.id), chosen)
        return Expanded(chosen, needs_node=True)

    def create_snapshot(self, request: CreateSnapshot) -> Snapshot:
        with building(self.snapshot(request.snapshot_id)) as copy:
            copy_file(self.image(request.volume.id), copy)
        return request.snapshot()

    def delete_snapshot(self, snapshot_id: str) -> None:
        self.snapshot(snapshot_id).unlink(missing_ok=True)

    def capacity(self, parameters: object, segments: object) -> Capacity:
        found = os.statvfs(self.root)
        return Capacity(found.f_bavail * found.f_frsize, smallest_bytes=64 * MIB, largest_bytes=LARGEST)

    def topology(self) -> dict[str, str]:
        return {f"topology.{self.name}/node": self.environment.node_id}

    # --- the node ---------------------------------------------------------------------------------------------------

    def stage(self, volume: NodeVolume, target: StagingTarget) -> None:
        device = loop_device(self.image(volume.id))
        if not volume.access.is_block:
            target.mount_device(device)
            grow_filesystem(device, target.path)

    def unstage(self, volume_id: str, path: Path) -> None:
        release_loop_devices(self.image(volume_id))

    def publish(self, volume: NodeVolume, target: PublishTarget) -> None:
        assert volume.staging is not None
        if volume.access.is_block:  # a read-only mount of a device does not keep anyone from writing to the device
            target.bind(loop_device(self.image(volume.id), read_only=volume.is_read_only))
        else:
            target.bind(volume.staging)

    def expand_on_node(self, volume_id: str, path: Path, size: SizeRange) -> int:
        image = self.image(volume_id)
        grow_loop_devices(image)
        if path.is_dir():
            grow_filesystem(loop_device(image), path)
        return image.stat().st_size


if __name__ == "__main__":
    Images().main()
