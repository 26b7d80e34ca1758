"""What the operations of one plugin process share.

Owns: the container of shared parts, and finding the pool of an object.
Start reading at: `PluginContext`.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moorage.csi.inflight import InFlight
from moorage.host.targets import Target, check_below, check_path
from moorage.plugin.errors import NotAtPath
from moorage.plugin.io_limits import IoCgroups, LimitsUnsupported
from moorage.plugin.settings import PluginSettings
from moorage.sdk.operations import BlockingCalls
from moorage.storage import Pool, Pools, VolumeKind, errors, ids, tunables


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

    def target(self, field: str, path: str) -> Target:
        """A path that the kubelet names. Raises InvalidRequest if it lies outside of the kubelet's directory."""
        return Target.from_request(field, path, self.settings.kubelet_dir)

    def check_path(self, field: str, path: str) -> None:
        """Raise InvalidRequest for a path that cannot be the kubelet's. Links on the way are followed."""
        check_path(field, path)
        check_below(field, path, os.path.realpath(path), self.settings.kubelet_dir)

    def check_volume_path(self, volume_id: str, path: str) -> None:
        """Raise NotAtPath, or InvalidRequest, for a path where no volume can be."""
        if not os.path.isabs(path) or not path.strip("/"):
            raise NotAtPath(volume_id, path)
        self.check_path("volume_path", path)

    def check_io_limits(self, changes: Mapping[str, str], kind: VolumeKind) -> None:
        """Raise LimitsUnsupported if I/O limits are asked for where they cannot be set."""
        settings = tunables.Tunables.of(changes)
        if settings.has_io_limits and (why := self.cgroups.why_unsupported(kind is VolumeKind.DIRECTORY)):
            raise LimitsUnsupported(f"I/O limits are not possible: {why}")

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
