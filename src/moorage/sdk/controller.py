"""The Controller service: requests checked, operations called, answers written.

Owns: which fields a call needs, and the order of its checks.
Start reading at: `ControllerService.CreateVolume`.
"""

from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.csi.inflight import snapshot_key, volume_key
from moorage.errors import InvalidRequest
from moorage.sdk import wire
from moorage.sdk.identity import controller_capabilities
from moorage.sdk.model import Secrets
from moorage.sdk.operations import CapacityRequest, ControllerOperations, SnapshotRequest, Validation
from moorage.sdk.paging import position, token_of
from moorage.sdk.service import Service
from moorage.storage.ids import id_from


class ControllerService(Service[ControllerOperations], csi_pb2_grpc.ControllerServicer):
    """CSI messages in, operations out."""

    async def ControllerGetCapabilities(
        self, request: pb.ControllerGetCapabilitiesRequest, context: Any
    ) -> pb.ControllerGetCapabilitiesResponse:
        return pb.ControllerGetCapabilitiesResponse(capabilities=controller_capabilities(self._operations))

    # --- volumes -----------------------------------------------------------------------------------------------------

    async def CreateVolume(self, request: pb.CreateVolumeRequest, context: Any) -> pb.CreateVolumeResponse:
        self._need("create_volume")
        wanted = wire.create_volume_from(request)
        with self._claim(request, volume_key(wanted.volume_id)):
            volume = await self._run(request, self._operations.create_volume, wanted)
        return pb.CreateVolumeResponse(volume=wire.volume_message(volume))

    async def DeleteVolume(self, request: pb.DeleteVolumeRequest, context: Any) -> pb.DeleteVolumeResponse:
        self._need("delete_volume")
        volume_id = wire.required("volume_id", request.volume_id)
        with self._claim(request, volume_key(volume_id)):
            await self._run(request, self._operations.delete_volume, volume_id)
        return pb.DeleteVolumeResponse()

    async def ListVolumes(self, request: pb.ListVolumesRequest, context: Any) -> pb.ListVolumesResponse:
        self._need("list_volumes")
        after = position(request.max_entries, request.starting_token)
        found = await self._run(request, self._operations.list_volumes, after, request.max_entries)
        entries = [
            pb.ListVolumesResponse.Entry(
                volume=wire.volume_message(each.volume),
                status=pb.ListVolumesResponse.VolumeStatus(
                    published_node_ids=each.nodes, volume_condition=wire.condition_message(each.health)
                ),
            )
            for each in found.items
        ]
        return pb.ListVolumesResponse(entries=entries, next_token=token_of(found))

    async def ControllerGetVolume(
        self, request: pb.ControllerGetVolumeRequest, context: Any
    ) -> pb.ControllerGetVolumeResponse:
        self._need("get_volume")
        volume_id = wire.required("volume_id", request.volume_id)
        found = await self._run(request, self._operations.get_volume, volume_id)
        status = pb.ControllerGetVolumeResponse.VolumeStatus(
            published_node_ids=found.nodes, volume_condition=wire.condition_message(found.health)
        )
        return pb.ControllerGetVolumeResponse(volume=wire.volume_message(found.volume), status=status)

    async def ControllerGetVolumeHealth(
        self, request: pb.ControllerGetVolumeHealthRequest, context: Any
    ) -> pb.ControllerGetVolumeHealthResponse:
        self._need("volume_health")
        volume_id = wire.required("volume_id", request.volume_id)
        found = await self._run(request, self._operations.volume_health, volume_id)
        return pb.ControllerGetVolumeHealthResponse(volume_health=wire.health_message(volume_id, found))

    async def ControllerListVolumeHealth(
        self, request: pb.ControllerListVolumeHealthRequest, context: Any
    ) -> pb.ControllerListVolumeHealthResponse:
        self._need("list_health")
        after = position(request.max_entries, request.starting_token)
        found = await self._run(request, self._operations.list_health, after, request.max_entries)
        entries = [wire.health_message(volume_id, health) for volume_id, health in found.items]
        return pb.ControllerListVolumeHealthResponse(entries=entries, next_token=token_of(found))

    async def ValidateVolumeCapabilities(
        self, request: pb.ValidateVolumeCapabilitiesRequest, context: Any
    ) -> pb.ValidateVolumeCapabilitiesResponse:
        self._need("why_not_valid")
        question = Validation(
            volume_id=wire.required("volume_id", request.volume_id),
            accesses=wire.accesses_from(request.volume_capabilities),
            context=dict(request.volume_context),
            parameters=dict(request.parameters),
            mutable_parameters=dict(request.mutable_parameters),
        )
        why = await self._run(request, self._operations.why_not_valid, question)
        if why:
            return pb.ValidateVolumeCapabilitiesResponse(message=wire.shortened(why))
        confirmed = pb.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=request.volume_context,
            volume_capabilities=request.volume_capabilities,
            parameters=request.parameters,
            mutable_parameters=request.mutable_parameters,
        )
        return pb.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    async def GetCapacity(self, request: pb.GetCapacityRequest, context: Any) -> pb.GetCapacityResponse:
        self._need("capacity")
        wanted = CapacityRequest(
            accesses=wire.accesses_from(request.volume_capabilities) if request.volume_capabilities else (),
            parameters=dict(request.parameters),
            segments=wire.segments_from("accessible_topology", request.accessible_topology),
        )
        return wire.capacity_message(await self._run(request, self._operations.capacity, wanted))

    async def ControllerExpandVolume(
        self, request: pb.ControllerExpandVolumeRequest, context: Any
    ) -> pb.ControllerExpandVolumeResponse:
        self._need("expand_volume")
        volume_id = wire.required("volume_id", request.volume_id)
        if not request.HasField("capacity_range"):
            raise InvalidRequest("capacity_range is needed")
        size = wire.size_from("capacity_range", request.capacity_range)
        access = wire.access_if_given(request)
        with self._claim(request, volume_key(volume_id)):
            done = await self._run(request, self._operations.expand_volume, volume_id, size, access)
        return pb.ControllerExpandVolumeResponse(
            capacity_bytes=done.size_bytes, node_expansion_required=done.needs_node
        )

    async def ControllerModifyVolume(
        self, request: pb.ControllerModifyVolumeRequest, context: Any
    ) -> pb.ControllerModifyVolumeResponse:
        self._need("modify_volume")
        volume_id = wire.required("volume_id", request.volume_id)
        with self._claim(request, volume_key(volume_id)):
            await self._run(request, self._operations.modify_volume, volume_id, dict(request.mutable_parameters))
        return pb.ControllerModifyVolumeResponse()

    # --- attaching ---------------------------------------------------------------------------------------------------

    async def ControllerPublishVolume(
        self, request: pb.ControllerPublishVolumeRequest, context: Any
    ) -> pb.ControllerPublishVolumeResponse:
        self._need("attach")
        volume_id = wire.required("volume_id", request.volume_id)
        node_id = wire.required("node_id", request.node_id)
        access = wire.needed_access_from(request)
        with self._claim(request, volume_key(volume_id)):
            made = await self._run(request, self._operations.attach, volume_id, node_id, access, request.readonly)
        return pb.ControllerPublishVolumeResponse(publish_context=made.context)

    async def ControllerUnpublishVolume(
        self, request: pb.ControllerUnpublishVolumeRequest, context: Any
    ) -> pb.ControllerUnpublishVolumeResponse:
        self._need("detach")
        volume_id = wire.required("volume_id", request.volume_id)
        with self._claim(request, volume_key(volume_id)):
            await self._run(request, self._operations.detach, volume_id, request.node_id)
        return pb.ControllerUnpublishVolumeResponse()

    # --- snapshots ---------------------------------------------------------------------------------------------------

    async def CreateSnapshot(self, request: pb.CreateSnapshotRequest, context: Any) -> pb.CreateSnapshotResponse:
        self._need("create_snapshot")
        name = wire.required("name", request.name)
        requisite, _ = wire.places_from(request.accessibility_requirements)
        wanted = SnapshotRequest(
            name=name,
            snapshot_id=id_from(name),
            volume_id=wire.required("source_volume_id", request.source_volume_id),
            parameters=dict(request.parameters),
            requisite=requisite,
            secrets=Secrets(request.secrets),
        )
        with self._claim(request, snapshot_key(wanted.snapshot_id)):
            snapshot = await self._run(request, self._operations.create_snapshot, wanted)
        return pb.CreateSnapshotResponse(snapshot=wire.snapshot_message(snapshot))

    async def DeleteSnapshot(self, request: pb.DeleteSnapshotRequest, context: Any) -> pb.DeleteSnapshotResponse:
        self._need("delete_snapshot")
        snapshot_id = wire.required("snapshot_id", request.snapshot_id)
        with self._claim(request, snapshot_key(snapshot_id)):
            await self._run(request, self._operations.delete_snapshot, snapshot_id)
        return pb.DeleteSnapshotResponse()

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Any) -> pb.ListSnapshotsResponse:
        self._need("list_snapshots")
        after = position(request.max_entries, request.starting_token)
        found = await self._run(
            request,
            self._operations.list_snapshots,
            request.snapshot_id,
            request.source_volume_id,
            after,
            request.max_entries,
        )
        entries = [pb.ListSnapshotsResponse.Entry(snapshot=wire.snapshot_message(each)) for each in found.items]
        return pb.ListSnapshotsResponse(entries=entries, next_token=token_of(found))

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Any) -> pb.GetSnapshotResponse:
        self._need("get_snapshot")
        snapshot_id = wire.required("snapshot_id", request.snapshot_id)
        snapshot = await self._run(request, self._operations.get_snapshot, snapshot_id)
        return pb.GetSnapshotResponse(snapshot=wire.snapshot_message(snapshot))
