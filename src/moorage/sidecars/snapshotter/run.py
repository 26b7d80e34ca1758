"""Wires the snapshotter: contents and group contents to queues, queues to workers."""

import asyncio

from moorage.kube.cache.informer import Informer
from moorage.kube.objects import VolumeGroupSnapshotContent, VolumeSnapshotClass, VolumeSnapshotContent
from moorage.log import get_logger
from moorage.sidecars import names
from moorage.sidecars.context import RoleContext, synced, wait_served
from moorage.sidecars.roles import Role
from moorage.sidecars.snapshotter.adopt import UNLABELLED, Adopter, handles_of
from moorage.sidecars.snapshotter.contents import ContentWorker
from moorage.sidecars.snapshotter.decide import is_worth_a_look
from moorage.sidecars.snapshotter.groups import GroupWorker
from moorage.sidecars.snapshotter.versions import GroupKinds, best_served

log = get_logger(__name__)

_LOOK_FOR_GROUPS_S = 60.0


class Snapshotter:
    """Stands for csi-snapshotter."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._events = context.recorder(f"csi-snapshotter {context.driver.name}")
        self._contents = context.queue("csi-snapshotter-content")
        self._unlabelled = context.queue("csi-snapshotter-unlabelled")
        self._groups = context.queue("csi-snapshotter-groupsnapshotcontent")
        self._content_worker: ContentWorker | None = None
        self._adopter: Adopter | None = None
        self._group_worker: GroupWorker | None = None
        self._group_kinds: GroupKinds | None = None

    async def run(self) -> None:
        """Make and delete snapshots until cancelled."""
        context, can = self._context, self._context.driver.capabilities
        async with self._events, asyncio.TaskGroup() as tasks:
            if can.controller("CREATE_DELETE_SNAPSHOT") or can.controller("LIST_SNAPSHOTS"):
                tasks.create_task(self._run_contents(), name="snapshot-contents")
            if can.groups and context.settings.gate("CSIVolumeGroupSnapshot", True):
                tasks.create_task(self._run_groups(), name="group-contents")

    async def _run_contents(self) -> None:
        context = self._context
        await wait_served(context.client, VolumeSnapshotContent)
        contents = self._contents_informer()
        classes = context.informers.of(VolumeSnapshotClass)
        await synced(contents, classes)
        if self._content_worker is None:
            self._content_worker = ContentWorker(context, contents, classes, self._events)
            contents.subscribe(self._on_content)
            classes.subscribe(self._on_class)
        for content in contents:
            self._contents.forget(content.name)
            self._on_content(None, content)
        async with asyncio.TaskGroup() as tasks:
            if context.settings.node_deployment:
                tasks.create_task(self._run_unlabelled(self._content_worker), name="unlabelled-contents")
            await self._contents.run(self._content_worker.sync, context.settings.workers_for(Role.SNAPSHOTTER))

    async def _run_unlabelled(self, worker: ContentWorker) -> None:
        context = self._context
        unlabelled = context.informers.of(VolumeSnapshotContent, labels=UNLABELLED)
        await synced(unlabelled, context.volumes)
        if self._adopter is None:
            self._adopter = Adopter(context, unlabelled, worker)
            unlabelled.subscribe(self._on_unlabelled)
        for content in unlabelled:
            self._on_unlabelled(None, content)
        await self._unlabelled.run(self._adopter.sync)

    def _contents_informer(self) -> Informer[VolumeSnapshotContent]:
        settings, around = self._context.settings, self._context.around
        labels = f"{names.SNAPSHOT_MANAGED_BY}={around.node_name}" if settings.node_deployment else ""
        return self._context.informers.of(VolumeSnapshotContent, labels=labels)

    async def _run_groups(self) -> None:
        context = self._context
        while (kinds := await best_served(context.client)) is None:
            log.info("the cluster lacks the group snapshot kinds; groups are off until it has them")
            await asyncio.sleep(_LOOK_FOR_GROUPS_S)
        log.info("group snapshots are on", version=kinds.content.resource.version)
        contents = context.informers.of(kinds.content)
        classes = context.informers.of(kinds.group_class)
        await synced(contents, classes)
        if context.settings.node_deployment:
            context.volumes.index("handle", handles_of)
            await synced(context.volumes)
        if self._group_worker is None or self._group_kinds != kinds:
            self._group_kinds = kinds
            self._group_worker = GroupWorker(context, contents, classes, self._events)
            contents.subscribe(self._on_group)
        for content in contents:
            self._groups.forget(content.name)
            self._on_group(None, content)
        await self._groups.run(self._group_worker.sync, context.settings.workers_for(Role.SNAPSHOTTER))

    def _on_content(self, old: VolumeSnapshotContent | None, new: VolumeSnapshotContent | None) -> None:
        if new is None or new.spec.driver != self._context.driver.name:
            return
        if is_worth_a_look(old, new, names.SNAPSHOT_BEING_CREATED):
            self._contents.add(new.name)

    def _on_unlabelled(self, _: VolumeSnapshotContent | None, new: VolumeSnapshotContent | None) -> None:
        if new is not None and new.spec.driver == self._context.driver.name:
            self._unlabelled.add(new.name)

    def _on_class(self, old: VolumeSnapshotClass | None, new: VolumeSnapshotClass | None) -> None:
        """Contents may have waited for their class."""
        if new is None or old is not None or new.driver != self._context.driver.name:
            return
        for content in self._contents_informer():
            if content.spec.volume_snapshot_class_name == new.name and content.status is None:
                self._contents.add(content.name)

    def _on_group(self, old: VolumeGroupSnapshotContent | None, new: VolumeGroupSnapshotContent | None) -> None:
        if new is None or new.spec.driver != self._context.driver.name or not self._is_local(new):
            return
        if is_worth_a_look(old, new, names.GROUP_BEING_CREATED):
            self._groups.add(new.name)

    def _is_local(self, content: VolumeGroupSnapshotContent) -> bool:
        """With one process per node: labelled for this node, or its first volume is here.

        One whose volumes are all gone before anything was made has nothing behind it: any node may let it go.
        """
        context = self._context
        if not context.settings.node_deployment:
            return True
        managed_by = content.labels.get(names.SNAPSHOT_MANAGED_BY)
        if managed_by is not None:
            return managed_by == context.around.node_name
        handles = content.spec.source.volume_handles or []
        volumes = [volume for handle in handles for volume in context.volumes.at("handle", handle)]
        if not volumes:
            was_made = content.status is not None and content.status.volume_group_snapshot_handle
            return content.is_deleting and bool(handles) and not was_made
        return context.is_local(volumes[0])
