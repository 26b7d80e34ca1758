"""All volumes of a pool at a glance: what each was promised, what it uses, what it shares with snapshots.

Owns: reading ten thousand records quickly: one open, one read and one stat each, and extents only where blocks can be
shared.
May not touch: anything; it reads.
Start reading at: `overview`.
"""

import os
from collections import Counter

import msgspec

from moorage.host.extents import SHARED, extents_of
from moorage.storage.ids import is_volume_id
from moorage.storage.model import VolumeKind
from moorage.storage.pool import Pool
from moorage.storage.records import VolumeRecord

_USUAL_BYTES = 4096
_decoder = msgspec.json.Decoder(VolumeRecord)


class _Cut(msgspec.Struct):
    volume_id: str


_cuts = msgspec.json.Decoder(_Cut)


class VolumeRow(msgspec.Struct, frozen=True, gc=False):
    """One volume. Sizes are bytes; `shared_bytes` of the used ones belong to a snapshot or another volume too."""

    id: str
    name: str
    claim: str
    kind: str
    filesystem: str
    size_bytes: int
    used_bytes: int
    shared_bytes: int
    snapshots: int
    created_ns: int
    problem: str = ""


def overview(pool: Pool) -> list[VolumeRow]:
    """Every volume in order of id; one whose record cannot be read is there with its problem."""
    layout = pool.context.layout
    with layout.translated("list volumes"):
        cuts = _snapshot_counts(layout.snapshots, layout.groups)
        base = os.open(layout.volumes, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with os.scandir(base) as entries:
                # A planted link is not followed: only real directories count.
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            return [row for name in sorted(names) if is_volume_id(name) and (row := _row(pool, base, name, cuts[name]))]
        finally:
            os.close(base)


def shared_bytes(pool: Pool, data: str) -> int:
    """How many bytes of a file lie in blocks that another file has too."""
    if not pool.copies_by_reflink:
        return 0
    fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return sum(length for _, _, length, flags in extents_of(fd, sync=False) if flags & SHARED)
    finally:
        os.close(fd)


def _row(pool: Pool, base: int, name: str, cuts: int) -> VolumeRow | None:
    try:
        raw = _read(f"{name}/volume.json", base)
        record = _decoder.decode(raw)
    except FileNotFoundError:
        if not os.path.isdir(os.path.join(pool.context.layout.volumes, name)):
            return None  # deleted meanwhile
        return _damaged(name, "the record is missing")
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as failed:
        return _damaged(name, f"the record cannot be read: {failed}")
    used, problem = _used(pool, base, name, record)
    shared = 0
    if used and record.kind is VolumeKind.IMAGE and (cuts or record.source is not None):
        shared = min(used, shared_bytes(pool, os.path.join(pool.context.layout.volumes, name, "data")))
    size, kind = record.size_bytes, record.kind.value
    return VolumeRow(
        name,
        record.name,
        record.claim,
        kind,
        record.filesystem,
        size,
        used,
        shared,
        cuts,
        record.created_ns,
        problem,
    )


def _used(pool: Pool, base: int, name: str, record: VolumeRecord) -> tuple[int, str]:
    try:
        if record.kind is VolumeKind.DIRECTORY:
            path = os.path.join(pool.context.layout.volumes, name, "data")
            return pool.context.data_bytes(path, record.kind), "" if os.path.isdir(path) else "the data is missing"
        found = os.stat(f"{name}/data", dir_fd=base, follow_symlinks=False)
    except FileNotFoundError:
        return 0, "the data is missing"
    return min(found.st_size, found.st_blocks * 512), "" if found.st_size >= record.size_bytes else "cut short"


def _damaged(name: str, why: str) -> VolumeRow:
    return VolumeRow(name, "", "", "", "", 0, 0, 0, 0, 0, why)


def _snapshot_counts(snapshots: str, groups: str) -> Counter[str]:
    """How many snapshots each volume has; damaged ones are not counted."""
    found: Counter[str] = Counter()
    places = [os.path.join(snapshots, name) for name in os.listdir(snapshots)]
    for group in os.listdir(groups):
        members = os.path.join(groups, group, "members")
        if os.path.isdir(members):
            places += [os.path.join(members, name) for name in os.listdir(members)]
    for place in places:
        try:
            found[_cuts.decode(_read(f"{place}/snapshot.json")).volume_id] += 1
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
    return found


def _read(path: str, base: int | None = None) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=base)
    try:
        raw = os.read(fd, _USUAL_BYTES)  # a large buffer for each would cost more than all the rest
        while len(raw) % _USUAL_BYTES == 0 and (more := os.read(fd, _USUAL_BYTES)):
            raw += more
        return raw
    finally:
        os.close(fd)
