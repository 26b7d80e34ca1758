"""How a caller wants to use a volume: the plugin's own words for a CSI volume capability.

Owns: access modes, and which of them a kind of volume can give in a scope.
May not touch: generated messages (see `wire`), storage.
Start reading at: `Access`, `why_unsupported`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

FILESYSTEMS = ("ext4", "xfs", "btrfs")


class AccessMode(IntEnum):
    """CSI access modes, with their numbers on the wire."""

    SINGLE_NODE_WRITER = 1
    SINGLE_NODE_READER_ONLY = 2
    MULTI_NODE_READER_ONLY = 3
    MULTI_NODE_SINGLE_WRITER = 4
    MULTI_NODE_MULTI_WRITER = 5
    SINGLE_NODE_SINGLE_WRITER = 6
    SINGLE_NODE_MULTI_WRITER = 7

    @property
    def is_read_only(self) -> bool:
        return self in (AccessMode.SINGLE_NODE_READER_ONLY, AccessMode.MULTI_NODE_READER_ONLY)

    @property
    def is_multi_node(self) -> bool:
        return self in (
            AccessMode.MULTI_NODE_READER_ONLY,
            AccessMode.MULTI_NODE_SINGLE_WRITER,
            AccessMode.MULTI_NODE_MULTI_WRITER,
        )


@dataclass(frozen=True, slots=True)
class Access:
    """A block device, or a filesystem with its flags; and how many may use it."""

    mode: AccessMode
    is_block: bool = False
    fs_type: str = ""
    # Flags may carry credentials, so they stay out of the representation that ends up in logs.
    mount_flags: tuple[str, ...] = field(default=(), repr=False)


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


def why_inconsistent(accesses: Iterable[Access]) -> str:
    """Why one volume cannot satisfy all of these at once; empty when it can."""
    wanted = list(accesses)
    if len({access.is_block for access in wanted}) > 1:
        return "one volume cannot be both a block device and mounted"
    filesystems = {access.fs_type for access in wanted if access.fs_type}
    if len(filesystems) > 1:
        return f"one volume cannot have several filesystems ({', '.join(sorted(filesystems))})"
    return ""
