"""Project quotas: a size limit on a directory, where the kernel and the mount have them.

Owns: giving a directory a project and the project a limit, on ext4 and XFS.
May not touch: pools. `limit_directory` says whether the limit holds, and never pretends.
"""

import ctypes
import fcntl
import os
import struct

from moorage.host import libc
from moorage.host.mountinfo import mount_containing

_FSGETXATTR, _FSSETXATTR = 0x801C581F, 0x401C5820
_PROJINHERIT = 0x200
_FSXATTR = struct.Struct("=IIIII8x")
_PRJQUOTA = 2
_Q_SETQUOTA, _Q_XSETQLIM = 0x800008, 0x5804
_QIF_BLIMITS = 1


class _Dqblk(ctypes.Structure):
    _fields_ = (
        ("bhardlimit", ctypes.c_uint64),
        ("bsoftlimit", ctypes.c_uint64),
        ("curspace", ctypes.c_uint64),
        ("ihardlimit", ctypes.c_uint64),
        ("isoftlimit", ctypes.c_uint64),
        ("curinodes", ctypes.c_uint64),
        ("btime", ctypes.c_uint64),
        ("itime", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
    )


class _FsDiskQuota(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int8),
        ("flags", ctypes.c_int8),
        ("fieldmask", ctypes.c_uint16),
        ("id", ctypes.c_uint32),
        ("blk_hardlimit", ctypes.c_uint64),
        ("blk_softlimit", ctypes.c_uint64),
        ("rest", ctypes.c_uint8 * 88),
    )


def has_project_quota(path: str) -> bool:
    """Whether the filesystem below `path` is mounted with project quotas."""
    options = mount_containing(path).super_options
    return "prjquota" in options or "pquota" in options


def limit_directory(path: str, project: int, size_bytes: int) -> bool:
    """Limit what lies below a directory; False where that cannot be done, and nothing was changed."""
    mount = mount_containing(path)
    if not has_project_quota(path) or mount.fstype not in ("ext4", "xfs"):
        return False
    try:
        _set_limit(mount.fstype, mount.source, project, size_bytes)
        _set_project(path, project)
    except OSError:
        return False
    return True


def _set_project(path: str, project: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags, extsize, extents, _, cow = _FSXATTR.unpack(fcntl.ioctl(fd, _FSGETXATTR, bytes(_FSXATTR.size)))
        fcntl.ioctl(fd, _FSSETXATTR, _FSXATTR.pack(flags | _PROJINHERIT, extsize, extents, project, cow))
    finally:
        os.close(fd)


def _set_limit(fstype: str, device: str, project: int, size_bytes: int) -> None:
    if fstype == "xfs":
        units = size_bytes // 512
        wanted = _FsDiskQuota(1, 2, 1 << 3, project, units, units)
        libc.quotactl(_Q_XSETQLIM << 8 | _PRJQUOTA, device, project, wanted)
    else:
        limit = _Dqblk(bhardlimit=size_bytes // 1024, bsoftlimit=0, valid=_QIF_BLIMITS)
        libc.quotactl(ctypes.c_int(_Q_SETQUOTA << 8 | _PRJQUOTA).value, device, project, limit)
