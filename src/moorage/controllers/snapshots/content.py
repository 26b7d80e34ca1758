"""The contents: protected while bound, and marked for deletion only when their snapshot is.

Owns: one pass over one VolumeSnapshotContent or VolumeGroupSnapshotContent.
May not touch: deleting a content whose snapshot is merely missing; that never happens.
Start reading at: `Contents.sync`.
"""

from moorage.controllers.snapshots import names
from moorage.controllers.snapshots.store import SnapshotStore
from moorage.kube.objects.snapshots import VolumeGroupSnapshotContent, VolumeSnapshotContent


class Contents:
    """Keeps contents protected."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store

    async def sync(self, key: str) -> None:
        content = self._store.contents.get(key)
        if content is None:
            return
        source = content.spec.source
        if bool(source.volume_handle) == bool(source.snapshot_handle):
            self._complain(content, "ContentValidationError", "exactly one of volumeHandle and snapshotHandle")
            return
        ref = content.spec.volume_snapshot_ref
        if not ref.uid:
            return
        if not content.is_deleting:
            content = await self._store.protect(content, names.CONTENT_BOUND)
        snapshot = self._store.snapshots.get(f"{ref.namespace}/{ref.name}")
        is_leaving = snapshot is not None and snapshot.uid == ref.uid and snapshot.is_deleting
        if content.is_deleting and is_leaving:
            await self._store.annotate(content, {names.BEING_DELETED: "yes"})

    async def sync_group(self, key: str) -> None:
        content = self._store.group_contents.get(key)
        if content is None:
            return
        source = content.spec.source
        if bool(source.volume_handles) == bool(source.group_snapshot_handles):
            self._complain(
                content, "GroupContentValidationError", "exactly one of volumeHandles and groupSnapshotHandles"
            )
            return
        ref = content.spec.volume_group_snapshot_ref
        if not ref.uid:
            return
        if not content.is_deleting:
            content = await self._store.protect(content, names.GROUP_CONTENT_BOUND)
        group = self._store.groups.get(f"{ref.namespace}/{ref.name}")
        is_leaving = group is not None and group.uid == ref.uid and group.is_deleting
        if content.is_deleting and is_leaving:
            await self._store.annotate(content, {names.GROUP_BEING_DELETED: "yes"})

    def _complain(self, content: VolumeSnapshotContent | VolumeGroupSnapshotContent, reason: str, wanted: str) -> None:
        self._store.recorder.warning(content, reason, f"a content needs {wanted}")
