"""What every controller is given: the API, shared informers, event recorders, options, and where to say it is busy.

Owns: `ControllerContext` and its parts, so that controllers can run alone, together or in a test, not knowing which.
May not touch: decisions of any controller.
Start reading at: `ControllerContext`, `Activity`.

Each controller module exposes `async def run(context: ControllerContext) -> None`, which returns only when cancelled.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self

from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informers
from moorage.kube.control.events import Recorder
from moorage.kube.control.queue import WorkQueue


class HasWork(Protocol):
    """Anything that can say whether it has work in hand: a WorkQueue, a Recorder, a controller's own executor."""

    @property
    def is_idle(self) -> bool: ...


class Activity:
    """Whether the controllers of this process have anything left to do.

    A controller registers each of its queues with `register` and wraps work that runs outside a queue in `busy`. What
    it would look at anyway after a period it offers through `on_resync`, so that a test can ask for it now.
    """

    def __init__(self) -> None:
        self._watched: list[HasWork] = []
        self._in_flight: dict[str, int] = {}
        self._resyncs: list[Callable[[], None]] = []

    def register(self, work: HasWork) -> None:
        """From now on `work` counts."""
        self._watched.append(work)

    def on_resync(self, look_again: Callable[[], None]) -> None:
        """`look_again` does at once what the controller does from time to time; it must only fill queues."""
        self._resyncs.append(look_again)

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """While inside, the process is not idle."""
        self._in_flight[name] = self._in_flight.get(name, 0) + 1
        try:
            yield
        finally:
            self._in_flight[name] -= 1
            if not self._in_flight[name]:
                del self._in_flight[name]

    def resync(self) -> None:
        """Make every periodic check due now."""
        for look_again in self._resyncs:
            look_again()

    @property
    def is_idle(self) -> bool:
        """No queue holds a key that is due, nothing is in flight; keys that wait for a later time do not count."""
        return not self._in_flight and all(work.is_idle for work in self._watched)

    def is_idle_for(self, seconds: float) -> bool:
        """Idle, and no queue has a key that comes back within this time, such as one that failed a moment ago."""
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
        """The recorder whose events name `component` as their source."""
        recorder = self._recorders.get(component)
        if recorder is None:
            recorder = await self._stack.enter_async_context(Recorder(self._client, component, self._host))
            self._recorders[component] = recorder
            self._activity.register(recorder)
        return recorder


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """What a person may choose; times are those of kube-controller-manager."""

    binder_resync_s: float = 15.0
    attach_reconcile_s: float = 0.1
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


@dataclass(frozen=True, slots=True)
class ControllerContext:
    """What `run(context)` of each controller receives."""

    client: Client
    informers: Informers
    recorders: Recorders
    activity: Activity = field(default_factory=Activity)
    options: ControllerOptions = field(default_factory=ControllerOptions)
    clock: Callable[[], float] = time.monotonic
