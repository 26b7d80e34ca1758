"""How a volume does on this node: its use, and what is wrong with it, from real signs.

Owns: statistics and node health. What the pool can see is asked of the pool.
Start reading at: `volume_health`, `usage`.
"""

import dataclasses
from collections.abc import Sequence

from moorage.host import block_devices, mounts
from moorage.host.commands import run
from moorage.host.errors import CommandFailed, HostError
from moorage.log import get_logger
from moorage.plugin.context import PluginContext
from moorage.plugin.node.observe import NodeVolume, is_dead, observe
from moorage.sdk.model import Stats, StorageHealth
from moorage.sdk.targets import stats_of
from moorage.storage import HealthEntry, HealthStatus, Pools, health, ids

log = get_logger(__name__)


def usage(volume: NodeVolume, path: str) -> Stats | None:
    """Bytes and inodes of a filesystem; the size alone of a block device; None where nothing answers."""
    try:
        return _usage(volume, path)
    except (HostError, OSError) as failed:
        log.warning("a volume did not tell its use", volume=volume.volume_id, path=path, error=str(failed))
        return None


def _usage(volume: NodeVolume, path: str) -> Stats:
    if volume.filesystem == "" and not volume.is_directory:
        size = max((block_devices.size_of(device.path) for device in observe(volume).loops), default=0)
        return Stats(size or volume.volume.size_bytes)
    space = mounts.space_of(path)
    if volume.is_directory and volume.volume.size_enforced and volume.pool.filesystem == "btrfs":
        space = _within_quota(volume, space)
    return stats_of(space)


def _within_quota(volume: NodeVolume, space: mounts.Space) -> mounts.Space:
    """The volume's own numbers: a btrfs quota does not show in statfs, as a project quota does."""
    used = _quota_used(volume)
    if used is None:
        return space
    size = volume.volume.size_bytes
    free = max(0, size - used)
    available = min(free, space.available_bytes)
    return dataclasses.replace(space, total_bytes=size, free_bytes=free, available_bytes=available)


def _quota_used(volume: NodeVolume) -> int | None:
    try:
        done = run(["btrfs", "qgroup", "show", "--raw", "-f", volume.data])
    except CommandFailed as failed:
        log.warning("a quota did not tell its use", volume=volume.volume_id, error=str(failed))
        return None
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("0/")]
    return int(rows[-1][1]) if rows and rows[-1][1].isdigit() else None


def volume_health(parts: PluginContext, volume: NodeVolume, paths: Sequence[str]) -> list[HealthEntry]:
    """Everything adverse that is known here; an empty list is a healthy volume."""
    entries = list(volume.pool.health.of(volume.volume_id))
    entries += [health.sign("MountDead", f"{path} does not answer any more") for path in paths if is_dead(path)]
    entries += health.node_signs(volume.volume, volume.direct_io)
    why = parts.cgroups.why_unsupported(volume.is_directory)
    if volume.io_limits and why:
        entries.append(health.sign("IoLimitsNotApplied", f"I/O is not limited: {why}"))
    return _unique(entries)


def health_of_unreadable(parts: PluginContext, volume_id: str) -> list[HealthEntry]:
    """What is wrong with a volume whose record or pool cannot be read; empty when nothing is."""
    for ident in (ids.ephemeral_id_from(volume_id), volume_id):
        pool = parts.pools.of_sick_volume(ident)
        if pool is not None:
            return list(pool.health.of(ident))
    return []


def storage_health(pools: Pools) -> list[StorageHealth]:
    """What is wrong with the pools themselves: one entry for each reason, which names every pool that has it."""
    found: dict[str, list[tuple[str, HealthEntry]]] = {}
    for pool in pools:
        for entry in pool.health.pool():
            found.setdefault(entry.reason, []).append((pool.name, entry))
    return [_backend_health(each) for each in found.values()]


def _backend_health(sick: Sequence[tuple[str, HealthEntry]]) -> StorageHealth:
    names, first = [name for name, _ in sick], sick[0][1]
    which = f"pool {names[0]}" if len(names) == 1 else f"pools {', '.join(names)}"
    is_gone = first.status is HealthStatus.INACCESSIBLE
    return StorageHealth(f"{which}: {first.message}", first.reason, is_unreachable=is_gone)


def _unique(entries: Sequence[HealthEntry]) -> list[HealthEntry]:
    return list({(entry.status, entry.reason): entry for entry in reversed(entries)}.values())[::-1]
