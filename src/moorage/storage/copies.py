"""Copies of volumes in use or at rest: snapshots, clones and the members of a group.

Owns: the choice between reflink, btrfs snapshot and full copy; refusing what would hold writers for
too long; freezing mounted filesystems around the copy, with a record on disk that lets the next
start thaw what a killed process left frozen.
May not touch: records and final places; it fills paths below tmp/.
Start reading at: `plan_copy` (pure), `Copier.cut`.
"""

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moorage.host import block_devices, freeze, mountinfo
from moorage.host.boot import boot_id
from moorage.host.errors import HostError
from moorage.host.extents import CopyProgress, clone_file, copy_sparse
from moorage.log import get_logger
from moorage.storage import directories
from moorage.storage.context import PoolContext
from moorage.storage.errors import ImageMissing, InUseCopyRefused, OutOfSpace
from moorage.storage.failpoints import reached
from moorage.storage.model import CopyPath, InUse, VolumeKind
from moorage.storage.usage import HostUse, observe, one_mount_each

log = get_logger(__name__)

_FOREIGN_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to copy. `is_blank` marks an image whose first format never ended: it holds nothing."""

    ident: str
    kind: VolumeKind
    source: Path
    target: str
    in_use: InUse
    is_blank: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """What a copy turned out to be."""

    path: CopyPath
    size_bytes: int
    data_bytes: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """How one job is done: whether writers are held, and for how long at most."""

    freeze: bool
    bound_s: float


class _FrozenRecord(msgspec.Struct):
    """What is frozen, and on which run of which machine: device numbers mean nothing elsewhere."""

    devices: list[tuple[int, int]]
    boot: str


def plan_copy(
    job: Job, use: HostUse, context: PoolContext, nodes: Sequence[str] = (), is_group: bool = False
) -> CopyPlan:
    """Decide, or refuse with advice. Pure: the use and the nodes that it is attached to were observed before.

    A group is of one moment, so its members are never copied file by file while they change.
    """
    config = context.config
    is_live = job.in_use is InUse.LIVE and not is_group
    is_instant = context.is_btrfs if job.kind is VolumeKind.DIRECTORY else context.copies_by_reflink
    if nodes and not use and not is_live and not is_instant:
        lacks = "cannot copy a directory in one moment" if context.copies_by_reflink else "has no reflinks"
        raise InUseCopyRefused(
            f"volume {job.ident} is attached to {', '.join(nodes)}, where it cannot be held still from here, and "
            f"the pool's filesystem ({context.fstype}) {lacks}; detach it first"
        )
    if job.kind is VolumeKind.DIRECTORY:
        if context.is_btrfs or not use.mountpoints or is_live:
            return CopyPlan(False, 0.0)
        other = "" if is_group else ", or set snapshotInUse: live to copy it file by file while it changes"
        raise InUseCopyRefused(
            f"volume {job.ident} is a directory in use at {use.mountpoints[0]}, and the pool's filesystem "
            f"({context.fstype}) cannot copy it in one moment; stop its pods{',' if other else ' or'} use a btrfs pool"
            f"{other}"
        )
    if context.copies_by_reflink:
        return CopyPlan(bool(use.mountpoints), config.freeze_bound_s)
    if not use:
        return CopyPlan(False, 0.0)
    if not use.mountpoints:
        raise InUseCopyRefused(
            f"volume {job.ident} is a block device in use ({use.holders}), and the pool's filesystem "
            f"({context.fstype}) has no reflinks; stop its pods first, or use an XFS or btrfs pool"
        )
    if job.in_use is not InUse.FREEZE:
        raise InUseCopyRefused(
            f"volume {job.ident} is in use ({use.holders}), and the pool's filesystem ({context.fstype}) has no "
            "reflinks: a copy would hold its writers until it is done; stop its pods, use an XFS or btrfs "
            f"pool, or set snapshotInUse: freeze to hold them for up to {config.copy_freeze_bound_s:g} s"
        )
    return CopyPlan(True, config.copy_freeze_bound_s)


class Copier:
    """Copies within one pool."""

    def __init__(self, context: PoolContext) -> None:
        self._context = context

    def cut(self, jobs: Sequence[Job], progress: CopyProgress | None = None) -> tuple[list[Cut], float]:
        """Copy all jobs from one moment; returns what each became, and the ms that writers were held."""
        uses = [observe(job.source, job.kind) for job in jobs]
        plans = [
            plan_copy(job, use, self._context, self._context.attached_nodes(job.ident), is_group=len(jobs) > 1)
            for job, use in zip(jobs, uses, strict=True)
        ]
        self.check_space(jobs)
        for job, use, plan in zip(jobs, uses, plans, strict=True):
            self._flush(job, use, plan)
        held = [use for use, plan in zip(uses, plans, strict=True) if plan.freeze]
        bound_s = min((plan.bound_s for plan in plans if plan.freeze), default=0.0)
        with self._held(held, bound_s) as hold:
            reached("cut.frozen")
            paths = [self._copy(job, progress) for job in jobs]
            reached("cut.copied")
        cuts = [self._finished(job, path) for job, path in zip(jobs, paths, strict=True)]
        for job, cut in zip(jobs, cuts, strict=True):
            log.info("copied", source=job.ident, path=cut.path, bytes=cut.data_bytes, held_ms=hold.held_ms)
        return cuts, hold.held_ms

    def copy_at_rest(self, job: Job, progress: CopyProgress | None = None) -> Cut:
        """Copy something that never changes: a snapshot."""
        self.check_space([job])
        cut = self._finished(job, self._copy(job, progress))
        log.info("copied", source=job.ident, path=cut.path, bytes=cut.data_bytes)
        return cut

    def check_space(self, jobs: Sequence[Job]) -> None:
        """Refuse a full copy that cannot fit, before it starts."""
        if self._context.copies_by_reflink:
            return
        needed = sum(self._context.data_bytes(job.source, job.kind) for job in jobs)
        self._context.make_room(needed)
        space = self._context.ledger.capacity()
        free = space.free_bytes - space.reserve_bytes
        if needed > free:
            names = ", ".join(job.ident for job in jobs)
            raise OutOfSpace(
                f"a copy of {names} needs {needed} bytes; pool {self._context.config.name} has {max(0, free)} free"
            )

    def _flush(self, job: Job, use: HostUse, plan: CopyPlan) -> None:
        """Write what is cached above the image while writers still run: the hold gets shorter.

        If no writer is frozen, the image itself need not be synced: FICLONE writes its cached pages
        first, a sparse copy reads them, and the copy is fsynced in either case.
        """
        if job.kind is VolumeKind.IMAGE:
            for device in use.devices:
                block_devices.flush(device.path)
            if plan.freeze:
                with _readable(job) as fd:
                    os.fsync(fd)

    def _copy(self, job: Job, progress: CopyProgress | None) -> CopyPath:
        if job.kind is VolumeKind.DIRECTORY:
            return directories.copy(os.fspath(job.source), job.target, self._context.is_btrfs, progress)
        with _readable(job) as source:
            target = os.open(job.target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if job.is_blank:
                    os.ftruncate(target, os.fstat(source).st_size)
                    return CopyPath.REFLINK if self._context.copies_by_reflink else CopyPath.SPARSE_COPY
                if self._context.copies_by_reflink and clone_file(source, target):
                    return CopyPath.REFLINK
                copy_sparse(source, target, progress)
                return CopyPath.SPARSE_COPY
            finally:
                os.close(target)

    def _finished(self, job: Job, path: CopyPath) -> Cut:
        if job.kind is VolumeKind.DIRECTORY:
            return Cut(path, 0, self._context.data_bytes(job.source, job.kind))
        fd = os.open(job.target, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            found = os.fstat(fd)
            return Cut(path, found.st_size, min(found.st_size, found.st_blocks * 512))
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _held(self, uses: Sequence[HostUse], bound_s: float) -> Iterator[freeze.Hold]:
        mountpoints = [place for use in uses for place in one_mount_each(use)]
        if not mountpoints:
            yield freeze.Hold()
            return
        devices = [device.device for use in uses for device in use.devices]
        with self._recorded(devices), freeze.frozen(mountpoints, bound_s) as hold:
            yield hold

    @contextlib.contextmanager
    def _recorded(self, devices: list[tuple[int, int]]) -> Iterator[None]:
        """A file that says what is frozen, locked while its writer lives. A power loss thaws anyway,
        so it need not be durable."""
        path = os.path.join(self._context.layout.frozen, secrets.token_hex(8))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(fd, msgspec.json.encode(_FrozenRecord(devices, boot_id())))
            yield
        finally:
            os.unlink(path)
            os.close(fd)


def thaw_leftovers(frozen_directory: str) -> list[str]:
    """Thaw what dead processes left frozen; returns the mount points."""
    thawed: list[str] = []
    for name in sorted(os.listdir(frozen_directory)):
        path = os.path.join(frozen_directory, name)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # its writer lives and will thaw it
                continue
            with contextlib.suppress(msgspec.DecodeError):  # killed before it was written: not frozen yet
                record = msgspec.json.decode(os.pread(fd, 1 << 20, 0), type=_FrozenRecord)
                if record.boot == boot_id():
                    thawed += _thaw(record)
                elif time.time() - os.fstat(fd).st_mtime < _FOREIGN_S:
                    continue  # another node of a shared pool may still need it; a restart thawed it
            os.unlink(path)
        finally:
            os.close(fd)
    return thawed


def _thaw(record: _FrozenRecord) -> list[str]:
    table = mountinfo.mounts()
    places = {mount.target for device in record.devices for mount in mountinfo.mounts_of_device(device, table)}
    thawed = []
    for place in sorted(places):
        try:
            if freeze.thaw(place):
                thawed.append(place)
        except (OSError, HostError) as failed:
            log.warning("cannot thaw", mountpoint=place, error=str(failed))
    return thawed


@contextlib.contextmanager
def _readable(job: Job) -> Iterator[int]:
    try:
        fd = os.open(job.source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as failed:
        raise ImageMissing(f"the image of {job.ident} is missing: {job.source}") from failed
    try:
        yield fd
    finally:
        os.close(fd)
