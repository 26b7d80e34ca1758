"""The attach/detach controller, running: its own loop over a state, instead of queues of keys.

Owns: the watches, the tasks of operations, and the loop that plans after a change.
Start reading at: `run`, `AttachDetachController.step`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from moorage.controllers.attachdetach.execute import AttachExecutor
from moorage.controllers.attachdetach.plan import AttachLimits, plan
from moorage.controllers.attachdetach.populate import Populator
from moorage.controllers.attachdetach.requests import AttachRequests
from moorage.controllers.attachdetach.state import AttachState
from moorage.controllers.context import ControllerContext
from moorage.kube.cache.caches import Caches
from moorage.kube.cache.informer import ChangeHandler, Informer
from moorage.kube.control.controller import Watch, subscribed, wait_synced
from moorage.kube.objects.meta import KubeObject
from moorage.kube.objects.storage import VolumeAttachment
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T", bound=KubeObject)

COMPONENT = "attachdetach-controller"


async def run(context: ControllerContext) -> None:
    """Attach and detach until cancelled."""
    caches, options, world = context.caches, context.options, AttachState()
    limits = AttachLimits(options.force_detach_s, options.force_detach_on_timeout, options.attach_verify_s)
    requests = AttachRequests(context.client, context.writer)
    recorder = await context.recorders.of(COMPONENT)
    executor = AttachExecutor(world, caches, requests, recorder, context.clock, limits)
    populator = Populator(world, caches, context.clock, options.attach_verify_s)
    controller = AttachDetachController(world, caches, populator, executor, limits, context.clock)
    await wait_synced(*(watch.cache for watch in controller.watches()))
    context.activity.register(controller)
    await controller.run()


class AttachDetachController:
    """The loop: plan what changed, start actions, sleep until something changes or is due."""

    def __init__(
        self,
        world: AttachState,
        caches: Caches,
        populator: Populator,
        executor: AttachExecutor,
        limits: AttachLimits,
        clock: Callable[[], float],
    ) -> None:
        self._world = world
        self._caches = caches
        self._populator = populator
        self._executor = executor
        self._limits = limits
        self._clock = clock
        self._wake = asyncio.Event()
        self._running = 0
        self._ready = False

    @property
    def is_idle(self) -> bool:
        return self._ready and not self._running and not self._wake.is_set()

    def next_due_s(self) -> float | None:
        """Return the seconds until a timer is due. Returns None if there is none."""
        due = self._world.next_due
        return None if due is None else max(0.0, due - self._clock())

    async def run(self) -> None:
        """Rebuild the state, then follow changes until cancelled."""
        self.rebuild()  # nothing may await before the handlers are subscribed
        with subscribed(self.watches()):
            await self._loop()

    async def _loop(self) -> None:
        async with asyncio.TaskGroup() as tasks:

            def spawn(work: Coroutine[Any, Any, None], name: str) -> None:
                self._running += 1
                tasks.create_task(self._guarded(work, name), name=name)

            while True:
                self._wake.clear()
                self.step(spawn)
                self._ready = True
                await self._sleep()

    def step(self, spawn: Callable[[Coroutine[Any, Any, None], str], None]) -> None:
        """One pass over what changed."""
        world, now = self._world, self._clock()
        world.ring(now)
        while world.dirty_drivers:
            self._populator.recheck_driver(world.dirty_drivers.pop())
        while world.late_nodes:
            self._populator.recheck_node(world.late_nodes.pop())
        dirty, world.dirty = world.dirty, set()
        self._executor.begin(plan(world, dirty, self._limits, now), spawn)
        if world.dirty:  # a task that had nothing to wait for changed something at once
            self._wake.set()

    async def _sleep(self) -> None:
        try:
            async with asyncio.timeout(self.next_due_s()):
                await self._wake.wait()
        except TimeoutError:
            log.debug("something is due")

    async def _guarded(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception:
            log.exception("operation failed unexpectedly", operation=name)
        finally:
            self._running -= 1
            self._wake.set()

    def rebuild(self) -> None:
        """Fill the state from the caches after a start."""
        self._populator.rebuild(self._caches.nodes, self._caches.attachments)
        for volume, node in list(self._world.names.values()):
            self._executor.judge(volume, node)

    def watches(self) -> list[Watch[Any]]:
        """Return the handlers of changes. `rebuild` has taken in the objects that exist, so nothing is replayed."""
        caches, populator = self._caches, self._populator
        return [
            self._watch(caches.nodes, populator.node_changed),
            self._watch(caches.drivers, populator.driver_changed),
            self._watch(caches.volumes, populator.pv_changed),
            self._watch(caches.claims, populator.claim_changed),
            self._watch(caches.pods, populator.pod_changed),
            self._watch(caches.attachments, self._attachment_changed),
        ]

    def _watch(self, cache: Informer[T], handler: ChangeHandler[T]) -> Watch[Any]:
        def on_change(old: T | None, new: T | None) -> None:
            handler(old, new)
            self._wake.set()

        return Watch(cache, on_change, replay=False)

    def _attachment_changed(self, old: VolumeAttachment | None, new: VolumeAttachment | None) -> None:
        name = new.name if new is not None else old.name if old is not None else ""
        doubted = self._world.in_doubt.pop(name, None) if new is not None else None
        pair = self._world.names.get(name) or doubted
        if doubted is not None:
            self._world.found_attachment(*doubted)
        if pair is None:
            return
        if new is None:
            self._executor.attachment_gone(*pair)
        else:
            self._executor.judge(*pair)
