"""Which uses a kind of volume can give.

Start reading at: `why_unsupported`.
"""

from moorage.sdk.model import Access, AccessMode
from moorage.storage import Volume, VolumeKind

FILESYSTEMS = ("ext4", "xfs", "btrfs")


def why_unsupported(access: Access, *, is_directory: bool, filesystem: str = "") -> str:
    """Why a volume of this kind cannot be used so; empty when it can.

    `filesystem` is the one that an image has or will have; `block` stands for a raw one.
    """
    if is_directory:
        if access.is_block:
            return "a directory volume cannot be a block device; use kind: image"
        if access.fs_type:
            return f"a directory volume has no filesystem of its own; leave out the filesystem type {access.fs_type}"
        if any(flag.partition("=")[2] for flag in access.mount_flags):
            return "a directory volume takes only general mount flags such as ro, noexec or noatime"
        return ""
    if access.mode in (AccessMode.MULTI_NODE_SINGLE_WRITER, AccessMode.MULTI_NODE_MULTI_WRITER):
        return f"an image volume cannot be used in mode {access.mode.name}; use kind: directory"
    if access.fs_type and access.fs_type not in FILESYSTEMS:
        return f"the filesystem type {access.fs_type!r} is not supported; use one of {', '.join(FILESYSTEMS)}"
    if filesystem == "block" and not access.is_block:
        return "this volume is a raw block device and cannot be mounted"
    if filesystem and filesystem != "block":
        if access.is_block:
            return f"this volume holds a filesystem ({filesystem}) and cannot be given out as a block device"
        if access.fs_type and access.fs_type != filesystem:
            return f"this volume's filesystem is {filesystem}, not {access.fs_type}"
    return ""


def why_unsupported_by(volume: Volume, access: Access) -> str:
    """Why a volume that exists cannot be used so; empty when it can."""
    is_directory = volume.kind is VolumeKind.DIRECTORY
    return why_unsupported(access, is_directory=is_directory, filesystem=volume.filesystem or "block")
