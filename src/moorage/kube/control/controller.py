"""The controller runtime: change handlers fill queues, workers reconcile keys.

Owns: the order of starting (caches complete, then handlers, then workers) and the end of all of them together.
Start reading at: `run`, `Controller`, `Watch`.

A controller is written as decisions (what to do about one key) and a few lines that name the caches to watch. See
docs/contributing/controller-runtime.md for an example.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from moorage.kube.cache.informer import ChangeHandler, Informer
from moorage.kube.control.queue import Reconcile, WorkQueue
from moorage.kube.objects.meta import KubeObject

T = TypeVar("T", bound=KubeObject)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a key waits after a failure: `start_s`, doubled for each further one, at most `max_s`."""

    start_s: float = 0.005
    max_s: float = 1000.0
    jitter: float = 0.0


class Controller(Generic[K]):
    """A queue of keys and the coroutine that reconciles one of them.

    `reconcile` returns None when the key is done, or the seconds after which to call it again. If it raises, the key
    is queued again with exponential back-off. No key is reconciled by two workers at the same time.
    """

    def __init__(self, name: str, reconcile: Reconcile[K], *, workers: int = 1, backoff: Backoff | None = None) -> None:
        backoff = backoff or Backoff()
        self.reconcile = reconcile
        self.workers = workers
        self.queue: WorkQueue[K] = WorkQueue(name, start_s=backoff.start_s, max_s=backoff.max_s, jitter=backoff.jitter)

    def watch(self, cache: Informer[T], keys: Callable[[T | None, T | None], Iterable[K]]) -> "Watch[Any]":
        """Return a watch that enqueues the keys that a change of one object affects."""

        def on_change(old: T | None, new: T | None) -> None:
            for key in keys(old, new):
                self.queue.add(key)

        return Watch(cache, on_change)


@dataclass(frozen=True, slots=True)
class Watch(Generic[T]):
    """A change handler. It is first called with (None, obj) for each cached object, unless `replay` is False."""

    cache: Informer[T]
    on_change: ChangeHandler[T]
    replay: bool = True


@dataclass(frozen=True, slots=True)
class Resync:
    """A function that enqueues keys every `period_s`, in case a change was missed."""

    period_s: float
    enqueue: Callable[[], None]


async def run(
    controllers: Sequence[Controller[Any]],
    watches: Sequence[Watch[Any]],
    resyncs: Sequence[Resync] = (),
    *,
    reads: Sequence[Informer[Any]] = (),
    beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
) -> None:
    """Run controllers that share caches, and the functions in `beside`, until cancelled. May be called again later.

    Nothing starts before every watched cache, and every cache in `reads`, is complete: an object that is not cached
    yet must not be taken for one that does not exist.
    """
    await wait_synced(*(watch.cache for watch in watches), *reads)
    for controller in controllers:
        controller.queue.reset()
    with subscribed(watches):
        async with asyncio.TaskGroup() as tasks:
            for one in controllers:
                tasks.create_task(one.queue.run(one.reconcile, one.workers), name=one.queue.name)
            for resync in resyncs:
                tasks.create_task(_repeat(resync), name="resync")
            for work in beside:
                tasks.create_task(work(), name=work.__qualname__)
            await asyncio.Event().wait()  # watches alone are reason enough to stay


@contextmanager
def subscribed(watches: Sequence[Watch[Any]]) -> Iterator[None]:
    """Call the handlers of the watches inside the block, for a part that has a loop of its own instead of queues."""
    with ExitStack() as subscriptions:
        for watch in watches:
            subscriptions.enter_context(watch.cache.subscription(watch.on_change, replay=watch.replay))
        yield


async def wait_synced(*caches: Informer[Any]) -> None:
    """Return when each of the caches has taken in its first list."""
    for cache in caches:
        await cache.wait_synced()


async def _repeat(resync: Resync) -> None:
    while True:
        await asyncio.sleep(resync.period_s)
        resync.enqueue()
