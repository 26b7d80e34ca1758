"""What the operations of one plugin process share.

Owns: the container of shared parts, and finding the pool of an object.
Start reading at: `PluginContext`.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from moorage.csi.inflight import InFlight
from moorage.plugin.io_limits import IoCgroups
from moorage.plugin.settings import PluginSettings
from moorage.sdk.operations import BlockingCalls
from moorage.storage import Pool, Pools, errors, ids


@dataclass(frozen=True)
class PluginContext:
    """One object for the services to be made from."""

    settings: PluginSettings
    pools: Pools
    in_flight: InFlight = field(default_factory=InFlight)
    work: BlockingCalls = field(default_factory=BlockingCalls)
    cgroups: IoCgroups = field(default_factory=IoCgroups)
    copies: "Counter[str]" = field(default_factory=Counter)  # by the way they were made
    # Volumes with I/O limits that were seen here: a hint for `tuning`, found again after a restart.
    limited: set[str] = field(default_factory=set)

    @property
    def pool_directories(self) -> list[Path]:
        return [pool.directory for pool in self.pools]

    def pool_of_volume(self, volume_id: str) -> Pool:
        """The pool that has the volume; VolumeNotFound for an unknown id."""
        return _found(self.pools.of_volume(volume_id), errors.VolumeNotFound(volume_id))

    def persistent_pool(self, volume_id: str) -> Pool:
        """The pool of a volume that the controller may touch. Those that live with a pod are not shown to it."""
        if ids.is_ephemeral(volume_id):
            raise errors.VolumeNotFound(volume_id)
        return self.pool_of_volume(volume_id)

    def pool_of_snapshot(self, snapshot_id: str) -> Pool:
        return _found(self.pools.of_snapshot(snapshot_id), errors.SnapshotNotFound(snapshot_id))


def _found(pool: Pool | None, otherwise: errors.NoSuchObject) -> Pool:
    if pool is None:
        raise otherwise
    return pool
