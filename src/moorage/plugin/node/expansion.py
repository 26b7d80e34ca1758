"""Growth on the node: first the loop device, then the filesystem on it.

Owns: NodeExpandVolume's work. The pool has grown the image before.
Start reading at: `expand_on_node`.
"""

import os

from moorage.host import filesystems, loop
from moorage.host.errors import CannotGrow
from moorage.host.mountinfo import Mount
from moorage.plugin.node.observe import NodeVolume, observe
from moorage.storage.errors import SizeOutOfRange


def expand_on_node(volume: NodeVolume, path: str, required_bytes: int, limit_bytes: int) -> int:
    """Grow to the image's size, which must be in the range; returns the size."""
    size = volume.volume.size_bytes
    if size < required_bytes:
        raise SizeOutOfRange(
            f"volume {volume.volume_id} has {size} bytes, {required_bytes} are wanted; the controller grows it first"
        )
    if limit_bytes and size > limit_bytes:
        raise SizeOutOfRange(f"volume {volume.volume_id} has {size} bytes, more than the limit of {limit_bytes}")
    if volume.is_directory:
        return size
    loop.grow_all(volume.data)
    seen = observe(volume)
    mount = seen.at(os.path.realpath(path))
    if volume.filesystem and mount is not None:
        writable = _writable(mount, seen.mounts)
        device_path = next(str(device.path) for device in seen.loops)
        if writable.is_read_only and not filesystems.is_full_size(device_path, mount.fstype):
            raise CannotGrow(
                f"the {mount.fstype} of volume {volume.volume_id} is mounted read-only and cannot be grown so; "
                "it is grown when the volume is staged for writing next"
            )
        filesystems.grow_or_postpone(device_path, mount.fstype, writable.target)
    return size


def _writable(mount: Mount, others: tuple[Mount, ...]) -> Mount:
    """A mount of the filesystem that may be written: a read-only bind cannot carry the call."""
    candidates = [mount, *others]
    return next((each for each in candidates if not each.is_read_only and each.fstype == mount.fstype), mount)
