"""Where a volume is staged or published, and the mounts that a driver makes there.

Owns: making, checking and removing the mount points. The kernel is asked before and after each step.
Start reading at: `PublishTarget`, `live_mount`.
"""

from collections.abc import Iterable
from pathlib import Path

from moorage.host import filesystems, mountinfo, mounts
from moorage.host.targets import Target
from moorage.log import get_logger
from moorage.sdk.errors import DriverError, FailedPrecondition
from moorage.sdk.model import Access, Stats

_log = get_logger(__name__)


class NotMounted(DriverError):
    """The driver's method returned, but left no mount as promised."""


class StagingTarget:
    """The directory in which a volume is staged for all pods of this node. It exists when `stage` is called."""

    def __init__(self, target: Target, access: Access) -> None:
        self._target = target
        self._access = access

    @property
    def path(self) -> Path:
        return Path(self._target.path)

    @property
    def is_mounted(self) -> bool:
        return self._target.mounted() is not None

    def mount_device(self, device: str | Path, default_fs: str = "ext4") -> None:
        """Mount a block device here. A blank device is formatted first; one that holds data never is."""
        fs_type = self._access.fs_type or default_fs
        found = filesystems.content_of(device)
        if found is None:
            filesystems.format_blank(device, fs_type)
        elif found.fstype != fs_type:
            raise FailedPrecondition(f"{device} holds {found.fstype}, not {fs_type}")
        else:
            filesystems.check(device, fs_type)
        mounts.mount(device, self.path, fs_type, [*filesystems.mount_options(fs_type), *self._access.mount_flags])

    def mount(self, source: str, fs_type: str, options: Iterable[str] = ()) -> None:
        """Mount a filesystem here, with the flags of the request as well."""
        mounts.mount(source, self.path, fs_type, [*options, *self._access.mount_flags])


class PublishTarget:
    """The place where a pod finds its volume. It exists when `publish` is called, and must be a mount afterwards."""

    def __init__(self, target: Target, access: Access, is_read_only: bool) -> None:
        self._target = target
        self._access = access
        self.is_read_only = is_read_only

    @property
    def path(self) -> Path:
        return Path(self._target.path)

    def bind(self, source: str | Path) -> None:
        """Show a directory, or a block device, at the target; read-only if that is asked for."""
        words = {"ro"} if self.is_read_only else set()
        if not self._access.is_block:
            words |= {flag for flag in self._access.mount_flags if "=" not in flag}
        self._target.bind("target_path", source, sorted(words))

    def mount(self, source: str, fs_type: str, options: Iterable[str] = ()) -> None:
        """Mount a filesystem at the target, with the flags of the request; read-only if that is asked for."""
        words = [*options, *self._access.mount_flags, *(["ro"] if self.is_read_only else [])]
        with self._target.held("target_path") as handle:
            mounts.mount(source, handle, fs_type, words)


def live_mount(target: Target) -> mountinfo.Mount | None:
    """Return the mount at a target, None if there is none. A dead one is removed first."""
    found = target.mounted()
    if found is not None and mounts.is_corrupted(target.path):
        _log.warning("a dead mount was taken away", target=target.path, source=found.source)
        target.unmount()
        return target.mounted()
    return found


def make_target(target: Target, access: Access) -> bool:
    """Make the file or the directory on which a volume is mounted. Returns whether it was there before."""
    existed = target.exists()
    if access.is_block:
        target.ensure_file("target_path")
    else:
        target.ensure_directory("target_path")
    return existed


def verify_publish(target: Target, is_read_only: bool) -> None:
    """Raise NotMounted unless the target is a mount, and read-only if that was asked for."""
    found = target.mounted()
    if found is None:
        raise NotMounted(f"publish returned, but nothing is mounted at {target.path}")
    if is_read_only and not found.is_read_only:
        raise NotMounted(f"publish returned, but the mount at {target.path} is not read-only")


def undo_publish(target: Target, existed: bool) -> None:
    """Leave nothing of a publish that failed."""
    target.unmount()
    if not existed:
        target.remove()


def stats_of(space: mounts.Space) -> Stats:
    return Stats(
        space.total_bytes,
        space.used_bytes,
        space.available_bytes,
        space.total_inodes,
        space.used_inodes,
        space.free_inodes,
    )
