"""What every controller receives: the API, shared caches, event recorders, options, and the place to report work.

Owns: `ControllerContext` and its parts. A controller does not know whether it runs alone, with others or in a test.
Start reading at: `ControllerContext`, `Activity`.

Each controller module exposes `async def run(context: ControllerContext) -> None`, which returns only when cancelled.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informer
from moorage.kube.cache.informers import Informers
from moorage.kube.control.controller import Backoff, Controller, Resync, Watch
from moorage.kube.control.controller import run as run_controllers
from moorage.kube.control.events import Recorder
from moorage.kube.control.queue import Reconcile, WorkQueue
from moorage.kube.control.shared import Shared

K = TypeVar("K", bound=Hashable)
MakeController = Callable[[str, Reconcile[str]], Controller[str]]


class HasWork(Protocol):
    """Anything that can say whether it has work in hand: a WorkQueue, a Recorder, a controller's own executor."""

    @property
    def is_idle(self) -> bool: ...


class Activity:
    """Whether the controllers of this process have anything left to do.

    Queues are registered with `register`; work outside a queue is wrapped in `busy`. What a controller does from time
    to time is registered with `on_resync`, so that a test can trigger it.
    """

    def __init__(self) -> None:
        self._watched: list[HasWork] = []
        self._in_flight: dict[str, int] = {}
        self._resyncs: list[Callable[[], None]] = []

    def register(self, work: HasWork) -> None:
        """Count `work` from now on."""
        self._watched.append(work)

    def on_resync(self, enqueue: Callable[[], None]) -> None:
        """Register what a controller does from time to time. It must only fill queues."""
        self._resyncs.append(enqueue)

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Report work outside a queue: the process is not idle inside the block."""
        self._in_flight[name] = self._in_flight.get(name, 0) + 1
        try:
            yield
        finally:
            self._in_flight[name] -= 1
            if not self._in_flight[name]:
                del self._in_flight[name]

    def resync(self) -> None:
        """Make every periodic check due now."""
        for enqueue in self._resyncs:
            enqueue()

    @property
    def is_idle(self) -> bool:
        """Whether no queue holds a key that is due and nothing is in flight. Delayed keys do not count."""
        return not self._in_flight and all(work.is_idle for work in self._watched)

    def is_idle_for(self, seconds: float) -> bool:
        """Whether it is idle and no delayed key is due within this time, such as one that failed a moment ago."""
        due = (work.next_due_s() for work in self._watched if isinstance(work, WorkQueue))
        return self.is_idle and all(in_s is None or in_s > seconds for in_s in due)


class Recorders:
    """One running event recorder per component. Use as `async with Recorders(client, activity)`."""

    def __init__(self, client: Client, activity: Activity, host: str = "") -> None:
        self._client = client
        self._activity = activity
        self._host = host
        self._stack = AsyncExitStack()
        self._recorders: dict[str, Recorder] = {}

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def of(self, component: str) -> Recorder:
        """Return the recorder whose events name `component` as their source."""
        recorder = self._recorders.get(component)
        if recorder is None:
            recorder = await self._stack.enter_async_context(Recorder(self._client, component, self._host))
            self._recorders[component] = recorder
            self._activity.register(recorder)
        return recorder


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Options of the command line. The default times are those of kube-controller-manager."""

    binder_resync_s: float = 15.0
    attach_verify_s: float = 60.0
    force_detach_s: float = 360.0
    force_detach_on_timeout: bool = True
    workers: int = 32  # many writes at a time share one commit of the server
    scheduler_name: str = "default-scheduler"
    bind_timeout_s: float = 600.0
    node_grace_s: float = 50.0  # without a sign of life a node counts as lost
    distributed_snapshotting: bool = False
    group_snapshots: bool = True
    retry_start_s: float = 0.005
    retry_max_s: float = 1000.0


@dataclass(frozen=True)
class ControllerContext(Shared):
    """What `run(context)` of each controller receives."""

    client: Client
    informers: Informers
    recorders: Recorders
    activity: Activity = field(default_factory=Activity)
    options: ControllerOptions = field(default_factory=ControllerOptions)
    clock: Callable[[], float] = time.monotonic

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.options.retry_start_s, self.options.retry_max_s)

    def controller(self, name: str, reconcile: Reconcile[K], backoff: Backoff | None = None) -> Controller[K]:
        """Return a controller with the workers and the back-off of the options."""
        return Controller(name, reconcile, workers=self.options.workers, backoff=backoff or self.backoff)

    async def run(
        self,
        controllers: Sequence[Controller[Any]],
        watches: Sequence[Watch[Any]],
        resyncs: Sequence[Resync] = (),
        *,
        reads: Sequence[Informer[Any]] = (),
    ) -> None:
        """Run controllers until cancelled, and count their queues as work of this process."""
        for controller in controllers:
            self.activity.register(controller.queue)
        for resync in resyncs:
            self.activity.on_resync(resync.enqueue)
        await run_controllers(controllers, watches, resyncs, reads=reads)
