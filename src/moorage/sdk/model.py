"""What drivers are asked for and what they answer with, as plain values.

Owns: the public types of requests and results. They know neither gRPC nor protobuf.
Start reading at: `CreateVolume`, `Volume`, `NodeVolume`.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path

from moorage.sdk.errors import OutOfRange

Segments = Mapping[str, str]  # a place: topology keys and their values


class AccessMode(IntEnum):
    """CSI access modes, with their numbers on the wire."""

    SINGLE_NODE_WRITER = 1
    SINGLE_NODE_READER_ONLY = 2
    MULTI_NODE_READER_ONLY = 3
    MULTI_NODE_SINGLE_WRITER = 4
    MULTI_NODE_MULTI_WRITER = 5
    SINGLE_NODE_SINGLE_WRITER = 6
    SINGLE_NODE_MULTI_WRITER = 7

    @property
    def is_read_only(self) -> bool:
        return self in (AccessMode.SINGLE_NODE_READER_ONLY, AccessMode.MULTI_NODE_READER_ONLY)

    @property
    def is_multi_node(self) -> bool:
        return self.name.startswith("MULTI_NODE")


class Secrets(dict[str, str]):
    """Secrets of a request. Their values never appear in a representation, so they cannot reach a log by accident."""

    def __repr__(self) -> str:
        return f"Secrets({', '.join(sorted(self))})"

    __str__ = __repr__


@dataclass(frozen=True, slots=True)
class Access:
    """How a caller wants to use a volume: as a block device, or as a filesystem."""

    mode: AccessMode = AccessMode.SINGLE_NODE_WRITER
    is_block: bool = False
    fs_type: str = ""
    mount_flags: tuple[str, ...] = field(default=(), repr=False)  # they may hold credentials
    mount_group: int | None = None


def why_inconsistent(accesses: Iterable[Access]) -> str:
    """Return why one volume cannot have all of these at once, "" if it can."""
    wanted = list(accesses)
    if len({access.is_block for access in wanted}) > 1:
        return "one volume cannot be both a block device and mounted"
    filesystems = {access.fs_type for access in wanted if access.fs_type}
    if len(filesystems) > 1:
        return f"one volume cannot have several filesystems ({', '.join(sorted(filesystems))})"
    return ""


@dataclass(frozen=True, slots=True)
class SizeRange:
    """The size that a caller needs and the size that it allows, in bytes; 0 means that it did not say."""

    required: int = 0
    limit: int = 0

    def choose(self, *, default: int, step: int = 1, least: int = 0, most: int = 0) -> int:
        """Return the smallest size that suits: a multiple of `step`, at least `least`.

        Raises OutOfRange if that is more than the caller's limit, or than `most`.
        """
        wanted = max(self.required or min(default, self.limit or default), least)
        chosen = -(-wanted // step) * step
        for limit, whose in ((self.limit, "the limit of the request"), (most, "the largest volume")):
            if limit and chosen > limit:
                raise OutOfRange(f"{chosen} bytes are needed, which is more than {whose}, {limit} bytes")
        return chosen

    def admits(self, size: int) -> bool:
        """Return whether a volume of this size satisfies the request."""
        return size >= self.required and (not self.limit or size <= self.limit)


class SourceKind(StrEnum):
    SNAPSHOT = "snapshot"
    VOLUME = "volume"


@dataclass(frozen=True, slots=True)
class Source:
    """What a new volume is a copy of."""

    kind: SourceKind
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A volume. `context` is handed to every node call; it must be the same in every answer."""

    id: str
    size_bytes: int
    context: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] | None = None  # of the class; None: not compared with a repeated request
    source: Source | None = None
    topology: Sequence[Segments] = ()  # where it can be used; empty: everywhere

    def is_usable_in(self, place: Segments) -> bool:
        """Return whether the volume can be used in a place. Keys are compared without regard to case."""
        given = {key.lower(): value for key, value in place.items()}
        return not self.topology or any(
            all(given.get(key.lower()) == value for key, value in own.items()) for own in self.topology
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateVolume:
    """A request for a volume. `volume_id` is derived from `name`: the same name always has the same id."""

    name: str
    volume_id: str
    size: SizeRange = SizeRange()
    accesses: Sequence[Access] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    mutable_parameters: Mapping[str, str] = field(default_factory=dict)
    source: Source | None = None
    requisite: Sequence[Segments] = ()
    preferred: Sequence[Segments] = ()
    secrets: Secrets = field(default_factory=Secrets)

    @property
    def is_block(self) -> bool:
        return any(access.is_block for access in self.accesses)

    def volume(
        self, size_bytes: int, *, context: Mapping[str, str] | None = None, topology: Sequence[Segments] = ()
    ) -> Volume:
        """Return the volume that answers this request."""
        return Volume(
            id=self.volume_id,
            size_bytes=size_bytes,
            context=context or {},
            parameters=self.parameters,
            source=self.source,
            topology=topology,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A snapshot of one volume. `created_ns` is in nanoseconds since the epoch."""

    id: str
    volume_id: str
    size_bytes: int
    created_ns: int = field(default_factory=time.time_ns)
    is_ready: bool = True
    group_id: str = ""
    topology: Sequence[Segments] = ()  # where volumes can be made from it; empty: everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSnapshot:
    """A request for a snapshot. `snapshot_id` is derived from `name`."""

    name: str
    snapshot_id: str
    volume: Volume
    parameters: Mapping[str, str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)

    def snapshot(self, *, size_bytes: int = 0, is_ready: bool = True) -> Snapshot:
        """Return the snapshot that answers this request, made now."""
        return Snapshot(
            id=self.snapshot_id,
            volume_id=self.volume.id,
            size_bytes=size_bytes or self.volume.size_bytes,
            is_ready=is_ready,
            topology=self.volume.topology,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Snapshots of several volumes, taken at one moment."""

    id: str
    snapshots: Sequence[Snapshot]
    created_ns: int = field(default_factory=time.time_ns)
    is_ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateGroup:
    """A request for a group snapshot. `snapshot_ids` are the ids for its members, in the order of `volumes`."""

    name: str
    group_id: str
    volumes: Sequence[Volume]
    snapshot_ids: Sequence[str]
    parameters: Mapping[str, str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)


@dataclass(frozen=True, slots=True)
class Expanded:
    """The size of a volume after `expand_volume`, and whether a node has to grow the filesystem as well."""

    size_bytes: int
    needs_node: bool = False


@dataclass(frozen=True, slots=True)
class Attachment:
    """A volume on a node. `context` is handed to the node calls as `publish_context`."""

    context: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much can still be provisioned, and how small and large one volume may be (None: not known)."""

    available_bytes: int
    smallest_bytes: int | None = None
    largest_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """How full a published volume is. A block device has only `total_bytes`."""

    total_bytes: int
    used_bytes: int = 0
    available_bytes: int = 0
    total_inodes: int | None = None  # of what has any
    used_inodes: int = 0
    available_inodes: int = 0


class HealthKind(StrEnum):
    """How bad it is: slower or at risk, not usable now, or lost."""

    DEGRADED = "DEGRADED"
    INACCESSIBLE = "INACCESSIBLE"
    DATA_LOSS = "DATA_LOSS"


@dataclass(frozen=True, slots=True)
class Health:
    """One thing that is wrong with a volume."""

    message: str
    reason: str = "Unhealthy"
    kind: HealthKind = HealthKind.DEGRADED


@dataclass(frozen=True, slots=True)
class StorageHealth:
    """One thing that is wrong with the storage as a whole, seen from this node."""

    message: str
    reason: str = "Unhealthy"
    is_unreachable: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A range of a snapshot that holds data, or that differs."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVolume:
    """A volume as a node call describes it: an id, and what the controller handed over."""

    id: str
    access: Access = Access()
    is_read_only: bool = False
    context: Mapping[str, str] = field(default_factory=dict)
    publish_context: Mapping[str, str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)
    staging: Path | None = None

    @property
    def is_ephemeral(self) -> bool:
        """Whether the volume lives with its pod, and exists only from publish to unpublish."""
        return self.context.get("csi.storage.k8s.io/ephemeral") == "true"
