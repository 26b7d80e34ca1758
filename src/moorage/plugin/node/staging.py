"""Stage and unstage: a volume ready on this node, or gone from it.

Owns: loop devices and the filesystem mount at the staging path. Every function looks at the kernel
first, does what is missing, and looks again; calling it twice is calling it once.
May not touch: generated messages, records of volumes. Nothing is formatted unless proven empty.
Start reading at: `ensure_staged`, `ensure_unstaged`.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moorage.host import block_devices, extents, filesystems, loop, mounts, privileges
from moorage.host.errors import CannotGrow, LoopGone
from moorage.host.loop import LoopDevice
from moorage.host.mountinfo import Mount
from moorage.host.targets import Target
from moorage.log import get_logger
from moorage.plugin.errors import (
    DeviceStillOpen,
    ForeignMount,
    MountedDifferently,
    MountUnverified,
    StillPublished,
    WrongContent,
)
from moorage.plugin.node.observe import (
    NodeVolume,
    VolumeOnHost,
    is_dead,
    is_ours,
    loop_number_behind,
    observe,
    shows_loop,
    vfs_words,
    wanted_words,
)
from moorage.sdk.model import Access
from moorage.sdk.targets import live_mount
from moorage.storage import failpoints

log = get_logger(__name__)

_FIELD = "staging_target_path"
_SMALLEST_XFS_BYTES = 16 << 20
_READ_BYTES = 1024 * 1024


def default_filesystem(size_bytes: int) -> str:
    """ext4; or XFS where this process may not grow a mounted ext4, as volumes are to grow while in use."""
    is_tiny = 0 < size_bytes < _SMALLEST_XFS_BYTES
    return "ext4" if is_tiny or privileges.may_grow_mounted_ext4() else "xfs"


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage did, for the log."""

    formatted: bool = False
    repaired: bool = False
    grown: bool = False
    direct_io: bool = True


def ensure_staged(volume: NodeVolume, target: Target, access: Access, *, read_only_device: bool = False) -> StageReport:
    """Leave the volume staged as asked, or raise; what is there already in another way is an error.

    The volume's lock is held: a copy that takes the volume for unused ends before, or begins after this.
    """
    with volume.pool.volumes.locked(volume.volume_id, shared=True):
        if volume.is_directory:
            return _stage_directory(volume, target, access)
        if access.is_block:
            with loop_of(volume, observe(volume), read_only=read_only_device) as device:
                return StageReport(direct_io=device.direct_io)
        return _stage_filesystem(volume, target, access, read_only_device)


def ensure_unstaged(
    volume_id: str,
    volume: NodeVolume | None,
    target: Target,
    pools: Sequence[Path],
    *,
    others_may_use: bool = False,
) -> None:
    """Take the volume from the staging path and release its loop devices; nothing there is success.

    `others_may_use` is for shared pools: other mounts of the volume may then be those of another
    node's plugin on this machine, and what they use is left alone.
    """
    mount = target.mounted()
    seen = observe(volume) if volume is not None else VolumeOnHost((), ())
    published = seen.targets_besides(target.path)
    if published and not others_may_use:
        raise StillPublished(volume_id, published)
    devices = set() if published else set(seen.loops)
    if mount is not None:
        if not _is_of(mount, volume, seen, volume_id, pools) and not is_dead(target.path):
            raise ForeignMount(volume_id, target.path, mount.source)
        behind = loop_number_behind(mount)
        if behind is not None and not published and is_ours(mount, volume_id, pools):
            devices.add(loop.at(behind))
        target.unmount()
    failpoints.reached("unstage.unmounted")
    for device in devices:
        loop.detach(device)
        if not loop.wait_detached(device):
            log.warning("a process still holds a loop device", volume=volume_id, device=str(device.path))


def _stage_directory(volume: NodeVolume, target: Target, access: Access) -> StageReport:
    read_only = access.mode.is_read_only
    mount = live_mount(target)
    if mount is not None:
        if not _same_file(target.path, volume.data):
            raise MountedDifferently(volume.volume_id, target.path, f"{mount.source} is mounted there")
        _check_words(volume, target, mount, access, read_only)
    else:
        target.ensure_directory(_FIELD)
        target.bind(_FIELD, volume.data, wanted_words(access.mount_flags, read_only))
        _verified(volume, target)
    return StageReport()


def _stage_filesystem(volume: NodeVolume, target: Target, access: Access, read_only_device: bool) -> StageReport:
    read_only = access.mode.is_read_only or read_only_device
    seen = observe(volume)
    mount = live_mount(target)
    if mount is not None:
        if not any(shows_loop(mount, device) for device in seen.loops):
            raise MountedDifferently(volume.volume_id, target.path, f"{mount.source} is mounted there")
        _check_words(volume, target, mount, access, read_only)
        if access.fs_type and mount.fstype != access.fs_type:
            raise MountedDifferently(volume.volume_id, target.path, f"it is mounted as {mount.fstype}")
        return _finish_staged(volume, target, mount)
    with loop_of(volume, seen, read_only=read_only_device) as device:
        return _mount_filesystem(volume, target, access, device, is_mounted=seen.shows(device))


def _finish_staged(volume: NodeVolume, target: Target, mount: Mount) -> StageReport:
    """What a stage does after its mount, for one that ended before; most often there is nothing left to do."""
    if mount.is_read_only:
        return StageReport()
    grown = False
    try:
        grown = filesystems.grow_or_postpone(_source(mount), mount.fstype, target.path)
    except CannotGrow as error:  # it is staged, only not as large as it will be
        log.warning("a staged filesystem did not grow", volume=volume.volume_id, error=str(error))
    return StageReport(grown=grown)


def _mount_filesystem(
    volume: NodeVolume, target: Target, access: Access, device: LoopDevice, *, is_mounted: bool
) -> StageReport:
    read_only = access.mode.is_read_only or device.read_only
    fstype, formatted = _ensure_filesystem(volume, access, device)
    repaired = grown = False
    if not device.read_only and not is_mounted:
        repaired = filesystems.check(device.path, fstype).repaired
        # ext4 grows best before its mount; the others can only grow after it.
        grown = (
            fstype == "ext4"
            and not access.mode.is_read_only
            and filesystems.grow_or_postpone(device.path, fstype, None)
        )
    if repaired:
        log.warning("a filesystem was repaired before its mount", volume=volume.volume_id, filesystem=fstype)
    target.ensure_directory(_FIELD)
    options = [*_default_options(fstype), *access.mount_flags, *(["ro"] if read_only else [])]
    failpoints.reached("stage.attached")
    with target.held(_FIELD) as handle:
        mounts.mount(device.path, handle, fstype, options)
    failpoints.reached("stage.mounted")
    _verified(volume, target, device)
    if not read_only:
        grown = filesystems.grow_or_postpone(device.path, fstype, target.path) or grown
    return StageReport(formatted, repaired, grown, device.direct_io)


def _ensure_filesystem(volume: NodeVolume, access: Access, device: LoopDevice) -> tuple[str, bool]:
    """The filesystem on the device, made now if the device is proven empty.

    A mark in the pool stands around the first mkfs: after a crash in the middle of it the image was
    never mounted, and only then is something formatted that has a signature.
    """
    wanted = access.fs_type or volume.filesystem or default_filesystem(volume.volume.size_bytes)
    pool, volume_id = volume.pool, volume.volume.id
    is_half_made = pool.volumes.is_half_formatted(volume_id)
    found = None if is_half_made else filesystems.content_of(device.path)
    if found is None:
        if device.read_only:
            raise WrongContent(f"volume {volume_id} is empty and cannot be formatted read-only")
        if not is_half_made and not is_blank(volume.data):
            raise WrongContent(f"volume {volume_id} holds data of no known filesystem; it is left as it is")
        pool.volumes.format_begin(volume_id)
        failpoints.reached("stage.formatting")
        filesystems.mkfs(device.path, wanted)
        pool.volumes.format_end(volume_id)
        return wanted, True
    if found.fstype != wanted:
        raise WrongContent(f"volume {volume_id} holds {found.fstype} and not {wanted}; its data is left as it is")
    return found.fstype, False


def is_blank(image: Path) -> bool:
    """Whether an image holds nothing but zeros: no signature is needed to tell that data is there."""
    fd = os.open(image, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for piece in extents.data_ranges(fd):
            for offset in range(piece.offset, piece.offset + piece.length, _READ_BYTES):
                found = os.pread(fd, min(_READ_BYTES, piece.offset + piece.length - offset), offset)
                if found.count(0) != len(found):
                    return False
    finally:
        os.close(fd)
    return True


@contextlib.contextmanager
def loop_of(volume: NodeVolume, seen: VolumeOnHost, *, read_only: bool) -> Iterator[LoopDevice]:
    """The volume's loop device with its settings, attached now if there is none.

    It is held until the end of the block, and so cannot become another volume's in between. One that was attached
    for a block that fails is released again.
    """
    for going in seen.going:
        if not loop.wait_detached(going):
            raise DeviceStillOpen(volume.volume_id, going.path)
    with contextlib.ExitStack() as holds:
        device = _held_if_there(seen.read_only_loop if read_only else seen.writable_loop, holds)
        if device is None:
            device = loop.attach(volume.data, read_only=read_only, direct_io=volume.direct_io)
            holds.enter_context(_detached_unless_used(device))
            holds.enter_context(loop.held(device))
        loop.grow(device, os.stat(volume.data).st_size)
        if volume.direct_io and not device.direct_io:
            log.warning("direct I/O is not possible here", volume=volume.volume_id, device=str(device.path))
        if volume.settings.read_ahead_kib is not None:
            block_devices.set_read_ahead(device.path, volume.settings.read_ahead_kib)
        yield device


def _held_if_there(device: LoopDevice | None, holds: contextlib.ExitStack) -> LoopDevice | None:
    """The device, held; None when it went after it was seen, as one does that its last opener closes."""
    if device is not None:
        with contextlib.suppress(LoopGone):
            holds.enter_context(loop.held(device))
            return device
    return None


@contextlib.contextmanager
def _detached_unless_used(device: LoopDevice) -> Iterator[None]:
    try:
        yield
    except BaseException:
        loop.detach(device)
        raise


def _default_options(fstype: str) -> list[str]:
    # A filesystem that notices errors stops writing: less is lost, and health can see it.
    errors = ["errors=remount-ro"] if fstype == "ext4" else []
    return [*filesystems.mount_options(fstype), *errors]


def _check_words(volume: NodeVolume, target: Target, mount: Mount, access: Access, read_only: bool) -> None:
    wanted = wanted_words(access.mount_flags, read_only)
    # A filesystem that the kernel turned read-only after errors was asked for read-write once.
    there = vfs_words(mount) if "ro" in mount.options else vfs_words(mount) - {"ro"}
    if wanted != there:
        different = ", ".join(sorted(wanted ^ there))
        raise MountedDifferently(volume.volume_id, target.path, f"it is mounted with other options ({different})")


def _verified(volume: NodeVolume, target: Target, device: LoopDevice | None = None) -> None:
    mount = target.mounted()
    shown = mount is not None and (
        _same_file(target.path, volume.data) if device is None else shows_loop(mount, device)
    )
    if not shown:
        raise MountUnverified(f"volume {volume.volume_id} was mounted at {target.path}, but is not there")


def _is_of(mount: Mount, volume: NodeVolume | None, seen: VolumeOnHost, volume_id: str, pools: Sequence[Path]) -> bool:
    if any(mount.mount_id == each.mount_id for each in seen.mounts):
        return True
    return volume is None and is_ours(mount, volume_id, pools)


def _source(mount: Mount) -> str:
    number = loop_number_behind(mount)
    return f"/dev/loop{number}" if number is not None else mount.source


def _same_file(path: str, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False
