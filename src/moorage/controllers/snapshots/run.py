"""Wires the snapshot controller to the informers and runs its queues.

Owns: which change makes which object worth another look, the queues, and waiting for the custom resources to be there.
May not touch: any rule; those are in `snapshot.py`, `content.py` and `group.py`.
Start reading at: `run`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from moorage.controllers.context import ControllerContext
from moorage.controllers.snapshots.content import Contents
from moorage.controllers.snapshots.group import Groups
from moorage.controllers.snapshots.snapshot import SnapshotReconciler
from moorage.controllers.snapshots.store import SnapshotStore
from moorage.kube.api.client import Client
from moorage.kube.control.queue import WorkQueue
from moorage.kube.errors import ApiError, Conflict, NotFound
from moorage.kube.objects.core import PersistentVolume, PersistentVolumeClaim
from moorage.kube.objects.meta import KubeObject, Resource
from moorage.kube.objects.snapshots import (
    VolumeGroupSnapshot,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T", bound=KubeObject)

COMPONENT = "snapshot-controller"
_RETRY_START_S = 1.0
_RETRY_MAX_S = 300.0
_CRD_WAIT_MAX_S = 30.0


async def run(context: ControllerContext) -> None:
    """Follow snapshots until cancelled; without their custom resources, wait for those."""
    await _wait_served(context.client, VolumeSnapshot.resource)
    groups = context.options.group_snapshots and await _is_served(context.client, VolumeGroupSnapshot.resource)
    distributed = context.options.distributed_snapshotting
    recorder = await context.recorders.of(COMPONENT)
    store = SnapshotStore(context.client, context.informers, recorder, groups=groups, nodes=distributed)
    await store.wait_synced()
    controller = SnapshotController(store, distributed=distributed)
    for queue in controller.queues:
        context.activity.register(queue)
    controller.subscribe()
    async with asyncio.TaskGroup() as tasks:
        for queue, work in controller.work.items():
            again = _again_after_conflict(queue, work)
            tasks.create_task(queue.run(again, workers=context.options.workers), name=queue.name)


def _again_after_conflict(
    queue: WorkQueue[str], work: Callable[[str], Awaitable[None]]
) -> Callable[[str], Awaitable[None]]:
    """Someone else wrote in between: look again at once, for what was read has been read anew."""

    async def look(key: str) -> None:
        try:
            await work(key)
        except Conflict as error:
            log.debug("looked at again", queue=queue.name, key=key, reason=str(error))
            queue.add(key)

    return look


async def _is_served(client: Client, resource: Resource) -> bool:
    """Whether the server knows a kind; a server that cannot say so is asked again."""
    while True:
        try:
            await client.request("GET", resource.path(), query={"limit": "1"})
            return True
        except NotFound:
            return False
        except ApiError as error:
            log.warning("cannot ask for a kind yet", kind=resource.kind, reason=str(error))
            await asyncio.sleep(1.0)


async def _wait_served(client: Client, resource: Resource) -> None:
    wait_s = 0.1
    while not await _is_served(client, resource):
        log.warning("custom resource is not installed; waiting for it", kind=resource.kind, group=resource.group)
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 1.5, _CRD_WAIT_MAX_S)


class SnapshotController:
    """One queue for each kind, and what fills them."""

    def __init__(self, store: SnapshotStore, *, distributed: bool) -> None:
        self._store = store
        self._snapshots = SnapshotReconciler(store, distributed=distributed)
        self._contents = Contents(store)
        self._groups = Groups(store)
        self._snapshot_queue = self._queue("snapshots")
        self._content_queue = self._queue("snapshot-contents")
        self._claim_queue = self._queue("snapshot-claims")
        self._group_queue = self._queue("group-snapshots")
        self._group_content_queue = self._queue("group-snapshot-contents")
        self.work: dict[WorkQueue[str], Callable[[str], Awaitable[None]]] = {
            self._snapshot_queue: self._snapshots.sync,
            self._content_queue: self._contents.sync,
            self._claim_queue: self._snapshots.release_claim,
        }
        if store.has_groups:
            self.work[self._group_queue] = self._groups.sync
            self.work[self._group_content_queue] = self._contents.sync_group

    @property
    def queues(self) -> list[WorkQueue[str]]:
        return list(self.work)

    def _queue(self, name: str) -> WorkQueue[str]:
        return WorkQueue(name, start_s=_RETRY_START_S, max_s=_RETRY_MAX_S)

    def subscribe(self) -> None:
        store = self._store
        store.snapshots.subscribe(self._snapshot_changed)
        store.contents.subscribe(self._content_changed)
        store.classes.subscribe(lambda old, new: self._wake_unfinished())
        store.claims.subscribe(self._claim_changed)
        store.volumes.subscribe(self._volume_changed)
        if store.has_groups:
            store.groups.subscribe(self._group_changed)
            store.group_contents.subscribe(self._group_content_changed)
            store.group_classes.subscribe(lambda old, new: self._wake_groups())

    def _snapshot_changed(self, old: VolumeSnapshot | None, new: VolumeSnapshot | None) -> None:
        changed = _either(old, new)
        self._snapshot_queue.add(changed.key)
        name = changed.spec.source.persistent_volume_claim_name
        if name:
            self._claim_queue.add(f"{changed.namespace}/{name}")
        for owner in changed.metadata.owner_references if self._store.has_groups else ():
            if owner.kind == "VolumeGroupSnapshot" and new is None:
                self._group_queue.add(f"{changed.namespace}/{owner.name}")

    def _content_changed(self, old: VolumeSnapshotContent | None, new: VolumeSnapshotContent | None) -> None:
        changed = _either(old, new)
        self._content_queue.add(changed.key)
        ref = changed.spec.volume_snapshot_ref
        self._wake_snapshot(f"{ref.namespace}/{ref.name}")

    def _claim_changed(self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        changed = _either(old, new)
        self._claim_queue.add(changed.key)
        for snapshot in self._store.snapshots.at("claim", changed.key):
            self._wake_snapshot(snapshot.key)
        source = changed.spec.data_source or changed.spec.data_source_ref
        if source is not None and source.kind == "VolumeSnapshot":
            self._wake_snapshot(f"{changed.namespace}/{source.name}")

    def _volume_changed(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        ref = _either(old, new).spec.claim_ref
        if ref is not None:
            for snapshot in self._store.snapshots.at("claim", f"{ref.namespace}/{ref.name}"):
                self._wake_snapshot(snapshot.key)

    def _group_changed(self, old: VolumeGroupSnapshot | None, new: VolumeGroupSnapshot | None) -> None:
        changed = _either(old, new)
        self._group_queue.add(changed.key)
        if new is None:  # its members may go now
            for snapshot in self._store.snapshots:
                if snapshot.is_deleting and snapshot.namespace == changed.namespace:
                    self._wake_snapshot(snapshot.key)

    def _group_content_changed(
        self, old: VolumeGroupSnapshotContent | None, new: VolumeGroupSnapshotContent | None
    ) -> None:
        changed = _either(old, new)
        self._group_content_queue.add(changed.key)
        ref = changed.spec.volume_group_snapshot_ref
        self._group_queue.forget(f"{ref.namespace}/{ref.name}")
        self._group_queue.add(f"{ref.namespace}/{ref.name}")

    def _wake_snapshot(self, key: str) -> None:
        if self._store.snapshots.get(key) is not None:
            self._snapshot_queue.add(key)

    def _wake_unfinished(self) -> None:
        for snapshot in self._store.snapshots:
            if snapshot.status is None or not snapshot.status.ready_to_use:
                self._wake_snapshot(snapshot.key)

    def _wake_groups(self) -> None:
        for group in self._store.groups:
            self._group_queue.add(group.key)


def _either(old: T | None, new: T | None) -> T:
    """The object that a change is about."""
    found = new if new is not None else old
    assert found is not None, "a change is about an object"
    return found
