"""What the kernel knows about a volume on this node. Nothing is remembered between calls.

Owns: finding the loop devices and mounts of one volume, and telling whose mount a path shows.
May not touch: any of it; `staging` and `publishing` act.
Start reading at: `NodeVolume`, `VolumeOnHost`.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moorage.host import loop, mountinfo, mounts
from moorage.host.loop import LoopDevice
from moorage.host.mountinfo import Mount
from moorage.plugin.io_limits import IoLimits
from moorage.storage import Pool, Volume, VolumeKind
from moorage.storage.tunables import Tunables as Mutable

_DEVICE_FILESYSTEMS = frozenset({"devtmpfs", "tmpfs"})
VFS_WORDS = frozenset({"nosuid", "nodev", "noexec", "noatime", "nodiratime", "sync", "dirsync", "nosymfollow"})


@dataclass(frozen=True, slots=True)
class NodeVolume:
    """A volume and its pool, as the node service uses them."""

    volume: Volume
    pool: Pool

    @property
    def volume_id(self) -> str:
        return self.volume.id

    @property
    def data(self) -> Path:
        return self.volume.data

    @property
    def is_directory(self) -> bool:
        return self.volume.kind is VolumeKind.DIRECTORY

    @property
    def filesystem(self) -> str:
        return self.volume.filesystem

    @property
    def settings(self) -> Mutable:
        return Mutable.of(self.volume.mutable)

    @property
    def direct_io(self) -> bool:
        return self.settings.direct_io is not False

    @property
    def io_limits(self) -> IoLimits:
        found = self.settings
        return IoLimits(found.read_iops, found.write_iops, found.read_bytes_per_second, found.write_bytes_per_second)


@dataclass(frozen=True, slots=True)
class VolumeOnHost:
    """One volume at one moment: its loop devices, and every mount that shows it."""

    loops: tuple[LoopDevice, ...]
    mounts: tuple[Mount, ...]

    @property
    def writable_loop(self) -> LoopDevice | None:
        return self._to_use(read_only=False)

    @property
    def read_only_loop(self) -> LoopDevice | None:
        return self._to_use(read_only=True)

    @property
    def going(self) -> tuple[LoopDevice, ...]:
        """Return writable devices that are released and mounted nowhere, but still open in a process."""
        return tuple(each for each in self.loops if each.autoclear and not each.read_only and not self.shows(each))

    def _to_use(self, *, read_only: bool) -> LoopDevice | None:
        """One that is mounted already before one that is not; one that was released goes with its last opener."""
        found = [device for device in self.loops if device.read_only == read_only and not device.is_deleted]
        mounted = [device for device in found if self.shows(device)]
        return next(iter(mounted or [device for device in found if not device.autoclear]), None)

    def shows(self, device: LoopDevice) -> bool:
        """Whether the device, or a filesystem on it, is mounted somewhere."""
        return any(shows_loop(mount, device) for mount in self.mounts)

    def at(self, path: str) -> Mount | None:
        return mountinfo.mount_at(path, self.mounts)

    def targets_besides(self, *paths: str) -> list[str]:
        return sorted({mount.target for mount in self.mounts} - set(paths))


def observe(volume: NodeVolume, table: Sequence[Mount] | None = None) -> VolumeOnHost:
    """The volume's loop devices and mounts, read now."""
    if volume.is_directory:
        return VolumeOnHost((), tuple(mountinfo.binds_of(volume.data)) if volume.data.exists() else ())
    found = loop.find(volume.data)
    seen = mountinfo.mounts_of_loops([each.number for each in found]) if table is None else table
    # The number of one that went meanwhile may be another volume's, with its mounts.
    loops = tuple(each for each in found if loop.is_still(each))
    return VolumeOnHost(loops, tuple(mount for mount in seen if any(shows_loop(mount, each) for each in loops)))


def shows_loop(mount: Mount, device: LoopDevice) -> bool:
    """Whether a mount is a filesystem on the device (btrfs has a number of its own), or its node."""
    if mount.device == device.device or mount.source == str(device.path):
        return True
    return is_node_of(mount, device.number)


def is_node_of(mount: Mount, number: int) -> bool:
    """Whether a mount is a bind of the loop device's node, as a published block volume is."""
    return mount.fstype in _DEVICE_FILESYSTEMS and os.path.basename(mount.root) == f"loop{number}"


def loop_number_behind(mount: Mount) -> int | None:
    """The loop device that a mount shows, whosever it is."""
    name = mount.source if mount.source.startswith("/dev/loop") else ""
    if mount.fstype in _DEVICE_FILESYSTEMS and os.path.basename(mount.root).startswith("loop"):
        name = os.path.basename(mount.root)
    digits = name.rpartition("loop")[2]
    return int(digits) if digits.isdigit() else None


def is_ours(mount: Mount, volume_id: str, pools: Sequence[Path]) -> bool:
    """Whether a mount shows something of our pools, also when the volume itself is known no more."""
    number = loop_number_behind(mount)
    if number is not None:
        return any(loop.is_below(number, pool) for pool in pools)
    return bool(volume_id) and volume_id in mount.root.split("/")


def vfs_words(mount: Mount) -> frozenset[str]:
    """The general options of a mount that a caller may ask for, `ro` included."""
    words = frozenset(mount.options) & VFS_WORDS
    return words | {"ro"} if mount.is_read_only else words


def wanted_words(flags: Sequence[str], read_only: bool) -> frozenset[str]:
    """The same for what a caller asks."""
    words = frozenset(word for flag in flags for word in flag.split(","))
    return (words & VFS_WORDS) | ({"ro"} if read_only or "ro" in words else frozenset())


def is_dead(path: str) -> bool:
    """Whether a mount point answers with the errors of a server or device that is gone."""
    return mounts.is_corrupted(path)


def is_block(path: str) -> bool:
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except OSError:
        return False
