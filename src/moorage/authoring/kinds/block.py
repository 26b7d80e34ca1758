"""Volumes that are block devices, handed over by an attach: the storage exports a device to one node at a time.

The storage here is a directory that all nodes see, and the device is a loop device. For iSCSI, NVMe over fabrics, NBD
or a cloud disk, replace the five methods below "the storage", and keep the rest.
Run it: python examples/drivers/devices.py --endpoint unix:///tmp/devices/csi.sock --state-dir /tmp/devices/state
"""

import os
from collections.abc import Mapping
from pathlib import Path

from moorage.sdk import (
    Access,
    Attachment,
    CreateVolume,
    Driver,
    Expanded,
    FailedPrecondition,
    NodeVolume,
    PublishTarget,
    SizeRange,
    StagingTarget,
    Volume,
)
from moorage.sdk.backends import building, grow_filesystem, grow_loop_devices, loop_device, release_loop_devices

MIB = 1 << 20
LARGEST = 8 << 40  # bytes, what this storage can give to one volume


class Devices(Driver):
    """A CSI driver whose volumes are block devices that one node has at a time."""

    name = "devices.example.org"
    supports_block = True

    def setup(self) -> None:
        self.root = Path(self.environment.options.get("root", self.environment.state_dir / "data"))
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)

    # --- the storage ------------------------------------------------------------------------------------------------

    def make(self, volume_id: str, size: int) -> None:
        with building(self.root / volume_id) as disk:
            os.truncate(disk, size)

    def export(self, volume_id: str, node_id: str, is_read_only: bool) -> dict[str, str]:
        """Let a node use a disk, and return what the node needs to connect to it."""
        return {"disk": volume_id}

    def withdraw(self, volume_id: str, node_id: str) -> None:
        """End what `export` allowed, so that the disk can go to another node."""

    def connect(self, exported: Mapping[str, str], *, read_only: bool = False) -> Path:
        """Return the device of a disk on this node; connect it first if need be."""
        if "disk" not in exported:
            raise FailedPrecondition("publish_context: the volume was not attached to this node")
        return loop_device(self.root / exported["disk"], read_only=read_only)

    def disconnect(self, volume_id: str) -> None:
        release_loop_devices(self.root / volume_id)

    # --- the controller ---------------------------------------------------------------------------------------------

    def create_volume(self, request: CreateVolume) -> Volume:
        size = request.size.choose(default=self.default_size_bytes, step=MIB, least=64 * MIB, most=LARGEST)
        self.make(request.volume_id, size)
        return request.volume(size)

    def delete_volume(self, volume_id: str) -> None:
        (self.root / volume_id).unlink(missing_ok=True)

    def expand_volume(self, volume: Volume, size: SizeRange) -> Expanded:
        chosen = size.choose(default=volume.size_bytes, step=MIB, most=LARGEST)
        os.truncate(self.root / volume.id, chosen)
        return Expanded(chosen, needs_node=True)

    def has_node(self, node_id: str) -> bool:
        known = self.environment.options.get("nodes", self.environment.node_id)
        return node_id in known.split(",") or known == "any"

    def attach(self, volume: Volume, node_id: str, access: Access, is_read_only: bool) -> Attachment:
        return Attachment(self.export(volume.id, node_id, is_read_only))

    def detach(self, volume_id: str, node_id: str) -> None:
        self.withdraw(volume_id, node_id)

    # --- the node ---------------------------------------------------------------------------------------------------

    def stage(self, volume: NodeVolume, target: StagingTarget) -> None:
        device = self.connect(volume.publish_context)
        if not volume.access.is_block:
            target.mount_device(device)
            grow_filesystem(device, target.path)

    def unstage(self, volume_id: str, path: Path) -> None:
        self.disconnect(volume_id)

    def publish(self, volume: NodeVolume, target: PublishTarget) -> None:
        assert volume.staging is not None
        if volume.access.is_block:  # a read-only mount of a device does not keep anyone from writing to the device
            target.bind(self.connect(volume.publish_context, read_only=volume.is_read_only))
        else:
            target.bind(volume.staging)

    def expand_on_node(self, volume_id: str, path: Path, size: SizeRange) -> int:
        grow_loop_devices(self.root / volume_id)
        if path.is_dir():
            grow_filesystem(loop_device(self.root / volume_id), path)
        return (self.root / volume_id).stat().st_size


if __name__ == "__main__":
    Devices().main()
