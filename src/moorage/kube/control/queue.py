"""A work queue: each key once, one worker per key at a time, failures later and later.

Owns: order, de-duplication, delays and back-off of keys, and the tasks that work on them.
May not touch: what a key means.
Start reading at: `WorkQueue.run`.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Generic, TypeVar

from moorage.errors import MoorageError
from moorage.kube.api.metrics import QueueMetrics
from moorage.log import get_logger

log = get_logger(__name__)

K = TypeVar("K", bound=Hashable)
Reconcile = Callable[[K], Awaitable[float | None]]


class WorkQueue(Generic[K]):
    """A queue of keys that are to be reconciled.

    The worker returns None when it is done with a key, or the seconds after which the key is queued again. If it
    raises, the key is queued again after its back-off: `start_s`, doubled for each failure up to `max_s`.
    """

    def __init__(self, name: str, *, start_s: float = 0.005, max_s: float = 1000.0, jitter: float = 0.0) -> None:
        self.name = name
        self._start_s = start_s
        self._max_s = max_s
        self._jitter = jitter
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()  # in _ready, or to be queued again when its worker ends
        self._working: dict[K, asyncio.Task[None]] = {}
        self._timers: dict[K, tuple[float, asyncio.TimerHandle]] = {}
        self._failures: dict[K, int] = {}
        self._queued_at: dict[K, float] = {}
        self._begun_at: dict[K, float] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._stopping = False
        self._has_ended = False
        self._metrics = QueueMetrics(self)

    def add(self, key: K) -> None:
        """Queue a key. One that is being worked on is queued once more afterwards."""
        if self._stopping or key in self._waiting:
            return
        self._waiting.add(key)
        self._metrics.added()
        self._queued_at[key] = time.monotonic()
        if key not in self._working:
            self._ready.append(key)
            self._wake.set()

    def add_after(self, key: K, delay_s: float) -> None:
        """Queue a key after a delay. The earliest of several delays counts."""
        if self._stopping:
            return
        if delay_s <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + delay_s
        known = self._timers.get(key)
        if known is not None:
            if known[0] <= due:
                return
            known[1].cancel()
        self._timers[key] = (due, loop.call_at(due, self._ring, key))

    def add_rate_limited(self, key: K) -> None:
        """Queue a key after its back-off."""
        self._metrics.retried()
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay_s: float = min(self._start_s * 2.0 ** min(failures, 60), self._max_s)
        self.add_after(key, delay_s * random.uniform(1.0, 1.0 + self._jitter))

    def forget(self, key: K) -> None:
        """Reset the key's back-off after a success."""
        self._failures.pop(key, None)

    def reset(self) -> None:
        """Reset the back-off of every key, before a new `run`."""
        self._failures.clear()

    def failures(self, key: K) -> int:
        return self._failures.get(key, 0)

    @property
    def is_idle(self) -> bool:
        """Nothing is waiting or being worked on; keys with a timer do not count."""
        return not self._ready and not self._working and not self._waiting

    @property
    def delayed(self) -> int:
        """How many keys come back later."""
        return len(self._timers)

    def next_due_s(self) -> float | None:
        """Seconds until the next delayed key, or None."""
        if not self._timers:
            return None
        return max(0.0, min(due for due, _ in self._timers.values()) - asyncio.get_running_loop().time())

    def running_since(self) -> Iterable[float]:
        """When each piece of work under way began (monotonic seconds), for the metrics."""
        return list(self._begun_at.values())

    def __len__(self) -> int:
        return len(self._ready)

    async def run(self, work: Reconcile[K], workers: int = 1) -> None:
        """Work on keys until cancelled; what has begun is then cancelled and awaited."""
        self._has_ended = False
        try:
            while True:
                while self._ready and len(self._working) < workers:
                    self._begin(work, self._ready.popleft())
                if not self._ready and not self._working:
                    self._idle.set()
                self._wake.clear()
                await self._wake.wait()
        finally:
            await self._end()

    async def drain(self) -> None:
        """Take nothing new and return when what is queued has been worked on, or when `run` has ended."""
        self._stopping = True
        self._cancel_timers()
        while (self._ready or self._working) and not self._has_ended:
            self._idle.clear()
            await self._idle.wait()

    def _begin(self, work: Reconcile[K], key: K) -> None:
        self._waiting.discard(key)
        now = time.monotonic()
        self._metrics.waited(now - self._queued_at.pop(key, now))
        self._begun_at[key] = now
        self._working[key] = asyncio.create_task(self._work(work, key), name=f"{self.name}:{key}")

    async def _work(self, work: Reconcile[K], key: K) -> None:
        try:
            again_s = await work(key)
            self.forget(key)
            if again_s is not None:
                self.add_after(key, again_s)
        except MoorageError as error:
            self.add_rate_limited(key)
            log.debug("comes back later", queue=self.name, key=key, reason=str(error), failures=self.failures(key))
        except Exception:
            self.add_rate_limited(key)
            log.exception("work failed unexpectedly", queue=self.name, key=key)
        finally:
            del self._working[key]
            self._metrics.worked(time.monotonic() - self._begun_at.pop(key))
            if key in self._waiting:
                self._ready.append(key)
            self._wake.set()

    def _ring(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _cancel_timers(self) -> None:
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    async def _end(self) -> None:
        self._cancel_timers()
        tasks = list(self._working.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._working.clear()  # a task that was cancelled before its first step has not removed itself
        queued = set(self._ready)
        self._ready.extend(key for key in self._waiting if key not in queued)  # nor put its key back
        self._begun_at.clear()
        self._has_ended = True
        self._idle.set()
