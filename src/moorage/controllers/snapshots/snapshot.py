"""The life of a VolumeSnapshot: class, protection, content, status, and the end.

Owns: one pass over one snapshot, and releasing the claim that snapshots were taken of.
May not touch: contents of other snapshots, drivers (the snapshotter sidecar talks to those).
Start reading at: `Snapshots.sync`.

Each pass looks at the latest state and does what is missing, so one that is cut off anywhere is made good by the next.
"""

from typing import Any

from moorage.controllers.snapshots import names, sources
from moorage.controllers.snapshots.sources import is_member, is_preprovisioned
from moorage.controllers.snapshots.status import is_bound, is_ready, snapshot_status
from moorage.controllers.snapshots.store import SnapshotProblem, SnapshotStore
from moorage.kube.errors import AlreadyExists
from moorage.kube.objects.core import PersistentVolume, PersistentVolumeClaim
from moorage.kube.objects.snapshots import VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent
from moorage.log import get_logger

log = get_logger(__name__)


class SnapshotReconciler:
    """Brings snapshots to where they should be."""

    def __init__(self, store: SnapshotStore, *, distributed: bool = False) -> None:
        self._store = store
        self._distributed = distributed

    async def sync(self, key: str) -> None:
        """One pass; a Fault is told to the user and raised, so that it is tried again later."""
        snapshot = self._store.snapshots.get(key)
        if snapshot is None:
            return
        try:
            await self._sync(snapshot)
        except SnapshotProblem as fault:
            latest = self._store.snapshots.get(key)
            if latest is not None and latest.uid == snapshot.uid:
                await self._store.report(latest, fault)
            raise

    async def release_claim(self, key: str) -> None:
        """Let a claim go that no unfinished snapshot is taken of any more."""
        claim = self._store.claims.get(key)
        if claim is None or names.CLAIM_AS_SOURCE not in claim.finalizers:
            return
        users = self._store.snapshots.at("claim", key)
        if not any(not is_ready(user) and not user.is_deleting for user in users):
            await self._store.unprotect(claim, names.CLAIM_AS_SOURCE)

    async def _sync(self, snapshot: VolumeSnapshot) -> None:
        if snapshot.is_deleting:
            await self._end(snapshot)
            return
        source = snapshot.spec.source
        is_odd = bool(source.persistent_volume_claim_name) == bool(source.volume_snapshot_content_name)
        if is_odd and not is_member(snapshot):  # a member's volume may belong to no claim
            raise SnapshotProblem(
                "SnapshotValidationError",
                "a snapshot needs exactly one of persistentVolumeClaimName and volumeSnapshotContentName",
            )
        snapshot, found = await self._with_class(snapshot)
        snapshot = await self._store.protect(snapshot, *self._finalizers(snapshot))
        if is_ready(snapshot) and is_bound(snapshot):
            await self._check(snapshot)
        elif is_preprovisioned(snapshot):
            await self._bind_existing(snapshot)
        elif is_member(snapshot):
            await self._follow_bound(snapshot)
        else:
            await self._make(snapshot, found)

    async def _with_class(self, snapshot: VolumeSnapshot) -> tuple[VolumeSnapshot, VolumeSnapshotClass | None]:
        name = snapshot.spec.volume_snapshot_class_name
        if name:
            found = self._store.classes.get(name)
            if found is None:
                raise SnapshotProblem("GetSnapshotClassFailed", f"snapshot class {name} does not exist")
            return snapshot, found
        if is_preprovisioned(snapshot) or is_member(snapshot) or is_bound(snapshot):
            return snapshot, None
        reason = "SetDefaultSnapshotClassFailed"
        claim = sources.claim_of(self._store, snapshot, reason)
        found = sources.default_class(self._store, sources.driver_of(self._store, claim, reason))
        return await self._store.patch(snapshot, {"spec": {"volumeSnapshotClassName": found.name}}), found

    def _finalizers(self, snapshot: VolumeSnapshot) -> list[str]:
        content = self._content_of(snapshot)
        if content is not None and is_bound(snapshot) and content.spec.deletion_policy == "Delete":
            return [names.AS_SOURCE, names.BOUND]
        return [names.AS_SOURCE]

    def _content_of(self, snapshot: VolumeSnapshot) -> VolumeSnapshotContent | None:
        """The content that is this snapshot's for sure: by name, and it says so itself."""
        bound = snapshot.status.bound_volume_snapshot_content_name if snapshot.status is not None else None
        source = snapshot.spec.source.volume_snapshot_content_name
        content = self._store.contents.get(bound or source or names.content_name(snapshot.uid))
        return content if content is not None and _points_at(content, snapshot, exactly=True) else None

    async def _check(self, snapshot: VolumeSnapshot) -> None:
        """A ready snapshot: its content must still be there, and be its own."""
        name = (snapshot.status.bound_volume_snapshot_content_name if snapshot.status else None) or ""
        content = self._store.contents.get(name) or await self._store.live(VolumeSnapshotContent, name)
        if content is None:
            raise SnapshotProblem(
                "SnapshotContentMissing", f"the content {name} of the snapshot is missing", unready=True
            )
        if not _points_at(content, snapshot, exactly=True):
            raise SnapshotProblem("SnapshotMisbound", f"the content {name} belongs to another snapshot", unready=True)
        await self._copy_status(snapshot, content)

    async def _bind_existing(self, snapshot: VolumeSnapshot) -> None:
        name = snapshot.spec.source.volume_snapshot_content_name or ""
        content = self._store.contents.get(name)
        if content is None:
            raise SnapshotProblem(
                "SnapshotContentMissing", f"the content {name} that the snapshot names does not exist"
            )
        if not content.spec.source.snapshot_handle:
            raise SnapshotProblem(
                "SnapshotContentMismatch", f"the content {name} is of a snapshot that is still to be taken"
            )
        if not _points_at(content, snapshot, exactly=False):
            raise SnapshotProblem("SnapshotContentMisbound", f"the content {name} belongs to another snapshot")
        if content.spec.volume_snapshot_ref.uid != snapshot.uid:
            spec: dict[str, Any] = {"volumeSnapshotRef": {"uid": snapshot.uid}}
            if snapshot.spec.volume_snapshot_class_name:
                spec["volumeSnapshotClassName"] = snapshot.spec.volume_snapshot_class_name
            content = await self._store.patch(content, {"spec": spec})
        await self._copy_status(snapshot, content)

    async def _follow_bound(self, snapshot: VolumeSnapshot) -> None:
        content = self._content_of(snapshot)
        if content is not None:
            await self._copy_status(snapshot, content)

    async def _make(self, snapshot: VolumeSnapshot, found: VolumeSnapshotClass | None) -> None:
        name = names.content_name(snapshot.uid)
        content = self._store.contents.get(name)
        if content is None:
            content = await self._create_content(snapshot, name, found)
        if not _points_at(content, snapshot, exactly=True):
            raise SnapshotProblem("SnapshotContentMisbound", f"the content {name} belongs to another snapshot")
        if content.spec.source.snapshot_handle:
            raise SnapshotProblem("SnapshotHandleSet", f"the content {name} is of a snapshot that exists already")
        await self._copy_status(snapshot, content)

    async def _create_content(
        self, snapshot: VolumeSnapshot, name: str, found: VolumeSnapshotClass | None
    ) -> VolumeSnapshotContent:
        reason = "SnapshotContentCreationFailed"
        if found is None:
            raise SnapshotProblem(reason, "the snapshot has no class")
        claim = sources.claim_of(self._store, snapshot, "SnapshotPVCSourceMissing")
        live = await self._store.live(PersistentVolume, claim.spec.volume_name) if claim.spec.volume_name else None
        volume = sources.volume_of(claim, live, reason)
        await self._protect_claim(claim)
        body = self._content_body(snapshot, name, found, volume)
        try:
            content = await self._store.create(VolumeSnapshotContent, body)
        except AlreadyExists:
            existing = await self._store.live(VolumeSnapshotContent, name)
            if existing is None:
                raise
            return existing
        message = f"Waiting for a snapshot {snapshot.key} to be created by the CSI driver."
        self._store.recorder.normal(snapshot, "CreatingSnapshot", message)
        log.info("snapshot content made", snapshot=snapshot.key, content=name, driver=found.driver)
        return content

    async def _protect_claim(self, claim: PersistentVolumeClaim) -> None:
        if claim.is_deleting:
            raise SnapshotProblem("ErrorPVCFinalizer", f"the source claim {claim.key} is being deleted")
        await self._store.protect(claim, names.CLAIM_AS_SOURCE)

    def _content_body(
        self, snapshot: VolumeSnapshot, name: str, found: VolumeSnapshotClass, volume: PersistentVolume
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {"name": name}
        secrets = sources.secrets_for(found, snapshot, name)
        if secrets:
            meta["annotations"] = secrets
        if self._distributed:
            meta["labels"] = {names.MANAGED_BY: sources.managing_node(self._store, volume)}
        handle = volume.spec.csi.volume_handle if volume.spec.csi is not None else ""
        reference = {
            "apiVersion": names.SNAPSHOT_API,
            "kind": "VolumeSnapshot",
            "namespace": snapshot.namespace,
            "name": snapshot.name,
            "uid": snapshot.uid,
            "resourceVersion": snapshot.metadata.resource_version,
        }
        spec = {
            "volumeSnapshotRef": reference,
            "source": {"volumeHandle": handle},
            "volumeSnapshotClassName": found.name,
            "deletionPolicy": found.deletion_policy,
            "driver": found.driver,
            "sourceVolumeMode": volume.spec.volume_mode or "Filesystem",
        }
        return {"metadata": meta, "spec": spec}

    async def _copy_status(self, snapshot: VolumeSnapshot, content: VolumeSnapshotContent) -> None:
        fields = snapshot_status(snapshot, content, self._group_of(content))
        if not fields:
            return
        written = await self._store.set_status(snapshot, fields)
        about = f"Snapshot {snapshot.key}"
        if "creationTime" in fields:
            message = f"{about} was successfully created by the CSI driver."
            self._store.recorder.normal(snapshot, "SnapshotCreated", message)
        if fields.get("readyToUse") is True:
            self._store.recorder.normal(snapshot, "SnapshotReady", f"{about} is ready to use.")
        await self._store.protect(written, *self._finalizers(written))

    def _group_of(self, content: VolumeSnapshotContent) -> str:
        handle = content.status.volume_group_snapshot_handle if content.status is not None else None
        if not handle or not self._store.has_groups:
            return ""
        found = self._store.group_contents.at("handle", handle)
        if not found:
            raise SnapshotProblem("SnapshotStatusUpdateFailed", f"no group content has the group handle {handle}")
        return found[0].spec.volume_group_snapshot_ref.name

    async def _end(self, snapshot: VolumeSnapshot) -> None:
        """A snapshot that is being deleted: its content first, if that is the policy."""
        if not {names.AS_SOURCE, names.BOUND, names.IN_GROUP} & set(snapshot.finalizers):
            return
        self._refuse_while_needed(snapshot)
        content = await self._content_for_deletion(snapshot)
        if content is not None:
            content = await self._store.annotate(content, {names.BEING_DELETED: "yes"})
        if content is not None and content.spec.deletion_policy == "Delete":
            await self._store.delete(content)
            # Gone at once where no finalizer holds it; then this is the last pass, else its end brings us back.
            content = await self._store.live(VolumeSnapshotContent, content.name)
            done = (
                [names.AS_SOURCE, names.IN_GROUP]
                if content is not None
                else [
                    names.AS_SOURCE,
                    names.IN_GROUP,
                    names.BOUND,
                ]
            )
            await self._store.unprotect(snapshot, *done)
            return
        await self._store.unprotect(snapshot, names.AS_SOURCE, names.IN_GROUP, names.BOUND)

    def _refuse_while_needed(self, snapshot: VolumeSnapshot) -> None:
        for claim in self._store.claims:
            source = claim.spec.data_source or claim.spec.data_source_ref
            if claim.namespace != snapshot.namespace or claim.status.phase != "Pending" or source is None:
                continue
            if (source.kind, source.api_group, source.name) == ("VolumeSnapshot", names.SNAPSHOT_GROUP, snapshot.name):
                raise SnapshotProblem(
                    "SnapshotDeletePending", f"claim {claim.key} is being restored from it", in_status=False
                )
        group = snapshot.status.volume_group_snapshot_name if snapshot.status is not None else None
        if group and self._store.has_groups and self._store.groups.get(f"{snapshot.namespace}/{group}") is not None:
            raise SnapshotProblem("SnapshotDeletePending", f"it belongs to group snapshot {group}", in_status=False)

    async def _content_for_deletion(self, snapshot: VolumeSnapshot) -> VolumeSnapshotContent | None:
        """The content, asked for live when it is not known: a content must not be left behind."""
        known = self._content_of(snapshot)
        if known is not None:
            return known
        bound = snapshot.status.bound_volume_snapshot_content_name if snapshot.status is not None else None
        name = bound or snapshot.spec.source.volume_snapshot_content_name or names.content_name(snapshot.uid)
        live = await self._store.live(VolumeSnapshotContent, name)
        return live if live is not None and _points_at(live, snapshot, exactly=True) else None


def _points_at(content: VolumeSnapshotContent, snapshot: VolumeSnapshot, *, exactly: bool) -> bool:
    """Whether a content names the snapshot; unless exactly, one that leaves the uid open does too."""
    ref = content.spec.volume_snapshot_ref
    if (ref.namespace, ref.name) != (snapshot.namespace, snapshot.name):
        return False
    return ref.uid == snapshot.uid or (not exactly and not ref.uid)
