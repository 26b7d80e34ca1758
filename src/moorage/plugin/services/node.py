"""What the plugin does at each node call. It keeps no state of its own.

Owns: the order of checks of each node call.
May not touch: mounts and devices directly; see `staging`, `publishing`, `ephemeral`, `health`.
Start reading at: `PoolNode`.
"""

import os
from collections.abc import Mapping, Sequence

from moorage.errors import InvalidRequest, MoorageError
from moorage.host import mountinfo
from moorage.host.errors import HostError
from moorage.host.targets import Target
from moorage.log import get_logger
from moorage.plugin.access import why_unsupported_by
from moorage.plugin.context import PluginContext
from moorage.plugin.errors import NotAtPath
from moorage.plugin.node import ephemeral, health, publishing, staging, tuning
from moorage.plugin.node.expansion import expand_on_node
from moorage.plugin.node.observe import NodeVolume
from moorage.plugin.node.publishing import Bind
from moorage.plugin.services.values import health_from, places, token_from
from moorage.sdk import model
from moorage.sdk.model import Access
from moorage.sdk.operations import ALPHA, NodeInfo, NodeOperations, VolumeUse
from moorage.storage import Attachment, errors

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


class PoolNode(NodeOperations):
    """Node calls on the volumes of this plugin's pools."""

    def __init__(self, parts: PluginContext) -> None:
        self._parts = parts
        self.hidden = frozenset() if parts.settings.shows_alpha else ALPHA

    def info(self) -> NodeInfo:
        settings = self._parts.settings
        return NodeInfo(settings.node_id, settings.max_volumes_per_node, next(iter(places(settings)), {}))

    def stage(self, volume: model.NodeVolume, path: str) -> None:
        here, attachment = self._usable(volume)
        target = self._parts.target("staging_target_path", path)
        is_for_reading = _is_for_reading(attachment, volume.access)
        done = staging.ensure_staged(here, target, volume.access, read_only_device=is_for_reading)
        tuning.note(self._parts, here)
        log.info(
            "volume staged",
            volume=here.volume_id,
            formatted=done.formatted,
            grown=done.grown,
            direct_io=done.direct_io,
        )

    def unstage(self, volume_id: str, path: str) -> None:
        target = self._parts.target("staging_target_path", path)
        here = find_node_volume(self._parts, volume_id)
        pools, is_shared = self._parts.pool_directories, self._parts.settings.is_shared
        staging.ensure_unstaged(volume_id, here, target, pools, others_may_use=is_shared)

    def publish(self, volume: model.NodeVolume, path: str) -> None:
        target = self._parts.target("target_path", path)
        if volume.is_ephemeral:
            here = ephemeral.publish(self._parts, volume, target)
        else:
            here = self._publish(volume, target)
        tuning.note(self._parts, here)
        tuning.limit(self._parts, here, always=False)

    def _publish(self, volume: model.NodeVolume, target: Target) -> NodeVolume:
        here = node_volume(self._parts, volume.id)
        if volume.staging is None:
            raise StagingPathMissing("staging_target_path is needed: volumes of this driver are staged first")
        here, attachment = self._usable(volume)
        bind = Bind(
            self._parts.target("staging_target_path", str(volume.staging)),
            target,
            volume.access,
            volume.is_read_only or (attachment is not None and attachment.readonly),
            _is_for_reading(attachment, volume.access),
        )
        publishing.ensure_published(here, bind)
        return here

    def unpublish(self, volume_id: str, path: str) -> None:
        target = self._parts.target("target_path", path)
        inline = ephemeral.find(self._parts, volume_id)
        if inline is not None and inline.volume.ephemeral == target.path:
            ephemeral.unpublish(self._parts, inline)
            return
        here = find_node_volume(self._parts, volume_id)
        publishing.ensure_unpublished(volume_id, here, target, self._parts.pool_directories)

    def stats(self, volume_id: str, path: str) -> VolumeUse:
        try:
            here = ephemeral.find(self._parts, volume_id) or node_volume(self._parts, volume_id)
            self._parts.check_volume_path(volume_id, path)
            is_there = publishing.is_shown(here, path)
        except _UNREADABLE:
            entries = health.health_of_unreadable(self._parts, volume_id)
            # Nothing can be said about how much is used, but what is wrong can.
            if not entries or mountinfo.mount_at(os.path.realpath(path)) is None:
                raise
            return VolumeUse(None, health_from(entries))
        if not is_there:
            raise NotAtPath(volume_id, path)
        return VolumeUse(health.usage(here, path), health_from(health.volume_health(self._parts, here, [path])))

    def expand(self, volume_id: str, path: str, size: model.SizeRange, access: Access | None) -> int:
        here = node_volume(self._parts, volume_id)
        if access is not None and (why := why_unsupported_by(here.volume, access)):
            raise InvalidRequest(f"volume_capability: {why}")
        self._parts.check_volume_path(volume_id, path)
        if not publishing.is_published(here, path):
            raise NotAtPath(volume_id, path)
        return expand_on_node(here, path, size.required, size.limit)

    def health(self, volume_id: str, paths: Sequence[str]) -> list[model.Health]:
        for path in paths:
            self._parts.check_path("path", path)
        try:
            here = ephemeral.find(self._parts, volume_id) or node_volume(self._parts, volume_id)
        except _UNREADABLE:
            entries = health.health_of_unreadable(self._parts, volume_id)
            if not entries:
                raise
            return health_from(entries)
        return health_from(health.volume_health(self._parts, here, paths))

    def storage_health(self) -> list[model.StorageHealth]:
        return health.storage_health(self._parts.pools)

    def _usable(self, volume: model.NodeVolume) -> tuple[NodeVolume, Attachment | None]:
        """Return the volume with its attachment. Raises Fenced, or CapabilityUnsupported."""
        here = node_volume(self._parts, volume.id)
        attachment = _attachment(self._parts, here, volume.publish_context)
        if why := why_unsupported_by(here.volume, volume.access):
            raise CapabilityUnsupported(f"volume {volume.id}: {why}")
        return here, attachment


def node_volume(parts: PluginContext, volume_id: str) -> NodeVolume:
    """The volume; VolumeNotFound names it."""
    pool = parts.pool_of_volume(volume_id)
    return NodeVolume(pool.volumes.get(volume_id), pool)


def find_node_volume(parts: PluginContext, volume_id: str) -> NodeVolume | None:
    try:
        return node_volume(parts, volume_id)
    except (errors.NoSuchObject, errors.DamagedRecord):
        return None


def _attachment(parts: PluginContext, volume: NodeVolume, publish_context: Mapping[str, str]) -> Attachment | None:
    """The valid attachment in a shared pool; Fenced without one, whatever is mounted here already."""
    if not parts.settings.is_shared:
        return None
    token = token_from(publish_context)
    return volume.pool.attachments.verify(volume.volume_id, parts.settings.node_id, token)


def _is_for_reading(attachment: Attachment | None, access: Access) -> bool:
    """Whether other nodes may read the volume at the same time: then not even a journal may be written here."""
    return attachment is not None and (attachment.readonly or access.mode.is_read_only)
