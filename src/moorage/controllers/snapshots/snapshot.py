"""The life of a VolumeSnapshot: class, protection, content, status, and the end.

Owns: the steps that only single snapshots have, and releasing the claim that a snapshot was taken of.
Start reading at: `SingleSnapshots`. The steps shared with group snapshots are in `reconciler.py`.
"""

from moorage.controllers.snapshots import sources
from moorage.controllers.snapshots.flavour import SINGLE
from moorage.controllers.snapshots.reconciler import Reconciler, SnapshotContext, SnapshotProblem
from moorage.controllers.snapshots.status import is_ready, snapshot_status
from moorage.kube.names import (
    CLAIM_AS_SOURCE,
    SNAPSHOT_AS_SOURCE,
    SNAPSHOT_BOUND,
    SNAPSHOT_IN_GROUP,
    SNAPSHOT_MANAGED_BY,
)
from moorage.kube.objects.snapshots import (
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.kube.objects.volumes import PersistentVolume
from moorage.kube.volumes import volume_mode


class SingleSnapshots(Reconciler[VolumeSnapshot, VolumeSnapshotContent]):
    """Reconciles VolumeSnapshots."""

    def __init__(self, context: SnapshotContext) -> None:
        super().__init__(context, SINGLE, context.caches.snapshots, context.caches.snapshot_contents)

    async def release_claim(self, key: str) -> None:
        """Take the finalizer off a claim that no unfinished snapshot is taken of."""
        claim = self._caches.claims.get(key)
        if claim is None or CLAIM_AS_SOURCE not in claim.finalizers:
            return
        users = self._snapshots.by(sources.source_claim, key)
        if not any(not is_ready(user) and not user.is_deleting for user in users):
            await self._writer.remove_finalizers(claim, CLAIM_AS_SOURCE)

    async def _advance(self, snapshot: VolumeSnapshot) -> None:
        source, is_member = snapshot.spec.source, sources.is_member(snapshot)
        has_one = bool(source.persistent_volume_claim_name) != bool(source.volume_snapshot_content_name)
        if not has_one and not is_member:  # a member's volume may belong to no claim
            raise SnapshotProblem(
                "SnapshotValidationError",
                "a snapshot needs exactly one of persistentVolumeClaimName and volumeSnapshotContentName",
            )
        snapshot, found = await self._with_class(snapshot)
        snapshot = await self._writer.add_finalizers(snapshot, *self._finalizers(snapshot))
        bound = SINGLE.content_of(snapshot)
        if bound and is_ready(snapshot):
            content: VolumeSnapshotContent | None = await self._still_bound(snapshot, bound)
        elif SINGLE.source_of(snapshot):
            content = await self._bind_existing(snapshot)
        elif is_member:
            content = self._own_content(snapshot)
        else:
            content = await self._taken(snapshot, found)
        if content is not None:
            await self._copy_status(snapshot, content)

    async def _with_class(self, snapshot: VolumeSnapshot) -> tuple[VolumeSnapshot, VolumeSnapshotClass | None]:
        name = SINGLE.class_of(snapshot)
        if name:
            found = self._caches.snapshot_classes.get(name)
            if found is None:
                raise SnapshotProblem("GetSnapshotClassFailed", f"snapshot class {name} does not exist")
            return snapshot, found
        if SINGLE.source_of(snapshot) or sources.is_member(snapshot) or SINGLE.content_of(snapshot):
            return snapshot, None
        reason = "SetDefaultSnapshotClassFailed"
        claim = sources.claim_of(self._caches, snapshot, reason)
        driver = sources.driver_of(self._caches, claim, reason)
        found = sources.default_class(self._caches.snapshot_classes, driver, SINGLE)
        return await self._writer.patch(snapshot, {"spec": {"volumeSnapshotClassName": found.name}}), found

    def _finalizers(self, snapshot: VolumeSnapshot) -> list[str]:
        content = self._own_content(snapshot)
        if content is not None and SINGLE.content_of(snapshot) and content.spec.deletion_policy == "Delete":
            return [SNAPSHOT_AS_SOURCE, SNAPSHOT_BOUND]
        return [SNAPSHOT_AS_SOURCE]

    def _own_content(self, snapshot: VolumeSnapshot) -> VolumeSnapshotContent | None:
        """Return the cached content that has the expected name and points at the snapshot."""
        content = self._contents.get(SINGLE.expected_content(snapshot))
        return content if content is not None and SINGLE.points_at(content, snapshot) else None

    async def _taken(self, snapshot: VolumeSnapshot, found: VolumeSnapshotClass | None) -> VolumeSnapshotContent:
        name = SINGLE.content_name(snapshot.uid)
        content = self._contents.get(name) or await self._take(snapshot, found)
        if not SINGLE.points_at(content, snapshot):
            raise self._misbound("SnapshotContentMisbound", name)
        if SINGLE.is_existing(content):
            raise SnapshotProblem("SnapshotHandleSet", f"the content {name} is of a snapshot that exists already")
        return content

    async def _take(self, snapshot: VolumeSnapshot, found: VolumeSnapshotClass | None) -> VolumeSnapshotContent:
        if found is None:
            raise SnapshotProblem(SINGLE.creation_failed, "the snapshot has no class")
        claim = sources.claim_of(self._caches, snapshot, "SnapshotPVCSourceMissing")
        volume = await sources.live_volume(self._writer, claim, SINGLE.creation_failed)
        if claim.is_deleting:
            raise SnapshotProblem("ErrorPVCFinalizer", f"the source claim {claim.key} is being deleted")
        await self._writer.add_finalizers(claim, CLAIM_AS_SOURCE)
        spec = {
            "source": {"volumeHandle": volume.spec.csi.volume_handle if volume.spec.csi is not None else ""},
            "sourceVolumeMode": volume_mode(volume.spec.volume_mode),
        }
        return await self._create_content(snapshot, found, spec, self._labels(volume))

    def _labels(self, volume: PersistentVolume) -> dict[str, str]:
        if not self._context.is_distributed:
            return {}
        return {SNAPSHOT_MANAGED_BY: sources.managing_node(self._caches.nodes, volume)}

    async def _copy_status(self, snapshot: VolumeSnapshot, content: VolumeSnapshotContent) -> None:
        fields = snapshot_status(snapshot, content, self._group_of(content))
        if fields:
            written = await self._write_status(snapshot, fields)
            await self._writer.add_finalizers(written, *self._finalizers(written))

    def _group_of(self, content: VolumeSnapshotContent) -> str:
        handle = content.status.volume_group_snapshot_handle if content.status is not None else None
        if not handle or not self._context.has_groups:
            return ""
        found = self._caches.group_contents.by(_group_handle, handle)
        if not found:
            raise SnapshotProblem("SnapshotStatusUpdateFailed", f"no group content has the group handle {handle}")
        return found[0].spec.volume_group_snapshot_ref.name

    async def _end(self, snapshot: VolumeSnapshot) -> None:
        """Delete the content first if its policy says so, then release the snapshot."""
        if not {SNAPSHOT_AS_SOURCE, SNAPSHOT_BOUND, SNAPSHOT_IN_GROUP} & set(snapshot.finalizers):
            return
        self._refuse_while_restored(snapshot.namespace, [snapshot.name])
        group = snapshot.status.volume_group_snapshot_name if snapshot.status is not None else None
        if group and self._context.has_groups and self._caches.groups.get(f"{snapshot.namespace}/{group}") is not None:
            raise SnapshotProblem("SnapshotDeletePending", f"it belongs to group snapshot {group}", in_status=False)
        done = [SNAPSHOT_AS_SOURCE, SNAPSHOT_IN_GROUP]
        if await self._end_content(snapshot):
            done.append(SNAPSHOT_BOUND)
        await self._writer.remove_finalizers(snapshot, *done)


def _group_handle(content: VolumeGroupSnapshotContent) -> list[str]:
    handle = content.status.volume_group_snapshot_handle if content.status is not None else None
    return [handle] if handle else []
