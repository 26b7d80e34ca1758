"""The Node service: CSI messages in, calls on this machine out. It keeps no state of its own.

Owns: the order of checks of each node call.
May not touch: mounts and devices directly; see `staging`, `publishing`, `ephemeral`, `nodehealth`.
Start reading at: `NodeService`.
"""

import os
from collections.abc import Mapping
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.errors import InvalidRequest, MoorageError
from moorage.host import mountinfo
from moorage.host.errors import HostError
from moorage.host.targets import Target, check_path
from moorage.log import get_logger
from moorage.plugin.access import Access, why_unsupported
from moorage.plugin.context import PluginContext, volume_key
from moorage.plugin.node import ephemeral, health, publishing, staging, tuning
from moorage.plugin.node.errors import NotAtPath
from moorage.plugin.node.expansion import expand_on_node
from moorage.plugin.node.observe import NodeVolume
from moorage.plugin.node.publishing import Bind
from moorage.plugin.services import wire
from moorage.plugin.services.capabilities import node_capabilities
from moorage.storage import Attachment, HealthEntry, errors

log = get_logger(__name__)

# A record, an image or a pool that does not answer as it should.
_UNREADABLE = (errors.DamagedRecord, errors.PoolVanished, errors.AttachmentsUnreadable, HostError, OSError)


class CapabilityUnsupported(MoorageError):
    """The volume exists, but not for this use."""

    code = "FAILED_PRECONDITION"
    retryable = False


class StagingPathMissing(MoorageError):
    """Stage is announced, so a publish must say where the volume was staged."""

    code = "FAILED_PRECONDITION"


class NodeService(csi_pb2_grpc.NodeServicer):
    """CSI messages in, domain calls out. Nothing is decided here."""

    def __init__(self, parts: PluginContext) -> None:
        self._parts = parts

    async def NodeStageVolume(self, request: pb.NodeStageVolumeRequest, context: Any) -> pb.NodeStageVolumeResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("staging_target_path", request.staging_target_path)
        access = wire.needed_access_from(request)
        with self._parts.in_flight.claim("NodeStageVolume", volume_key(volume_id)):
            await self._parts.work.run(_stage, self._parts, request, access)
        return pb.NodeStageVolumeResponse()

    async def NodeUnstageVolume(
        self, request: pb.NodeUnstageVolumeRequest, context: Any
    ) -> pb.NodeUnstageVolumeResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("staging_target_path", request.staging_target_path)
        with self._parts.in_flight.claim("NodeUnstageVolume", volume_key(volume_id)):
            await self._parts.work.run(_unstage, self._parts, volume_id, request.staging_target_path)
        return pb.NodeUnstageVolumeResponse()

    async def NodePublishVolume(
        self, request: pb.NodePublishVolumeRequest, context: Any
    ) -> pb.NodePublishVolumeResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("target_path", request.target_path)
        access = wire.needed_access_from(request)
        with self._parts.in_flight.claim("NodePublishVolume", volume_key(volume_id)):
            await self._parts.work.run(_publish, self._parts, request, access)
        return pb.NodePublishVolumeResponse()

    async def NodeUnpublishVolume(
        self, request: pb.NodeUnpublishVolumeRequest, context: Any
    ) -> pb.NodeUnpublishVolumeResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("target_path", request.target_path)
        with self._parts.in_flight.claim("NodeUnpublishVolume", volume_key(volume_id)):
            await self._parts.work.run(_unpublish, self._parts, volume_id, request.target_path)
        return pb.NodeUnpublishVolumeResponse()

    async def NodeGetVolumeStats(
        self, request: pb.NodeGetVolumeStatsRequest, context: Any
    ) -> pb.NodeGetVolumeStatsResponse:
        wire.required("volume_id", request.volume_id)
        wire.required("volume_path", request.volume_path)
        return await self._parts.work.run(_stats, self._parts, request)

    async def NodeExpandVolume(self, request: pb.NodeExpandVolumeRequest, context: Any) -> pb.NodeExpandVolumeResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        wire.required("volume_path", request.volume_path)
        with self._parts.in_flight.claim("NodeExpandVolume", volume_key(volume_id)):
            size = await self._parts.work.run(_expand, self._parts, request)
        return pb.NodeExpandVolumeResponse(capacity_bytes=size)

    async def NodeGetVolumeHealth(
        self, request: pb.NodeGetVolumeHealthRequest, context: Any
    ) -> pb.NodeGetVolumeHealthResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        paths = []
        for field in ("volume_publish_path", "staging_target_path"):
            if path := getattr(request, field):
                check_path(field, path)
                paths.append(path)
        entries = await self._parts.work.run(_volume_health, self._parts, volume_id, paths)
        return pb.NodeGetVolumeHealthResponse(volume_health=wire.health_message(volume_id, entries))

    async def NodeGetStorageHealth(
        self, request: pb.NodeGetStorageHealthRequest, context: Any
    ) -> pb.NodeGetStorageHealthResponse:
        found = await self._parts.work.run(health.storage_health, self._parts.pools)
        return pb.NodeGetStorageHealthResponse(backend_health=found)

    async def NodeGetCapabilities(
        self, request: pb.NodeGetCapabilitiesRequest, context: Any
    ) -> pb.NodeGetCapabilitiesResponse:
        return pb.NodeGetCapabilitiesResponse(capabilities=node_capabilities(self._parts.settings))

    async def NodeGetInfo(self, request: pb.NodeGetInfoRequest, context: Any) -> pb.NodeGetInfoResponse:
        settings = self._parts.settings
        return pb.NodeGetInfoResponse(
            node_id=settings.node_id,
            max_volumes_per_node=settings.max_volumes_per_node,
            accessible_topology=None if settings.is_shared else wire.topology_message(settings),
        )


def node_volume(parts: PluginContext, volume_id: str) -> NodeVolume:
    """The volume; VolumeNotFound names it."""
    pool = parts.pool_of_volume(volume_id)
    return NodeVolume(pool.volume(volume_id), pool)


def find_node_volume(parts: PluginContext, volume_id: str) -> NodeVolume | None:
    try:
        return node_volume(parts, volume_id)
    except (errors.NoSuchObject, errors.DamagedRecord):
        return None


def _attachment(parts: PluginContext, volume: NodeVolume, publish_context: Mapping[str, str]) -> Attachment | None:
    """The valid attachment in a shared pool; Fenced without one, whatever is mounted here already."""
    if not parts.settings.is_shared:
        return None
    token = wire.token_from(publish_context)
    return volume.pool.verify_attachment(volume.volume_id, parts.settings.node_id, token)


def _is_for_reading(attachment: Attachment | None, access: Access) -> bool:
    """Whether other nodes may read the volume at the same time: then not even a journal may be written here."""
    return attachment is not None and (attachment.readonly or access.mode.is_read_only)


def _check_use(volume: NodeVolume, access: Access) -> None:
    filesystem = volume.filesystem or "block"
    why = why_unsupported(access, is_directory=volume.is_directory, filesystem=filesystem)
    if why:
        raise CapabilityUnsupported(f"volume {volume.volume_id}: {why}")


def _stage(parts: PluginContext, request: pb.NodeStageVolumeRequest, access: Access) -> None:
    volume = node_volume(parts, request.volume_id)
    attachment = _attachment(parts, volume, request.publish_context)
    _check_use(volume, access)
    target = Target.from_request("staging_target_path", request.staging_target_path)
    done = staging.ensure_staged(volume, target, access, read_only_device=_is_for_reading(attachment, access))
    tuning.note(parts, volume)
    log.info(
        "volume staged",
        volume=volume.volume_id,
        formatted=done.formatted,
        grown=done.grown,
        direct_io=done.direct_io,
    )


def _unstage(parts: PluginContext, volume_id: str, path: str) -> None:
    target = Target.from_request("staging_target_path", path)
    staging.ensure_unstaged(
        volume_id,
        find_node_volume(parts, volume_id),
        target,
        parts.pool_directories,
        others_may_use=parts.settings.is_shared,
    )


def _publish(parts: PluginContext, request: pb.NodePublishVolumeRequest, access: Access) -> None:
    if ephemeral.is_inline(request.volume_context):
        target = Target.from_request("target_path", request.target_path)
        made = ephemeral.publish(parts, request.volume_id, target, access, request.readonly, request.volume_context)
        tuning.note(parts, made)
        tuning.limit(parts, made, always=False)
        return
    volume = node_volume(parts, request.volume_id)
    if not request.staging_target_path:
        raise StagingPathMissing("staging_target_path is needed: volumes of this driver are staged first")
    check_path("staging_target_path", request.staging_target_path)
    attachment = _attachment(parts, volume, request.publish_context)
    _check_use(volume, access)
    bind = Bind(
        Target.from_request("staging_target_path", request.staging_target_path),
        Target.from_request("target_path", request.target_path),
        access,
        request.readonly or (attachment is not None and attachment.readonly),
        _is_for_reading(attachment, access),
    )
    publishing.ensure_published(volume, bind)
    tuning.note(parts, volume)
    tuning.limit(parts, volume, always=False)


def _unpublish(parts: PluginContext, volume_id: str, path: str) -> None:
    target = Target.from_request("target_path", path)
    inline = ephemeral.find(parts, volume_id)
    if inline is not None and inline.volume.ephemeral == target.path:
        ephemeral.unpublish(parts, inline)
        return
    volume = find_node_volume(parts, volume_id)
    publishing.ensure_unpublished(volume_id, volume, target, parts.pool_directories)


def _stats(parts: PluginContext, request: pb.NodeGetVolumeStatsRequest) -> pb.NodeGetVolumeStatsResponse:
    path = request.volume_path
    try:
        volume = ephemeral.find(parts, request.volume_id) or node_volume(parts, request.volume_id)
        is_there = publishing.is_shown(volume, path)
    except _UNREADABLE:
        entries = health.health_of_unreadable(parts, request.volume_id)
        # Nothing can be said about how much is used, but what is wrong can.
        if not entries or mountinfo.mount_at(os.path.realpath(path)) is None:
            raise
        return pb.NodeGetVolumeStatsResponse(volume_condition=wire.condition_message(entries))
    if not is_there:
        raise NotAtPath(request.volume_id, path)
    entries = health.volume_health(parts, volume, [path])
    return pb.NodeGetVolumeStatsResponse(
        usage=health.usage(volume, path),
        volume_condition=wire.condition_message(entries),
    )


def _expand(parts: PluginContext, request: pb.NodeExpandVolumeRequest) -> int:
    volume = node_volume(parts, request.volume_id)
    required, limit = wire.size_range_from("capacity_range", request.capacity_range)
    if request.HasField("volume_capability"):
        access = wire.access_from("volume_capability", request.volume_capability)
        filesystem = volume.filesystem or "block"
        why = why_unsupported(access, is_directory=volume.is_directory, filesystem=filesystem)
        if why:
            raise InvalidRequest(f"volume_capability: {why}")
    if not publishing.is_published(volume, request.volume_path):
        raise NotAtPath(request.volume_id, request.volume_path)
    return expand_on_node(volume, request.volume_path, required, limit)


def _volume_health(parts: PluginContext, volume_id: str, paths: list[str]) -> list[HealthEntry]:
    try:
        volume = ephemeral.find(parts, volume_id) or node_volume(parts, volume_id)
    except _UNREADABLE:
        entries = health.health_of_unreadable(parts, volume_id)
        if not entries:
            raise
        return entries
    return health.volume_health(parts, volume, paths)
