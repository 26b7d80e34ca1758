"""The members of a group snapshot: one snapshot and one content for each volume that the driver reports.

Owns: creating them. Each step is repeatable and continues from what exists already.
Start reading at: `Members.ensure`.
"""

from typing import Any, TypeVar

from moorage.controllers.snapshots.flavour import GROUP, SINGLE, member_suffix
from moorage.controllers.snapshots.reconciler import SnapshotContext, SnapshotProblem
from moorage.kube import names
from moorage.kube.errors import AlreadyExists
from moorage.kube.objects.meta import KubeObject
from moorage.kube.objects.snapshots import (
    VolumeGroupSnapshot,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
    VolumeSnapshotContent,
    VolumeSnapshotInfo,
)
from moorage.kube.objects.volumes import PersistentVolume
from moorage.kube.volumes import volume_mode

T = TypeVar("T", bound=KubeObject)


class Members:
    """Creates what a group snapshot consists of."""

    def __init__(self, context: SnapshotContext) -> None:
        self._caches = context.caches
        self._writer = context.writer

    async def ensure(self, group: VolumeGroupSnapshot, content: VolumeGroupSnapshotContent) -> None:
        """Ensure that every volume of the group has its snapshot and content, bound to each other."""
        status = content.status
        handle = status.volume_group_snapshot_handle if status is not None else None
        if status is None or not handle:
            return
        for info in status.volume_snapshot_info_list:
            await self._ensure_one(group, content, handle, info)

    async def _ensure_one(
        self, group: VolumeGroupSnapshot, content: VolumeGroupSnapshotContent, handle: str, info: VolumeSnapshotInfo
    ) -> None:
        suffix = member_suffix(group.uid, info.volume_handle)
        volume = self._caches.volume_with_handle(content.spec.driver, info.volume_handle)
        body = _content_body(group, content, handle, info, suffix, volume)
        made = self._caches.snapshot_contents.get(f"snapcontent-{suffix}") or await self._made(
            VolumeSnapshotContent, body
        )
        snapshot = self._caches.snapshots.get(f"{group.namespace}/snapshot-{suffix}")
        if snapshot is None:
            snapshot = await self._made(VolumeSnapshot, _snapshot_body(group, suffix, volume), group.namespace)
        if made.spec.volume_snapshot_ref.uid != snapshot.uid:
            made = await self._writer.patch(made, {"spec": {"volumeSnapshotRef": {"uid": snapshot.uid}}})
        if snapshot.status is None or not snapshot.status.bound_volume_snapshot_content_name:
            await self._writer.patch_status(snapshot, {"boundVolumeSnapshotContentName": made.name})
        if made.status is None or not made.status.volume_group_snapshot_handle:
            await self._writer.patch_status(made, _content_status(handle, info))

    async def _made(self, kind: type[T], body: dict[str, Any], namespace: str = "") -> T:
        try:
            return await self._writer.create(kind, body, namespace)
        except AlreadyExists:
            found = await self._writer.fresh(kind, body["metadata"]["name"], namespace)
            if found is None:
                raise SnapshotProblem(
                    "CreateGroupSnapshotContentFailed", f"{body['metadata']['name']} was created and deleted meanwhile"
                ) from None
            return found


def _content_body(
    group: VolumeGroupSnapshot,
    content: VolumeGroupSnapshotContent,
    handle: str,
    info: VolumeSnapshotInfo,
    suffix: str,
    volume: PersistentVolume | None,
) -> dict[str, Any]:
    annotations = {names.GROUP_HANDLE: handle}
    for of_group, of_member in zip(GROUP.secret_annotations, SINGLE.secret_annotations, strict=True):
        if of_group in content.annotations:  # members are deleted with the group's secret
            annotations[of_member] = content.annotations[of_group]
    reference = {
        "apiVersion": VolumeSnapshot.resource.api_version,
        "kind": "VolumeSnapshot",
        "namespace": group.namespace,
        "name": f"snapshot-{suffix}",
    }
    spec: dict[str, Any] = {
        "volumeSnapshotRef": reference,
        "deletionPolicy": content.spec.deletion_policy,
        "driver": content.spec.driver,
        "source": {"volumeHandle": info.volume_handle},
    }
    if volume is not None:
        spec["sourceVolumeMode"] = volume_mode(volume.spec.volume_mode)
    meta: dict[str, Any] = {"name": f"snapcontent-{suffix}", "annotations": annotations}
    if names.SNAPSHOT_MANAGED_BY in content.labels:  # the sidecar of that node deletes the members too
        meta["labels"] = {names.SNAPSHOT_MANAGED_BY: content.labels[names.SNAPSHOT_MANAGED_BY]}
    return {"metadata": meta, "spec": spec}


def _snapshot_body(group: VolumeGroupSnapshot, suffix: str, volume: PersistentVolume | None) -> dict[str, Any]:
    owner = {
        "apiVersion": group.resource.api_version,
        "kind": group.resource.kind,
        "name": group.name,
        "uid": group.uid,
    }
    claim = volume.spec.claim_ref.name if volume is not None and volume.spec.claim_ref is not None else ""
    meta = {
        "name": f"snapshot-{suffix}",
        "namespace": group.namespace,
        "ownerReferences": [owner],
        "finalizers": [names.SNAPSHOT_IN_GROUP],
    }
    return {"metadata": meta, "spec": {"source": {"persistentVolumeClaimName": claim}}}


def _content_status(handle: str, info: VolumeSnapshotInfo) -> dict[str, Any]:
    status = {
        "snapshotHandle": info.snapshot_handle,
        "volumeGroupSnapshotHandle": handle,
        "creationTime": info.creation_time,
        "restoreSize": info.restore_size,
        "readyToUse": info.ready_to_use,
    }
    return {name: value for name, value in status.items() if value is not None}
