"""The trash: what was deleted, until it is reclaimed or comes back.

Owns: `trash/`, the order of reclaiming (oldest first), and undelete.
An entry is named `<deleted at, ns>-<volume|snapshot|group>-<id>`, so the names sort by age. Reclaiming
first renames an entry into tmp/, so what can be undeleted is always whole.
May not touch: living volumes and snapshots, except to put one back.
Start reading at: `Trash.put`, `Trash.sweep`, `Trash.undelete`.
"""

import contextlib
import errno
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator

from moorage.log import get_logger
from moorage.storage import snapshots, tunables, volumes
from moorage.storage.context import PoolContext
from moorage.storage.errors import DamagedRecord, InvalidValue, NameTaken, NotInTrash
from moorage.storage.failpoints import reached
from moorage.storage.layout import read_record
from moorage.storage.model import Trashed
from moorage.storage.records import GroupRecord, SnapshotRecord, VolumeRecord, decoded

log = get_logger(__name__)

_FREED_WAIT_S = 1.0
_LARGEST_HEADROOM = 256 << 20
_FASTEST_WRITER_BYTES_PER_S = 2 << 30
KINDS = ("volume", "snapshot", "group")


class Trash:
    """The trash of one pool."""

    def __init__(self, context: PoolContext) -> None:
        self._context = context
        self._layout = context.layout

    def put(self, what: str, ident: str, directory: str, promised: int) -> None:
        """Move a deleted object here; after this returns it is gone, also after a power loss."""
        deleted = self._context.now_ns()
        entry = f"{deleted:020d}-{what}-{ident}"
        target = os.path.join(self._layout.trash, entry)
        allocated = self._context.tree_sizes.bytes_of(directory)
        self._layout.move(directory, target)
        self._context.ledger.changed(promised=-promised, allocated=-allocated, reclaimable=allocated)
        self._context.changed_by_guest()

    def entries(self) -> list[str]:
        """The names of the entries, oldest first."""
        with self._layout.translated("list trash"):
            return sorted(name for name in os.listdir(self._layout.trash) if _parsed(name) is not None)

    def listed(self) -> list[Trashed]:
        """What could be undeleted, oldest first."""
        return list(self._described())

    def _described(self) -> Iterator[Trashed]:
        for entry in self.entries():
            parsed = _parsed(entry)
            path = os.path.join(self._layout.trash, entry)
            if parsed is None or not os.path.isdir(path):  # reclaimed meanwhile
                continue
            deleted, what, ident = parsed
            name, claim, retention_s = self._read(path, what, ident)
            expires = deleted + int(retention_s * 1e9)
            used = self._context.tree_sizes.bytes_of(path)
            yield Trashed(entry, what, ident, name, claim, deleted, expires, used)

    def _read(self, path: str, what: str, ident: str) -> tuple[str, str, float]:
        """Return the caller's name, the claim and how long the entry is kept; a damaged record keeps the default."""
        default = self._context.config.trash_retention_s
        with contextlib.suppress(DamagedRecord, OSError, InvalidValue):
            if what == "volume":
                record = decoded(read_record(path, volumes.RECORD), VolumeRecord, path, ident)
                own = tunables.Tunables.of(record.mutable).trash_retention_s
                if record.ephemeral:
                    own = 0.0
                return record.name, record.claim, default if own is None else own
            if what == "snapshot":
                raw = read_record(path, snapshots.RECORD)
                return decoded(raw, SnapshotRecord, path, ident).name, "", default
            raw = read_record(path, snapshots.GROUP_RECORD)
            return decoded(raw, GroupRecord, path, ident).name, "", default
        return ident, "", default

    def sweep(self) -> int:
        """Reclaim every entry whose time is over; returns how many."""
        now = self._context.now_ns()
        count = 0
        for item in self._described():
            if item.expires_ns <= now:
                self.reclaim(item.entry)
                count += 1
        return count

    def reclaim(self, entry: str) -> int:
        """Give an entry's space back; returns how much it took, 0 if it could not be removed."""
        path = os.path.join(self._layout.trash, entry)
        doomed = os.path.join(self._layout.tmp, f"reclaim-{secrets.token_hex(8)}")
        try:
            allocated = self._context.tree_sizes.bytes_of(path)
            os.rename(path, doomed)
        except FileNotFoundError:  # another process was faster
            return 0
        reached("reclaim.renamed")
        self._context.ledger.changed(reclaimable=-allocated)
        if not self._layout.leftovers.remove(doomed):
            return 0
        log.info("reclaimed", entry=entry, pool=self._context.config.name, bytes=allocated)
        return allocated

    def relieve(self) -> float:
        """Reclaim early if the pool is nearly full. Returns in how many seconds it could be so again.

        Volumes are sparse, so a pod may fill the pool by writing to a volume that it has. It must not be told that
        the disk is full while deleted volumes take the room.
        """
        space = self._context.ledger.space()
        headroom = min(_LARGEST_HEADROOM, space.total_bytes // 8)
        self.make_room(headroom)
        if not self.entries():
            return math.inf
        return max(0, self._free_bytes() - headroom) / _FASTEST_WRITER_BYTES_PER_S

    def _free_bytes(self) -> int:
        """Return how many bytes are free above the reserve; negative if the reserve is used."""
        found = self._context.ledger.space()
        return found.available_bytes - int(found.total_bytes * self._context.config.reserve_fraction)

    def make_room(self, needed: int) -> None:
        """Reclaim, oldest first, until so many bytes are free above the reserve or nothing is left."""
        for entry in self.entries():
            if self._free_bytes() >= needed:
                return
            found = self._context.ledger.space()
            log.info("trash is reclaimed early", entry=entry, needed=needed, free=found.available_bytes)
            freed = self.reclaim(entry)
            self._wait_for(found.available_bytes + freed // 2)

    def _wait_for(self, available: int) -> None:
        """XFS gives blocks back in the background: wait a moment, or younger trash would go as well."""
        deadline = time.monotonic() + _FREED_WAIT_S
        while self._context.ledger.space().available_bytes < available and time.monotonic() < deadline:
            time.sleep(0.005)

    def undelete(self, ident: str, what: str = "volume", prepare: Callable[[str], None] | None = None) -> str:
        """Put the youngest deleted object with this id, caller's name or claim back; returns its id.

        `prepare` is called with its directory in the trash before it is moved.
        """
        if what not in KINDS:
            raise InvalidValue("what", f"{what!r} is none of {', '.join(KINDS)}")
        for item in reversed(self.listed()):
            if item.what == what and ident and ident in (item.id, item.name, item.claim):
                self._restore(item, prepare)
                return item.id
        raise NotInTrash(ident, self._context.config.name)

    def _restore(self, item: Trashed, prepare: Callable[[str], None] | None) -> None:
        source = os.path.join(self._layout.trash, item.entry)
        homes = {
            "volume": self._layout.volumes,
            "snapshot": self._layout.snapshots,
            "group": self._layout.groups,
        }
        target = os.path.join(homes[item.what], item.id)
        promised = self._promised(source, item)
        with (
            self._context.names.held(f"{item.what} {item.id}"),
            self._layout.translated(f"undelete {item.what} {item.id}"),
            self._context.ledger.reserved(promised, f"undelete {item.what} {item.id}"),
        ):
            try:
                if prepare is not None:
                    prepare(source)
                self._layout.move(source, target)
            except OSError as failed:
                if failed.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise NameTaken(item.what, item.name, "it was created again since the deletion") from failed
                if failed.errno == errno.ENOENT:
                    raise NotInTrash(item.id, self._context.config.name) from failed
                raise
        self._context.ledger.changed(allocated=item.used_bytes, reclaimable=-item.used_bytes)
        self._context.changed_by_guest()
        log.info("undeleted", what=item.what, id=item.id, name=item.name)

    def _promised(self, path: str, item: Trashed) -> int:
        if item.what == "volume":
            return decoded(read_record(path, volumes.RECORD), VolumeRecord, path, item.id).size_bytes
        if item.what == "snapshot":
            return decoded(read_record(path, snapshots.RECORD), SnapshotRecord, path, item.id).data_bytes
        members = os.path.join(path, snapshots.MEMBERS)
        return sum(
            decoded(read_record(place, snapshots.RECORD), SnapshotRecord, place, f"{item.id}.{name}").data_bytes
            for name in os.listdir(members)
            if (place := os.path.join(members, name))
        )


def _parsed(entry: str) -> tuple[int, str, str] | None:
    stamp, _, rest = entry.partition("-")
    what, _, ident = rest.partition("-")
    if not stamp.isdigit() or what not in KINDS or not ident:
        return None
    return int(stamp), what, ident
