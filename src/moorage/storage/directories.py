"""The data of directory volumes: a directory, or a btrfs subvolume where the pool is btrfs.

Owns: making, limiting and copying that directory. Whether the size is enforced is said, not assumed.
May not touch: records.
Start reading at: `make`, `copy`.
"""

import contextlib
import os
import zlib

from moorage.host import libc, quota, subvolumes
from moorage.host.extents import CopyProgress
from moorage.log import get_logger
from moorage.storage.model import CopyPath
from moorage.storage.trees import copy_tree

log = get_logger(__name__)


def make(path: str, is_btrfs: bool) -> None:
    """An empty directory for a volume. Everybody may use it, as with a new filesystem's root for root."""
    if is_btrfs:
        subvolumes.create(path)
    else:
        os.mkdir(path)
    os.chmod(path, 0o755)


def limit(path: str, ident: str, size_bytes: int, is_btrfs: bool) -> bool:
    """Enforce a size on a directory; False says that nothing enforces it here."""
    if is_btrfs:
        try:
            subvolumes.enable_quota(path)
            subvolumes.limit(path, size_bytes)
        except OSError as failed:
            log.warning("size not enforced", volume=ident, error=str(failed))
            return False
        return True
    # Projects are numbers; a volume's is derived, so it needs no table. 0 and 1 are taken by habit.
    project = zlib.crc32(ident.encode()) | 0x10000
    return quota.limit_directory(path, project, size_bytes)


def copy(source: str, target: str, is_btrfs: bool, progress: CopyProgress | None = None) -> CopyPath:
    """A copy of a directory volume at `target`, which must not exist yet; fsynced."""
    if is_btrfs and subvolumes.is_subvolume(source):
        subvolumes.snapshot(source, target)
        sync(target)
        return CopyPath.BTRFS_SNAPSHOT
    make(target, is_btrfs)
    result = copy_tree(source, target, progress)
    sync(target)
    return CopyPath.COPY_FILES if result.copied else CopyPath.REFLINK_FILES


def sync(path: str) -> None:
    """Write the filesystem below `path` to disk: one call for a whole tree."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        libc.syncfs(fd)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
