"""btrfs subvolumes and their size limits.

Owns: the ioctls that make, snapshot, limit and destroy subvolumes, and seeing whether a limit still holds.
May not touch: pools. Functions raise OSError; callers say what it means for them.
Start reading at: `create`, `snapshot`, `limit`.
"""

import errno
import fcntl
import os
import stat
import struct
import sys
import uuid

from moorage.host.mountinfo import mount_containing

_SUBVOL_CREATE = 0x5000940E
_SNAP_DESTROY = 0x5000940F
_SUBVOL_SETFLAGS = 0x4008941A
_SNAP_CREATE_V2 = 0x50009417
_QUOTA_CTL = 0xC0109428
_QGROUP_LIMIT = 0x8030942B
_FS_INFO = 0x8400941F
_INO_LOOKUP = 0xD0009412
_QUOTA_ENABLE = 1
_LIMIT_MAX_RFER = 1
_VOL_ARGS = struct.Struct("=q4088s")
_VOL_ARGS_V2 = struct.Struct("=qQQ4Q4040s")
_LIMIT_ARGS = struct.Struct("=QQQQQQ")
_FIRST_INODE = 256


def is_btrfs(path: str) -> bool:
    """Whether a path lies on btrfs."""
    return mount_containing(path).fstype == "btrfs"


def is_subvolume(path: str) -> bool:
    """Whether a directory is the root of a btrfs subvolume."""
    found = os.lstat(path)
    # Other filesystems have an inode 256 too; there a parent shares the device number.
    return stat.S_ISDIR(found.st_mode) and is_subvolume_root(found, os.lstat(os.path.dirname(os.path.abspath(path))))


def is_subvolume_root(found: os.stat_result, above: os.stat_result) -> bool:
    """Whether a directory is the root of a subvolume (or of a mount), judged by its parent."""
    return found.st_ino == _FIRST_INODE and found.st_dev != above.st_dev


def create(path: str) -> None:
    """A new, empty subvolume at `path`."""
    _on_parent(path, _SUBVOL_CREATE, _VOL_ARGS.pack(0, os.fsencode(os.path.basename(path))))


def snapshot(source: str, target: str) -> None:
    """A writable snapshot of the subvolume `source` at `target`: one moment, no copying."""
    source_fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = os.fsencode(os.path.basename(target))
        _on_parent(target, _SNAP_CREATE_V2, _VOL_ARGS_V2.pack(source_fd, 0, 0, 0, 0, 0, 0, name))
    finally:
        os.close(source_fd)


def destroy_in(parent: int, name: str) -> None:
    """Remove a subvolume in an open directory; ENOTEMPTY if it holds others."""
    fcntl.ioctl(parent, _SNAP_DESTROY, bytearray(_VOL_ARGS.pack(0, os.fsencode(name))), True)


def make_writable(parent: int, name: str) -> None:
    """Clear the read-only property of a subvolume in an open directory."""
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        fcntl.ioctl(fd, _SUBVOL_SETFLAGS, struct.pack("=Q", 0))
    finally:
        os.close(fd)


def enable_quota(path: str) -> None:
    """Switch qgroups on for the filesystem that holds `path`; on already is fine."""
    try:
        _on(path, _QUOTA_CTL, struct.pack("=QQ", _QUOTA_ENABLE, 0))
    except OSError as failed:
        if failed.errno not in (errno.EEXIST, errno.EINPROGRESS):
            raise


def limit(path: str, size_bytes: int) -> None:
    """Let the subvolume at `path` refer to at most `size_bytes` of data."""
    request = _LIMIT_ARGS.pack(0, _LIMIT_MAX_RFER, size_bytes, 0, 0, 0)
    _on(path, _QGROUP_LIMIT, request)


def has_lost_limit(path: str) -> bool:
    """Whether a subvolume's qgroup limits nothing: quotas were switched off, or its limit was taken away.

    Read from sysfs, without a command, because many volumes may be asked. False where nothing can be told.
    """
    if not is_subvolume(path):
        return False
    base = f"/sys/fs/btrfs/{uuid.UUID(bytes=bytes(_on(path, _FS_INFO, bytes(1024))[16:32]))}"
    if not os.path.isdir(base):
        return False
    tree = int.from_bytes(_on(path, _INO_LOOKUP, struct.pack("=QQ", 0, _FIRST_INODE) + bytes(4080))[:8], sys.byteorder)
    try:
        with open(f"{base}/qgroups/0_{tree}/limit_flags") as flags:
            return not int(flags.read()) & _LIMIT_MAX_RFER
    except FileNotFoundError:
        return True


def _on_parent(path: str, request: int, argument: bytes) -> None:
    if len(os.fsencode(os.path.basename(path))) > 255:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    _on(os.path.dirname(os.path.abspath(path)), request, argument)


def _on(path: str, request: int, argument: bytes) -> bytearray:
    """The argument as the kernel left it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # A mutable buffer: some of these are larger than what ioctl copies for bytes.
        answer = bytearray(argument)
        fcntl.ioctl(fd, request, answer, True)
        return answer
    finally:
        os.close(fd)
