"""The volume worker: released volumes are deleted, and the reclaim policy is honoured with a finalizer.

Owns: DeleteVolume, the PersistentVolume's deletion, and our finalizer on it.
Start reading at: `VolumeWorker.sync`.
"""

import time

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.kube.api.client import PatchType
from moorage.kube.control.events import Recorder
from moorage.kube.errors import ApiError, NotFound
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, SecretReference
from moorage.kube.objects.meta import Meta
from moorage.log import get_logger
from moorage.sidecars import names
from moorage.sidecars.context import RoleContext
from moorage.sidecars.edits import finalizer_patch
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.provisioner.decide import finalizer_wanted, should_delete
from moorage.sidecars.provisioner.parameters import secret_references
from moorage.sidecars.secrets import read_secret

log = get_logger(__name__)

_PATIENCE_S = 10.0  # a detach that follows on a claim's deletion is normally over sooner


class VolumeWorker:
    """Deletes volumes; `sync` is the work of the queue `volumes`, whose keys are names."""

    def __init__(self, context: RoleContext, events: Recorder) -> None:
        self._context = context
        self._events = events
        self._deleted: set[str] = set()  # UIDs of volumes that are gone, until the watch has told us so
        self._held_since: dict[str, float] = {}  # by UID: volumes that are to go and are still attached

    def forget(self, volume: PersistentVolume) -> None:
        """The object is gone from the API too."""
        self._deleted.discard(volume.uid)
        self._held_since.pop(volume.uid, None)

    def concerns(self, volume: PersistentVolume) -> bool:
        """Worth queueing: something is to be done about the volume as it is."""
        driver = self._context.driver.name
        if volume.uid in self._deleted or not self._context.is_local(volume):
            return False
        return finalizer_wanted(volume, driver) is not None or should_delete(volume, driver)

    async def sync(self, name: str) -> None:
        """Bring the finalizer in line with the policy, and delete the volume if it is time."""
        volume = self._context.volumes.get(name)
        if volume is None or volume.uid in self._deleted or not self._context.is_local(volume):
            return
        wanted = finalizer_wanted(volume, self._context.driver.name)
        if wanted is not None:
            volume = await self._set_finalizer(volume, wanted)
        if volume is not None and should_delete(volume, self._context.driver.name):
            await self._delete(volume)

    async def _set_finalizer(self, volume: PersistentVolume, wanted: bool) -> PersistentVolume | None:
        patch = finalizer_patch(names.VOLUME_FINALIZER, wanted)
        try:
            changed = await self._context.client.patch(PersistentVolume, volume.name, patch, how=PatchType.STRATEGIC)
        except NotFound:
            return None
        self._remember(changed)
        return changed

    async def _delete(self, volume: PersistentVolume) -> None:
        self._check_unused(volume)
        started = time.monotonic()
        csi = volume.spec.csi
        assert csi is not None  # should_delete saw it
        secrets = await self._secrets(volume)
        request = pb.DeleteVolumeRequest(volume_id=csi.volume_handle, secrets=secrets)
        try:
            timeout_s = self._context.settings.timeout_for("provisioner")
            await self._context.driver.client.DeleteVolume(request, timeout_s=timeout_s)
        except CsiError as error:
            self._context.metrics.deleted.failed(volume.spec.storage_class_name)
            follows = self._context.settings.retry_words
            message = f"volume {csi.volume_handle} could not be deleted: {error}; {follows}"
            self._events.warning(volume, "VolumeFailedDelete", message)
            log.warning("deletion failed", volume=volume.name, reason=str(error))
            raise
        await self._remove_object(volume)
        if self._context.volumes.get(volume.name) is not None:
            self._deleted.add(volume.uid)
        self._context.metrics.deleted.succeeded(started, volume.spec.storage_class_name)
        log.info("volume deleted", volume=volume.name, handle=csi.volume_handle)

    def _check_unused(self, volume: PersistentVolume) -> None:
        """No volume is deleted that is attached, or that a living claim still calls its own."""
        if self._context.driver.capabilities.attaches:
            nodes = [a.spec.node_name for a in self._context.attachments.at("volume", volume.name)]
            if nodes:
                message = f"volume {volume.name} is still attached to {', '.join(sorted(nodes))}"
                if time.monotonic() - self._held_since.setdefault(volume.uid, time.monotonic()) >= _PATIENCE_S:
                    self._events.warning(volume, "VolumeFailedDelete", f"{message}; it is deleted once it is detached")
                raise SidecarError(message)
        reference = volume.spec.claim_ref
        for claim in self._context.claims.at("uid", reference.uid) if reference is not None else []:
            if claim.spec.volume_name == volume.name:
                raise SidecarError(f"volume {volume.name} is Released, but claim {claim.key} still uses it")

    async def _secrets(self, volume: PersistentVolume) -> dict[str, str]:
        """A secret that cannot be read does not keep the volume: the driver says whether it needed it."""
        try:
            return await read_secret(self._context.client, self._secret_of(volume))
        except (SidecarError, ApiError) as error:
            log.warning("deleting without secrets", volume=volume.name, reason=str(error))
            return {}

    def _secret_of(self, volume: PersistentVolume) -> SecretReference | None:
        annotations = volume.annotations
        if names.DELETION_SECRET_NAME in annotations and names.DELETION_SECRET_NAMESPACE in annotations:
            name, namespace = annotations[names.DELETION_SECRET_NAME], annotations[names.DELETION_SECRET_NAMESPACE]
            return SecretReference(name=name, namespace=namespace) if name and namespace else None
        storage_class = self._context.classes.get(volume.spec.storage_class_name)
        reference = volume.spec.claim_ref
        if storage_class is None or reference is None:
            return None
        claims = self._context.claims.at("uid", reference.uid)
        claim = claims[0] if claims else _claim_named(reference.namespace, reference.name)
        return secret_references(storage_class.parameters, claim, volume.name).get("provision")

    async def _remove_object(self, volume: PersistentVolume) -> None:
        """First our finalizer, then the object: whoever guards it too acts on its deletion, and would meet our write.

        A crash between the two leaves a released volume, which is deleted once more; that changes nothing.
        """
        client = self._context.client
        try:
            if names.VOLUME_FINALIZER in volume.finalizers:
                patch = finalizer_patch(names.VOLUME_FINALIZER, False)
                patch["metadata"]["uid"] = volume.uid
                self._remember(await client.patch(PersistentVolume, volume.name, patch, how=PatchType.STRATEGIC))
            if not volume.is_deleting:
                await client.delete(PersistentVolume, volume.name, uid=volume.uid)
        except NotFound:
            return

    def _remember(self, volume: PersistentVolume) -> None:
        """Not when the write was the one that removed it: its DELETED event is on its way."""
        if not (volume.is_deleting and not volume.finalizers):
            self._context.volumes.remember(volume)


def _claim_named(namespace: str, name: str) -> PersistentVolumeClaim:
    return PersistentVolumeClaim(metadata=Meta(namespace=namespace, name=name))
