"""A pod's group on a volume: `volume_mount_group`.

Owns: giving a filesystem's files to a group, so that what is made later belongs to it too.
Start reading at: `apply_mount_group`.
"""

import os
import stat
import struct

# POSIX ACLs as extended attributes: a version, then (tag, permissions, id) each.
_ACL_HEADER = struct.pack("<I", 2)
_ACL_ENTRY = struct.Struct("<HHI")
_USER_OBJECT, _GROUP_OBJECT, _OTHER, _NO_ID = 0x01, 0x04, 0x20, 0xFFFFFFFF


def apply_mount_group(root: str, gid: int | None) -> None:
    """Give the volume to the group: its files now, and through setgid and a default ACL those to come.

    The walk is only done when the root does not belong to the group yet, so that staging a volume
    with many files again costs nothing. Links are never followed.
    """
    if gid is None:
        return
    here = os.stat(root)
    if here.st_gid == gid and here.st_mode & stat.S_ISGID:
        return
    for directory, names, files in os.walk(root, topdown=False, followlinks=False):
        for name in (*files, *names):
            _give(os.path.join(directory, name), gid)
    # The root last: a walk that was cut short is done again.
    _give(root, gid)


def _give(path: str, gid: int) -> None:
    os.lchown(path, -1, gid)
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return
    if stat.S_ISDIR(mode):
        os.chmod(path, stat.S_IMODE(mode) | stat.S_ISGID | 0o070)
        # New entries are group writable whatever umask their maker has.
        os.setxattr(path, "system.posix_acl_default", _default_acl(stat.S_IMODE(mode)))
    else:
        os.chmod(path, stat.S_IMODE(mode) | 0o060)


def _default_acl(mode: int) -> bytes:
    entries = ((_USER_OBJECT, 7), (_GROUP_OBJECT, 7), (_OTHER, mode & 7))
    return _ACL_HEADER + b"".join(_ACL_ENTRY.pack(tag, allowed, _NO_ID) for tag, allowed in entries)
