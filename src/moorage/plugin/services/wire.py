"""Between CSI messages and the plugin's own values. Nothing is decided here.

Owns: reading requests (InvalidRequest names the field) and writing responses.
May not touch: pools, the host.
Start reading at: `access_from`, `volume_message`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.wrappers_pb2 import Int64Value

from moorage.csi import csi_pb2 as pb
from moorage.csi.limits import STRING_BYTES
from moorage.errors import InvalidRequest
from moorage.plugin.access import Access, AccessMode
from moorage.plugin.settings import TOPOLOGY_KEY, PluginSettings
from moorage.storage import Group, HealthEntry, HealthStatus, Snapshot, Source, Volume, VolumeKind
from moorage.storage import VolumeCondition as Condition

TOKEN_KEY = "moorage.dev/fencing-token"
HasCapability = pb.NodeStageVolumeRequest | pb.NodePublishVolumeRequest | pb.ControllerPublishVolumeRequest
_HEALTH = {
    HealthStatus.DEGRADED: pb.DEGRADED,
    HealthStatus.INACCESSIBLE: pb.INACCESSIBLE,
    HealthStatus.DATA_LOSS: pb.DATA_LOSS,
}
_UNSAFE_FLAG = re.compile(r"[\x00-\x1f\x7f]")


def required(field: str, value: str) -> str:
    """The value of a field that must be there."""
    if not value:
        raise InvalidRequest(f"{field} is needed")
    return value


def access_from(field: str, capability: pb.VolumeCapability) -> Access:
    """One capability; exactly one access type and a known mode are needed."""
    kind = capability.WhichOneof("access_type")
    if kind is None:
        raise InvalidRequest(f"{field}: neither block nor mount is set")
    number = capability.access_mode.mode
    if number not in {mode.value for mode in AccessMode}:
        raise InvalidRequest(f"{field}.access_mode: mode {number} is not known")
    if kind == "block":
        return Access(AccessMode(number), is_block=True)
    flags = tuple(capability.mount.mount_flags)
    if any(_UNSAFE_FLAG.search(flag) for flag in flags):
        raise InvalidRequest(f"{field}.mount.mount_flags contain control characters")
    return Access(AccessMode(number), fs_type=capability.mount.fs_type, mount_flags=flags)


def needed_access_from(request: HasCapability) -> Access:
    """The `volume_capability` of a request that must have one."""
    if not request.HasField("volume_capability"):
        raise InvalidRequest("volume_capability is needed")
    return access_from("volume_capability", request.volume_capability)


def accesses_from(capabilities: Iterable[pb.VolumeCapability]) -> list[Access]:
    """Every entry of `volume_capabilities`, of which there must be one."""
    found = [access_from(f"volume_capabilities[{index}]", each) for index, each in enumerate(capabilities)]
    if not found:
        raise InvalidRequest("volume_capabilities: at least one is needed")
    return found


def size_range_from(field: str, capacity: pb.CapacityRange) -> tuple[int, int]:
    """`(required, limit)` in bytes; 0 means not given."""
    if capacity.required_bytes < 0 or capacity.limit_bytes < 0:
        raise InvalidRequest(f"{field}: sizes must not be negative")
    if 0 < capacity.limit_bytes < capacity.required_bytes:
        raise InvalidRequest(f"{field}: limit_bytes is smaller than required_bytes")
    return capacity.required_bytes, capacity.limit_bytes


def source_from(request: pb.CreateVolumeRequest) -> Source | None:
    """The source that is asked for. One of a type that is not known is refused: an empty volume is no copy of it."""
    if not request.HasField("volume_content_source"):
        return None
    content = request.volume_content_source
    kind = content.WhichOneof("type")
    if kind == "snapshot":
        return Source.snapshot(required("volume_content_source.snapshot.snapshot_id", content.snapshot.snapshot_id))
    if kind == "volume":
        return Source.volume(required("volume_content_source.volume.volume_id", content.volume.volume_id))
    raise InvalidRequest("volume_content_source is neither a snapshot nor a volume")


def topologies_from(requirement: pb.TopologyRequirement) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """`(requisite, preferred)` as plain segments."""
    field = "accessibility_requirements"
    return (
        [segments_from(f"{field}.requisite", each) for each in requirement.requisite],
        [segments_from(f"{field}.preferred", each) for each in requirement.preferred],
    )


def segments_from(field: str, topology: pb.Topology) -> dict[str, str]:
    """The segments of a place; keys that differ in case alone are one key with two values, which is no place."""
    if len({key.lower() for key in topology.segments}) != len(topology.segments):
        raise InvalidRequest(f"{field}: two keys differ in case alone")
    return dict(topology.segments)


def topology_messages(settings: PluginSettings) -> list[pb.Topology]:
    """Where a node-scope object is; a shared pool is everywhere, which no entry at all says."""
    return [] if settings.is_shared else [topology_message(settings)]


def topology_message(settings: PluginSettings) -> pb.Topology:
    return pb.Topology(segments={TOPOLOGY_KEY: settings.node_id})


def volume_message(volume: Volume, settings: PluginSettings) -> pb.Volume:
    return pb.Volume(
        volume_id=volume.id,
        capacity_bytes=volume.size_bytes,
        volume_context=context_of(volume),
        content_source=_source_message(volume.source),
        accessible_topology=topology_messages(settings),
    )


def context_of(volume: Volume) -> dict[str, str]:
    """What nodes are told: facts that never change, so that every response has the same."""
    context = {"kind": volume.kind.value, "pool": volume.pool}
    if volume.kind is VolumeKind.IMAGE:
        context["filesystem"] = volume.filesystem or "block"
    if volume.copy_path:
        context["copyPath"] = volume.copy_path.value
    return context


def snapshot_message(snapshot: Snapshot, settings: PluginSettings) -> pb.Snapshot:
    return pb.Snapshot(
        snapshot_id=snapshot.id,
        source_volume_id=snapshot.volume_id,
        size_bytes=snapshot.size_bytes,
        creation_time=timestamp(snapshot.created_ns),
        ready_to_use=True,
        group_snapshot_id=snapshot.group_id or "",
        accessible_topology=topology_messages(settings),
    )


def group_message(group: Group, settings: PluginSettings) -> pb.VolumeGroupSnapshot:
    return pb.VolumeGroupSnapshot(
        group_snapshot_id=group.id,
        snapshots=[snapshot_message(member, settings) for member in group.snapshots],
        creation_time=timestamp(group.created_ns),
        ready_to_use=True,
    )


def condition_message(entries: Sequence[HealthEntry]) -> pb.VolumeCondition:
    """All reasons; where their messages are too long for one string, each has an equal part of it."""
    condition = Condition.of(tuple(entries))
    if len(condition.message.encode()) > STRING_BYTES:
        room = STRING_BYTES - sum(len(f"{entry.reason}: ; ") for entry in entries)
        cut = [replace(entry, message=short(entry.message, room // len(entries))) for entry in entries]
        condition = Condition.of(tuple(cut))
    return pb.VolumeCondition(abnormal=condition.abnormal, message=short(condition.message))


def health_message(volume_id: str, entries: Sequence[HealthEntry]) -> pb.VolumeHealth:
    """No two entries share (status, reason), as the contract asks."""
    unique = {(entry.status, entry.reason): entry for entry in reversed(entries)}
    return pb.VolumeHealth(
        volume_id=volume_id,
        health_statuses=[
            pb.VolumeHealth.VolumeHealthEntry(
                status=_HEALTH[entry.status], reason=entry.reason, message=short(entry.message)
            )
            for entry in entries
            if unique[entry.status, entry.reason] is entry
        ],
    )


def short(message: str, size: int = STRING_BYTES) -> str:
    """A message as a field of an answer, where CSI allows as many bytes as in a request."""
    raw = message.encode()
    if len(raw) <= size:
        return message
    return raw[: max(0, size - 3)].decode(errors="ignore") + "…"  # which has 3 bytes


def timestamp(nanoseconds: int) -> Timestamp:
    return Timestamp(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)


def int64(value: int) -> Int64Value:
    return Int64Value(value=value)


def token_from(publish_context: Mapping[str, str]) -> int:
    """The fencing token that an attach handed out; 0, which is never one, when it is missing or no number."""
    text = publish_context.get(TOKEN_KEY, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _source_message(source: Source | None) -> pb.VolumeContentSource | None:
    if source is None:
        return None
    if source.kind == "snapshot":
        return pb.VolumeContentSource(snapshot=pb.VolumeContentSource.SnapshotSource(snapshot_id=source.id))
    return pb.VolumeContentSource(volume=pb.VolumeContentSource.VolumeSource(volume_id=source.id))
