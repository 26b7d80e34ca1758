"""Publish and unpublish: a staged volume shown to one workload at its target path.

Owns: bind mounts at target paths, of directories and of block device nodes, and the read-only loop
devices behind read-only block volumes. The kernel is looked at before and after each step.
May not touch: generated messages, records of volumes.
Start reading at: `ensure_published`, `ensure_unpublished`.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moorage.host import loop, mountinfo
from moorage.host.errors import HostError
from moorage.host.loop import LoopDevice
from moorage.host.mountinfo import Mount
from moorage.host.targets import Target
from moorage.log import get_logger
from moorage.plugin.errors import ForeignMount, MountedDifferently, MountUnverified, NotStaged, StillPublished
from moorage.plugin.node import staging
from moorage.plugin.node.observe import (
    NodeVolume,
    VolumeOnHost,
    is_block,
    is_dead,
    is_node_of,
    is_ours,
    loop_number_behind,
    observe,
    vfs_words,
    wanted_words,
)
from moorage.sdk.model import Access, AccessMode
from moorage.sdk.targets import live_mount, make_target
from moorage.storage import failpoints

log = get_logger(__name__)

_FIELD = "target_path"


@dataclass(frozen=True, slots=True)
class Bind:
    """What a workload asked for."""

    staging: Target
    target: Target
    access: Access
    read_only: bool
    read_only_device: bool = False  # the volume was attached for reading, so it is staged so

    @property
    def is_read_only(self) -> bool:
        return self.read_only or self.access.mode.is_read_only


def ensure_published(volume: NodeVolume, bind: Bind) -> None:
    """Leave the volume at the target as asked, or raise; a dead mount there is replaced.

    The volume's lock is held, as it is while the volume is staged.
    """
    with volume.pool.volumes.locked(volume.volume_id, shared=True):
        _ensure_published(volume, bind)


def _ensure_published(volume: NodeVolume, bind: Bind) -> None:
    seen = _staged(volume, bind)
    mount = live_mount(bind.target)
    if mount is not None:
        _check_same(volume, bind, mount, seen)
        return
    _check_single_writer(volume, bind, seen)
    numbers = {device.number for device in seen.loops}
    if bind.access.is_block:
        numbers.add(_bind_device(volume, bind))
    else:
        _bind_directory(volume, bind)
    failpoints.reached("bind.bound")
    _verify(volume, bind, numbers)


def ensure_unpublished(volume_id: str, volume: NodeVolume | None, target: Target, pools: Sequence[Path]) -> None:
    """Take the volume from the target and remove the target; nothing there is success."""
    mount = target.mounted()
    device = None
    if mount is not None:
        is_known = volume is not None and is_published(volume, target.path)
        if not is_known and not is_ours(mount, volume_id, pools) and not is_dead(target.path):
            raise ForeignMount(volume_id, target.path, mount.source)
        device = _device_behind(mount)
        target.unmount()
    failpoints.reached("unbind.unmounted")
    if device is not None and device.read_only:
        _release_read_only_loop(device, volume)
    target.remove()


def _staged(volume: NodeVolume, bind: Bind) -> VolumeOnHost:
    """The volume's state, with a staging mount that died repaired; NotStaged if there never was one."""
    seen = observe(volume)
    if bind.access.is_block:
        if not seen.loops:
            raise NotStaged(volume.volume_id, bind.staging.path)
        return seen
    mount = bind.staging.mounted()
    if mount is not None and is_dead(bind.staging.path):
        staging.ensure_staged(volume, bind.staging, bind.access, read_only_device=bind.read_only_device)
        seen, mount = observe(volume), bind.staging.mounted()
    if mount is None or all(mount.mount_id != each.mount_id for each in seen.mounts):
        raise NotStaged(volume.volume_id, bind.staging.path)
    return seen


def _check_same(volume: NodeVolume, bind: Bind, mount: Mount, seen: VolumeOnHost) -> None:
    """A repeated call is fine when nothing differs but the secrets."""
    why = ""
    if all(mount.mount_id != each.mount_id for each in seen.mounts):
        why = f"{mount.source} is mounted there"
    elif bind.access.is_block != is_block(bind.target.path):
        why = "it is published there in another way (block or mount)"
    elif bind.access.is_block:
        if _is_read_only_device(mount) != bind.is_read_only:
            why = "it is published there with another read-only setting"
    elif wanted_words(bind.access.mount_flags, bind.is_read_only) != _bind_words(mount):
        why = "it is published there with other options"
    if why:
        raise MountedDifferently(volume.volume_id, bind.target.path, why)


def _bind_words(mount: Mount) -> frozenset[str]:
    """The words of this mount alone: its filesystem may have turned read-only below it."""
    words = vfs_words(mount)
    return words if "ro" in mount.options else words - {"ro"}


def _check_single_writer(volume: NodeVolume, bind: Bind, seen: VolumeOnHost) -> None:
    if bind.access.mode is AccessMode.SINGLE_NODE_SINGLE_WRITER:
        others = seen.targets_besides(bind.staging.path, bind.target.path)
        if others:
            raise StillPublished(volume.volume_id, others)


def _bind_directory(volume: NodeVolume, bind: Bind) -> None:
    make_target(bind.target, bind.access)
    failpoints.reached("bind.made")
    with bind.staging.held("staging_target_path") as source:
        bind.target.bind(_FIELD, source, wanted_words(bind.access.mount_flags, bind.is_read_only))


def _bind_device(volume: NodeVolume, bind: Bind) -> int:
    with staging.loop_of(volume, observe(volume), read_only=bind.is_read_only) as device:
        make_target(bind.target, bind.access)
        failpoints.reached("bind.made")
        bind.target.bind(_FIELD, device.path)
    return device.number


def _verify(volume: NodeVolume, bind: Bind, numbers: set[int]) -> None:
    mount = bind.target.mounted()
    known = tuple(mountinfo.binds_of(volume.data)) if volume.is_directory else ()
    shown = mount is not None and (
        mount.mount_id in {each.mount_id for each in known}
        if volume.is_directory
        else loop_number_behind(mount) in numbers
    )
    if not shown:
        raise MountUnverified(f"volume {volume.volume_id} was published at {bind.target.path}, but is not there")


def _is_read_only_device(mount: Mount) -> bool:
    number = loop_number_behind(mount)
    return number is not None and loop.at(number).read_only


def _device_behind(mount: Mount) -> LoopDevice | None:
    number = loop_number_behind(mount)
    if number is not None:
        with contextlib.suppress(HostError):  # the device has no file any more
            return loop.at(number)
    return None


def _release_read_only_loop(device: LoopDevice, volume: NodeVolume | None) -> None:
    """A read-only device beside a writable one is there for read-only block targets; it goes with the last of them.

    One that is alone is what the volume was staged with, and goes when it is unstaged.
    """
    seen = observe(volume) if volume is not None else VolumeOnHost((), ())
    in_use = any(is_node_of(mount, device.number) or mount.source == str(device.path) for mount in seen.mounts)
    is_staged = [each.number for each in seen.loops] == [device.number]
    if not in_use and not is_staged:
        loop.detach(device)


def is_published(volume: NodeVolume, path: str) -> bool:
    """Whether the volume is at this path, staged or published."""
    real = os.path.realpath(path) if path.startswith("/") else ""
    return bool(real) and (_is_behind(volume, real) or observe(volume).at(real) is not None)


def _is_behind(volume: NodeVolume, real: str) -> bool:
    """Whether what is mounted at the path is the volume's loop device. The path alone is asked, which takes as long
    however many volumes there are; where that does not tell (btrfs, a dead mount), the answer is no."""
    try:
        there, above, data = os.stat(real), os.stat(os.path.dirname(real)), os.stat(volume.data)
        if there.st_dev == above.st_dev:
            return False
        number = loop.number_behind(there)
        return number is not None and loop.at(number).file == (data.st_dev, data.st_ino)
    except (HostError, OSError):
        return False


def is_shown(volume: NodeVolume, path: str) -> bool:
    """The same for one who only looks: also when the volume's image was deleted or replaced below its device."""
    if is_published(volume, path):
        return True
    mount = mountinfo.mount_at(os.path.realpath(path)) if path.startswith("/") else None
    number = None if mount is None else loop_number_behind(mount)
    return number is not None and loop.is_below(number, volume.data.parent)
