"""The Controller service: checks, idempotency and records around a driver's hooks.

Owns: the order of checks of each call, and what makes a repeated request compatible.
Start reading at: `ControllerService.CreateVolume`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.wrappers_pb2 import Int64Value

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.csi.errors import NotServed
from moorage.csi.inflight import InFlight
from moorage.errors import InvalidRequest
from moorage.sdk import model, wire
from moorage.sdk.driver import Driver
from moorage.sdk.errors import AlreadyExists, FailedPrecondition, NotFound, OutOfRange
from moorage.sdk.identity import controller_capabilities
from moorage.sdk.model import (
    Access,
    Attachment,
    Capacity,
    Expanded,
    Health,
    Secrets,
    Snapshot,
    Source,
    SourceKind,
    Volume,
)
from moorage.sdk.paging import page
from moorage.sdk.records import AttachmentRecord, Records
from moorage.storage.ids import id_from


class ControllerService(csi_pb2_grpc.ControllerServicer):
    """CSI messages in, hooks out."""

    def __init__(self, driver: Driver, records: Records, in_flight: InFlight) -> None:
        self._driver = driver
        self._records = records
        self._in_flight = in_flight

    async def ControllerGetCapabilities(
        self, request: pb.ControllerGetCapabilitiesRequest, context: Any
    ) -> pb.ControllerGetCapabilitiesResponse:
        return pb.ControllerGetCapabilitiesResponse(capabilities=controller_capabilities(self._driver))

    # --- volumes -----------------------------------------------------------------------------------------------------

    async def CreateVolume(self, request: pb.CreateVolumeRequest, context: Any) -> pb.CreateVolumeResponse:
        self._need("create_volume")
        wanted = wire.create_volume_from(request)
        for access in wanted.accesses:
            if why := self._why_unsupported(access):
                raise InvalidRequest(f"volume_capabilities: {why}")
        with self._in_flight.claim("CreateVolume", f"volume {wanted.volume_id}"):
            found = await self._records.find_volume(wanted.volume_id)
            if found is not None:
                _check_compatible(wanted, found)
            else:
                found = await self._create(wanted)
        return pb.CreateVolumeResponse(volume=wire.volume_message(found))

    async def _create(self, wanted: model.CreateVolume) -> Volume:
        hook = "create_volume"
        if wanted.source is not None:
            hook = "copy_volume"
            self._need(hook)
            least = await self._size_of(wanted.source)
            if wanted.size.limit and wanted.size.limit < least:
                raise OutOfRange(f"the source has {least} bytes, which is more than the limit of the request")
            size = replace(wanted.size, required=max(wanted.size.required, least))
            wanted = replace(wanted, size=size)
        made: Volume = await self._driver.call(hook, wanted)
        if not wanted.size.admits(made.size_bytes):
            raise OutOfRange(f"volume {made.id} has {made.size_bytes} bytes, which the request does not admit")
        self._records.keep_volume(made)
        return made

    async def _size_of(self, source: Source) -> int:
        """Return the size of a source. Raises NotFound if it does not exist."""
        if source.kind is SourceKind.VOLUME:
            return (await self._records.volume(source.id)).size_bytes
        return self._snapshot(source.id).size_bytes

    async def DeleteVolume(self, request: pb.DeleteVolumeRequest, context: Any) -> pb.DeleteVolumeResponse:
        self._need("delete_volume")
        volume_id = wire.required("volume_id", request.volume_id)
        with self._in_flight.claim("DeleteVolume", f"volume {volume_id}"):
            if await self._records.find_volume(volume_id) is not None:
                if nodes := self._records.attachments(volume_id):
                    raise FailedPrecondition(f"volume {volume_id} is attached to {', '.join(sorted(nodes))}")
                await self._driver.call("delete_volume", volume_id)
                self._records.drop_volume(volume_id)
        return pb.DeleteVolumeResponse()

    async def ListVolumes(self, request: pb.ListVolumesRequest, context: Any) -> pb.ListVolumesResponse:
        self._need("create_volume")
        volumes = await self._records.list_volumes()
        shown, token = page(volumes, lambda volume: volume.id, request.max_entries, request.starting_token)
        entries = [
            pb.ListVolumesResponse.Entry(
                volume=wire.volume_message(volume),
                status=pb.ListVolumesResponse.VolumeStatus(
                    published_node_ids=sorted(self._records.attachments(volume.id)),
                    volume_condition=wire.condition_message(await self._health(volume)),
                ),
            )
            for volume in shown
        ]
        return pb.ListVolumesResponse(entries=entries, next_token=token)

    async def ControllerGetVolume(
        self, request: pb.ControllerGetVolumeRequest, context: Any
    ) -> pb.ControllerGetVolumeResponse:
        self._need("create_volume")
        volume = await self._records.volume(wire.required("volume_id", request.volume_id))
        status = pb.ControllerGetVolumeResponse.VolumeStatus(
            published_node_ids=sorted(self._records.attachments(volume.id)),
            volume_condition=wire.condition_message(await self._health(volume)),
        )
        return pb.ControllerGetVolumeResponse(volume=wire.volume_message(volume), status=status)

    async def _health(self, volume: Volume) -> list[Health]:
        return list(await self._driver.call("volume_health", volume)) if self._driver.defines("volume_health") else []

    async def ControllerGetVolumeHealth(
        self, request: pb.ControllerGetVolumeHealthRequest, context: Any
    ) -> pb.ControllerGetVolumeHealthResponse:
        self._need("volume_health")
        volume = await self._records.volume(wire.required("volume_id", request.volume_id))
        message = wire.health_message(volume.id, await self._health(volume))
        return pb.ControllerGetVolumeHealthResponse(volume_health=message)

    async def ControllerListVolumeHealth(
        self, request: pb.ControllerListVolumeHealthRequest, context: Any
    ) -> pb.ControllerListVolumeHealthResponse:
        self._need("volume_health")
        found = [(volume.id, await self._health(volume)) for volume in await self._records.list_volumes()]
        sick = [(volume_id, health) for volume_id, health in found if health]
        shown, token = page(sick, lambda pair: pair[0], request.max_entries, request.starting_token)
        entries = [wire.health_message(volume_id, health) for volume_id, health in shown]
        return pb.ControllerListVolumeHealthResponse(entries=entries, next_token=token)

    async def ValidateVolumeCapabilities(
        self, request: pb.ValidateVolumeCapabilitiesRequest, context: Any
    ) -> pb.ValidateVolumeCapabilitiesResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        accesses = wire.accesses_from(request.volume_capabilities)
        volume = await self._records.volume(volume_id)
        reasons = [why for access in accesses if (why := self._why_unsupported(access))]
        given = request.volume_context
        reasons += [f"volume_context: {key} differs" for key in given if given[key] != volume.context.get(key)]
        if reasons:
            return pb.ValidateVolumeCapabilitiesResponse(message=wire.shortened(reasons[0]))
        confirmed = pb.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=request.volume_context,
            volume_capabilities=request.volume_capabilities,
            parameters=request.parameters,
            mutable_parameters=request.mutable_parameters,
        )
        return pb.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    def _why_unsupported(self, access: Access) -> str:
        if access.is_block and not self._driver.supports_block:
            return "this driver has no block devices"
        if access.mode.is_multi_node and not access.mode.is_read_only and not self._driver.supports_multi_node:
            return f"this driver cannot give a volume to several nodes ({access.mode.name})"
        return ""

    async def GetCapacity(self, request: pb.GetCapacityRequest, context: Any) -> pb.GetCapacityResponse:
        self._need("capacity")
        segments = dict(request.accessible_topology.segments)
        found: Capacity = await self._driver.call("capacity", dict(request.parameters), segments)
        return pb.GetCapacityResponse(
            available_capacity=max(0, found.available_bytes),
            minimum_volume_size=Int64Value(value=found.smallest_bytes) if found.smallest_bytes else None,
            maximum_volume_size=Int64Value(value=found.largest_bytes) if found.largest_bytes else None,
        )

    async def ControllerExpandVolume(
        self, request: pb.ControllerExpandVolumeRequest, context: Any
    ) -> pb.ControllerExpandVolumeResponse:
        self._need("expand_volume")
        volume_id = wire.required("volume_id", request.volume_id)
        if not request.HasField("capacity_range"):
            raise InvalidRequest("capacity_range is missing")
        size = wire.size_from("capacity_range", request.capacity_range)
        with self._in_flight.claim("ControllerExpandVolume", f"volume {volume_id}"):
            volume = await self._records.volume(volume_id)
            if size.limit and volume.size_bytes > size.limit:
                raise OutOfRange(f"volume {volume_id} has {volume.size_bytes} bytes already")
            done = Expanded(volume.size_bytes, self._driver.defines("expand_on_node"))
            if volume.size_bytes < size.required:
                done = await self._driver.call("expand_volume", volume, size)
                self._records.keep_volume(replace(volume, size_bytes=done.size_bytes))
        return pb.ControllerExpandVolumeResponse(
            capacity_bytes=done.size_bytes, node_expansion_required=done.needs_node
        )

    async def ControllerModifyVolume(
        self, request: pb.ControllerModifyVolumeRequest, context: Any
    ) -> pb.ControllerModifyVolumeResponse:
        self._need("modify_volume")
        volume_id = wire.required("volume_id", request.volume_id)
        with self._in_flight.claim("ControllerModifyVolume", f"volume {volume_id}"):
            volume = await self._records.volume(volume_id)
            await self._driver.call("modify_volume", volume, dict(request.mutable_parameters))
        return pb.ControllerModifyVolumeResponse()

    # --- attaching ---------------------------------------------------------------------------------------------------

    async def ControllerPublishVolume(
        self, request: pb.ControllerPublishVolumeRequest, context: Any
    ) -> pb.ControllerPublishVolumeResponse:
        self._need("attach")
        volume_id = wire.required("volume_id", request.volume_id)
        node_id = wire.required("node_id", request.node_id)
        access = wire.needed_access_from(request)
        with self._in_flight.claim("ControllerPublishVolume", f"volume {volume_id}"):
            volume = await self._records.volume(volume_id)
            if not self._driver.has_node(node_id):
                raise NotFound(f"there is no node {node_id}")
            nodes = self._records.attachments(volume_id)
            known = nodes.get(node_id)
            if known is None:
                known = await self._attach(volume, node_id, access, request.readonly, nodes)
            elif (known.mode, known.is_block, known.is_read_only) != (access.mode, access.is_block, request.readonly):
                raise AlreadyExists(f"volume {volume_id} is attached to {node_id} in another way")
        return pb.ControllerPublishVolumeResponse(publish_context=known.context)

    async def _attach(
        self,
        volume: Volume,
        node_id: str,
        access: Access,
        is_read_only: bool,
        nodes: Mapping[str, AttachmentRecord],
    ) -> AttachmentRecord:
        if nodes and not access.mode.is_multi_node:
            raise FailedPrecondition(f"volume {volume.id} is attached to {', '.join(sorted(nodes))}")
        made: Attachment = await self._driver.call("attach", volume, node_id, access, is_read_only)
        record = AttachmentRecord(access.mode, access.is_block, is_read_only, dict(made.context))
        self._records.keep_attachments(volume.id, {**nodes, node_id: record})
        return record

    async def ControllerUnpublishVolume(
        self, request: pb.ControllerUnpublishVolumeRequest, context: Any
    ) -> pb.ControllerUnpublishVolumeResponse:
        self._need("detach")
        volume_id = wire.required("volume_id", request.volume_id)
        with self._in_flight.claim("ControllerUnpublishVolume", f"volume {volume_id}"):
            nodes = self._records.attachments(volume_id)
            for node_id in [request.node_id] if request.node_id else sorted(nodes):
                if node_id in nodes:
                    await self._driver.call("detach", volume_id, node_id)
                    del nodes[node_id]
                    self._records.keep_attachments(volume_id, nodes)
        return pb.ControllerUnpublishVolumeResponse()

    # --- snapshots ---------------------------------------------------------------------------------------------------

    async def CreateSnapshot(self, request: pb.CreateSnapshotRequest, context: Any) -> pb.CreateSnapshotResponse:
        self._need("create_snapshot")
        name = wire.required("name", request.name)
        volume_id = wire.required("source_volume_id", request.source_volume_id)
        snapshot_id = id_from(name)
        with self._in_flight.claim("CreateSnapshot", f"snapshot {snapshot_id}"):
            found = self._records.find_snapshot(snapshot_id)
            if found is not None and found.volume_id != volume_id:
                raise AlreadyExists(f"snapshot {name!r} exists, of volume {found.volume_id}")
            if found is None or not found.is_ready:
                volume = await self._records.volume(volume_id)
                wanted = model.CreateSnapshot(
                    name=name,
                    snapshot_id=snapshot_id,
                    volume=volume,
                    parameters=dict(request.parameters),
                    secrets=Secrets(request.secrets),
                )
                made: Snapshot = await self._driver.call("create_snapshot", wanted)
                # The moment of a snapshot does not change while it is being completed.
                found = made if found is None else replace(made, created=found.created)
                self._records.keep_snapshot(found)
        return pb.CreateSnapshotResponse(snapshot=wire.snapshot_message(found))

    async def DeleteSnapshot(self, request: pb.DeleteSnapshotRequest, context: Any) -> pb.DeleteSnapshotResponse:
        self._need("delete_snapshot")
        snapshot_id = wire.required("snapshot_id", request.snapshot_id)
        with self._in_flight.claim("DeleteSnapshot", f"snapshot {snapshot_id}"):
            found = self._records.find_snapshot(snapshot_id)
            if found is not None:
                if found.group_id:
                    raise InvalidRequest(f"snapshot {snapshot_id} belongs to group {found.group_id}; delete the group")
                await self._driver.call("delete_snapshot", snapshot_id)
                self._records.drop_snapshot(snapshot_id)
        return pb.DeleteSnapshotResponse()

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Any) -> pb.ListSnapshotsResponse:
        self._need("create_snapshot")
        found = [
            snapshot
            for snapshot in self._records.list_snapshots()
            if request.snapshot_id in ("", snapshot.id) and request.source_volume_id in ("", snapshot.volume_id)
        ]
        shown, token = page(found, lambda snapshot: snapshot.id, request.max_entries, request.starting_token)
        entries = [pb.ListSnapshotsResponse.Entry(snapshot=wire.snapshot_message(each)) for each in shown]
        return pb.ListSnapshotsResponse(entries=entries, next_token=token)

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Any) -> pb.GetSnapshotResponse:
        self._need("create_snapshot")
        snapshot = self._snapshot(wire.required("snapshot_id", request.snapshot_id))
        return pb.GetSnapshotResponse(snapshot=wire.snapshot_message(snapshot))

    def _snapshot(self, snapshot_id: str) -> Snapshot:
        found = self._records.find_snapshot(snapshot_id)
        if found is None:
            raise NotFound(f"there is no snapshot {snapshot_id}")
        return found

    def _need(self, *hooks: str) -> None:
        """Raise UNIMPLEMENTED unless the driver defines the hooks."""
        if not self._driver.defines(*hooks):
            raise NotServed(f"driver {self._driver.name} does not offer this call")


def _check_compatible(wanted: model.CreateVolume, found: Volume) -> None:
    """Raise AlreadyExists if the volume is not what the request asks for."""
    reasons = []
    if not wanted.size.admits(found.size_bytes):
        reasons.append(f"its size is {found.size_bytes} bytes")
    if found.parameters is not None and dict(found.parameters) != dict(wanted.parameters):
        reasons.append("its parameters differ")
    if found.source != wanted.source:
        reasons.append("its source differs")
    if reasons:
        raise AlreadyExists(f"volume {wanted.name!r} exists, but {', '.join(reasons)}")
