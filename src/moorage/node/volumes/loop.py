"""The loop of the volume manager: plans the volumes that changed, and carries the steps out.

Owns: the set of volumes to plan, the timers and the running steps.
Decides nothing: see `plan.py`. Start reading at: `VolumeLoop.run`.

A pass costs what changed: an event names volumes, only those are planned; back-offs and republishing are timers.
"""

import asyncio
import heapq
from collections.abc import Callable

from moorage.kube.volumes import VolumeName
from moorage.log import get_logger
from moorage.node.layout import PodUid
from moorage.node.volumes.execute import VolumeExecutor
from moorage.node.volumes.plan import PASSING, plan_volume
from moorage.node.volumes.pod_slots import Turns
from moorage.node.volumes.state import (
    ActualVolume,
    Expand,
    MountVolume,
    PlainSource,
    StepOutcome,
    UnmountVolume,
    VolumeAction,
    VolumeState,
    settle,
    volume_of,
)

log = get_logger(__name__)

_MOST_PLAIN = 32  # steps of a pod at a time that the agent takes itself, each in a thread

FailureSink = Callable[[VolumeAction, StepOutcome], None]
Moved = Callable[[PodUid], None]


class VolumeLoop:
    """Brings the actual state of volumes to the desired one, step by step.

    `waiting` holds the reason why a volume of a pod is not mounted yet. `on_moved` is called if something about the
    volumes of a pod changed.
    """

    def __init__(
        self,
        world: VolumeState,
        executor: VolumeExecutor,
        on_moved: Moved,
        on_failure: FailureSink | None,
        clock: Callable[[], float],
    ) -> None:
        self.world = world
        self.waiting: dict[PodUid, dict[VolumeName, str]] = {}
        self.in_use_changed = asyncio.Event()
        self._executor = executor
        self._on_moved = on_moved
        self._on_failure = on_failure
        self._clock = clock
        self._dirty: dict[VolumeName, None] = {}
        self._timers: list[tuple[float, VolumeName]] = []
        self._due: dict[VolumeName, float] = {}
        self._wake = asyncio.Event()
        self._turns = Turns(_MOST_PLAIN)
        self._running: dict[VolumeName, asyncio.Task[None]] = {}
        self._is_empty = asyncio.Event()

    @property
    def under_way(self) -> int:
        """How many volumes have a running step."""
        return len(self._running)

    async def emptied(self) -> None:
        """Wait until the last volume is forgotten."""
        self._is_empty.clear()
        await self._is_empty.wait()

    def look_at(self, name: VolumeName) -> None:
        self._dirty[name] = None
        self._wake.set()

    async def run(self) -> None:
        """Plan what changed, start what is planned; running steps are cancelled with this task."""
        try:
            while True:
                now = self._clock()
                while self._timers and self._timers[0][0] <= now:
                    due, name = heapq.heappop(self._timers)
                    if self._due.get(name) == due:
                        del self._due[name]
                        self._dirty[name] = None
                dirty, self._dirty = self._dirty, {}
                for name in dirty:
                    self._step(name, now)
                for name in self._turns.due():
                    self._step(name, now)
                if not self._dirty:
                    await self._sleep(self._timers[0][0] - self._clock() if self._timers else None)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _sleep(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _step(self, name: VolumeName, now: float) -> None:
        step = plan_volume(self.world, name, now)
        for uid, reason in step.waiting.items():
            waits = self.waiting.setdefault(uid, {})
            is_news = waits.get(name) != reason
            waits[name] = reason
            if is_news and reason not in PASSING:
                self._on_moved(uid)
        if step.forget:
            self.world.actual.pop(name, None)
            self.in_use_changed.set()
            if not self.world.actual:
                self._is_empty.set()
            return
        if step.action is not None and self._may_start(name, step.action):
            self._start(name, step.action)
        if step.look_again_at is not None and self._due.get(name, float("inf")) > step.look_again_at:
            self._due[name] = step.look_again_at
            heapq.heappush(self._timers, (step.look_again_at, name))

    def _may_start(self, name: VolumeName, action: VolumeAction) -> bool:
        """A driver's time is its own affair, but thousands of threads at once would stop all the others."""
        uid = _pod_of_plain(action, self.world.actual.get(name))
        return uid is None or self._turns.take(uid, name)

    def _start(self, name: VolumeName, action: VolumeAction) -> None:
        volume = self.world.actual.get(name)
        if volume is None:
            assert isinstance(action, MountVolume)
            volume = self.world.actual[name] = ActualVolume(name, action.use.source)
        if isinstance(action, MountVolume):
            self.waiting.get(action.use.pod.uid, {}).pop(name, None)
        volume.pending = action
        self._running[name] = asyncio.create_task(self._carry_out(action, volume), name=f"{action.kind} {name}")

    async def _carry_out(self, action: VolumeAction, volume: ActualVolume) -> None:
        started = self._clock()
        name = volume_of(action)
        in_turn = _pod_of_plain(action, volume)
        outcome = await self._executor.execute(action, volume)
        if in_turn is not None:
            self._turns.give_back(in_turn)
        settle(self.world, action, outcome, self._clock())
        self._running.pop(name, None)
        uids = set(volume.pods)
        if isinstance(action, MountVolume | Expand):
            uids.add(action.use.pod.uid)
        elif isinstance(action, UnmountVolume):
            uids.add(action.uid)
        took = self._clock() - started
        if outcome.failure is None:
            log.debug("volume step done", action=action.kind, volume=name, seconds=took)
        else:
            log.warning(
                "volume step failed",
                action=action.kind,
                volume=name,
                reason=outcome.message,
                meaning=outcome.failure.value,
            )
            if self._on_failure is not None:
                self._on_failure(action, outcome)
        for uid in uids:
            self._on_moved(uid)
        self.look_at(name)


def _pod_of_plain(action: VolumeAction, volume: ActualVolume | None) -> PodUid | None:
    """Whose volume it is, if no driver has to do with it."""
    match action:
        case MountVolume(use) if isinstance(use.source, PlainSource):
            return use.pod.uid
        case UnmountVolume(_, uid) if volume is not None and isinstance(volume.source_of(uid), PlainSource):
            return uid
    return None
