"""With one process per node: contents that carry no node's label, taken over by the node that has what they stand for.

Such a content was written by hand, or by a snapshot controller that does not know of nodes. Without a label no node
would ever look at it.

Owns: the managed-by label of contents that have none.
May not touch: anything else of a content; once it is labelled, the content worker has it.
Start reading at: `Adopter.sync`.
"""

from moorage.kube.cache.informer import Informer
from moorage.kube.errors import NotFound
from moorage.kube.objects import PersistentVolume, VolumeSnapshotContent
from moorage.log import get_logger
from moorage.sidecars import names
from moorage.sidecars.context import RoleContext
from moorage.sidecars.snapshotter.contents import ContentWorker

log = get_logger(__name__)

UNLABELLED = f"!{names.SNAPSHOT_MANAGED_BY}"
_LOOK_AGAIN_S = 60.0


class Adopter:
    """Labels what is here; `sync` is the work of the queue of unlabelled contents."""

    def __init__(
        self, context: RoleContext, unlabelled: Informer[VolumeSnapshotContent], worker: ContentWorker
    ) -> None:
        self._context = context
        self._unlabelled = unlabelled
        self._worker = worker
        context.volumes.index("handle", handles_of)

    async def sync(self, name: str) -> float | None:
        """Take the content if its volume or snapshot is on this node; otherwise look again some time later."""
        content = self._unlabelled.get(name)
        if content is None or content.spec.driver != self._context.driver.name:
            return None
        if not await self._is_here(content):
            return _LOOK_AGAIN_S
        node = self._context.around.node_name
        patch = {"metadata": {"labels": {names.SNAPSHOT_MANAGED_BY: node}}}
        version = content.metadata.resource_version  # another node may have taken it in this moment
        try:
            await self._context.client.patch(VolumeSnapshotContent, name, patch, version=version)
        except NotFound:
            return None
        log.info("content belongs to this node", content=name, node=node)
        return None

    async def _is_here(self, content: VolumeSnapshotContent) -> bool:
        source, context = content.spec.source, self._context
        if source.snapshot_handle:
            return await self._worker.find(content, source.snapshot_handle) is not None
        volumes = context.volumes.at("handle", source.volume_handle or "")
        return any(_driver_of(volume) == context.driver.name and context.is_local(volume) for volume in volumes)


def handles_of(volume: PersistentVolume) -> list[str]:
    """The key of the index "handle": what the driver calls the volume."""
    return [volume.spec.csi.volume_handle] if volume.spec.csi is not None else []


def _driver_of(volume: PersistentVolume) -> str:
    return volume.spec.csi.driver if volume.spec.csi is not None else ""
