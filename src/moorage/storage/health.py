"""Signs of trouble: what is adverse about a volume or a pool, each with a reason.

Owns: the reasons (`REASONS`, which docs/reference/csi-support.md and the tests repeat) and when they hold. An entry
stands as long as its cause does.
`volume_signs` and `pool_signs` are what the pool itself shows; `node_signs` is what the kernel of the
node shows about a volume that is attached here.
May not touch: anything; signs are read.
Start reading at: `volume_signs`, `node_signs`.
"""

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from moorage.host import filesystems, loop, mountinfo, subvolumes
from moorage.host.loop import LoopDevice
from moorage.host.mountinfo import Mount
from moorage.host.mounts import is_corrupted
from moorage.host.probe import probe_known
from moorage.storage.model import Capacity, HealthEntry, HealthStatus, Volume, VolumeKind

DEGRADED, INACCESSIBLE, DATA_LOSS = HealthStatus.DEGRADED, HealthStatus.INACCESSIBLE, HealthStatus.DATA_LOSS

# Every reason there is. One that is not here cannot be given, and one that no test brings about fails a test.
REASONS: Mapping[str, HealthStatus] = {
    "DataMissing": DATA_LOSS,
    "ImageTruncated": DATA_LOSS,
    "BackingFileDeleted": DATA_LOSS,
    "DataUnreadable": INACCESSIBLE,
    "RecordDamaged": INACCESSIBLE,
    "PoolGone": INACCESSIBLE,
    "PoolUnreadable": INACCESSIBLE,
    "RemountedReadOnly": INACCESSIBLE,
    "MountCorrupted": INACCESSIBLE,
    "MountDead": INACCESSIBLE,
    "PoolNearlyFull": DEGRADED,
    "PoolReadOnly": DEGRADED,
    "SizeNotEnforced": DEGRADED,
    "CannotReclaim": DEGRADED,
    "FilesystemErrors": DEGRADED,
    "DirectIOLost": DEGRADED,
    "IoLimitsNotApplied": DEGRADED,
}

_EMERGENCY = {"emergency_ro", "shutdown"}


def sign(reason: str, message: str) -> HealthEntry:
    """An adverse fact; its status follows from its reason."""
    return HealthEntry(REASONS[reason], reason, message)


def volume_signs(volume: Volume) -> list[HealthEntry]:
    """What the pool shows: the data missing, of the wrong type or cut short, the size not enforced."""
    try:
        found = os.lstat(volume.data)
    except FileNotFoundError:
        return [sign("DataMissing", f"{volume.data} does not exist")]
    except OSError as failed:
        return [sign("DataUnreadable", f"{volume.data}: {failed.strerror}")]
    if volume.kind is VolumeKind.DIRECTORY:
        return _directory_signs(volume, found)
    if not stat.S_ISREG(found.st_mode):
        return [sign("DataMissing", f"{volume.data} is not a regular file")]
    if found.st_size < volume.size_bytes:
        missing = volume.size_bytes - found.st_size
        return [sign("ImageTruncated", f"{volume.data} is {missing} bytes too short")]
    return []


def _directory_signs(volume: Volume, found: os.stat_result) -> list[HealthEntry]:
    if not stat.S_ISDIR(found.st_mode):
        return [sign("DataMissing", f"{volume.data} is not a directory")]
    if not volume.size_enforced or subvolumes.has_lost_limit(os.fspath(volume.data)):
        return [
            sign(
                "SizeNotEnforced",
                f"size not enforced: the pool's filesystem has no quota that holds it to {volume.size_bytes} bytes",
            )
        ]
    return []


def pool_signs(name: str, space: Capacity) -> list[HealthEntry]:
    """What the room in the pool says."""
    if space.free_bytes < space.reserve_bytes:
        return [
            sign(
                "PoolNearlyFull",
                f"pool {name} has {space.free_bytes} bytes free, less than its reserve of {space.reserve_bytes}",
            )
        ]
    return []


def leftover_signs(name: str, stuck: Mapping[str, str]) -> list[HealthEntry]:
    """What could not be removed from the pool."""
    if not stuck:
        return []
    path, why = next(iter(stuck.items()))
    more = f" (and {len(stuck) - 1} more)" if len(stuck) > 1 else ""
    return [sign("CannotReclaim", f"pool {name} cannot remove {path}{more}: {why}")]


def node_signs(volume: Volume, wants_direct_io: bool = True) -> list[HealthEntry]:
    """What this node's kernel shows about a volume in use here."""
    if volume.kind is not VolumeKind.IMAGE:
        return []
    entries: list[HealthEntry] = []
    attached = loop.files()
    try:
        found = loop.find(volume.data, attached)
    except OSError:  # `volume_signs` tells that the data does not answer
        found = []
    present = {device.number for device in found}
    orphans = [device for device in _told_at(volume.data, attached) if device.number not in present]
    table = mountinfo.mounts_of_loops([device.number for device in (*found, *orphans)])
    for device in (*found, *orphans):
        if device in orphans:
            entries.append(sign("BackingFileDeleted", f"{device.path} points at a deleted file"))
        entries += _device_signs(volume, device, wants_direct_io)
        entries += _mount_signs(device, mountinfo.mounts_of_device(device.device, table))
    return _unique(entries)


def _told_at(data: Path, attached: Iterable[tuple[int, bytes]]) -> list[LoopDevice]:
    """Loop devices whose file is or was the volume's: it may have been deleted or replaced."""
    path = os.path.realpath(data)
    return [] if _answers_with_error(path) else loop.told_at(path, attached)


def _answers_with_error(path: str) -> bool:
    """Whether nothing can be said about a file, not even that it is missing."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _device_signs(volume: Volume, device: LoopDevice, wants_direct_io: bool) -> list[HealthEntry]:
    entries = []
    if wants_direct_io and not device.direct_io:
        entries.append(sign("DirectIOLost", f"{device.path} caches twice: it runs without direct I/O"))
    if volume.filesystem:
        content = probe_known(device.path)
        if content is not None and content.has_errors:
            entries.append(sign("FilesystemErrors", f"the {content.fstype} on {device.path} marked itself damaged"))
    return entries


def _mount_signs(device: LoopDevice, mounts: Sequence[Mount]) -> list[HealthEntry]:
    entries = []
    errors = filesystems.ext4_errors(device.path)
    if errors:
        entries.append(sign("FilesystemErrors", f"the kernel counted {errors} errors on {device.path}"))
    for mount in mounts:
        # The whole filesystem went read-only, not just one read-only bind of it.
        # Newer kernels keep `rw` and report an error with an option of its own.
        is_ro = "ro" in mount.super_options and "ro" not in mount.options and not device.read_only
        if is_ro or _EMERGENCY & set(mount.super_options):
            entries.append(sign("RemountedReadOnly", f"{mount.target} was remounted read-only after an error"))
        if is_corrupted(mount.target):
            entries.append(sign("MountCorrupted", f"{mount.target} does not answer"))
    return entries


def _unique(entries: Sequence[HealthEntry]) -> list[HealthEntry]:
    """One entry for each status and reason; the first message stays."""
    found: dict[tuple[str, str], HealthEntry] = {}
    for entry in entries:
        found.setdefault((entry.status, entry.reason), entry)
    return list(found.values())
