"""The controller side of the scripted driver: volumes, snapshots, groups and attachments in memory.

Owns: `Backend`, which survives restarts of the driver as a real back end does, and the work of each controller method.
Start reading at: `ControllerService`.
"""

from dataclasses import dataclass, field
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError


@dataclass
class Backend:
    """What exists, independent of the process that serves it. Tests read it and write to it."""

    volumes: dict[str, pb.Volume] = field(default_factory=dict)
    ids_by_name: dict[str, str] = field(default_factory=dict)
    published: dict[str, set[str]] = field(default_factory=dict)
    snapshots: dict[str, pb.Snapshot] = field(default_factory=dict)
    groups: dict[str, pb.VolumeGroupSnapshot] = field(default_factory=dict)
    parameters: dict[str, dict[str, str]] = field(default_factory=dict)
    abnormal: dict[str, str] = field(default_factory=dict)


class ControllerService:
    """The Controller and GroupController methods of a driver. Override one to change what it does."""

    def __init__(self) -> None:
        self.backend = Backend()
        self.topology: dict[str, str] = {}
        self.capacity_bytes = 1 << 40
        self.publish_context = {"device": "/dev/x"}
        self.node_expansion = False
        self.makes_small_by = 0
        self.ready_after = 0  # so many calls of CreateSnapshot answer that the snapshot is not ready yet

    def count(self, method: str) -> int:
        """Return how many calls of a method have arrived."""
        raise NotImplementedError

    async def CreateVolume(self, request: Any) -> Any:
        backend = self.backend
        if request.name not in backend.ids_by_name:
            volume_id = f"vol-{len(backend.ids_by_name)}-{request.name[-12:]}"
            volume = pb.Volume(volume_id=volume_id, volume_context={"made": "yes"})
            volume.capacity_bytes = request.capacity_range.required_bytes - self.makes_small_by
            if request.HasField("volume_content_source"):
                volume.content_source.CopyFrom(request.volume_content_source)
            preferred = request.accessibility_requirements.preferred
            if preferred:
                volume.accessible_topology.append(preferred[0])
            elif self.topology:
                volume.accessible_topology.append(pb.Topology(segments=self.topology))
            backend.ids_by_name[request.name] = volume_id
            backend.volumes[volume_id] = volume
        return pb.CreateVolumeResponse(volume=backend.volumes[backend.ids_by_name[request.name]])

    async def DeleteVolume(self, request: Any) -> Any:
        backend = self.backend
        if backend.published.get(request.volume_id):
            raise CsiError("DeleteVolume", "FAILED_PRECONDITION", "the volume is published")
        backend.volumes.pop(request.volume_id, None)
        for name in [name for name, each in backend.ids_by_name.items() if each == request.volume_id]:
            del backend.ids_by_name[name]
        return pb.DeleteVolumeResponse()

    async def ControllerPublishVolume(self, request: Any) -> Any:
        self._known(request.volume_id)
        self.backend.published.setdefault(request.volume_id, set()).add(request.node_id)
        return pb.ControllerPublishVolumeResponse(publish_context=self.publish_context)

    async def ControllerUnpublishVolume(self, request: Any) -> Any:
        self.backend.published.get(request.volume_id, set()).discard(request.node_id)
        return pb.ControllerUnpublishVolumeResponse()

    async def ListVolumes(self, request: Any) -> Any:
        entry = pb.ListVolumesResponse.Entry
        status = pb.ListVolumesResponse.VolumeStatus
        backend = self.backend
        entries = []
        for volume in backend.volumes.values():
            condition = pb.VolumeCondition(
                abnormal=volume.volume_id in backend.abnormal, message=backend.abnormal.get(volume.volume_id, "fine")
            )
            nodes = sorted(backend.published.get(volume.volume_id, ()))
            entries.append(entry(volume=volume, status=status(published_node_ids=nodes, volume_condition=condition)))
        start = int(request.starting_token or 0)
        end = start + (request.max_entries or len(entries))
        return pb.ListVolumesResponse(entries=entries[start:end], next_token=str(end) if end < len(entries) else "")

    async def ControllerGetVolume(self, request: Any) -> Any:
        volume = self._known(request.volume_id)
        trouble = self.backend.abnormal.get(request.volume_id)
        condition = pb.VolumeCondition(abnormal=trouble is not None, message=trouble or "fine")
        status = pb.ControllerGetVolumeResponse.VolumeStatus(volume_condition=condition)
        return pb.ControllerGetVolumeResponse(volume=volume, status=status)

    def _health(self, volume_id: str) -> pb.VolumeHealth:
        health = pb.VolumeHealth(volume_id=volume_id)
        if volume_id in self.backend.abnormal:
            health.health_statuses.add(
                status=pb.VolumeHealthErrorType.DEGRADED, reason="Scripted", message=self.backend.abnormal[volume_id]
            )
        return health

    async def ControllerGetVolumeHealth(self, request: Any) -> Any:
        self._known(request.volume_id)
        return pb.ControllerGetVolumeHealthResponse(volume_health=self._health(request.volume_id))

    async def ControllerListVolumeHealth(self, request: Any) -> Any:
        """Only what is not well, one volume to a page, so that callers have to follow the token."""
        sick = sorted(self.backend.abnormal)
        at = int(request.starting_token or 0)
        entries = [self._health(volume_id) for volume_id in sick[at : at + 1]]
        token = str(at + 1) if at + 1 < len(sick) else ""
        return pb.ControllerListVolumeHealthResponse(entries=entries, next_token=token)

    async def GetCapacity(self, request: Any) -> Any:
        used = sum(volume.capacity_bytes for volume in self.backend.volumes.values())
        return pb.GetCapacityResponse(available_capacity=max(0, self.capacity_bytes - used))

    async def CreateSnapshot(self, request: Any) -> Any:
        snapshots = self.backend.snapshots
        snapshot_id = f"snap-{request.name}"
        if snapshot_id not in snapshots:
            source = self._known(request.source_volume_id)
            snapshots[snapshot_id] = pb.Snapshot(
                snapshot_id=snapshot_id,
                source_volume_id=request.source_volume_id,
                size_bytes=source.capacity_bytes,
                creation_time=Timestamp(seconds=1_700_000_000, nanos=5),
            )
        is_ready = self.count("CreateSnapshot") > self.ready_after
        snapshots[snapshot_id].ready_to_use = is_ready
        return pb.CreateSnapshotResponse(snapshot=snapshots[snapshot_id])

    async def DeleteSnapshot(self, request: Any) -> Any:
        self.backend.snapshots.pop(request.snapshot_id, None)
        return pb.DeleteSnapshotResponse()

    async def ListSnapshots(self, request: Any) -> Any:
        entry = pb.ListSnapshotsResponse.Entry
        found = [s for s in self.backend.snapshots.values() if request.snapshot_id in ("", s.snapshot_id)]
        return pb.ListSnapshotsResponse(entries=[entry(snapshot=snapshot) for snapshot in found])

    async def ControllerExpandVolume(self, request: Any) -> Any:
        volume = self._known(request.volume_id)
        volume.capacity_bytes = max(volume.capacity_bytes, request.capacity_range.required_bytes)
        return pb.ControllerExpandVolumeResponse(
            capacity_bytes=volume.capacity_bytes, node_expansion_required=self.node_expansion
        )

    async def ControllerModifyVolume(self, request: Any) -> Any:
        self._known(request.volume_id)
        self.backend.parameters[request.volume_id] = dict(request.mutable_parameters)
        return pb.ControllerModifyVolumeResponse()

    async def CreateVolumeGroupSnapshot(self, request: Any) -> Any:
        group_id = f"group-{request.name}"
        if group_id not in self.backend.groups:
            group = pb.VolumeGroupSnapshot(
                group_snapshot_id=group_id, creation_time=Timestamp(seconds=1_700_000_000), ready_to_use=True
            )
            for volume_id in request.source_volume_ids:
                volume = self._known(volume_id)
                member = pb.Snapshot(
                    snapshot_id=f"{group_id}-{volume_id}",
                    source_volume_id=volume_id,
                    size_bytes=volume.capacity_bytes,
                    creation_time=Timestamp(seconds=1_700_000_000),
                    ready_to_use=True,
                    group_snapshot_id=group_id,
                )
                group.snapshots.append(member)
                self.backend.snapshots[member.snapshot_id] = member
            self.backend.groups[group_id] = group
        return pb.CreateVolumeGroupSnapshotResponse(group_snapshot=self.backend.groups[group_id])

    async def GetVolumeGroupSnapshot(self, request: Any) -> Any:
        found = self.backend.groups.get(request.group_snapshot_id)
        if found is None:
            raise CsiError("GetVolumeGroupSnapshot", "NOT_FOUND", request.group_snapshot_id)
        return pb.GetVolumeGroupSnapshotResponse(group_snapshot=found)

    async def DeleteVolumeGroupSnapshot(self, request: Any) -> Any:
        self.backend.groups.pop(request.group_snapshot_id, None)
        for snapshot_id in request.snapshot_ids:
            self.backend.snapshots.pop(snapshot_id, None)
        return pb.DeleteVolumeGroupSnapshotResponse()

    def _known(self, volume_id: str) -> pb.Volume:
        found = self.backend.volumes.get(volume_id)
        if found is None:
            raise CsiError("", "NOT_FOUND", f"there is no volume {volume_id}")
        return found
