"""The Node service: requests checked, operations called, answers written.

Owns: which fields a call needs, and the order of its checks.
Start reading at: `NodeService.NodePublishVolume`.
"""

from pathlib import Path
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.csi.inflight import volume_key
from moorage.host.targets import check_path
from moorage.sdk import wire
from moorage.sdk.identity import node_capabilities
from moorage.sdk.model import Access, NodeVolume, Secrets
from moorage.sdk.operations import NodeOperations
from moorage.sdk.service import Service


class NodeService(Service[NodeOperations], csi_pb2_grpc.NodeServicer):
    """CSI messages in, operations out."""

    async def NodeGetCapabilities(
        self, request: pb.NodeGetCapabilitiesRequest, context: Any
    ) -> pb.NodeGetCapabilitiesResponse:
        return pb.NodeGetCapabilitiesResponse(capabilities=node_capabilities(self._operations))

    async def NodeGetInfo(self, request: pb.NodeGetInfoRequest, context: Any) -> pb.NodeGetInfoResponse:
        found = self._operations.info()
        return pb.NodeGetInfoResponse(
            node_id=found.node_id,
            max_volumes_per_node=found.max_volumes,
            accessible_topology=pb.Topology(segments=dict(found.segments)) if found.segments else None,
        )

    async def NodeStageVolume(self, request: pb.NodeStageVolumeRequest, context: Any) -> pb.NodeStageVolumeResponse:
        self._need("stage")
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("staging_target_path", request.staging_target_path)
        volume = _volume(request, wire.needed_access_from(request))
        with self._claim(request, volume_key(volume_id)):
            await self._run(request, self._operations.stage, volume, request.staging_target_path)
        return pb.NodeStageVolumeResponse()

    async def NodeUnstageVolume(
        self, request: pb.NodeUnstageVolumeRequest, context: Any
    ) -> pb.NodeUnstageVolumeResponse:
        self._need("unstage")
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("staging_target_path", request.staging_target_path)
        with self._claim(request, volume_key(volume_id)):
            await self._run(request, self._operations.unstage, volume_id, request.staging_target_path)
        return pb.NodeUnstageVolumeResponse()

    async def NodePublishVolume(
        self, request: pb.NodePublishVolumeRequest, context: Any
    ) -> pb.NodePublishVolumeResponse:
        self._need("publish")
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("target_path", request.target_path)
        if request.staging_target_path:
            check_path("staging_target_path", request.staging_target_path)
        volume = _volume(request, wire.needed_access_from(request), is_read_only=request.readonly)
        with self._claim(request, volume_key(volume_id)):
            await self._run(request, self._operations.publish, volume, request.target_path)
        return pb.NodePublishVolumeResponse()

    async def NodeUnpublishVolume(
        self, request: pb.NodeUnpublishVolumeRequest, context: Any
    ) -> pb.NodeUnpublishVolumeResponse:
        self._need("unpublish")
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("target_path", request.target_path)
        with self._claim(request, volume_key(volume_id)):
            await self._run(request, self._operations.unpublish, volume_id, request.target_path)
        return pb.NodeUnpublishVolumeResponse()

    async def NodeGetVolumeStats(
        self, request: pb.NodeGetVolumeStatsRequest, context: Any
    ) -> pb.NodeGetVolumeStatsResponse:
        self._need("stats")
        volume_id = wire.required("volume_id", request.volume_id)
        path = wire.required("volume_path", request.volume_path)
        found = await self._run(request, self._operations.stats, volume_id, path)
        return pb.NodeGetVolumeStatsResponse(
            usage=[] if found.stats is None else wire.usage_messages(found.stats),
            volume_condition=None if found.health is None else wire.condition_message(found.health),
        )

    async def NodeExpandVolume(self, request: pb.NodeExpandVolumeRequest, context: Any) -> pb.NodeExpandVolumeResponse:
        self._need("expand")
        volume_id = wire.required("volume_id", request.volume_id)
        path = wire.required("volume_path", request.volume_path)
        size = wire.size_from("capacity_range", request.capacity_range)
        access = wire.access_if_given(request)
        with self._claim(request, volume_key(volume_id)):
            grown = await self._run(request, self._operations.expand, volume_id, path, size, access)
        return pb.NodeExpandVolumeResponse(capacity_bytes=grown)

    async def NodeGetVolumeHealth(
        self, request: pb.NodeGetVolumeHealthRequest, context: Any
    ) -> pb.NodeGetVolumeHealthResponse:
        self._need("health")
        volume_id = wire.required("volume_id", request.volume_id)
        fields = ("volume_publish_path", "staging_target_path")
        given = {name: getattr(request, name) for name in fields if getattr(request, name)}
        for name, path in given.items():
            check_path(name, path)
        found = await self._run(request, self._operations.health, volume_id, list(given.values()))
        return pb.NodeGetVolumeHealthResponse(volume_health=wire.health_message(volume_id, found))

    async def NodeGetStorageHealth(
        self, request: pb.NodeGetStorageHealthRequest, context: Any
    ) -> pb.NodeGetStorageHealthResponse:
        self._need("storage_health")
        return wire.storage_health_message(await self._run(request, self._operations.storage_health))


def _volume(request: Any, access: Access, *, is_read_only: bool = False) -> NodeVolume:
    staging = request.staging_target_path
    return NodeVolume(
        id=request.volume_id,
        access=access,
        is_read_only=is_read_only or access.mode.is_read_only,
        context=dict(request.volume_context),
        publish_context=dict(request.publish_context),
        secrets=Secrets(request.secrets),
        staging=Path(staging) if staging else None,
    )
