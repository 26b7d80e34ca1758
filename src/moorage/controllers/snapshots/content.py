"""Snapshot contents: protected while bound, and marked for deletion only if their snapshot is being deleted.

Owns: one pass over one content of either flavour. A content whose snapshot is merely missing is never deleted.
Start reading at: `Contents.sync`.
"""

from typing import Generic

from moorage.controllers.snapshots.flavour import C, Flavour, S
from moorage.controllers.snapshots.reconciler import SnapshotContext
from moorage.kube.cache.informer import Informer


class Contents(Generic[S, C]):
    """Protects the contents of one flavour."""

    def __init__(
        self, context: SnapshotContext, flavour: Flavour[S, C], snapshots: Informer[S], contents: Informer[C]
    ) -> None:
        self._context = context
        self._flavour = flavour
        self._snapshots = snapshots
        self._contents = contents

    async def sync(self, key: str) -> None:
        """Protect one content, and mark it if its snapshot is being deleted too."""
        content, flavour, writer = self._contents.get(key), self._flavour, self._context.writer
        if content is None:
            return
        if flavour.is_to_be_taken(content) == flavour.is_existing(content):
            reason = f"{flavour.word.removesuffix('Snapshot')}ContentValidationError"
            message = f"a content needs exactly one of {flavour.content_sources}"
            self._context.recorder.warning(content, reason, message)
            return
        ref = flavour.snapshot_of(content)
        if not ref.uid:
            return
        if not content.is_deleting:
            content = await writer.add_finalizers(content, flavour.content_bound)
        snapshot = self._snapshots.get(f"{ref.namespace}/{ref.name}")
        is_leaving = snapshot is not None and snapshot.uid == ref.uid and snapshot.is_deleting
        if content.is_deleting and is_leaving:
            await writer.annotate(content, {flavour.being_deleted: "yes"})
