"""Who on this machine uses a volume's data, as the kernel says.

Owns: finding loop devices, their mounts and bind mounts for a volume.
May not touch: any of them.
Start reading at: `observe`.
"""

from dataclasses import dataclass
from pathlib import Path

from moorage.host import loop, mountinfo
from moorage.host.loop import LoopDevice
from moorage.storage.model import VolumeKind


@dataclass(frozen=True, slots=True)
class HostUse:
    """The loop devices on an image and the places where they, or a directory, are mounted."""

    devices: tuple[LoopDevice, ...] = ()
    mountpoints: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.devices or self.mountpoints)

    @property
    def holders(self) -> str:
        return ", ".join((*(str(device.path) for device in self.devices), *self.mountpoints))


def observe(data: Path, kind: VolumeKind) -> HostUse:
    """Everything on this machine that holds the data open through the kernel."""
    if kind is VolumeKind.DIRECTORY:
        return HostUse(mountpoints=tuple(mount.target for mount in mountinfo.binds_of(data)))
    found = loop.find(data)
    table = mountinfo.mounts_of_loops([device.number for device in found])
    devices = tuple(device for device in found if loop.is_still(device))  # or its number may be another volume's
    # A block device that is bound into a pod shows as devtmpfs: it is not a filesystem of the device.
    places = tuple(mount.target for device in devices for mount in mountinfo.mounts_of_device(device.device, table))
    return HostUse(devices, places)


def one_mount_each(use: HostUse) -> list[str]:
    """One mount point for each mounted device: enough to freeze its filesystem."""
    table = mountinfo.mounts_of_loops([device.number for device in use.devices])
    chosen = []
    for device in use.devices:
        found = mountinfo.mounts_of_device(device.device, table)
        if found and loop.is_still(device):
            chosen.append(found[0].target)
    return chosen
