"""The values that a pool takes and gives.

Owns: the public, frozen types of `storage`.
May not touch: the disk.
Start reading at: `Volume`, `CreateVolume`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

from moorage.host.extents import Range
from moorage.storage.ids import GroupId, SnapshotId, VolumeId

T = TypeVar("T")
MIB = 1024 * 1024
TRASH_RETENTION_S = 24 * 3600.0
"""How long deleted volumes and snapshots can be brought back, unless a flag, a class or full pools say otherwise."""


class VolumeKind(StrEnum):
    """An image is a file behind a loop device; a directory is shared as it is."""

    IMAGE = "image"
    DIRECTORY = "directory"


class PoolScope(StrEnum):
    """Who sees the pool: one node, or all of them."""

    NODE = "node"
    SHARED = "shared"


class CopyPath(StrEnum):
    """How the bytes of a copy came to be; always reported."""

    NONE = ""
    REFLINK = "reflink"
    SPARSE_COPY = "sparse-copy"
    BTRFS_SNAPSHOT = "btrfs-snapshot"
    REFLINK_FILES = "reflink-files"
    COPY_FILES = "copy-files"


class InUse(StrEnum):
    """What a copy without reflink does with a source in use.

    REFUSE: an error with advice. FREEZE: hold the writers for the copy, up to a bound.
    LIVE: directories only; file by file while it changes, so not one moment in time.
    """

    REFUSE = "refuse"
    FREEZE = "freeze"
    LIVE = "live"


@dataclass(frozen=True, slots=True)
class Source:
    """What a volume was made from: a snapshot or another volume of the same pool."""

    kind: str
    id: str

    @staticmethod
    def snapshot(ident: str) -> "Source":
        return Source("snapshot", ident)

    @staticmethod
    def volume(ident: str) -> "Source":
        return Source("volume", ident)


@dataclass(frozen=True, slots=True)
class CreateVolume:
    """A wish for a volume.

    `limit_bytes` 0 means none. `filesystem` is what a first stage makes on an image; empty means
    that it is only ever a raw block device. `parameters` are compared when the name exists already,
    `mutable` are not. `ephemeral` names the pod's target path that the volume lives and dies with.
    `smallest_bytes` takes the place of the filesystem's usual smallest size. `claim` is the namespace and name of the
    claim that the volume is made for; it is only shown.
    """

    name: str
    required_bytes: int = 0
    limit_bytes: int = 0
    smallest_bytes: int = 0
    kind: VolumeKind = VolumeKind.IMAGE
    filesystem: str = "ext4"
    thick: bool = False
    source: Source | None = None
    in_use: InUse = InUse.REFUSE
    parameters: Mapping[str, str] = field(default_factory=dict)
    mutable: Mapping[str, str] = field(default_factory=dict)
    ephemeral: str = ""
    claim: str = ""


@dataclass(frozen=True, slots=True)
class Volume:
    """One volume as its record says; `data` is the image file or the directory."""

    id: VolumeId
    name: str
    pool: str
    kind: VolumeKind
    size_bytes: int
    filesystem: str
    thick: bool
    source: Source | None
    copy_path: CopyPath
    in_use: InUse
    parameters: Mapping[str, str]
    mutable: Mapping[str, str]
    ephemeral: str
    claim: str
    size_enforced: bool
    created_ns: int
    data: Path


@dataclass(frozen=True, slots=True)
class CreateSnapshot:
    """A wish for a snapshot; without `in_use` the volume's own setting holds."""

    name: str
    volume_id: str
    in_use: InUse | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot. `size_bytes` is the size to restore to at least, `data_bytes` what it held."""

    id: SnapshotId
    name: str
    pool: str
    volume_id: VolumeId
    kind: VolumeKind
    size_bytes: int
    data_bytes: int
    filesystem: str
    copy_path: CopyPath
    group_id: GroupId | None
    parameters: Mapping[str, str]
    created_ns: int
    data: Path


@dataclass(frozen=True, slots=True)
class Group:
    """A group snapshot: all members from one moment."""

    id: GroupId
    name: str
    pool: str
    volume_ids: tuple[VolumeId, ...]
    snapshots: tuple[Snapshot, ...]
    parameters: Mapping[str, str]
    created_ns: int
    held_ms: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """A pool's room. `available_bytes` is what the next volume can have."""

    total_bytes: int
    free_bytes: int
    reserve_bytes: int
    promised_bytes: int
    reclaimable_bytes: int
    available_bytes: int
    largest_bytes: int


class HealthStatus(StrEnum):
    DEGRADED = "DEGRADED"
    INACCESSIBLE = "INACCESSIBLE"
    DATA_LOSS = "DATA_LOSS"


@dataclass(frozen=True, slots=True)
class HealthEntry:
    """One adverse fact: how bad, a CamelCase reason for machines, a sentence for people."""

    status: HealthStatus
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class VolumeCondition:
    """The same facts in the form of CSI 1.12."""

    abnormal: bool
    message: str

    @staticmethod
    def of(entries: tuple[HealthEntry, ...]) -> "VolumeCondition":
        if not entries:
            return VolumeCondition(False, "the volume is healthy")
        return VolumeCondition(True, "; ".join(f"{entry.reason}: {entry.message}" for entry in entries))


@dataclass(frozen=True, slots=True)
class VolumeHealth:
    volume_id: VolumeId
    entries: tuple[HealthEntry, ...]


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of many, in order of id. `next` continues after the last; empty means the end."""

    items: tuple[T, ...]
    next: str = ""


@dataclass(frozen=True, slots=True)
class Trashed:
    """A deleted volume, snapshot or group that can still come back."""

    entry: str
    what: str
    id: str
    name: str
    claim: str
    deleted_ns: int
    expires_ns: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class BlockDiff:
    """Ranges of a snapshot. `method` says how they were found; `ranges` reads as it goes."""

    size_bytes: int
    method: str
    ranges: Iterator[Range]


@dataclass(frozen=True, slots=True)
class Attachment:
    """A volume given to a node. A higher token fences every lower one."""

    volume_id: VolumeId
    node_id: str
    token: int
    readonly: bool
    mode: str


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How a pool is served. `owner` is the plugin; the command line opens pools as a guest."""

    name: str
    directory: Path
    scope: PoolScope = PoolScope.NODE
    owner: bool = True
    reserve_fraction: float = 0.05
    overcommit: float = 1.0
    trash_retention_s: float = TRASH_RETENTION_S
    freeze_bound_s: float = 10.0
    copy_freeze_bound_s: float = 60.0
    background: bool = True
