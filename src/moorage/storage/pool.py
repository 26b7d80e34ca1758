"""A pool: the door to everything in one directory.

Owns: opening and closing, the background thread that reclaims trash, and the wiring of the parts.
Each method is one promise of docs/explanation/storage.md; the parts keep it.
May not touch: gRPC, Kubernetes.
Start reading at: `Pool.open`, then `volumes.py`, `snapshots.py`, `copies.py`.
"""

import contextlib
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moorage.host.errors import HostError
from moorage.host.extents import CopyProgress, Range, clone_file
from moorage.host.mountinfo import mount_containing
from moorage.host.mounts import space_of
from moorage.log import get_logger
from moorage.storage import health
from moorage.storage.attachments import Attachments
from moorage.storage.changes import Comparison, allocated_ranges
from moorage.storage.context import PoolContext
from moorage.storage.copies import Copier, thaw_leftovers
from moorage.storage.errors import (
    DamagedRecord,
    GroupMember,
    ImageMissing,
    InvalidValue,
    PoolReadOnly,
    PoolVanished,
    SizeOutOfRange,
    StorageError,
    VolumeNotFound,
)
from moorage.storage.ids import VolumeId, group_of, is_volume_id
from moorage.storage.layout import PoolLayout
from moorage.storage.ledger import Ledger, Sums
from moorage.storage.model import (
    Attachment,
    BlockDiff,
    Capacity,
    CreateSnapshot,
    CreateVolume,
    Group,
    HealthEntry,
    HealthStatus,
    InUse,
    Page,
    PoolConfig,
    PoolScope,
    Snapshot,
    Trashed,
    Volume,
    VolumeHealth,
    VolumeKind,
)
from moorage.storage.snapshots import Snapshots
from moorage.storage.trash import Trash
from moorage.storage.volumes import Volumes

log = get_logger(__name__)

_SHARED_TMP_AGE_S = 24 * 3600.0
_WATCH_S = 10.0
_SHORTEST_WATCH_S = 0.05
_SWEEP_WAIT_S = 5.0


class Pool:
    """One open pool. Every method may be called from any thread."""

    def __init__(self, context: PoolContext) -> None:
        """Use `Pool.open`."""
        self._context = context
        self._layout = context.layout
        copier = Copier(context)
        self._snapshots = Snapshots(context, copier)
        self._volumes = Volumes(context, copier, self._snapshots.get)
        self._trash = Trash(context)
        self._attachments = Attachments(context, self._volumes.directory)
        self._wake = threading.Event()
        self._swept = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # --- opening and closing ---------------------------------------------------------------

    @classmethod
    def open(cls, config: PoolConfig) -> "Pool":
        """Make or open the pool in a directory; what a dead process left behind is put right."""
        directory = Path(os.path.realpath(config.directory))
        layout = PoolLayout(config.name, directory)
        layout.open(config.scope, config.owner)
        try:
            with layout.translated("open"):
                ledger = Ledger(config, lambda: space_of(directory), lambda: pool._count())
                context = PoolContext(
                    config=config,
                    layout=layout,
                    ledger=ledger,
                    fstype=mount_containing(directory).fstype,
                    copies_by_reflink=_can_clone(layout.tmp),
                )
                pool = cls(context)
                pool._recover()
        except BaseException:
            layout.close()
            raise
        log.info(
            "pool opened",
            pool=config.name,
            directory=directory,
            filesystem=context.fstype,
            reflink=context.copies_by_reflink,
        )
        return pool

    def _recover(self) -> None:
        context, config = self._context, self._context.config
        context.make_room = self._trash.make_room
        if config.owner:
            for place in thaw_leftovers(self._layout.frozen):
                log.warning("thawed what a dead process left frozen", mountpoint=place)
            age = _SHARED_TMP_AGE_S if config.scope is PoolScope.SHARED else 0.0
            abandoned = self._layout.leftovers.abandoned(age)
            if config.background:
                self._thread = threading.Thread(
                    target=self._watch, args=(abandoned,), name=f"pool-{config.name}", daemon=True
                )
            else:
                self._layout.leftovers.sweep(abandoned)
        else:
            context.changed_by_guest = self._tell_owner
        if config.scope is PoolScope.SHARED:
            context.attached_nodes = lambda ident: [held.node_id for held in self._attachments.attachments(ident)]
        if self._thread is not None:
            self._thread.start()
            self._swept.wait(_SWEEP_WAIT_S)  # then a large tree does not keep the pool from opening

    def close(self) -> None:
        """Stop the background thread and let another process own the pool."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=60)
        self._layout.close()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self._context.config.name

    @property
    def directory(self) -> Path:
        return self._layout.root

    @property
    def config(self) -> PoolConfig:
        return self._context.config

    @property
    def context(self) -> PoolContext:
        """What the other modules of this package work with: directories, ledger, locks."""
        return self._context

    @property
    def filesystem(self) -> str:
        """The type of the filesystem that the pool lies on."""
        return self._context.fstype

    @property
    def copies_by_reflink(self) -> bool:
        return self._context.copies_by_reflink

    # --- volumes ---------------------------------------------------------------------------

    def create_volume(self, request: CreateVolume, progress: CopyProgress | None = None) -> Volume:
        self._see_guests()
        return self._volumes.create(request, progress)

    def volume(self, ident: str) -> Volume:
        return self._volumes.get(ident)

    def find_volume(self, ident: str) -> Volume | None:
        return self._volumes.find(ident)

    def volumes(self, after: str = "", limit: int = 0) -> Page[Volume]:
        return self._volumes.page(after, limit)

    def ephemerals(self) -> list[Volume]:
        return self._volumes.ephemerals()

    def delete_volume(self, ident: str) -> bool:
        """Move a volume to the trash; False when there is none. One in use is refused."""
        if not is_volume_id(ident):
            return False
        directory = self._volumes.directory(ident)
        missing = VolumeNotFound(ident, self.name)
        with self._layout.translated(f"delete volume {ident}"):
            try:
                with self._layout.locked(directory, lambda: missing):
                    self._volumes.check_unused(ident)
                    promised = 0
                    try:
                        promised = self._volumes.get(ident).size_bytes
                    except DamagedRecord as damaged:
                        # It cannot be used any more, but it can be deleted.
                        log.warning("deleting a damaged volume", volume=ident, error=str(damaged))
                        self._context.ledger.stale()
                    if self.config.scope is PoolScope.SHARED:
                        self._attachments.seal(ident)
                    self._trash.put("volume", ident, directory, promised)
            except VolumeNotFound:
                return False
        self._wake.set()
        log.info("volume deleted", volume=ident, pool=self.name)
        return True

    def expand_volume(self, ident: str, required_bytes: int, limit_bytes: int = 0) -> Volume:
        self._see_guests()
        return self._volumes.expand(ident, required_bytes, limit_bytes)

    def modify_volume(self, ident: str, changes: Mapping[str, str]) -> Volume:
        return self._volumes.modify(ident, changes)

    def format_begin(self, ident: str) -> None:
        self._volumes.format_begin(ident)

    def format_end(self, ident: str) -> None:
        self._volumes.format_end(ident)

    def is_half_formatted(self, ident: str) -> bool:
        return self._volumes.is_half_formatted(ident)

    @contextlib.contextmanager
    def held(self, ident: str, *, shared: bool = False) -> Iterator[Volume]:
        """Hold a volume against every other operation on it, also of other processes; see `Volumes.locked`."""
        with self._volumes.locked(ident, shared=shared) as volume:
            yield volume

    # --- snapshots and groups --------------------------------------------------------------

    def create_snapshot(self, request: CreateSnapshot, progress: CopyProgress | None = None) -> Snapshot:
        self._see_guests()
        return self._snapshots.create(request, self._volumes, progress)

    def snapshot(self, ident: str) -> Snapshot:
        return self._snapshots.get(ident)

    def find_snapshot(self, ident: str) -> Snapshot | None:
        return self._snapshots.find(ident)

    def snapshots(self, after: str = "", limit: int = 0, volume_id: str = "") -> Page[Snapshot]:
        return self._snapshots.page(after, limit, volume_id)

    def delete_snapshot(self, ident: str) -> bool:
        """Move a snapshot to the trash; False when there is none."""
        member = group_of(ident)
        if member is not None:
            if self._snapshots.find(ident) is None:
                return False
            raise GroupMember(f"snapshot {ident} belongs to group snapshot {member[0]}; delete the group")
        directory = self._snapshots.directory(ident)
        if directory is None or not os.path.isdir(directory):
            self._layout.check_present()
            return False
        return self._discard("snapshot", ident, directory)

    def create_group(
        self,
        name: str,
        volume_ids: Sequence[str],
        parameters: Mapping[str, str] | None = None,
        in_use: InUse | None = None,
    ) -> Group:
        self._see_guests()
        return self._snapshots.create_group(name, volume_ids, parameters or {}, in_use, self._volumes)

    def group(self, ident: str) -> Group:
        return self._snapshots.get_group(ident)

    def find_group(self, ident: str) -> Group | None:
        return self._snapshots.find_group(ident)

    def delete_group(self, ident: str, snapshot_ids: Sequence[str] = ()) -> bool:
        """Move a group with all its members to the trash; False when there is none."""
        if self._snapshots.find_group(ident) is None:
            return False
        self._snapshots.check_members(ident, snapshot_ids)
        return self._discard("group", ident, os.path.join(self._layout.groups, ident))

    def _discard(self, what: str, ident: str, directory: str) -> bool:
        missing = VolumeNotFound(ident, self.name)
        with self._layout.translated(f"delete {what} {ident}"):
            try:
                with self._layout.locked(directory, lambda: missing):
                    self._trash.put(what, ident, directory, self._promised_by(what, ident))
            except VolumeNotFound:
                return False
        self._wake.set()
        log.info("deleted", what=what, id=ident, pool=self.name)
        return True

    def _promised_by(self, what: str, ident: str) -> int:
        try:
            if what == "group":
                return sum(cut.data_bytes for cut in self._snapshots.get_group(ident).snapshots)
            return self._snapshots.get(ident).data_bytes
        except DamagedRecord:
            self._context.ledger.stale()
            return 0

    # --- changed blocks --------------------------------------------------------------------

    def allocated(self, snapshot_id: str, start: int = 0) -> BlockDiff:
        """The ranges of a snapshot that hold data."""
        snapshot = self._image_snapshot(snapshot_id, start)

        def ranges() -> Iterator[Range]:
            with _reading(snapshot) as fd:
                yield from allocated_ranges(fd, snapshot.size_bytes, start)

        return BlockDiff(snapshot.size_bytes, "extents", ranges())

    def changed(self, base_id: str, target_id: str, start: int = 0) -> BlockDiff:
        """The ranges of a snapshot that differ from an older one of the same volume."""
        base, target = self._image_snapshot(base_id), self._image_snapshot(target_id, start)
        if base.volume_id != target.volume_id:
            raise InvalidValue(
                "base_snapshot_id", f"{base_id} is of volume {base.volume_id}, {target_id} of {target.volume_id}"
            )
        by_extents = self.copies_by_reflink

        def ranges() -> Iterator[Range]:
            with _reading(base) as old, _reading(target) as new:
                comparison = Comparison(old, new, by_extents, start)
                yield from comparison.ranges(target.size_bytes)
                if comparison.compared_bytes:
                    log.info("compared by content", base=base_id, target=target_id, bytes=comparison.compared_bytes)

        return BlockDiff(target.size_bytes, "extents" if by_extents else "content", ranges())

    def _image_snapshot(self, ident: str, start: int = 0) -> Snapshot:
        snapshot = self.snapshot(ident)
        if snapshot.kind is not VolumeKind.IMAGE:
            raise InvalidValue("snapshot_id", f"{ident} is of a directory, which has no blocks")
        if not 0 <= start <= snapshot.size_bytes:
            raise SizeOutOfRange(f"starting_offset {start} lies outside of snapshot {ident}")
        return snapshot

    # --- capacity and trash ----------------------------------------------------------------

    def capacity(self) -> Capacity:
        self._see_guests()
        self._layout.check_present()
        return self._context.ledger.capacity()

    def trash(self) -> list[Trashed]:
        return self._trash.listed()

    def undelete(self, ident: str, what: str = "volume") -> str:
        """Put a deleted object back, whole, with its id; takes an id or the caller's name."""
        is_attached = what == "volume" and self.config.scope is PoolScope.SHARED
        # In the trash, where nobody can attach it: a crash after the move would leave it sealed for ever.
        return self._trash.undelete(ident, what, self._attachments.unseal if is_attached else None)

    def sweep(self) -> int:
        """Reclaim the trash whose time is over, and more when the pool is nearly full."""
        count = self._trash.sweep()
        self._trash.relieve()
        return count

    def _watch(self, abandoned: Sequence[str]) -> None:
        """The background thread: remove what was abandoned, then reclaim what was deleted when its time is over."""
        self._layout.leftovers.sweep(abandoned)
        self._swept.set()
        swept_at = -math.inf
        while not self._stopping:
            pause_s = _WATCH_S
            try:
                if self._wake.is_set() or time.monotonic() - swept_at >= _WATCH_S:
                    self._wake.clear()
                    swept_at = time.monotonic()
                    self._context.ledger.recount(at_most_every_s=600.0)
                    self._trash.sweep()
                    self._layout.leftovers.retry()
                pause_s = min(_WATCH_S, max(_SHORTEST_WATCH_S, self._trash.relieve()))
            except (StorageError, HostError, OSError) as failed:
                log.warning("cannot reclaim", pool=self.name, error=str(failed))
            except Exception:  # nothing that lies in a pool may end its upkeep
                log.exception("cannot reclaim", pool=self.name)
            self._wake.wait(pause_s)

    # --- attachments -----------------------------------------------------------------------

    def register_node(self, node_id: str, limit: int = 0) -> None:
        self._attachments.register_node(node_id, limit)

    def forget_node(self, node_id: str) -> None:
        self._attachments.forget_node(node_id)

    def nodes(self) -> Mapping[str, int]:
        return self._attachments.nodes()

    def attach(self, volume_id: str, node_id: str, mode: str, readonly: bool = False) -> Attachment:
        return self._attachments.attach(volume_id, node_id, mode, readonly)

    def detach(self, volume_id: str, node_id: str = "") -> bool:
        return self._attachments.detach(volume_id, node_id)

    def attachments(self, volume_id: str) -> list[Attachment]:
        return self._attachments.attachments(volume_id)

    def verify_attachment(self, volume_id: str, node_id: str, token: int) -> Attachment:
        return self._attachments.verify(volume_id, node_id, token)

    # --- health ----------------------------------------------------------------------------

    def health(self, ident: str) -> tuple[HealthEntry, ...]:
        """What is adverse about a volume, as the pool sees it."""
        pool_entries = self._pool_signs()
        if any(entry.status is HealthStatus.INACCESSIBLE for entry in pool_entries):
            return pool_entries
        return (*self._own_health(ident), *pool_entries)

    def _own_health(self, ident: str) -> tuple[HealthEntry, ...]:
        try:
            return tuple(health.volume_signs(self.volume(ident)))
        except DamagedRecord as damaged:
            return (health.sign("RecordDamaged", str(damaged)),)

    def unhealthy(self, after: str = "", limit: int = 0) -> Page[VolumeHealth]:
        """The volumes with something adverse, in order of id."""
        pool_entries = self._pool_signs()
        found: list[VolumeHealth] = []
        for ident in self._volumes.ids(after):
            try:
                entries = (*self._own_health(ident), *pool_entries)
            except VolumeNotFound:  # deleted meanwhile
                continue
            if entries:
                if limit and len(found) == limit:
                    return Page(tuple(found), found[-1].volume_id)
                found.append(VolumeHealth(VolumeId(ident), entries))
        return Page(tuple(found))

    def pool_health(self) -> tuple[HealthEntry, ...]:
        """What is adverse about the pool as a whole, for the pool's operator and for its volumes."""
        return (*self._pool_signs(), *health.leftover_signs(self.name, self._layout.leftovers.stuck))

    def _pool_signs(self) -> tuple[HealthEntry, ...]:
        """What is adverse about the pool and matters to each volume in it."""
        try:
            self._layout.check_present()
            self._check_usable()
            space = self._context.ledger.capacity()
        except PoolVanished as gone:
            return (health.sign("PoolGone", str(gone)),)
        except PoolReadOnly as failed:
            return (health.sign("PoolReadOnly", str(failed)),)
        except (StorageError, HostError) as failed:
            return (health.sign("PoolUnreadable", str(failed)),)
        return tuple(health.pool_signs(self.name, space))

    def _check_usable(self) -> None:
        """The directory of volumes answers, and the filesystem can be written."""
        with self._layout.translated("look at the pool"):
            os.stat(self._layout.volumes)
            if os.statvfs(self._layout.root).f_flag & os.ST_RDONLY:
                raise PoolReadOnly(f"pool {self.name} at {self._layout.root} is read-only")

    def damaged(self) -> list[str]:
        """The ids of volumes whose records cannot be read."""
        found = []
        for ident in self._volumes.ids():
            try:
                self._volumes.find(ident)
            except DamagedRecord:
                found.append(ident)
        return found

    # --- counting --------------------------------------------------------------------------

    def _count(self) -> Sums:
        """Add up the pool; each volume costs one read and one stat."""
        sums = Sums()
        for ident in self._volumes.ids():
            with contextlib.suppress(DamagedRecord, FileNotFoundError):
                volume = self._volumes.find(ident)
                if volume is not None:
                    sums.promised += volume.size_bytes
                    sums.allocated += self._context.data_bytes(volume.data, volume.kind)
        for cut in self._snapshots.records():
            with contextlib.suppress(FileNotFoundError):
                sums.promised += cut.data_bytes
                sums.allocated += self._context.data_bytes(cut.data, cut.kind)
        for entry in self._trash.entries():
            sums.reclaimable += self._context.tree_sizes.bytes_of(os.path.join(self._layout.trash, entry))
        return sums

    def _tell_owner(self) -> None:
        """A guest changed the pool: the owner sees the new time of this file and counts again."""
        with open(os.path.join(self._layout.root, "guests"), "ab") as mark:
            mark.write(b".")
            if mark.tell() > 4096:
                mark.truncate(0)

    def _see_guests(self) -> None:
        try:
            stamp = os.stat(os.path.join(self._layout.root, "guests")).st_mtime_ns
        except OSError:
            return
        if stamp != self._guests_seen:
            self._guests_seen = stamp
            self._context.ledger.stale()

    _guests_seen = 0


def _can_clone(directory: str) -> bool:
    """Whether files here can share blocks, found by trying."""
    base = os.path.join(directory, f"probe-{secrets.token_hex(8)}")
    os.mkdir(base, 0o700)
    try:
        with open(os.path.join(base, "a"), "wb+") as first, open(os.path.join(base, "b"), "wb+") as second:
            first.write(b"x" * 4096)
            first.flush()
            return clone_file(first.fileno(), second.fileno())
    finally:
        for name in ("a", "b"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(base, name))
        os.rmdir(base)


@contextlib.contextmanager
def _reading(snapshot: Snapshot) -> Iterator[int]:
    try:
        fd = os.open(snapshot.data, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as failed:
        raise ImageMissing(f"the data of snapshot {snapshot.id}: {failed.strerror}") from failed
    try:
        yield fd
    finally:
        os.close(fd)
