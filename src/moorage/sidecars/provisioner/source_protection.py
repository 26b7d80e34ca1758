"""Sources must outlive the volumes made from them: finalizers on source claims and snapshots.

Owns: putting them on before CreateVolume, taking them off afterwards, and sweeping what a crash left.
Start reading at: `SourceProtection.protect`, `SourceProtection.sync_clone_source`.
"""

from moorage.kube import names
from moorage.kube.errors import ApiError, Conflict, Forbidden, NotFound
from moorage.kube.objects import PersistentVolumeClaim, VolumeSnapshot, VolumeSnapshotContent
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.edits import add_finalizer, remove_finalizer
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.provisioner.sources import DataSource

log = get_logger(__name__)

# Conflicts in a row after which the claim waits as after any other failure.
PROTECT_ATTEMPTS = 10

_CLAIM, _SNAPSHOT = "PersistentVolumeClaim", "VolumeSnapshot"


class SourceProtection:
    """The finalizers of data sources."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context

    async def protect(self, source: DataSource) -> None:
        """Put the finalizer on the source.

        Tasks that create volumes from the same source at once write to the same object. The one that loses the race
        retries at once: for its user nothing has failed.
        """
        for _ in range(PROTECT_ATTEMPTS - 1):
            try:
                await self._protect(source)
                return
            except Conflict:
                continue
        await self._protect(source)

    async def _protect(self, source: DataSource) -> None:
        writer = self._context.writer
        if source.is_claim:
            origin = self._context.caches.claims.get(f"{source.namespace}/{source.name}")
            if origin is not None and names.CLONE_PROTECTION in origin.finalizers:
                return
            change = add_finalizer(names.CLONE_PROTECTION)
            await writer.update(PersistentVolumeClaim, source.name, source.namespace, change)
        elif source.is_snapshot:
            change = add_finalizer(names.RESTORE_PROTECTION)
            try:
                await writer.update(VolumeSnapshot, source.name, source.namespace, change)
            except Forbidden as error:  # older RBAC rules; the snapshot controller protects it as well
                log.debug("snapshot is not protected", snapshot=source.name, reason=str(error))

    async def release_snapshot(self, source: DataSource) -> None:
        """Take the finalizer off unless another claim still needs it; what fails here, the sweep repeats."""
        if self._pending_restores(source.namespace, source.name):
            return
        await self._release(source.name, source.namespace)

    async def sweep(self) -> None:
        """Take the finalizer off every snapshot that no unfinished claim is made from."""
        if not self._context.driver.capabilities.controller("CREATE_DELETE_SNAPSHOT"):
            return
        try:
            snapshots = await self._snapshots()
        except (NotFound, Forbidden):  # no snapshot kinds in this cluster, or not ours to see
            return
        except ApiError as error:
            log.info("snapshots cannot be listed; the next sweep tries again", reason=str(error))
            return
        for snapshot in snapshots:
            protected = names.RESTORE_PROTECTION in snapshot.finalizers
            if protected and not self._pending_restores(snapshot.namespace, snapshot.name):
                await self._release(snapshot.name, snapshot.namespace)

    async def _snapshots(self) -> list[VolumeSnapshot]:
        """The snapshots to sweep: all, or with one process per node those whose content is marked as this node's."""
        client = self._context.client
        if not self._context.settings.node_deployment:
            return (await client.list(VolumeSnapshot)).items
        labels = f"{names.SNAPSHOT_MANAGED_BY}={self._context.around.node_name}"
        contents = (await client.list(VolumeSnapshotContent, labels=labels)).items
        driver = self._context.driver.name
        of = [content.spec.volume_snapshot_ref for content in contents if content.spec.driver == driver]
        found = [await client.find(VolumeSnapshot, each.name, each.namespace) for each in of if each.name]
        return [snapshot for snapshot in found if snapshot is not None]

    async def sync_clone_source(self, key: str) -> None:
        """Release a source claim that is being deleted, once no unfinished clone needs it."""
        claim = self._context.caches.claims.get(key)
        if claim is None or not claim.is_deleting or names.CLONE_PROTECTION not in claim.finalizers:
            return
        if not self._is_local(claim):
            return
        waiting = [
            other.key
            for other in self._context.caches.claims
            if other.status.phase in ("", "Pending") and _is_made_from(other, _CLAIM, claim.namespace, claim.name)
        ]
        if waiting:
            raise SidecarError(f"claim {key} is still being cloned for {', '.join(sorted(waiting))}")
        change = remove_finalizer(names.CLONE_PROTECTION)
        try:
            await self._context.writer.update(PersistentVolumeClaim, claim.name, claim.namespace, change)
        except NotFound:
            return

    def _is_local(self, claim: PersistentVolumeClaim) -> bool:
        """With one process per node, the one with the source's volume releases the source; any, if there is none."""
        volume = self._context.caches.volumes.get(claim.spec.volume_name) if claim.spec.volume_name else None
        return volume is None or self._context.is_local(volume)

    async def _release(self, name: str, namespace: str) -> None:
        try:
            change = remove_finalizer(names.RESTORE_PROTECTION)
            await self._context.writer.update(VolumeSnapshot, name, namespace, change)
        except (NotFound, Forbidden, Conflict):
            return
        except ApiError as error:
            log.info("snapshot is still protected; the sweep tries again", snapshot=name, reason=str(error))

    def _pending_restores(self, namespace: str, name: str) -> bool:
        """Whether a claim without a volume is to be made from this snapshot."""
        return any(
            claim.status.phase in ("", "Pending")
            and _is_made_from(claim, _SNAPSHOT, namespace, name)
            and not self._context.caches.volumes_of_claim(claim.uid)
            for claim in self._context.caches.claims
        )


def _is_made_from(claim: PersistentVolumeClaim, kind: str, namespace: str, name: str) -> bool:
    """Whether a claim names this object as its source, in its own namespace or across namespaces."""
    for source in (claim.spec.data_source, claim.spec.data_source_ref):
        if source is None or (source.kind, source.name) != (kind, name):
            continue
        if (source.namespace or claim.namespace) == namespace:
            return True
    return False
