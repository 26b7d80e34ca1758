"""The scheduler, running: watches fill one queue of pods. Decides nothing.

Owns: which changes enqueue which pods.
Start reading at: `run`, `Scheduler.sync_pod`.
"""

from typing import Any

from moorage.controllers.context import ControllerContext
from moorage.controllers.scheduler.execute import SchedulerExecutor
from moorage.controllers.scheduler.plan import Nowhere, plan
from moorage.controllers.scheduler.state import SchedulerState
from moorage.kube.cache.caches import Caches
from moorage.kube.control.controller import Backoff, Controller, Watch
from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import VolumeAttachment
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import reference_key
from moorage.log import get_logger

log = get_logger(__name__)

DEFAULT_NAME = "default-scheduler"
_RETRY_STUCK_S = 300.0
_BACKOFF = Backoff(start_s=0.5, max_s=10.0)


async def run(context: ControllerContext) -> None:
    """Place pods on nodes until cancelled."""
    caches, name = context.caches, context.options.scheduler_name
    world = SchedulerState()
    executor = SchedulerExecutor(
        world,
        caches,
        context.client,
        context.writer,
        await context.recorders.of(name),
        context.clock,
        context.options.bind_timeout_s,
    )
    scheduler = Scheduler(world, caches, executor, name, context.options.workers)
    context.activity.on_resync(scheduler.wake_all)
    await context.run([scheduler.pods], scheduler.watches())


class Scheduler:
    """Places pods. `sync_pod` decides without awaiting, so that no two decisions mix."""

    def __init__(
        self, world: SchedulerState, caches: Caches, executor: SchedulerExecutor, name: str, workers: int
    ) -> None:
        self._world = world
        self._caches = caches
        self._executor = executor
        self._name = name
        self._stuck: set[str] = set()  # pods for which no node was found
        self.pods: Controller[str] = Controller("scheduler", self.sync_pod, workers=workers, backoff=_BACKOFF)
        self._queue = self.pods.queue
        executor.on_freed = self.wake_all

    async def sync_pod(self, key: str) -> float | None:
        """Place one pod, or advance its reservation."""
        pod = self._caches.pods.get(key)
        reservation = self._executor.reservations.get(key)
        if pod is None or not self._is_ours(pod) or (reservation is not None and reservation.uid != pod.uid):
            self._executor.release(key)
            reservation = None
        if pod is None or not self._is_ours(pod):
            self._stuck.discard(key)
            return None
        if reservation is None:
            found = plan(pod, self._caches, self._world, self._executor.rejected.get(pod.uid, {}))
            if isinstance(found, Nowhere):
                self._stuck.add(key)
                await self._executor.tell(pod, found)
                return _RETRY_STUCK_S
            self._stuck.discard(key)
            reservation = self._executor.reserve(pod, found)
        return await self._executor.advance(pod, reservation)

    def _is_ours(self, pod: Pod) -> bool:
        if pod.spec.node_name or pod.is_deleting or pod.spec.scheduling_gates or pod.is_terminated:
            return False
        return (pod.spec.scheduler_name or DEFAULT_NAME) == self._name

    def wake_all(self) -> None:
        """Enqueue every pod for which no node was found."""
        for key in self._stuck:
            self._queue.add(key)

    def watches(self) -> list[Watch[Any]]:
        """Return what fills the queue."""
        caches = self._caches
        watches: list[Watch[Any]] = [
            Watch(caches.pods, self._pod_changed),
            Watch(caches.nodes, self._node_changed),
            Watch(caches.claims, self._claim_changed),
            Watch(caches.volumes, self._pv_changed),
            Watch(caches.attachments, self._attachment_changed),
        ]
        rarely = (caches.classes, caches.drivers, caches.csi_nodes, caches.capacities)
        return [*watches, *(Watch(cache, lambda _old, _new: self.wake_all()) for cache in rarely)]

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        if old is not None and (new is None or new.uid != old.uid):
            self._world.see(old.uid, None)
            self._executor.rejected.pop(old.uid, None)
            self._queue.add(old.key)  # to give up its reservation
            if old.spec.node_name:
                self.wake_all()
        if new is None:
            return
        self._world.see(new.uid, new)
        if new.spec.node_name:
            if new.is_terminated:
                self.wake_all()
            if new.key in self._stuck or new.key in self._executor.reservations:
                self._queue.add(new.key)
        elif old is None or old.spec != new.spec or old.is_deleting != new.is_deleting:
            self._queue.add(new.key)

    def _node_changed(self, old: Node | None, new: Node | None) -> None:
        if new is None or old is None or _matters(old) != _matters(new):
            self.wake_all()

    def _claim_changed(self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        changed = new or old
        if changed is not None:
            self._wake_users(changed.key)

    def _pv_changed(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        changed = new or old
        if changed is not None and changed.spec.claim_ref is not None:
            self._wake_users(reference_key(changed.spec.claim_ref))
        elif new is not None:
            self.wake_all()

    def _attachment_changed(self, old: VolumeAttachment | None, new: VolumeAttachment | None) -> None:
        if new is None:
            self.wake_all()

    def _wake_users(self, claim_key: str) -> None:
        for pod in self._caches.pods_using(claim_key):
            if self._is_ours(pod):
                self._queue.add(pod.key)


def _matters(node: Node) -> tuple[Any, ...]:
    """Return the parts of a node that decide whether a pod fits."""
    return (node.labels, node.spec, node.status.allocatable, node.status.capacity)
