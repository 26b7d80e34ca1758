"""With one process per node: label contents without a node's label on the node that has their volume or snapshot.

Such a content was written by hand, or by a snapshot controller that does not know of nodes. Without a label no node
would ever reconcile it.

Owns: the managed-by label of contents that have none.
Start reading at: `Adopter.sync`.
"""

from moorage.kube import names
from moorage.kube.cache.informer import Informer
from moorage.kube.errors import NotFound
from moorage.kube.objects import VolumeSnapshotContent
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.snapshotter.single import SingleWorker

log = get_logger(__name__)

UNLABELLED = f"!{names.SNAPSHOT_MANAGED_BY}"
_CHECK_AGAIN_S = 60.0


class Adopter:
    """Labels what is here; `sync` is the work of the queue of unlabelled contents."""

    def __init__(self, context: RoleContext, unlabelled: Informer[VolumeSnapshotContent], worker: SingleWorker) -> None:
        self._context = context
        self._unlabelled = unlabelled
        self._worker = worker

    async def sync(self, name: str) -> float | None:
        """Label the content if its volume or snapshot is on this node. Otherwise return when to check again."""
        content = self._unlabelled.get(name)
        if content is None or content.spec.driver != self._context.driver.name:
            return None
        if not await self._is_here(content):
            return _CHECK_AGAIN_S
        node = self._context.around.node_name
        patch = {"metadata": {"labels": {names.SNAPSHOT_MANAGED_BY: node}}}
        try:  # guarded by the version: another node may take it at this moment
            await self._context.writer.patch(content, patch)
        except NotFound:
            return None
        log.info("content belongs to this node", content=name, node=node)
        return None

    async def _is_here(self, content: VolumeSnapshotContent) -> bool:
        source, context = content.spec.source, self._context
        if source.snapshot_handle:
            return await self._worker.find(content, source.snapshot_handle) is not None
        volume = context.caches.volume_with_handle(context.driver.name, source.volume_handle or "")
        return volume is not None and context.is_local(volume)
