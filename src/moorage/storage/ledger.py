"""How much room a pool has, and who has been promised it.

Owns: the running sums (promised, allocated, reclaimable) and the decision whether something fits.
A volume promises its size; a snapshot promises the bytes that it held when it was cut, because a
rewrite of its volume takes that much again. Sums change with each operation and cost O(1); they are
counted again from the disk before anything is refused, so drift never refuses what would fit.
May not touch: files, except for one statfs.
Start reading at: `Ledger.capacity`, `Ledger.reserved`.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moorage.host.mounts import Space
from moorage.storage.errors import OutOfSpace, SizeOutOfRange
from moorage.storage.model import MIB, Capacity, PoolConfig, PoolScope

_FRESH_S = 60.0
_FRESH_SHARED_S = 5.0


@dataclass(slots=True)
class Sums:
    """What a count of the pool finds."""

    promised: int = 0
    allocated: int = 0
    reclaimable: int = 0


class Ledger:
    """One per open pool; safe from any thread."""

    def __init__(self, config: PoolConfig, space: Callable[[], Space], count: Callable[[], Sums]) -> None:
        self._config = config
        self.space = space
        self._count = count
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._sums = Sums()
        self._pending = 0
        self._epoch = 0
        self._counted_at = float("-inf")
        self._count_took = 0.0
        # Other nodes change a shared pool without telling; a node's own pool has one owner.
        self._fresh_s = _FRESH_SHARED_S if config.scope is PoolScope.SHARED else _FRESH_S

    def recount(self, *, at_most_every_s: float = 0.0) -> bool:
        """Recount the pool. Returns False if the last count is recent enough."""
        with self._counting:  # one count at a time; who waited for it has it fresh
            return self._recount(at_most_every_s)

    def _recount(self, at_most_every_s: float) -> bool:
        started = time.monotonic()
        if started - self._counted_at < max(at_most_every_s, 10 * self._count_took):
            return False
        for _ in range(3):  # an operation that ended during the count may be in it or not
            epoch = self._epoch
            found = self._count()
            with self._lock:
                if self._epoch == epoch:
                    break
        with self._lock:
            self._sums = found
            self._counted_at = time.monotonic()
            self._count_took = self._counted_at - started
        return True

    def changed(self, *, promised: int = 0, allocated: int = 0, reclaimable: int = 0) -> None:
        """Note what an operation did."""
        with self._lock:
            self._epoch += 1
            self._sums.promised = max(0, self._sums.promised + promised)
            self._sums.allocated = max(0, self._sums.allocated + allocated)
            self._sums.reclaimable = max(0, self._sums.reclaimable + reclaimable)

    def stale(self) -> None:
        """Another process changed the pool: count again before the next refusal."""
        self._counted_at = float("-inf")

    def capacity(self) -> Capacity:
        """The pool's room now."""
        self.recount(at_most_every_s=self._fresh_s)
        return self._capacity()

    def _capacity(self) -> Capacity:
        space = self.space()
        reserve = int(space.total_bytes * self._config.reserve_fraction)
        with self._lock:
            promised = self._sums.promised + self._pending
            reclaimable = self._sums.reclaimable
            room = self._room(space, reserve)
        largest = int(max(0, space.total_bytes - reserve) * self._config.overcommit)
        return Capacity(
            total_bytes=space.total_bytes,
            free_bytes=space.available_bytes,
            reserve_bytes=reserve,
            promised_bytes=promised,
            reclaimable_bytes=reclaimable,
            available_bytes=max(0, room) // MIB * MIB,
            largest_bytes=largest // MIB * MIB,
        )

    def _room(self, space: Space, reserve: int) -> int:
        """What is left to promise; negative when too much is promised already."""
        # Bytes that are neither ours nor free: other people's files and the filesystem's own needs.
        ours = self._sums.allocated + self._sums.reclaimable
        foreign = max(0, space.total_bytes - space.available_bytes - ours)
        usable = max(0, space.total_bytes - reserve - foreign)
        return int(usable * self._config.overcommit) - self._sums.promised - self._pending

    @contextlib.contextmanager
    def reserved(self, size: int, what: str) -> Iterator[None]:
        """Hold `size` bytes of promise for the block; a block that succeeds keeps them."""
        self._take(size, what)
        try:
            yield
        except BaseException:
            with self._lock:
                self._pending -= size
            raise
        with self._lock:
            self._epoch += 1
            self._pending -= size
            self._sums.promised += size

    def _take(self, size: int, what: str) -> None:
        if self._counted_at == float("-inf") or self._config.scope is PoolScope.SHARED:
            self.recount(at_most_every_s=self._fresh_s)
        if self._try(size):
            return
        found = self._capacity()
        if size > found.largest_bytes:
            raise SizeOutOfRange(
                f"{what}: {size} bytes is more than pool {self._config.name} can ever give, {found.largest_bytes} bytes"
            )
        if self.recount() and self._try(size):
            return
        raise OutOfSpace(
            f"{what}: {size} bytes do not fit into pool {self._config.name}, which has "
            f"{self._capacity().available_bytes} bytes left to promise"
        )

    def _try(self, size: int) -> bool:
        space = self.space()
        reserve = int(space.total_bytes * self._config.reserve_fraction)
        with self._lock:
            if size > 0 and self._room(space, reserve) < size:
                return False
            self._pending += size
            return True
