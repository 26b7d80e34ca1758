"""A pool opened by hand, beside the plugin that serves it: what the command line starts from.

Owns: opening an existing pool as a guest, finding volumes and snapshots by id or by name, and the snapshots that an
export cuts for itself.
May not touch: the owner's lock; a guest never sweeps, thaws or reclaims what is not its own.
Start reading at: `open_pool`.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from moorage.errors import UsageError
from moorage.host.errors import host_error
from moorage.storage.errors import DamagedRecord, SnapshotNotFound, StorageError, VolumeNotFound
from moorage.storage.ids import id_from, is_id
from moorage.storage.layout import read_file
from moorage.storage.listing import overview
from moorage.storage.model import TRASH_RETENTION_S, CreateSnapshot, PoolConfig, PoolScope, Snapshot, Volume
from moorage.storage.pool import Pool
from moorage.storage.records import PoolRecord, decoded
from moorage.storage.trash import Trash

FOR_EXPORT = "moorage.dev/for-export"
"""The parameter that marks a snapshot as one that an export cut and takes away when it is done."""


class NoPool(StorageError):
    """The directory holds no pool."""

    code = "NOT_FOUND"
    retryable = False


def open_pool(directory: Path, *, make: bool = False, trash_retention_s: float = TRASH_RETENTION_S) -> Pool:
    """The pool in a directory, as a guest; a new one only when asked for."""
    root = Path(os.path.realpath(directory))
    scope = _scope_of(root)
    if scope is None and not make:
        raise NoPool(f"there is no pool at {root}; `moorage volume --pool {root} create --new-pool …` makes one")
    config = PoolConfig(
        name=root.name or "pool",
        directory=root,
        scope=scope or PoolScope.NODE,
        owner=False,
        trash_retention_s=trash_retention_s,
    )
    return Pool.open(config)


def _scope_of(root: Path) -> PoolScope | None:
    path = root / "pool.json"
    try:
        record = decoded(read_file(os.fspath(path)), PoolRecord, path)
        return PoolScope(record.scope)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as failed:
        raise DamagedRecord(path, str(failed)) from failed
    except OSError as failed:
        raise host_error("open the pool at", root, failed) from failed


def volume_named(pool: Pool, text: str) -> Volume:
    """A volume by its id, by the name that it was made with, or by its claim, as `default/data`.

    Raises UsageError if several volumes were made for that claim, one after the other.
    """
    found = pool.volumes.find(text) or pool.volumes.find(_id_or_nothing(text)) or _volume_of_claim(pool, text)
    if found is None:
        raise VolumeNotFound(text, pool.name)
    return found


def _volume_of_claim(pool: Pool, text: str) -> Volume | None:
    if "/" not in text:
        return None
    found = [row.id for row in overview(pool) if row.claim == text]
    if len(found) > 1:
        raise UsageError(f"several volumes were made for the claim {text}: {', '.join(found)}; name one of them")
    return pool.volumes.find(found[0]) if found else None


def snapshot_named(pool: Pool, text: str) -> Snapshot:
    """A snapshot by its id or name."""
    found = pool.snapshots.find(text) or pool.snapshots.find(_id_or_nothing(text))
    if found is None:
        raise SnapshotNotFound(text, pool.name)
    return found


def source_named(pool: Pool, text: str) -> Volume | Snapshot:
    """A volume or a snapshot; `volume/NAME` and `snapshot/NAME` tell which where both exist."""
    what, slash, name = text.partition("/")
    if slash and what == "volume":
        return volume_named(pool, name)
    if slash and what == "snapshot":
        return snapshot_named(pool, name)
    ident = _id_or_nothing(text)
    volume = pool.volumes.find(text) or pool.volumes.find(ident)
    snapshot = pool.snapshots.find(text) or pool.snapshots.find(ident)
    if volume is not None and snapshot is not None:
        raise UsageError(f"{text!r} is a volume and a snapshot; say volume/{text} or snapshot/{text}")
    found = volume or snapshot or _volume_of_claim(pool, text)
    if found is None:
        raise VolumeNotFound(text, pool.name)
    return found


def _id_or_nothing(name: str) -> str:
    return id_from(name) if name else "-"


@contextlib.contextmanager
def snapshot_for_export(pool: Pool, volume: Volume, kept: str = "") -> Iterator[Snapshot]:
    """A snapshot that goes when the block succeeds and stays when it fails, so that the export can go on.

    `kept` is the id of one that an earlier try left behind.
    """
    found = pool.snapshots.find(kept) if is_id(kept) else None
    if found is None or found.volume_id != volume.id:
        name = f"export-{volume.id[:40]}-{secrets.token_hex(6)}"
        found = pool.create_snapshot(CreateSnapshot(name, volume.id, parameters={FOR_EXPORT: "true"}))
    yield found
    if FOR_EXPORT in found.parameters:
        discard_snapshot(pool, found.id)


def discard_snapshot(pool: Pool, ident: str) -> None:
    """Delete a snapshot for good: its space is given back at once."""
    if not pool.delete_snapshot(ident):
        return
    trash = Trash(pool.context)
    for entry in trash.entries():
        if entry.endswith(f"-snapshot-{ident}"):
            trash.reclaim(entry)
