"""Mutable settings of volumes in use, put on their devices and their pods.

Owns: applying direct I/O, read-ahead and I/O limits to what is staged and published on this node,
and doing it again for cgroups that appear later (containers start after their volumes are there).
May not touch: records; callers pass a volume, and the kernel is made to agree with it.
Start reading at: `retune`, `keep_limits`.
"""

import asyncio
import contextlib
from collections.abc import Iterable

from moorage.errors import MoorageError
from moorage.host import block_devices, loop
from moorage.host.errors import LoopGone
from moorage.host.loop import LoopDevice
from moorage.log import get_logger
from moorage.plugin.context import PluginContext
from moorage.plugin.io_limits import pod_uid_from
from moorage.plugin.node.observe import NodeVolume, observe
from moorage.storage import Pool, Volume, VolumeKind

log = get_logger(__name__)

_PERIOD_S = 2.0


def retune(parts: PluginContext, pool: Pool, volume: Volume) -> None:
    """Make the volume's devices on this node follow its settings."""
    if volume.kind is not VolumeKind.IMAGE:
        return
    here = NodeVolume(volume, pool)
    seen = observe(here)
    for device in seen.loops:
        with contextlib.suppress(LoopGone), loop.held(device):
            _retune_device(here, device)
    note(parts, here)
    limit(parts, here)


def _retune_device(volume: NodeVolume, device: LoopDevice) -> None:
    wanted = volume.direct_io
    if device.direct_io != wanted and loop.set_direct_io(device.number, wanted) != wanted:
        log.warning("direct I/O was not changed", volume=volume.volume_id, device=str(device.path))
    if volume.settings.read_ahead_kib is not None:
        block_devices.set_read_ahead(device.path, volume.settings.read_ahead_kib)


def limit(parts: PluginContext, volume: NodeVolume, always: bool = True) -> int:
    """Put the volume's I/O limits on the pods it is published to; returns on how many cgroups."""
    if parts.cgroups.why_unsupported() or volume.is_directory:
        return 0
    limits = volume.io_limits
    if not limits and not always:
        return 0
    seen = observe(volume)
    pods = {uid for mount in seen.mounts if (uid := pod_uid_from(mount.target))}
    return sum(parts.cgroups.apply(uid, device.device, limits) for uid in pods for device in seen.loops)


def note(parts: PluginContext, volume: NodeVolume) -> None:
    """Remember a volume that was staged, published or modified here, if it has limits."""
    if volume.io_limits:
        parts.limited.add(volume.volume_id)


async def keep_limits(parts: PluginContext) -> None:
    """Apply limits again and again where there are some; with cgroup v1 each new one starts without.

    Runs until it is cancelled.
    """
    if parts.cgroups.why_unsupported():
        return
    await parts.work.run(_find_limited, parts)
    while True:
        await asyncio.sleep(_PERIOD_S)
        if parts.limited:
            await parts.work.run(_renew, parts, sorted(parts.limited))


def _find_limited(parts: PluginContext) -> None:
    for pool in parts.pools:
        for device in loop.attached(pool.directory):
            volume = pool.volumes.find(volume_id_behind(pool, device.backing_file))
            if volume is not None:
                note(parts, NodeVolume(volume, pool))


def _renew(parts: PluginContext, volume_ids: Iterable[str]) -> None:
    for volume_id in volume_ids:
        try:
            pool = parts.pools.of_volume(volume_id)
            if pool is None:
                parts.limited.discard(volume_id)
            else:
                limit(parts, NodeVolume(pool.volumes.get(volume_id), pool), always=False)
        except MoorageError as error:
            log.warning("I/O limits were not renewed", volume=volume_id, error=str(error))


def volume_id_behind(pool: Pool, backing_file: str) -> str:
    """The volume whose image a loop device holds, read from the path below the pool."""
    parts = backing_file.removeprefix(f"{pool.directory.resolve()}/").split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "volumes" else ""
