"""Controller calls that attach: only a shared pool has them.

Owns: ControllerPublishVolume and ControllerUnpublishVolume as calls on the pool's fencing tokens.
Start reading at: `AttachCalls`.
"""

from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import NotServed
from moorage.errors import InvalidRequest
from moorage.plugin.access import Access, why_unsupported
from moorage.plugin.context import PluginContext, volume_key
from moorage.plugin.services import wire
from moorage.plugin.services.controller_volumes import persistent_pool
from moorage.storage import Attachment, VolumeKind, ids


class AttachCalls:
    """Mixed into the controller service."""

    _parts: PluginContext

    async def ControllerPublishVolume(
        self, request: pb.ControllerPublishVolumeRequest, context: Any
    ) -> pb.ControllerPublishVolumeResponse:
        self._check_served("ControllerPublishVolume")
        volume_id = wire.required("volume_id", request.volume_id)
        wire.required("node_id", request.node_id)
        access = wire.needed_access_from(request)
        with self._parts.in_flight.claim("ControllerPublishVolume", volume_key(volume_id)):
            attachment = await self._parts.work.run(_attach, self._parts, request, access)
        context_for_node = {wire.TOKEN_KEY: str(attachment.token)}
        return pb.ControllerPublishVolumeResponse(publish_context=context_for_node)

    async def ControllerUnpublishVolume(
        self, request: pb.ControllerUnpublishVolumeRequest, context: Any
    ) -> pb.ControllerUnpublishVolumeResponse:
        self._check_served("ControllerUnpublishVolume")
        volume_id = wire.required("volume_id", request.volume_id)
        with self._parts.in_flight.claim("ControllerUnpublishVolume", volume_key(volume_id)):
            await self._parts.work.run(_detach, self._parts, volume_id, request.node_id)
        return pb.ControllerUnpublishVolumeResponse()

    def _check_served(self, method: str) -> None:
        if not self._parts.settings.is_shared:
            raise NotServed(f"{method}: volumes of a node's own pool need no attaching (--scope node)")


def _attach(parts: PluginContext, request: pb.ControllerPublishVolumeRequest, access: Access) -> Attachment:
    pool = persistent_pool(parts, request.volume_id)
    volume = pool.volume(request.volume_id)
    is_directory = volume.kind is VolumeKind.DIRECTORY
    why = why_unsupported(access, is_directory=is_directory, filesystem=volume.filesystem or "block")
    if why:
        raise InvalidRequest(f"volume_capability: {why}")
    return pool.attach(volume.id, request.node_id, access.mode.name, readonly=request.readonly)


def _detach(parts: PluginContext, volume_id: str, node_id: str) -> None:
    """Unknown volumes and nodes are detached by definition."""
    pool = None if ids.is_ephemeral(volume_id) else parts.pools.of_volume(volume_id)
    if pool is not None:
        pool.detach(volume_id, node_id)
