"""Wires the snapshotter: contents and group contents to controllers. Decides nothing."""

import asyncio
from typing import Any

from moorage.kube import names
from moorage.kube.api.discovery import wait_served
from moorage.kube.cache.informer import Informer
from moorage.kube.control.controller import Watch, run
from moorage.kube.objects import VolumeGroupSnapshotContent, VolumeSnapshotClass, VolumeSnapshotContent
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.snapshotter.adopt import UNLABELLED, Adopter
from moorage.sidecars.snapshotter.contents import ContentWorker
from moorage.sidecars.snapshotter.decide import is_relevant_change
from moorage.sidecars.snapshotter.flavour import C
from moorage.sidecars.snapshotter.group import GroupWorker
from moorage.sidecars.snapshotter.single import SingleWorker
from moorage.sidecars.snapshotter.versions import best_served

log = get_logger(__name__)

_LOOK_FOR_GROUPS_S = 60.0


class Snapshotter:
    """Stands for csi-snapshotter."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._events = context.recorder(f"csi-snapshotter {context.driver.name}")

    async def run(self) -> None:
        """Take and delete snapshots until cancelled."""
        context, can = self._context, self._context.driver.capabilities
        async with self._events, asyncio.TaskGroup() as tasks:
            if can.controller("CREATE_DELETE_SNAPSHOT") or can.controller("LIST_SNAPSHOTS"):
                tasks.create_task(self._run_contents(), name="snapshot-contents")
            if can.groups and context.settings.gate("CSIVolumeGroupSnapshot", True):
                tasks.create_task(self._run_groups(), name="group-contents")

    async def _run_contents(self) -> None:
        context = self._context
        await wait_served(context.client, VolumeSnapshotContent)
        classes, per_node = context.caches.snapshot_classes, context.settings.node_deployment
        labels = f"{names.SNAPSHOT_MANAGED_BY}={context.around.node_name}" if per_node else ""
        contents = context.informers.of(VolumeSnapshotContent, labels=labels)
        worker = SingleWorker(context, contents, classes, self._events)

        def on_class(old: VolumeSnapshotClass | None, new: VolumeSnapshotClass | None) -> None:
            """Enqueue the contents that have waited for a new class."""
            if new is None or old is not None or new.driver != context.driver.name:
                return
            for content in contents:
                if content.spec.volume_snapshot_class_name == new.name and content.status is None:
                    worker.controller.queue.add(content.name)

        controllers = [worker.controller]
        watches = [
            self._watch(worker, contents),
            Watch(classes, on_class, replay=False),
        ]
        reads = []
        if per_node:
            unlabelled = context.informers.of(VolumeSnapshotContent, labels=UNLABELLED)
            adopter = context.controller("csi-snapshotter-unlabelled", Adopter(context, unlabelled, worker).sync)
            controllers.append(adopter)
            watches.append(adopter.watch(unlabelled, lambda _, new: [new.name] if new and self._is_ours(new) else []))
            reads.append(context.caches.volumes)
        await run(controllers, watches, reads=reads)

    async def _run_groups(self) -> None:
        context = self._context
        while (kinds := await best_served(context.client)) is None:
            log.info("the cluster lacks the group snapshot kinds; groups are off until it has them")
            await asyncio.sleep(_LOOK_FOR_GROUPS_S)
        log.info("group snapshots are on", version=kinds.content.resource.version)
        contents, classes = context.informers.of(kinds.content), context.informers.of(kinds.group_class)
        worker = GroupWorker(context, contents, classes, self._events)
        reads: list[Informer[Any]] = [classes, *([context.caches.volumes] if context.settings.node_deployment else [])]
        await run([worker.controller], [self._watch(worker, contents)], reads=reads)

    def _watch(self, worker: ContentWorker[C, Any], contents: Informer[C]) -> Watch[Any]:
        def keys(old: C | None, new: C | None) -> list[str]:
            is_ours = new is not None and self._is_ours(new)
            return [new.name] if new and is_ours and is_relevant_change(old, new, worker.flavour.being_created) else []

        return worker.controller.watch(contents, keys)

    def _is_ours(self, content: VolumeSnapshotContent | VolumeGroupSnapshotContent) -> bool:
        """Whether the content is of our driver. With one process per node, a group content must also be of our node.

        It is if it is labelled for the node, or if its first volume is here. Any node may release one that is being
        deleted, was never taken and has no volume left.
        """
        context = self._context
        if content.spec.driver != context.driver.name:
            return False
        if not context.settings.node_deployment or isinstance(content, VolumeSnapshotContent):
            return True  # single contents are selected by their label
        managed_by = content.labels.get(names.SNAPSHOT_MANAGED_BY)
        if managed_by is not None:
            return managed_by == context.around.node_name
        handles = content.spec.source.volume_handles or []
        volumes = (context.caches.volume_with_handle(context.driver.name, handle) for handle in handles)
        first = next((volume for volume in volumes if volume is not None), None)
        if first is None:
            was_made = content.status is not None and content.status.volume_group_snapshot_handle
            return content.is_deleting and bool(handles) and not was_made
        return context.is_local(first)
