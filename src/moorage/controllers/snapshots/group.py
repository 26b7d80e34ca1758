"""The life of a VolumeGroupSnapshot: class, content, members, status, and the end.

Owns: one pass over one group snapshot.
May not touch: drivers; the snapshotter sidecar asks them.
Start reading at: `Groups.sync`.
"""

from typing import Any

from moorage.controllers.snapshots import names, sources
from moorage.controllers.snapshots.members import Members
from moorage.controllers.snapshots.status import group_status, is_group_bound, is_group_ready
from moorage.controllers.snapshots.store import SnapshotProblem, SnapshotStore
from moorage.kube.errors import AlreadyExists
from moorage.kube.objects.core import PersistentVolume, PersistentVolumeClaim
from moorage.kube.objects.snapshots import (
    VolumeGroupSnapshot,
    VolumeGroupSnapshotClass,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
)
from moorage.kube.selectors import LabelMatch

_FAILED = "CreateGroupSnapshotContentFailed"


class Groups:
    """Brings group snapshots to where they should be."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._members = Members(store)

    async def sync(self, key: str) -> None:
        """One pass; a Fault is told to the user and raised, so that it is tried again later."""
        group = self._store.groups.get(key)
        if group is None:
            return
        try:
            await self._sync(group)
        except SnapshotProblem as fault:
            latest = self._store.groups.get(key)
            if latest is not None and latest.uid == group.uid:
                await self._store.report(latest, fault)
            raise

    async def _sync(self, group: VolumeGroupSnapshot) -> None:
        if group.is_deleting:
            await self._end(group)
            return
        source = group.spec.source
        if (source.selector is not None) == bool(source.volume_group_snapshot_content_name):
            raise SnapshotProblem(
                "GroupSnapshotValidationError",
                "a group snapshot needs exactly one of selector and volumeGroupSnapshotContentName",
            )
        if is_group_bound(group):
            group = await self._store.protect(group, names.GROUP_BOUND)
        if source.volume_group_snapshot_content_name:
            content = await self._bind_existing(group)
        else:
            group, found = await self._with_class(group)
            content = await self._made_content(group, found)
            await self._members.ensure(group, content)
        await self._copy_status(group, content)

    async def _with_class(
        self, group: VolumeGroupSnapshot
    ) -> tuple[VolumeGroupSnapshot, VolumeGroupSnapshotClass | None]:
        name = group.spec.volume_group_snapshot_class_name
        if name:
            found = self._store.group_classes.get(name)
            if found is None and not is_group_bound(group):
                raise SnapshotProblem("GetGroupSnapshotClassFailed", f"group snapshot class {name} does not exist")
            return group, found
        reason = "SetDefaultGroupSnapshotClassFailed"
        claims = await self._claims(group, reason)
        found = sources.default_group_class(self._store, sources.driver_of(self._store, claims[0], reason))
        return await self._store.patch(group, {"spec": {"volumeGroupSnapshotClassName": found.name}}), found

    async def _claims(self, group: VolumeGroupSnapshot, reason: str) -> list[PersistentVolumeClaim]:
        """The claims that the selector names, asked for live: matchLabels alone counts."""
        selector = group.spec.source.selector
        labels = LabelMatch.of(None if selector is None else type(selector)(match_labels=selector.match_labels))
        if not labels.requirements:
            raise SnapshotProblem(reason, "the selector of the group snapshot has no matchLabels")
        found = await self._store.client.list(PersistentVolumeClaim, group.namespace, labels=labels.text())
        if not found.items:
            raise SnapshotProblem(reason, f"no claim in namespace {group.namespace} has the labels {labels.text()}")
        return sorted(found.items, key=lambda claim: claim.name)

    async def _made_content(
        self, group: VolumeGroupSnapshot, found: VolumeGroupSnapshotClass | None
    ) -> VolumeGroupSnapshotContent:
        name = names.group_content_name(group.uid)
        content = self._store.group_contents.get(name)
        if content is None and (is_group_ready(group) or is_group_bound(group)):
            content = await self._store.live(VolumeGroupSnapshotContent, name)
            if content is None:
                reason = "GroupSnapshotContentMissing"
                raise SnapshotProblem(reason, f"the content {name} of the group snapshot is missing", unready=True)
        if content is None:
            content = await self._create_content(group, name, found)
        if not _points_at(content, group, exactly=True):
            raise SnapshotProblem(
                "GroupSnapshotMisbound", f"the content {name} belongs to another group snapshot", unready=True
            )
        return content

    async def _create_content(
        self, group: VolumeGroupSnapshot, name: str, found: VolumeGroupSnapshotClass | None
    ) -> VolumeGroupSnapshotContent:
        if found is None:
            raise SnapshotProblem(_FAILED, "the group snapshot has no class")
        volumes = [await self._volume(claim, found) for claim in await self._claims(group, _FAILED)]
        handles = [volume.spec.csi.volume_handle for volume in volumes if volume.spec.csi is not None]
        meta: dict[str, Any] = {"name": name}
        secrets = sources.group_secrets_for(found, group, name)
        if secrets:
            meta["annotations"] = secrets
        reference = {
            "apiVersion": group.resource.api_version,
            "kind": group.resource.kind,
            "namespace": group.namespace,
            "name": group.name,
            "uid": group.uid,
            "resourceVersion": group.metadata.resource_version,
        }
        spec = {
            "volumeGroupSnapshotRef": reference,
            "source": {"volumeHandles": handles},
            "volumeGroupSnapshotClassName": found.name,
            "deletionPolicy": found.deletion_policy,
            "driver": found.driver,
        }
        try:
            content = await self._store.create(VolumeGroupSnapshotContent, {"metadata": meta, "spec": spec})
        except AlreadyExists:
            existing = await self._store.live(VolumeGroupSnapshotContent, name)
            if existing is None:
                raise
            return existing
        message = f"Waiting for a group snapshot {group.key} to be created by the CSI driver."
        self._store.recorder.normal(group, "CreatingGroupSnapshot", message)
        return content

    async def _volume(self, claim: PersistentVolumeClaim, found: VolumeGroupSnapshotClass) -> PersistentVolume:
        live = await self._store.live(PersistentVolume, claim.spec.volume_name) if claim.spec.volume_name else None
        volume = sources.volume_of(claim, live, _FAILED)
        if volume.spec.csi is None or volume.spec.csi.driver != found.driver:
            raise SnapshotProblem(_FAILED, f"volume {volume.name} of claim {claim.key} is not of driver {found.driver}")
        return volume

    async def _bind_existing(self, group: VolumeGroupSnapshot) -> VolumeGroupSnapshotContent:
        name = group.spec.source.volume_group_snapshot_content_name or ""
        content = self._store.group_contents.get(name)
        if content is None:
            reason = "GroupSnapshotContentMissing"
            raise SnapshotProblem(
                reason, f"the content {name} that the group snapshot names does not exist", unready=True
            )
        if content.spec.source.group_snapshot_handles is None:
            raise SnapshotProblem(
                "GroupSnapshotContentMismatch", f"the content {name} is of a group that is still to be taken"
            )
        if not _points_at(content, group, exactly=False):
            raise SnapshotProblem(
                "GroupSnapshotContentMisbound", f"the content {name} belongs to another group snapshot"
            )
        if content.spec.volume_group_snapshot_ref.uid != group.uid:
            spec: dict[str, Any] = {"volumeGroupSnapshotRef": {"uid": group.uid}}
            if group.spec.volume_group_snapshot_class_name:
                spec["volumeGroupSnapshotClassName"] = group.spec.volume_group_snapshot_class_name
            content = await self._store.patch(content, {"spec": spec})
        return content

    async def _copy_status(self, group: VolumeGroupSnapshot, content: VolumeGroupSnapshotContent) -> None:
        fields = group_status(group, content)
        if not fields:
            return
        written = await self._store.set_status(group, fields)
        about = f"GroupSnapshot {group.key}"
        if "creationTime" in fields:
            message = f"{about} was successfully created by the CSI driver."
            self._store.recorder.normal(group, "GroupSnapshotCreated", message)
        if fields.get("readyToUse") is True:
            self._store.recorder.normal(group, "GroupSnapshotReady", f"{about} is ready to use.")
        await self._store.protect(written, names.GROUP_BOUND)

    async def _end(self, group: VolumeGroupSnapshot) -> None:
        """A group snapshot that is being deleted: its content and members go first, if that is the policy."""
        if names.GROUP_BOUND not in group.finalizers:
            return
        members = self._members_of(group)
        self._refuse_while_restored(group, members)
        bound = group.status.bound_volume_group_snapshot_content_name if group.status is not None else None
        name = bound or group.spec.source.volume_group_snapshot_content_name or names.group_content_name(group.uid)
        content = self._store.group_contents.get(name) or await self._store.live(VolumeGroupSnapshotContent, name)
        if content is not None and not _points_at(content, group, exactly=True):
            content = None
        if content is not None:
            content = await self._store.annotate(content, {names.GROUP_BEING_DELETED: "yes"})
            if content.spec.deletion_policy == "Delete":
                await self._store.delete(content)
                content = await self._store.live(VolumeGroupSnapshotContent, name)
            else:
                content = None
        for member in members:
            await self._store.delete(member)
        if content is None:
            await self._store.unprotect(group, names.GROUP_BOUND)

    def _members_of(self, group: VolumeGroupSnapshot) -> list[VolumeSnapshot]:
        return [
            snapshot
            for snapshot in self._store.snapshots
            if snapshot.namespace == group.namespace
            and any(owner.uid == group.uid for owner in snapshot.metadata.owner_references)
        ]

    def _refuse_while_restored(self, group: VolumeGroupSnapshot, members: list[VolumeSnapshot]) -> None:
        mine = {member.name for member in members}
        for claim in self._store.claims:
            source = claim.spec.data_source or claim.spec.data_source_ref
            if claim.namespace != group.namespace or claim.status.phase != "Pending" or source is None:
                continue
            if source.kind == "VolumeSnapshot" and source.name in mine:
                raise SnapshotProblem(
                    "SnapshotDeletePending", f"claim {claim.key} is being restored from it", in_status=False
                )


def _points_at(content: VolumeGroupSnapshotContent, group: VolumeGroupSnapshot, *, exactly: bool) -> bool:
    ref = content.spec.volume_group_snapshot_ref
    if (ref.namespace, ref.name) != (group.namespace, group.name):
        return False
    return ref.uid == group.uid or (not exactly and not ref.uid)
