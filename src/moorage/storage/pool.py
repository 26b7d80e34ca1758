"""A pool: everything in one directory.

Owns: opening and closing, the background thread that reclaims trash, the wiring of the parts, and the changes that need
several of them. docs/explanation/storage.md explains the promises.
May not touch: gRPC, Kubernetes.
Start reading at: `Pool.open`, then `volumes.py`, `snapshots.py`, `copies.py`.
"""

import contextlib
import math
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from moorage.host.errors import HostError
from moorage.host.extents import CopyProgress, clone_file
from moorage.host.mountinfo import mount_containing
from moorage.host.mounts import space_of
from moorage.log import get_logger
from moorage.storage.attachments import Attachments
from moorage.storage.context import PoolContext
from moorage.storage.copies import Copier, thaw_leftovers
from moorage.storage.errors import (
    DamagedRecord,
    GroupMember,
    StorageError,
    VolumeNotFound,
)
from moorage.storage.ids import group_of, is_volume_id
from moorage.storage.layout import PoolLayout
from moorage.storage.ledger import Ledger, Sums
from moorage.storage.model import (
    Capacity,
    CreateSnapshot,
    CreateVolume,
    Group,
    InUse,
    PoolConfig,
    PoolScope,
    Snapshot,
    Volume,
)
from moorage.storage.pool_health import PoolHealth
from moorage.storage.snapshot_blocks import SnapshotBlocks
from moorage.storage.snapshots import Snapshots
from moorage.storage.trash import Trash
from moorage.storage.volumes import Volumes

log = get_logger(__name__)

_SHARED_TMP_AGE_S = 24 * 3600.0
_WATCH_S = 10.0
_SHORTEST_WATCH_S = 0.05
_SWEEP_WAIT_S = 5.0


class Pool:
    """One open pool, made of parts: `volumes`, `snapshots`, `attachments`, `trash`, `health` and `blocks`.

    The parts look up, and change what is theirs alone. The methods here change what several parts keep.
    Every method of the pool and of its parts may be called from any thread.
    """

    def __init__(self, context: PoolContext) -> None:
        """Use `Pool.open`."""
        self._context = context
        self._layout = context.layout
        copier = Copier(context)
        self.snapshots = Snapshots(context, copier)
        self.volumes = Volumes(context, copier, self.snapshots.get)
        self.trash = Trash(context)
        self.attachments = Attachments(context, self.volumes.directory)
        self.health = PoolHealth(context, self.volumes)
        self.blocks = SnapshotBlocks(self.snapshots, context.copies_by_reflink)
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
        context.make_room = self.trash.make_room
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
            context.attached_nodes = lambda ident: [held.node_id for held in self.attachments.of_volume(ident)]
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
        return self.volumes.create(request, progress)

    def delete_volume(self, ident: str) -> bool:
        """Move a volume to the trash; False when there is none. One in use is refused."""
        if not is_volume_id(ident):
            return False
        directory = self.volumes.directory(ident)
        missing = VolumeNotFound(ident, self.name)
        with self._layout.translated(f"delete volume {ident}"):
            try:
                with self._layout.locked(directory, lambda: missing):
                    self.volumes.check_unused(ident)
                    promised = 0
                    try:
                        promised = self.volumes.get(ident).size_bytes
                    except DamagedRecord as damaged:
                        # It cannot be used any more, but it can be deleted.
                        log.warning("deleting a damaged volume", volume=ident, error=str(damaged))
                        self._context.ledger.stale()
                    if self.config.scope is PoolScope.SHARED:
                        self.attachments.seal(ident)
                    self.trash.put("volume", ident, directory, promised)
            except VolumeNotFound:
                return False
        self._wake.set()
        log.info("volume deleted", volume=ident, pool=self.name)
        return True

    def expand_volume(self, ident: str, required_bytes: int, limit_bytes: int = 0) -> Volume:
        self._see_guests()
        return self.volumes.expand(ident, required_bytes, limit_bytes)

    # --- snapshots and groups --------------------------------------------------------------

    def create_snapshot(self, request: CreateSnapshot, progress: CopyProgress | None = None) -> Snapshot:
        self._see_guests()
        return self.snapshots.create(request, self.volumes, progress)

    def delete_snapshot(self, ident: str) -> bool:
        """Move a snapshot to the trash; False when there is none."""
        member = group_of(ident)
        if member is not None:
            if self.snapshots.find(ident) is None:
                return False
            raise GroupMember(f"snapshot {ident} belongs to group snapshot {member[0]}; delete the group")
        directory = self.snapshots.directory(ident)
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
        return self.snapshots.create_group(name, volume_ids, parameters or {}, in_use, self.volumes)

    def delete_group(self, ident: str, snapshot_ids: Sequence[str] = ()) -> bool:
        """Move a group with all its members to the trash; False when there is none."""
        if self.snapshots.find_group(ident) is None:
            return False
        self.snapshots.check_members(ident, snapshot_ids)
        return self._discard("group", ident, os.path.join(self._layout.groups, ident))

    def _discard(self, what: str, ident: str, directory: str) -> bool:
        missing = VolumeNotFound(ident, self.name)
        with self._layout.translated(f"delete {what} {ident}"):
            try:
                with self._layout.locked(directory, lambda: missing):
                    self.trash.put(what, ident, directory, self._promised_by(what, ident))
            except VolumeNotFound:
                return False
        self._wake.set()
        log.info("deleted", what=what, id=ident, pool=self.name)
        return True

    def _promised_by(self, what: str, ident: str) -> int:
        try:
            if what == "group":
                return sum(cut.data_bytes for cut in self.snapshots.get_group(ident).snapshots)
            return self.snapshots.get(ident).data_bytes
        except DamagedRecord:
            self._context.ledger.stale()
            return 0

    # --- capacity and trash ----------------------------------------------------------------

    def capacity(self) -> Capacity:
        self._see_guests()
        self._layout.check_present()
        return self._context.ledger.capacity()

    def undelete(self, ident: str, what: str = "volume") -> str:
        """Put a deleted object back, whole, with its id; takes an id or the caller's name."""
        is_attached = what == "volume" and self.config.scope is PoolScope.SHARED
        # In the trash, where it cannot be attached: a crash after the move would leave it sealed for ever.
        return self.trash.undelete(ident, what, self.attachments.unseal if is_attached else None)

    def sweep(self) -> int:
        """Reclaim the trash whose time is over, and more when the pool is nearly full."""
        count = self.trash.sweep()
        self.trash.relieve()
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
                    self.trash.sweep()
                    self._layout.leftovers.retry()
                pause_s = min(_WATCH_S, max(_SHORTEST_WATCH_S, self.trash.relieve()))
            except (StorageError, HostError, OSError) as failed:
                log.warning("cannot reclaim", pool=self.name, error=str(failed))
            except Exception:  # nothing that lies in a pool may end its upkeep
                log.exception("cannot reclaim", pool=self.name)
            self._wake.wait(pause_s)

    def _count(self) -> Sums:
        """Add up the pool; each volume costs one read and one stat."""
        sums = Sums()
        for ident in self.volumes.ids():
            with contextlib.suppress(DamagedRecord, FileNotFoundError):
                volume = self.volumes.find(ident)
                if volume is not None:
                    sums.promised += volume.size_bytes
                    sums.allocated += self._context.data_bytes(volume.data, volume.kind)
        for cut in self.snapshots.records():
            with contextlib.suppress(FileNotFoundError):
                sums.promised += cut.data_bytes
                sums.allocated += self._context.data_bytes(cut.data, cut.kind)
        for entry in self.trash.entries():
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
