"""Records: the JSON beside each volume's, snapshot's and group's data.

Owns: the on-disk field names, and the translation to and from the public types.
May not touch: where records lie; see `layout`.
Start reading at: `VolumeRecord`.

Fields that a newer version added are ignored; a missing or wrong one makes the record damaged.
"""

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from moorage.storage.errors import DamagedRecord
from moorage.storage.ids import GroupId, SnapshotId, VolumeId
from moorage.storage.model import CopyPath, Group, InUse, Snapshot, Source, Volume, VolumeKind

Size = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class SourceRecord(msgspec.Struct, frozen=True):
    kind: str
    id: str


class VolumeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    id: Text
    name: Text
    kind: VolumeKind
    size_bytes: Size
    created_ns: Size
    filesystem: str = ""
    thick: bool = False
    source: SourceRecord | None = None
    copy_path: CopyPath = CopyPath.NONE
    in_use: InUse = InUse.REFUSE
    parameters: dict[str, str] = {}
    mutable: dict[str, str] = {}
    ephemeral: str = ""
    claim: str = ""
    size_enforced: bool = True

    def public(self, pool: str, data: Path) -> Volume:
        source = None if self.source is None else Source(self.source.kind, self.source.id)
        return Volume(
            id=VolumeId(self.id),
            name=self.name,
            pool=pool,
            kind=self.kind,
            size_bytes=self.size_bytes,
            filesystem=self.filesystem,
            thick=self.thick,
            source=source,
            copy_path=self.copy_path,
            in_use=self.in_use,
            parameters=self.parameters,
            mutable=self.mutable,
            ephemeral=self.ephemeral,
            claim=self.claim,
            size_enforced=self.size_enforced,
            created_ns=self.created_ns,
            data=data,
        )


class SnapshotRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    id: Text
    name: Text
    volume_id: Text
    kind: VolumeKind
    size_bytes: Size
    data_bytes: Size
    created_ns: Size
    filesystem: str = ""
    copy_path: CopyPath = CopyPath.NONE
    group_id: str = ""
    parameters: dict[str, str] = {}

    def public(self, pool: str, data: Path) -> Snapshot:
        return Snapshot(
            id=SnapshotId(self.id),
            name=self.name,
            pool=pool,
            volume_id=VolumeId(self.volume_id),
            kind=self.kind,
            size_bytes=self.size_bytes,
            data_bytes=self.data_bytes,
            filesystem=self.filesystem,
            copy_path=self.copy_path,
            group_id=GroupId(self.group_id) if self.group_id else None,
            parameters=self.parameters,
            created_ns=self.created_ns,
            data=data,
        )


class GroupRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    id: Text
    name: Text
    volume_ids: list[str]
    created_ns: Size
    held_ms: float = 0.0
    parameters: dict[str, str] = {}

    def public(self, pool: str, snapshots: tuple[Snapshot, ...]) -> Group:
        return Group(
            id=GroupId(self.id),
            name=self.name,
            pool=pool,
            volume_ids=tuple(VolumeId(ident) for ident in self.volume_ids),
            snapshots=snapshots,
            parameters=self.parameters,
            created_ns=self.created_ns,
            held_ms=self.held_ms,
        )


class PoolRecord(msgspec.Struct, frozen=True):
    """`pool.json`: the format of everything below it."""

    format: Annotated[int, msgspec.Meta(ge=1)]
    id: Text
    scope: str = "node"


R = TypeVar("R", VolumeRecord, SnapshotRecord, GroupRecord, PoolRecord)


def encoded(record: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decoded(raw: bytes, kind: type[R], path: Path | str, ident: str = "") -> R:
    """A record from its bytes; what does not decode, or belongs elsewhere, is damaged."""
    if not raw:
        raise DamagedRecord(path, "it is empty")
    try:
        record = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as failed:  # ValidationError is one of these
        raise DamagedRecord(path, str(failed)) from failed
    if ident and getattr(record, "id", "") != ident:
        raise DamagedRecord(path, f"it says that it belongs to {getattr(record, 'id', '')!r}")
    return record
