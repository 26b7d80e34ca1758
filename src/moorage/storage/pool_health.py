"""The health of a pool and of the volumes in it, as the pool sees them.

Owns: which signs of `health.py` are looked for, and in which order.
Start reading at: `PoolHealth.of`.
"""

import os

from moorage.host.errors import HostError
from moorage.storage import health
from moorage.storage.context import PoolContext
from moorage.storage.errors import DamagedRecord, PoolReadOnly, PoolVanished, StorageError, VolumeNotFound
from moorage.storage.ids import VolumeId
from moorage.storage.model import HealthEntry, HealthStatus, Page, VolumeHealth
from moorage.storage.volumes import Volumes


class PoolHealth:
    """What is adverse about one pool and its volumes."""

    def __init__(self, context: PoolContext, volumes: Volumes) -> None:
        self._context = context
        self._layout = context.layout
        self._name = context.config.name
        self._volumes = volumes

    def of(self, ident: str) -> tuple[HealthEntry, ...]:
        """What is adverse about a volume, as the pool sees it."""
        pool_entries = self._pool_signs()
        if any(entry.status is HealthStatus.INACCESSIBLE for entry in pool_entries):
            return pool_entries
        return (*self._own_health(ident), *pool_entries)

    def _own_health(self, ident: str) -> tuple[HealthEntry, ...]:
        try:
            return tuple(health.volume_signs(self._volumes.get(ident)))
        except DamagedRecord as damaged:
            return (health.sign("RecordDamaged", str(damaged)),)

    def unhealthy(self, after: str = "", limit: int = 0) -> Page[VolumeHealth]:
        """The volumes with something adverse, in order of id."""
        pool_entries = self._pool_signs()
        found: list[VolumeHealth] = []
        for ident in self._volumes.ids(after):
            try:
                entries = (*self._own_health(ident), *pool_entries)
            except VolumeNotFound:  # deleted meanwhile
                continue
            if entries:
                if limit and len(found) == limit:
                    return Page(tuple(found), found[-1].volume_id)
                found.append(VolumeHealth(VolumeId(ident), entries))
        return Page(tuple(found))

    def pool(self) -> tuple[HealthEntry, ...]:
        """What is adverse about the pool as a whole, for the pool's operator and for its volumes."""
        return (*self._pool_signs(), *health.leftover_signs(self._name, self._layout.leftovers.stuck))

    def _pool_signs(self) -> tuple[HealthEntry, ...]:
        """What is adverse about the pool and matters to each volume in it."""
        try:
            self._layout.check_present()
            self._check_usable()
            space = self._context.ledger.capacity()
        except PoolVanished as gone:
            return (health.sign("PoolGone", str(gone)),)
        except PoolReadOnly as failed:
            return (health.sign("PoolReadOnly", str(failed)),)
        except (StorageError, HostError) as failed:
            return (health.sign("PoolUnreadable", str(failed)),)
        return tuple(health.pool_signs(self._name, space))

    def _check_usable(self) -> None:
        """The directory of volumes answers, and the filesystem can be written."""
        with self._layout.translated("look at the pool"):
            os.stat(self._layout.volumes)
            if os.statvfs(self._layout.root).f_flag & os.ST_RDONLY:
                raise PoolReadOnly(f"pool {self._name} at {self._layout.root} is read-only")

    def damaged(self) -> list[str]:
        """The ids of volumes whose records cannot be read."""
        found = []
        for ident in self._volumes.ids():
            try:
                self._volumes.find(ident)
            except DamagedRecord:
                found.append(ident)
        return found
