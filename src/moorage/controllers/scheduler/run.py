"""Wires the scheduler to the informers and runs its queue.

Owns: which changes make which pods worth another look, and the queue of pods.
May not touch: any rule; those are in `plan.py` and what it calls.
Start reading at: `run`, `Scheduler.look_at`.
"""

from collections.abc import Iterable
from typing import Any

from moorage.controllers.context import ControllerContext
from moorage.controllers.scheduler.execute import SchedulerExecutor
from moorage.controllers.scheduler.plan import Nowhere, plan
from moorage.controllers.scheduler.state import SchedulerState
from moorage.kube.cache.informer import Informer, Informers
from moorage.kube.control.queue import WorkQueue
from moorage.kube.objects.core import Node, PersistentVolume, PersistentVolumeClaim, Pod
from moorage.kube.objects.storage import CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment
from moorage.kube.volumes import claim_class, claims_of, reference_key, volume_class
from moorage.log import get_logger

log = get_logger(__name__)

DEFAULT_NAME = "default-scheduler"
_LOOK_AGAIN_S = 300.0


async def run(context: ControllerContext) -> None:
    """Put pods on nodes until cancelled."""
    views = InformerViews(context.informers)
    recorder = await context.recorders.of(context.options.scheduler_name)
    await views.wait_synced()
    world = SchedulerState()
    executor = SchedulerExecutor(world, views, context.client, recorder, context.clock, context.options.bind_timeout_s)
    scheduler = Scheduler(world, views, executor, context.options.scheduler_name)
    context.activity.register(scheduler.queue)
    context.activity.on_resync(scheduler.wake_all)
    scheduler.subscribe()
    await scheduler.queue.run(scheduler.look_at, workers=context.options.workers)


class InformerViews:
    """The informers of the scheduler, asked by key."""

    def __init__(self, informers: Informers) -> None:
        self.pod_informer = informers.of(Pod)
        self.node_informer = informers.of(Node)
        self.claim_informer = informers.of(PersistentVolumeClaim)
        self.pv_informer = informers.of(PersistentVolume)
        self.class_informer = informers.of(StorageClass)
        self.driver_informer = informers.of(CSIDriver)
        self.csi_node_informer = informers.of(CSINode)
        self.capacity_informer = informers.of(CSIStorageCapacity)
        self.attachment_informer = informers.of(VolumeAttachment)
        self.pv_informer.index("scheduler-offer", _offered_to)
        self.capacity_informer.index("scheduler-class", lambda capacity: [capacity.storage_class_name])
        self.attachment_informer.index("scheduler-node", lambda attachment: [attachment.spec.node_name])

    @property
    def all(self) -> tuple[Informer[Any], ...]:
        return (
            self.pod_informer,
            self.node_informer,
            self.claim_informer,
            self.pv_informer,
            self.class_informer,
            self.driver_informer,
            self.csi_node_informer,
            self.capacity_informer,
            self.attachment_informer,
        )

    async def wait_synced(self) -> None:
        for informer in self.all:
            await informer.wait_synced()

    def nodes(self) -> Iterable[Node]:
        return self.node_informer

    def node(self, name: str) -> Node | None:
        return self.node_informer.get(name)

    def claim(self, key: str) -> PersistentVolumeClaim | None:
        return self.claim_informer.get(key)

    def pv(self, name: str) -> PersistentVolume | None:
        return self.pv_informer.get(name)

    def storage_class(self, name: str) -> StorageClass | None:
        return self.class_informer.get(name)

    def driver(self, name: str) -> CSIDriver | None:
        return self.driver_informer.get(name)

    def csi_node(self, name: str) -> CSINode | None:
        return self.csi_node_informer.get(name)

    def volumes_for(self, claim: PersistentVolumeClaim) -> Iterable[PersistentVolume]:
        reserved = self.pv_informer.at("scheduler-offer", f"claim {claim.key}")
        return [*reserved, *self.pv_informer.at("scheduler-offer", f"class {claim_class(claim)}")]

    def capacities(self, class_name: str) -> Iterable[CSIStorageCapacity]:
        return self.capacity_informer.at("scheduler-class", class_name)

    def attachments(self, node: str) -> Iterable[VolumeAttachment]:
        return self.attachment_informer.at("scheduler-node", node)

    def remember_claim(self, claim: PersistentVolumeClaim) -> None:
        self.claim_informer.remember(claim)

    def remember_pv(self, volume: PersistentVolume) -> None:
        self.pv_informer.remember(volume)

    def remember_pod(self, pod: Pod) -> None:
        self.pod_informer.remember(pod)


def _offered_to(volume: PersistentVolume) -> list[str]:
    if volume.spec.claim_ref is not None:
        return [f"claim {reference_key(volume.spec.claim_ref)}"]
    return [f"class {volume_class(volume)}"]


class Scheduler:
    """Looks at one pod at a time; `look_at` decides without awaiting, so no two decisions mix."""

    def __init__(self, world: SchedulerState, views: InformerViews, executor: SchedulerExecutor, name: str) -> None:
        self._world = world
        self._views = views
        self._executor = executor
        self._name = name
        self._stuck: set[str] = set()  # pods that had no node when they were last looked at
        self.queue: WorkQueue[str] = WorkQueue("scheduler", start_s=0.5, max_s=10.0)
        executor.on_freed = self.wake_all

    async def look_at(self, key: str) -> float | None:
        """Place one pod, or move its reservation on."""
        pod = self._views.pod_informer.get(key)
        reservation = self._executor.reservations.get(key)
        if pod is None or not self._is_ours(pod) or (reservation is not None and reservation.uid != pod.uid):
            self._executor.release(key)
            reservation = None
        if pod is None or not self._is_ours(pod):
            self._stuck.discard(key)
            return None
        if reservation is None:
            found = plan(pod, self._views, self._world, self._executor.rejected.get(pod.uid, {}))
            if isinstance(found, Nowhere):
                self._stuck.add(key)
                await self._executor.tell(pod, found)
                return _LOOK_AGAIN_S
            self._stuck.discard(key)
            reservation = self._executor.reserve(pod, found)
        return await self._executor.advance(pod, reservation)

    def _is_ours(self, pod: Pod) -> bool:
        if pod.spec.node_name or pod.is_deleting or pod.spec.scheduling_gates or pod.is_terminated:
            return False
        return (pod.spec.scheduler_name or DEFAULT_NAME) == self._name

    def wake_all(self) -> None:
        """Look again at every pod that had no node."""
        for key in self._stuck:
            self.queue.add(key)

    def subscribe(self) -> None:
        views = self._views
        views.pod_informer.subscribe(self._pod_changed)
        views.node_informer.subscribe(self._node_changed)
        views.claim_informer.subscribe(self._claim_changed)
        views.pv_informer.subscribe(self._pv_changed)
        for informer in (
            views.class_informer,
            views.driver_informer,
            views.csi_node_informer,
            views.capacity_informer,
        ):
            informer.subscribe(lambda _old, _new: self.wake_all())
        views.attachment_informer.subscribe(self._attachment_changed)

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        if old is not None and (new is None or new.uid != old.uid):
            self._world.see(old.uid, None)
            self._executor.rejected.pop(old.uid, None)
            self.queue.add(old.key)  # a reservation of it is to be given up
            if old.spec.node_name:
                self.wake_all()
        if new is None:
            return
        self._world.see(new.uid, new)
        if new.spec.node_name:
            if new.is_terminated:
                self.wake_all()
            if new.key in self._stuck or new.key in self._executor.reservations:
                self.queue.add(new.key)
        elif old is None or old.spec != new.spec or old.is_deleting != new.is_deleting:
            self.queue.add(new.key)

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
        for pod in self._views.pod_informer.by(claims_of, claim_key):
            if self._is_ours(pod):
                self.queue.add(pod.key)


def _matters(node: Node) -> tuple[Any, ...]:
    """What of a node decides whether a pod fits."""
    return (node.labels, node.spec, node.status.allocatable, node.status.capacity)
