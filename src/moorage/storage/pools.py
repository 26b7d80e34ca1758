"""Several pools behind one plugin.

Owns: finding a pool by name, or by something that lies in it.
May not touch: what is inside a pool.
"""

from collections.abc import Iterator, Mapping

from moorage.host.errors import HostError
from moorage.storage.errors import PoolNotFound, StorageError
from moorage.storage.pool import Pool


class Pools:
    """The pools that one plugin serves, by name; ids do not say which, so each is asked."""

    def __init__(self, pools: Mapping[str, Pool], default: str = "") -> None:
        self._pools = dict(sorted(pools.items()))
        self._default = default or next(iter(self._pools), "")

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def __len__(self) -> int:
        return len(self._pools)

    def named(self, name: str = "") -> Pool:
        """The pool with this name, or the default one."""
        found = self._pools.get(name or self._default)
        if found is None:
            raise PoolNotFound(name or self._default, self._pools)
        return found

    def of_volume(self, ident: str) -> Pool | None:
        return next((pool for pool in self if pool.volumes.find(ident) is not None), None)

    def of_sick_volume(self, ident: str) -> Pool | None:
        """The pool to ask for a volume's health: also one that cannot be read, if no other has the volume."""
        suspect = None
        for pool in self:
            try:
                if pool.volumes.find(ident) is not None:
                    return pool
            except (StorageError, HostError):
                suspect = suspect or pool
        return suspect

    def of_snapshot(self, ident: str) -> Pool | None:
        return next((pool for pool in self if pool.snapshots.find(ident) is not None), None)

    def of_group(self, ident: str) -> Pool | None:
        return next((pool for pool in self if pool.snapshots.find_group(ident) is not None), None)

    def close(self) -> None:
        for pool in self:
            pool.close()
