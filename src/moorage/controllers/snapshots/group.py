"""The life of a VolumeGroupSnapshot: class, content, members, status, and the end.

Owns: the steps that only group snapshots have.
Start reading at: `GroupSnapshots`. The steps shared with single snapshots are in `reconciler.py`.
"""

from moorage.controllers.snapshots import sources
from moorage.controllers.snapshots.flavour import GROUP
from moorage.controllers.snapshots.members import Members
from moorage.controllers.snapshots.reconciler import Reconciler, SnapshotContext, SnapshotProblem
from moorage.controllers.snapshots.status import group_status, is_ready
from moorage.kube.names import GROUP_BOUND
from moorage.kube.objects.snapshots import (
    VolumeGroupSnapshot,
    VolumeGroupSnapshotClass,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
)
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.selectors import LabelMatch


class GroupSnapshots(Reconciler[VolumeGroupSnapshot, VolumeGroupSnapshotContent]):
    """Reconciles VolumeGroupSnapshots."""

    def __init__(self, context: SnapshotContext) -> None:
        super().__init__(context, GROUP, context.caches.groups, context.caches.group_contents)
        self._members = Members(context)

    async def _advance(self, group: VolumeGroupSnapshot) -> None:
        source = group.spec.source
        if (source.selector is not None) == bool(source.volume_group_snapshot_content_name):
            raise SnapshotProblem(
                "GroupSnapshotValidationError",
                "a group snapshot needs exactly one of selector and volumeGroupSnapshotContentName",
            )
        if GROUP.content_of(group):
            group = await self._writer.add_finalizers(group, GROUP_BOUND)
        if GROUP.source_of(group):
            content = await self._bind_existing(group)
        else:
            group, found = await self._with_class(group)
            content = await self._taken(group, found)
            await self._members.ensure(group, content)
        fields = group_status(group, content)
        if fields:
            written = await self._write_status(group, fields)
            await self._writer.add_finalizers(written, GROUP_BOUND)

    async def _with_class(
        self, group: VolumeGroupSnapshot
    ) -> tuple[VolumeGroupSnapshot, VolumeGroupSnapshotClass | None]:
        name = GROUP.class_of(group)
        if name:
            found = self._caches.group_classes.get(name)
            if found is None and not GROUP.content_of(group):
                raise SnapshotProblem("GetGroupSnapshotClassFailed", f"group snapshot class {name} does not exist")
            return group, found
        reason = "SetDefaultGroupSnapshotClassFailed"
        claims = await self._claims(group, reason)
        driver = sources.driver_of(self._caches, claims[0], reason)
        found = sources.default_class(self._caches.group_classes, driver, GROUP)
        return await self._writer.patch(group, {"spec": {"volumeGroupSnapshotClassName": found.name}}), found

    async def _claims(self, group: VolumeGroupSnapshot, reason: str) -> list[PersistentVolumeClaim]:
        """List the claims that the selector names from the API server. Only matchLabels counts."""
        selector = group.spec.source.selector
        labels = LabelMatch.of(None if selector is None else type(selector)(match_labels=selector.match_labels))
        if not labels.requirements:
            raise SnapshotProblem(reason, "the selector of the group snapshot has no matchLabels")
        found = await self._context.client.list(PersistentVolumeClaim, group.namespace, labels=labels.text())
        if not found.items:
            raise SnapshotProblem(reason, f"no claim in namespace {group.namespace} has the labels {labels.text()}")
        return sorted(found.items, key=lambda claim: claim.name)

    async def _taken(
        self, group: VolumeGroupSnapshot, found: VolumeGroupSnapshotClass | None
    ) -> VolumeGroupSnapshotContent:
        name = GROUP.content_name(group.uid)
        content = self._contents.get(name)
        if content is None and not is_ready(group) and not GROUP.content_of(group):
            content = await self._take(group, found)
            if not GROUP.points_at(content, group):
                raise self._misbound("GroupSnapshotMisbound", name, unready=True)
            return content
        return await self._still_bound(group, name)

    async def _take(
        self, group: VolumeGroupSnapshot, found: VolumeGroupSnapshotClass | None
    ) -> VolumeGroupSnapshotContent:
        if found is None:
            raise SnapshotProblem(GROUP.creation_failed, "the group snapshot has no class")
        claims = await self._claims(group, GROUP.creation_failed)
        volumes = [await self._volume(claim, found) for claim in claims]
        handles = [volume.spec.csi.volume_handle for volume in volumes if volume.spec.csi is not None]
        return await self._create_content(group, found, {"source": {"volumeHandles": handles}}, {})

    async def _volume(self, claim: PersistentVolumeClaim, found: VolumeGroupSnapshotClass) -> PersistentVolume:
        volume = await sources.live_volume(self._writer, claim, GROUP.creation_failed)
        if volume.spec.csi is None or volume.spec.csi.driver != found.driver:
            message = f"volume {volume.name} of claim {claim.key} is not of driver {found.driver}"
            raise SnapshotProblem(GROUP.creation_failed, message)
        return volume

    async def _end(self, group: VolumeGroupSnapshot) -> None:
        """Delete the content and the members first, if the policy says so, then release the group snapshot."""
        if GROUP_BOUND not in group.finalizers:
            return
        members = self._members_of(group)
        self._refuse_while_restored(group.namespace, {member.name for member in members})
        is_done = await self._end_content(group)
        for member in members:
            await self._writer.delete(member)
        if is_done:
            await self._writer.remove_finalizers(group, GROUP_BOUND)

    def _members_of(self, group: VolumeGroupSnapshot) -> list[VolumeSnapshot]:
        return [
            snapshot
            for snapshot in self._caches.snapshots
            if snapshot.namespace == group.namespace
            and any(owner.uid == group.uid for owner in snapshot.metadata.owner_references)
        ]
