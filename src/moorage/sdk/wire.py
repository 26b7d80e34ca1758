"""CSI messages as plain values, and back.

Owns: which fields a request must have, and the words of the refusal. Generated messages go no further than here and
the services.
Start reading at: `access_from`, `create_volume_from`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.wrappers_pb2 import Int64Value

from moorage.csi import csi_pb2 as pb
from moorage.csi.limits import STRING_BYTES
from moorage.errors import InvalidRequest
from moorage.sdk.model import (
    Access,
    AccessMode,
    Capacity,
    CreateVolume,
    Group,
    Health,
    Secrets,
    Segments,
    SizeRange,
    Snapshot,
    Source,
    SourceKind,
    Stats,
    StorageHealth,
    Volume,
    why_inconsistent,
)
from moorage.storage.ids import id_from

_UNSAFE_FLAG = re.compile(r"[\x00-\x1f\x7f]")
_LARGEST_GID = 2**32 - 2
_MODES: frozenset[int] = frozenset(AccessMode)


def required(field: str, value: str) -> str:
    """Return the value of a field. Raises InvalidArgument if it is missing."""
    if not value:
        raise InvalidRequest(f"{field} is needed")
    return value


def access_from(field: str, capability: pb.VolumeCapability) -> Access:
    """Return one capability. Raises InvalidArgument unless it has an access type and a known mode."""
    kind = capability.WhichOneof("access_type")
    if kind is None:
        raise InvalidRequest(f"{field}: neither block nor mount is set")
    number = capability.access_mode.mode
    if number not in _MODES:
        raise InvalidRequest(f"{field}.access_mode: mode {number} is not known")
    if kind == "block":
        return Access(AccessMode(number), is_block=True)
    flags = tuple(capability.mount.mount_flags)
    if any(_UNSAFE_FLAG.search(flag) for flag in flags):
        raise InvalidRequest(f"{field}.mount.mount_flags contain control characters")
    group = _gid(field, capability.mount.volume_mount_group)
    return Access(AccessMode(number), fs_type=capability.mount.fs_type, mount_flags=flags, mount_group=group)


def needed_access_from(request: Any) -> Access:
    """Return the `volume_capability` of a request. Raises InvalidArgument if it is missing."""
    if not request.HasField("volume_capability"):
        raise InvalidRequest("volume_capability is needed")
    return access_from("volume_capability", request.volume_capability)


def access_if_given(request: Any) -> Access | None:
    """Return the `volume_capability` of a request, None if there is none."""
    return needed_access_from(request) if request.HasField("volume_capability") else None


def accesses_from(capabilities: Iterable[pb.VolumeCapability]) -> list[Access]:
    """Return all of `volume_capabilities`. Raises InvalidArgument if there is none."""
    found = [access_from(f"volume_capabilities[{index}]", each) for index, each in enumerate(capabilities)]
    if not found:
        raise InvalidRequest("volume_capabilities: at least one is needed")
    return found


def size_from(field: str, capacity: pb.CapacityRange) -> SizeRange:
    """Return a size range. Raises InvalidArgument if it is negative or empty."""
    if capacity.required_bytes < 0 or capacity.limit_bytes < 0:
        raise InvalidRequest(f"{field}: sizes must not be negative")
    if 0 < capacity.limit_bytes < capacity.required_bytes:
        raise InvalidRequest(f"{field}: limit_bytes is smaller than required_bytes")
    return SizeRange(capacity.required_bytes, capacity.limit_bytes)


def source_from(request: pb.CreateVolumeRequest) -> Source | None:
    """Return what the volume is to be a copy of, None for an empty one."""
    if not request.HasField("volume_content_source"):
        return None
    content, field = request.volume_content_source, "volume_content_source"
    match content.WhichOneof("type"):
        case "snapshot":
            return Source(SourceKind.SNAPSHOT, required(f"{field}.snapshot_id", content.snapshot.snapshot_id))
        case "volume":
            return Source(SourceKind.VOLUME, required(f"{field}.volume_id", content.volume.volume_id))
    raise InvalidRequest(f"{field} is neither a snapshot nor a volume")


def create_volume_from(request: pb.CreateVolumeRequest) -> CreateVolume:
    """Return a checked request for a volume."""
    name = required("name", request.name)
    accesses = accesses_from(request.volume_capabilities)
    if why := why_inconsistent(accesses):
        raise InvalidRequest(f"volume_capabilities: {why}")
    requisite, preferred = places_from(request.accessibility_requirements)
    return CreateVolume(
        name=name,
        volume_id=id_from(name),
        size=size_from("capacity_range", request.capacity_range),
        accesses=accesses,
        parameters=dict(request.parameters),
        mutable_parameters=dict(request.mutable_parameters),
        source=source_from(request),
        requisite=requisite,
        preferred=preferred,
        secrets=Secrets(request.secrets),
    )


def places_from(requirement: pb.TopologyRequirement) -> tuple[list[Segments], list[Segments]]:
    """Return the requisite and the preferred places."""
    field = "accessibility_requirements"
    return (
        [segments_from(f"{field}.requisite", each) for each in requirement.requisite],
        [segments_from(f"{field}.preferred", each) for each in requirement.preferred],
    )


def segments_from(field: str, place: pb.Topology) -> Segments:
    """Return the segments of a place. Raises InvalidArgument if two keys differ only in case."""
    if len({key.lower() for key in place.segments}) != len(place.segments):
        raise InvalidRequest(f"{field}: two keys differ in case alone")
    return dict(place.segments)


def volume_message(volume: Volume) -> pb.Volume:
    return pb.Volume(
        volume_id=volume.id,
        capacity_bytes=volume.size_bytes,
        volume_context=volume.context,
        content_source=_source_message(volume.source),
        accessible_topology=_places(volume.topology),
    )


def snapshot_message(snapshot: Snapshot) -> pb.Snapshot:
    return pb.Snapshot(
        snapshot_id=snapshot.id,
        source_volume_id=snapshot.volume_id,
        size_bytes=snapshot.size_bytes,
        creation_time=timestamp(snapshot.created_ns),
        ready_to_use=snapshot.is_ready,
        group_snapshot_id=snapshot.group_id,
        accessible_topology=_places(snapshot.topology),
    )


def group_message(group: Group) -> pb.VolumeGroupSnapshot:
    return pb.VolumeGroupSnapshot(
        group_snapshot_id=group.id,
        snapshots=[snapshot_message(snapshot) for snapshot in group.snapshots],
        creation_time=timestamp(group.created_ns),
        ready_to_use=group.is_ready,
    )


def capacity_message(found: Capacity) -> pb.GetCapacityResponse:
    smallest, largest = found.smallest_bytes, found.largest_bytes
    return pb.GetCapacityResponse(
        available_capacity=max(0, found.available_bytes),
        minimum_volume_size=None if smallest is None else Int64Value(value=smallest),
        maximum_volume_size=None if largest is None else Int64Value(value=max(0, largest)),
    )


def usage_messages(found: Stats) -> list[pb.VolumeUsage]:
    """Return bytes and, of what has any, inodes."""
    kind = pb.VolumeUsage
    size, used, free = found.total_bytes, found.used_bytes, found.available_bytes
    usage = [kind(unit=kind.BYTES, total=size, used=used, available=free)]
    if found.total_inodes is not None:
        total, used, free = found.total_inodes, found.used_inodes, found.available_inodes
        usage.append(kind(unit=kind.INODES, total=total, used=used, available=free))
    return usage


def condition_message(found: Sequence[Health]) -> pb.VolumeCondition:
    """Return all reasons. If their messages are too long for one string, each gets an equal part of it."""
    text = "; ".join(f"{one.reason}: {one.message}" for one in found) or "the volume is healthy"
    if len(text.encode()) > STRING_BYTES and found:
        room = STRING_BYTES - sum(len(f"{one.reason}: ; ") for one in found)
        text = "; ".join(f"{one.reason}: {shortened(one.message, room // len(found))}" for one in found)
    return pb.VolumeCondition(abnormal=bool(found), message=shortened(text))


def health_message(volume_id: str, found: Sequence[Health]) -> pb.VolumeHealth:
    """Return all that is wrong; of entries with the same kind and reason only the first, as the contract asks."""
    unique = {(one.kind, one.reason): one for one in reversed(found)}
    entry = pb.VolumeHealth.VolumeHealthEntry
    entries = [
        entry(status=pb.VolumeHealthErrorType.Value(one.kind), reason=one.reason, message=shortened(one.message))
        for one in found
        if unique[one.kind, one.reason] is one
    ]
    return pb.VolumeHealth(volume_id=volume_id, health_statuses=entries)


def storage_health_message(found: Sequence[StorageHealth]) -> pb.NodeGetStorageHealthResponse:
    entry = pb.NodeGetStorageHealthResponse.StorageBackendHealth
    entries = [
        entry(
            status=pb.STORAGE_UNREACHABLE if one.is_unreachable else pb.STORAGE_DEGRADED,
            reason=one.reason,
            message=shortened(one.message),
        )
        for one in found
    ]
    return pb.NodeGetStorageHealthResponse(backend_health=entries)


def shortened(text: str, size: int = STRING_BYTES) -> str:
    """Return a message that fits a field of an answer. Bytes that are no text, as in names of files, are escaped."""
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= size:
        return raw.decode()
    return raw[: max(0, size - 3)].decode(errors="ignore") + "…"  # which has 3 bytes


def timestamp(nanoseconds: int) -> Timestamp:
    return Timestamp(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)


def _places(topology: Sequence[Segments]) -> list[pb.Topology]:
    return [pb.Topology(segments=dict(place)) for place in topology]


def _source_message(source: Source | None) -> pb.VolumeContentSource | None:
    if source is None:
        return None
    if source.kind is SourceKind.SNAPSHOT:
        return pb.VolumeContentSource(snapshot=pb.VolumeContentSource.SnapshotSource(snapshot_id=source.id))
    return pb.VolumeContentSource(volume=pb.VolumeContentSource.VolumeSource(volume_id=source.id))


def _gid(field: str, text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text[:11]) > _LARGEST_GID:
        raise InvalidRequest(f"{field}.mount.volume_mount_group {text[:32]!r} is not a group id")
    return int(text)
