"""The snapshot controller, running: watches fill one queue for each kind. Decides nothing.

Owns: which change enqueues which object, and waiting for the custom resources to be installed.
Start reading at: `run`.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from moorage.controllers.context import ControllerContext
from moorage.controllers.snapshots.content import Contents
from moorage.controllers.snapshots.flavour import GROUP, SINGLE
from moorage.controllers.snapshots.group import GroupSnapshots
from moorage.controllers.snapshots.reconciler import SnapshotContext
from moorage.controllers.snapshots.snapshot import SingleSnapshots
from moorage.controllers.snapshots.sources import source_claim
from moorage.kube.api.discovery import is_served, wait_served
from moorage.kube.control.controller import Backoff, Controller, Watch
from moorage.kube.control.queue import WorkQueue
from moorage.kube.control.writer import Writer
from moorage.kube.errors import Conflict
from moorage.kube.objects.meta import KubeObject
from moorage.kube.objects.snapshots import (
    VolumeGroupSnapshot,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T", bound=KubeObject)

COMPONENT = "snapshot-controller"
_BACKOFF = Backoff(start_s=1.0, max_s=300.0)


async def run(context: ControllerContext) -> None:
    """Reconcile snapshots until cancelled. Without their custom resources, wait for those."""
    await wait_served(context.client, VolumeSnapshot)
    options = context.options
    shared = SnapshotContext(
        context.client,
        context.caches,
        Writer(context.client, context.informers, refreshes=True),
        await context.recorders.of(COMPONENT),
        has_groups=options.group_snapshots and await is_served(context.client, VolumeGroupSnapshot, retries=True),
        is_distributed=options.distributed_snapshotting,
    )
    controller = SnapshotController(shared, options.workers)
    reads = [context.caches.nodes] if shared.is_distributed else []
    await context.run(controller.all, controller.watches(), reads=reads)


def _retry_after_conflict(work: Callable[[str], Awaitable[None]]) -> Callable[[str], Awaitable[float | None]]:
    """On a conflict, reconcile again at once: the cache was just refreshed."""

    async def reconcile(key: str) -> float | None:
        try:
            await work(key)
        except Conflict as error:
            log.debug("conflict; retried at once", key=key, reason=str(error))
            return 0.0
        return None

    return reconcile


class SnapshotController:
    """One queue for each kind, and what fills them."""

    def __init__(self, context: SnapshotContext, workers: int) -> None:
        self._caches = caches = context.caches
        self._has_groups = context.has_groups
        self._workers = workers
        self.all: list[Controller[str]] = []
        snapshots = SingleSnapshots(context)
        self._snapshot_queue = self._add("snapshots", snapshots.sync)
        contents = Contents(context, SINGLE, caches.snapshots, caches.snapshot_contents)
        self._content_queue = self._add("snapshot-contents", contents.sync)
        self._claim_queue = self._add("snapshot-claims", snapshots.release_claim)
        if context.has_groups:
            self._group_queue = self._add("group-snapshots", GroupSnapshots(context).sync)
            group_contents = Contents(context, GROUP, caches.groups, caches.group_contents)
            self._group_content_queue = self._add("group-snapshot-contents", group_contents.sync)

    def _add(self, name: str, sync: Callable[[str], Awaitable[None]]) -> WorkQueue[str]:
        controller = Controller(name, _retry_after_conflict(sync), workers=self._workers, backoff=_BACKOFF)
        self.all.append(controller)
        return controller.queue

    def watches(self) -> list[Watch[Any]]:
        """Return what fills the queues."""
        caches = self._caches
        watches: list[Watch[Any]] = [
            Watch(caches.snapshots, self._snapshot_changed),
            Watch(caches.snapshot_contents, self._content_changed),
            Watch(caches.snapshot_classes, lambda old, new: self._wake_unfinished()),
            Watch(caches.claims, self._claim_changed),
            Watch(caches.volumes, self._volume_changed),
        ]
        if self._has_groups:
            watches += [
                Watch(caches.groups, self._group_changed),
                Watch(caches.group_contents, self._group_content_changed),
                Watch(caches.group_classes, lambda old, new: self._wake_groups()),
            ]
        return watches

    def _snapshot_changed(self, old: VolumeSnapshot | None, new: VolumeSnapshot | None) -> None:
        changed = _either(old, new)
        self._snapshot_queue.add(changed.key)
        name = changed.spec.source.persistent_volume_claim_name
        if name:
            self._claim_queue.add(f"{changed.namespace}/{name}")
        for owner in changed.metadata.owner_references if self._has_groups else ():
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
        for snapshot in self._caches.snapshots.by(source_claim, changed.key):
            self._wake_snapshot(snapshot.key)
        source = changed.spec.data_source or changed.spec.data_source_ref
        if source is not None and source.kind == "VolumeSnapshot":
            self._wake_snapshot(f"{changed.namespace}/{source.name}")

    def _volume_changed(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        ref = _either(old, new).spec.claim_ref
        if ref is not None:
            for snapshot in self._caches.snapshots.by(source_claim, f"{ref.namespace}/{ref.name}"):
                self._wake_snapshot(snapshot.key)

    def _group_changed(self, old: VolumeGroupSnapshot | None, new: VolumeGroupSnapshot | None) -> None:
        changed = _either(old, new)
        self._group_queue.add(changed.key)
        if new is None:  # its members may go now
            for snapshot in self._caches.snapshots:
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
        if self._caches.snapshots.get(key) is not None:
            self._snapshot_queue.add(key)

    def _wake_unfinished(self) -> None:
        for snapshot in self._caches.snapshots:
            if snapshot.status is None or not snapshot.status.ready_to_use:
                self._wake_snapshot(snapshot.key)

    def _wake_groups(self) -> None:
        for group in self._caches.groups:
            self._group_queue.add(group.key)


def _either(old: T | None, new: T | None) -> T:
    """Return the object that a change is about."""
    found = new if new is not None else old
    assert found is not None, "a change is about an object"
    return found
