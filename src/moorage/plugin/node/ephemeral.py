"""Inline volumes: made when their pod is published, gone when it is unpublished.

Owns: their names and their life. They have ids of their own, so none is ever taken for a
persistent volume, and the filesystem is mounted straight at the pod's target path.
Start reading at: `publish`, `unpublish`, `sweep`.
"""

import os

from moorage.errors import InvalidRequest, MoorageError
from moorage.host.targets import Target
from moorage.log import get_logger
from moorage.plugin.access import why_unsupported
from moorage.plugin.context import PluginContext
from moorage.plugin.node import staging
from moorage.plugin.node.observe import NodeVolume, observe
from moorage.plugin.parameters import InlineParameters
from moorage.sdk import model
from moorage.sdk.model import Access, AccessMode
from moorage.storage import CreateVolume, Volume, VolumeKind, errors, failpoints, ids

log = get_logger(__name__)


def publish(parts: PluginContext, asked: model.NodeVolume, target: Target) -> NodeVolume:
    """Make the volume if need be and mount it at the target; a retry finishes what was begun."""
    access, settings = asked.access, parts.settings
    wanted = InlineParameters.parse(asked.context, settings.inline_attributes, settings.inline_max_bytes)
    if access.is_block:
        raise InvalidRequest("volume_capability: an inline volume cannot be a block device")
    kind = wanted.of_class.kind
    parts.check_io_limits(wanted.of_class.mutable, kind)
    # The class has no say here: the pod's attributes name the filesystem, or the capability does.
    filesystem = wanted.of_class.fs_type or access.fs_type or "ext4"  # an inline volume never grows
    why = why_unsupported(access, is_directory=kind is VolumeKind.DIRECTORY)
    if why:
        raise InvalidRequest(f"volume_capability: {why}")
    name = wanted.of_class.pool
    pool = parts.pools.named(name)
    volume = pool.create_volume(
        CreateVolume(
            name=asked.id,
            required_bytes=wanted.size_bytes,
            kind=kind,
            filesystem="" if kind is VolumeKind.DIRECTORY else filesystem,
            thick=wanted.of_class.thick,
            mutable=wanted.of_class.mutable,
            ephemeral=target.path,
        )
    )
    failpoints.reached("ephemeral.created")
    made = NodeVolume(volume, pool)
    if not volume.size_enforced:  # only making it tells
        if not observe(made).mounts:
            pool.delete_volume(volume.id)
        raise InvalidRequest(
            f"kind: pool {pool.name} does not enforce the size of directories; use an image or a claim"
        )
    mode = AccessMode.SINGLE_NODE_READER_ONLY if asked.is_read_only else AccessMode.SINGLE_NODE_WRITER
    used = Access(mode, False, volume.filesystem, access.mount_flags)
    staging.ensure_staged(made, target, used)
    return made


def find(parts: PluginContext, handle: str) -> NodeVolume | None:
    """The inline volume that a pod's handle names; None for what no volume can be called."""
    try:
        ident = ids.ephemeral_id_from(handle)
    except errors.InvalidValue:
        return None
    for pool in parts.pools:
        volume = pool.volumes.find(ident)
        if volume is not None:
            return NodeVolume(volume, pool)
    return None


def unpublish(parts: PluginContext, volume: NodeVolume) -> None:
    """Unmount, release and delete; each step may have been done before."""
    target = Target(volume.volume.ephemeral)
    staging.ensure_unstaged(volume.volume_id, volume, target, parts.pool_directories)
    target.remove()
    failpoints.reached("ephemeral.unmounted")
    volume.pool.delete_volume(volume.volume_id)


def sweep(parts: PluginContext) -> int:
    """Remove the volumes whose pods are gone: kubelet took their directories away."""
    count = 0
    for pool in parts.pools:
        for volume in pool.volumes.ephemerals():
            if _is_abandoned(NodeVolume(volume, pool)):
                count += _remove(parts, NodeVolume(volume, pool))
    return count


def _is_abandoned(volume: NodeVolume) -> bool:
    parent = os.path.dirname(volume.volume.ephemeral)
    return not observe(volume).mounts and not os.path.isdir(parent)


def _remove(parts: PluginContext, volume: NodeVolume) -> int:
    found: Volume = volume.volume
    try:
        unpublish(parts, volume)
    except MoorageError as error:
        log.warning("an abandoned inline volume was not removed", volume=found.id, error=str(error))
        return 0
    log.info("an abandoned inline volume was removed", volume=found.id, target=found.ephemeral)
    return 1
