"""The volume worker: released volumes are deleted, and the reclaim policy is honoured with a finalizer.

Owns: DeleteVolume, the PersistentVolume's deletion, and our finalizer on it.
Start reading at: `VolumeWorker.sync`.
"""

import time

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.csi.pending import on_behalf_of
from moorage.kube import names
from moorage.kube.api.client import PatchType
from moorage.kube.control.events import Recorder
from moorage.kube.errors import ApiError, NotFound
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, SecretReference
from moorage.kube.objects.meta import Meta
from moorage.kube.secrets import BadSecret, read_secret
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.provisioner.decide import finalizer_wanted, should_delete
from moorage.sidecars.provisioner.parameters import secret_references

log = get_logger(__name__)

_PATIENCE_S = 10.0  # a detach that follows on a claim's deletion is normally over sooner


class VolumeWorker:
    """Deletes volumes; `sync` is the work of the queue `volumes`, whose keys are names."""

    def __init__(self, context: RoleContext, events: Recorder) -> None:
        self._context = context
        self._events = events
        self._deleted: set[str] = set()  # UIDs of deleted volumes that may still be cached
        self._held_since: dict[str, float] = {}  # by UID: volumes that are to go and are still attached

    def begin(self) -> None:
        """Forget what an earlier run has seen: deletions since then were not reported to us."""
        self._deleted.clear()
        self._held_since.clear()

    def forget(self, volume: PersistentVolume) -> None:
        """Drop what is remembered about a volume whose object is gone."""
        self._deleted.discard(volume.uid)
        self._held_since.pop(volume.uid, None)

    def concerns(self, volume: PersistentVolume) -> bool:
        """Whether something is to be done about the volume as it is."""
        driver = self._context.driver.name
        if volume.uid in self._deleted or not self._context.is_local(volume):
            return False
        return finalizer_wanted(volume, driver) is not None or should_delete(volume, driver)

    async def sync(self, name: str) -> None:
        """Add or remove the finalizer as the reclaim policy requires, and delete a volume that is released."""
        volume = self._context.caches.volumes.get(name)
        if volume is None or volume.uid in self._deleted or not self._context.is_local(volume):
            return
        wanted = finalizer_wanted(volume, self._context.driver.name)
        if wanted is not None:
            volume = await self._set_finalizer(volume, wanted)
        if volume is not None and should_delete(volume, self._context.driver.name):
            await self._delete(volume)

    async def _set_finalizer(self, volume: PersistentVolume, wanted: bool) -> PersistentVolume | None:
        writer = self._context.writer
        if not wanted:
            return await writer.remove_finalizers(volume, names.EXTERNAL_DELETION, how=PatchType.STRATEGIC)
        try:
            return await writer.add_finalizers(volume, names.EXTERNAL_DELETION, how=PatchType.STRATEGIC)
        except NotFound:
            return None

    async def _delete(self, volume: PersistentVolume) -> None:
        self._check_unused(volume)
        started = time.monotonic()
        csi = volume.spec.csi
        assert csi is not None  # should_delete saw it
        secrets = await self._secrets(volume)
        request = pb.DeleteVolumeRequest(volume_id=csi.volume_handle, secrets=secrets)
        try:
            timeout_s = self._context.settings.timeout_for("provisioner")
            with on_behalf_of(self._events.event, volume):
                await self._context.driver.client.DeleteVolume(request, timeout_s=timeout_s)
        except CsiError as error:
            self._context.metrics.deleted.failed(volume.spec.storage_class_name)
            follows = self._context.settings.retry_words
            message = f"volume {csi.volume_handle} could not be deleted: {error}; {follows}"
            self._events.warning(volume, "VolumeFailedDelete", message)
            log.warning("deletion failed", volume=volume.name, reason=str(error))
            raise
        await self._remove_object(volume)
        if self._context.caches.volumes.get(volume.name) is not None:
            self._deleted.add(volume.uid)
        self._context.metrics.deleted.succeeded(started, volume.spec.storage_class_name)
        log.info("volume deleted", volume=volume.name, handle=csi.volume_handle)

    def _check_unused(self, volume: PersistentVolume) -> None:
        """Raise SidecarError if the volume is attached, or if an existing claim still names it."""
        caches = self._context.caches
        if self._context.driver.capabilities.attaches:
            nodes = [a.spec.node_name for a in caches.attachments_of(volume.name)]
            if nodes:
                message = f"volume {volume.name} is still attached to {', '.join(sorted(nodes))}"
                if time.monotonic() - self._held_since.setdefault(volume.uid, time.monotonic()) >= _PATIENCE_S:
                    self._events.warning(volume, "VolumeFailedDelete", f"{message}; it is deleted once it is detached")
                raise SidecarError(message)
        reference = volume.spec.claim_ref
        claim = caches.claim_with_uid(reference.uid) if reference is not None else None
        if claim is not None and claim.spec.volume_name == volume.name:
            raise SidecarError(f"volume {volume.name} is Released, but claim {claim.key} still uses it")

    async def _secrets(self, volume: PersistentVolume) -> dict[str, str]:
        """Return the secrets to delete with, none if they cannot be read: the driver reports whether it needed them."""
        try:
            return await read_secret(self._context.client, self._secret_of(volume))
        except (BadSecret, ApiError) as error:
            log.warning("deleting without secrets", volume=volume.name, reason=str(error))
            return {}

    def _secret_of(self, volume: PersistentVolume) -> SecretReference | None:
        annotations = volume.annotations
        if names.DELETION_SECRET_NAME in annotations and names.DELETION_SECRET_NAMESPACE in annotations:
            name, namespace = annotations[names.DELETION_SECRET_NAME], annotations[names.DELETION_SECRET_NAMESPACE]
            return SecretReference(name=name, namespace=namespace) if name and namespace else None
        caches = self._context.caches
        storage_class = caches.classes.get(volume.spec.storage_class_name)
        reference = volume.spec.claim_ref
        if storage_class is None or reference is None:
            return None
        claim = caches.claim_with_uid(reference.uid) or _claim_named(reference.namespace, reference.name)
        return secret_references(storage_class.parameters, claim, volume.name).get("provision")

    async def _remove_object(self, volume: PersistentVolume) -> None:
        """Remove our finalizer first, then the object.

        Other controllers with finalizers act on the deletion, and our write would conflict with theirs. A crash between
        the two leaves a released volume, which is deleted once more; that changes nothing.
        """
        writer = self._context.writer
        left = await writer.remove_finalizers(volume, names.EXTERNAL_DELETION, how=PatchType.STRATEGIC)
        if left is not None:
            await writer.delete(left)


def _claim_named(namespace: str, name: str) -> PersistentVolumeClaim:
    return PersistentVolumeClaim(metadata=Meta(namespace=namespace, name=name))
