"""Wires the attach/detach controller to the informers and runs its loop.

Owns: the subscription to informers, the tasks of operations, and the loop that plans when something changed.
May not touch: any rule; those are in `plan.py`.
Start reading at: `run`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from moorage.controllers.attachdetach.execute import AttachExecutor
from moorage.controllers.attachdetach.plan import AttachLimits, plan
from moorage.controllers.attachdetach.populate import Populator
from moorage.controllers.attachdetach.state import AttachState
from moorage.controllers.context import ControllerContext
from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informer, Informers
from moorage.kube.errors import NotFound
from moorage.kube.objects.core import Node, PersistentVolume, PersistentVolumeClaim, Pod
from moorage.kube.objects.storage import CSIDriver, VolumeAttachment
from moorage.kube.volumes import NodeName, claims_of, node_of
from moorage.log import get_logger

log = get_logger(__name__)

COMPONENT = "attachdetach-controller"
_PARALLEL_REQUESTS = 64


async def run(context: ControllerContext) -> None:
    """Attach and detach until cancelled."""
    views = InformerViews(context.informers)
    api = ClusterApi(context.client, views, _PARALLEL_REQUESTS)
    recorder = await context.recorders.of(COMPONENT)
    await views.wait_synced()
    options = context.options
    limits = AttachLimits(options.force_detach_s, options.force_detach_on_timeout, options.attach_verify_s)
    world = AttachState()
    executor = AttachExecutor(world, views, api, recorder, context.clock, limits)
    populator = Populator(world, views, context.clock, options.attach_verify_s)
    controller = AttachDetachController(world, views, populator, executor, limits, context.clock)
    context.activity.register(controller)
    await controller.run()


class InformerViews:
    """The informers of this controller, asked by key."""

    def __init__(self, informers: Informers) -> None:
        self.pod_informer = informers.of(Pod)
        self.claim_informer = informers.of(PersistentVolumeClaim)
        self.pv_informer = informers.of(PersistentVolume)
        self.driver_informer = informers.of(CSIDriver)
        self.node_informer = informers.of(Node)
        self.attachment_informer = informers.of(VolumeAttachment)

    async def wait_synced(self) -> None:
        every: Sequence[Informer[Any]] = (
            self.pod_informer,
            self.claim_informer,
            self.pv_informer,
            self.driver_informer,
            self.node_informer,
            self.attachment_informer,
        )
        for informer in every:
            await informer.wait_synced()

    def claim(self, key: str) -> PersistentVolumeClaim | None:
        return self.claim_informer.get(key)

    def pv(self, name: str) -> PersistentVolume | None:
        return self.pv_informer.get(name)

    def driver(self, name: str) -> CSIDriver | None:
        return self.driver_informer.get(name)

    def node(self, name: str) -> Node | None:
        return self.node_informer.get(name)

    def attachment(self, name: str) -> VolumeAttachment | None:
        return self.attachment_informer.get(name)

    def pods(self) -> Iterable[Pod]:
        return self.pod_informer

    def pods_of_claim(self, key: str) -> Iterable[Pod]:
        return self.pod_informer.by(claims_of, key)

    def pods_on_node(self, name: str) -> Iterable[Pod]:
        return self.pod_informer.by(node_of, name)


class ClusterApi:
    """The controller's requests to a real API server; what they return goes into the informers at once."""

    def __init__(self, client: Client, views: InformerViews, parallel: int) -> None:
        self._client = client
        self._views = views
        self._slots = asyncio.Semaphore(parallel)

    async def create_attachment(self, name: str, driver: str, node: str, pv_name: str) -> None:
        spec = {"attacher": driver, "nodeName": node, "source": {"persistentVolumeName": pv_name}}
        async with self._slots:
            made = await self._client.create(VolumeAttachment, {"metadata": {"name": name}, "spec": spec})
        self._views.attachment_informer.remember(made)

    async def delete_attachment(self, name: str) -> None:
        async with self._slots:
            await self._client.delete(VolumeAttachment, name)

    async def refresh_attachment(self, name: str) -> None:
        found = await self._client.find(VolumeAttachment, name)
        if found is not None:
            self._views.attachment_informer.remember(found)

    async def live_node(self, name: str) -> Node | None:
        found = await self._client.find(Node, name)
        if found is not None:
            self._views.node_informer.remember(found)
        return found

    async def list_attached(self, node: NodeName, entries: Sequence[tuple[str, str]]) -> None:
        attached = [{"name": name, "devicePath": path} for name, path in entries]
        try:
            async with self._slots:
                written = await self._client.patch(
                    Node, node, {"status": {"volumesAttached": attached}}, subresource="status"
                )
        except NotFound:
            log.debug("node is gone; its status needs no list", node=node)
            return
        self._views.node_informer.remember(written)


class AttachDetachController:
    """The loop: look at what changed, plan, start actions, sleep until something changes or is due."""

    def __init__(
        self,
        world: AttachState,
        views: InformerViews,
        populator: Populator,
        executor: AttachExecutor,
        limits: AttachLimits,
        clock: Callable[[], float],
    ) -> None:
        self._world = world
        self._views = views
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
        """Seconds until something is looked at again by itself, or None."""
        due = self._world.next_due
        return None if due is None else max(0.0, due - self._clock())

    async def run(self) -> None:
        self._subscribe()
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

    def _subscribe(self) -> None:
        """Rebuild the world from what there is, then follow; nothing may await in between."""
        views, populator = self._views, self._populator
        populator.rebuild(views.node_informer, views.attachment_informer)
        for volume, node in list(self._world.names.values()):
            self._executor.judge(volume, node)
        for informer, handler in (
            (views.node_informer, populator.node_changed),
            (views.driver_informer, populator.driver_changed),
            (views.pv_informer, populator.pv_changed),
            (views.claim_informer, populator.claim_changed),
            (views.pod_informer, populator.pod_changed),
            (views.attachment_informer, self._attachment_changed),
        ):
            self._follow(informer, handler)

    def _follow(self, informer: Informer[Any], handler: Callable[[Any, Any], None]) -> None:
        is_replaying = True

        def told(old: Any, new: Any) -> None:
            if not is_replaying:
                handler(old, new)
                self._wake.set()

        informer.subscribe(told)
        is_replaying = False

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
