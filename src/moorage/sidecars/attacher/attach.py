"""The attachment worker: publish, unpublish, and record the outcome in the attachment's status.

Owns: ControllerPublishVolume and ControllerUnpublishVolume, our finalizers, attached and the two errors.
Start reading at: `AttachmentWorker.sync`.
"""

import time
from contextlib import suppress
from typing import Any

import grpc

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.csi.pending import on_behalf_of
from moorage.errors import MoorageError
from moorage.kube import names
from moorage.kube.api.client import PatchType
from moorage.kube.control.events import Recorder
from moorage.kube.errors import ApiError, NotFound
from moorage.kube.objects import PersistentVolume, VolumeAttachment, VolumeSpec
from moorage.kube.objects.meta import timestamp_text
from moorage.kube.secrets import read_secret
from moorage.log import get_logger
from moorage.sidecars.attacher.decide import finalizer_of, node_id_on, source_spec
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError

log = get_logger(__name__)


class AttachmentWorker:
    """Attaches and detaches; `sync` and `sync_volume` are the work of the two queues."""

    def __init__(self, context: RoleContext, events: Recorder) -> None:
        self._context = context
        self._events = events
        self._forced: set[str] = set()

    @property
    def finalizer(self) -> str:
        return finalizer_of(self._context.driver.name)

    def force(self, name: str) -> None:
        """Do not trust `attached` at the next reconciliation: the driver contradicts it."""
        self._forced.add(name)

    async def sync(self, name: str) -> None:
        """Attach or detach one attachment, if its status says that this is still to be done."""
        attachment = self._context.caches.attachments.get(name)
        forced = name in self._forced
        self._forced.discard(name)
        if attachment is None or attachment.spec.attacher != self._context.driver.name:
            return
        if not self._context.driver.capabilities.attaches:
            await self._sync_trivially(attachment)
        elif attachment.is_deleting:
            if forced or self.finalizer in attachment.finalizers:
                await self._try(attachment, "detach")
        elif forced or not attachment.status.attached:
            await self._try(attachment, "attach")

    async def sync_volume(self, name: str) -> None:
        """Take our finalizer off a volume that is being deleted and is attached nowhere."""
        caches = self._context.caches
        volume = caches.volumes.get(name)
        if volume is None or self.finalizer not in volume.finalizers:
            return
        if holders := caches.attachments_of(name):
            log.debug("volume keeps its finalizer", volume=name, attachments=len(holders))
            return  # the end of each attachment enqueues the volume
        await self._context.writer.remove_finalizers(volume, self.finalizer, how=PatchType.JSON)

    async def _sync_trivially(self, attachment: VolumeAttachment) -> None:
        """The driver has nothing to do for an attachment: it is attached because it exists."""
        if not attachment.is_deleting and not attachment.status.attached:
            await self._status(attachment, {"attached": True})

    async def _try(self, attachment: VolumeAttachment, what: str) -> None:
        try:
            if what == "attach":
                await self._attach(attachment)
            else:
                await self._detach(attachment)
        except MoorageError as error:
            await self._note_error(attachment, f"{what}Error", error)
            raise

    async def _attach(self, attachment: VolumeAttachment) -> None:
        context = self._context
        volume = await self._volume(attachment)
        spec = source_spec(attachment, volume)
        if volume is not None:
            if volume.is_deleting:
                raise SidecarError(f"volume {volume.name} is being deleted")
            await context.writer.add_finalizers(volume, self.finalizer, how=PatchType.JSON)
        node_id = node_id_on(context.caches.csi_nodes.get(attachment.spec.node_name), context.driver.name)
        if not node_id:
            raise SidecarError(
                f"driver {context.driver.name} is not registered on node {attachment.spec.node_name} (no CSINode entry)"
            )
        request = await self._publish_request(spec, node_id)
        attachment = await self._mark(attachment, node_id)
        timeout_s = context.settings.timeout_for("attacher")
        with on_behalf_of(self._events.event, attachment):
            answer = await context.driver.client.ControllerPublishVolume(request, timeout_s=timeout_s)
        stale = dict.fromkeys(attachment.status.attachment_metadata)  # a merge patch would keep them
        metadata: dict[str, str | None] = {**stale, **answer.publish_context}
        status = {"attached": True, "attachmentMetadata": metadata or None, "attachError": None}
        await self._status(attachment, status)
        log.info("volume attached", volume=request.volume_id, node=attachment.spec.node_name)

    async def _detach(self, attachment: VolumeAttachment) -> None:
        context = self._context
        spec = source_spec(attachment, await self._volume(attachment))
        assert spec.csi is not None  # source_spec saw it
        node_id = node_id_on(context.caches.csi_nodes.get(attachment.spec.node_name), context.driver.name)
        node_id = node_id or attachment.annotations.get(names.ATTACHER_NODE_ID, "")
        if not node_id:
            raise SidecarError(f"the id of node {attachment.spec.node_name} is not known, neither by CSINode nor here")
        request = pb.ControllerUnpublishVolumeRequest(
            volume_id=spec.csi.volume_handle,
            node_id=node_id,
            secrets=await read_secret(context.client, spec.csi.controller_publish_secret_ref),
        )
        timeout_s = context.settings.timeout_for("attacher")
        with on_behalf_of(self._events.event, attachment):
            await context.driver.client.ControllerUnpublishVolume(request, timeout_s=timeout_s)
        await self._record_detached(attachment)
        log.info("volume detached", volume=request.volume_id, node=attachment.spec.node_name)

    async def _record_detached(self, attachment: VolumeAttachment) -> None:
        """Remove the finalizer first, then write the status: an attachment without finalizer needs no unpublishing."""
        left = await self._context.writer.remove_finalizers(attachment, self.finalizer)
        if left is not None:
            with suppress(NotFound):
                await self._status(left, {"attached": False, "detachError": None, "attachmentMetadata": None})

    async def _volume(self, attachment: VolumeAttachment) -> PersistentVolume | None:
        name = attachment.spec.source.persistent_volume_name
        if not name:
            return None
        return self._context.caches.volumes.get(name) or await self._context.client.find(PersistentVolume, name)

    async def _publish_request(self, spec: VolumeSpec, node_id: str) -> pb.ControllerPublishVolumeRequest:
        can = self._context.driver.capabilities
        csi = spec.csi
        assert csi is not None  # source_spec saw it
        return pb.ControllerPublishVolumeRequest(
            volume_id=csi.volume_handle,
            node_id=node_id,
            volume_capability=self._context.volume_capability(spec),
            readonly=csi.read_only and can.controller("PUBLISH_READONLY"),
            volume_context=csi.volume_attributes,
            secrets=await read_secret(self._context.client, csi.controller_publish_secret_ref),
        )

    async def _mark(self, attachment: VolumeAttachment, node_id: str) -> VolumeAttachment:
        """Finalizer and node id in one patch, before the driver is asked: from here on it may be attached."""
        if self.finalizer in attachment.finalizers and attachment.annotations.get(names.ATTACHER_NODE_ID) == node_id:
            return attachment
        finalizers = list(dict.fromkeys([*attachment.finalizers, self.finalizer]))
        patch = {"metadata": {"finalizers": finalizers, "annotations": {names.ATTACHER_NODE_ID: node_id}}}
        return await self._context.writer.patch(attachment, patch)

    async def _status(self, attachment: VolumeAttachment, status: dict[str, Any]) -> None:
        await self._context.writer.patch_status(attachment, status, guarded=False)

    async def _note_error(self, attachment: VolumeAttachment, field: str, error: MoorageError) -> None:
        note: dict[str, Any] = {"message": str(error), "time": timestamp_text(time.time())}
        if isinstance(error, CsiError) and self._context.settings.gate("MutableCSINodeAllocatableCount", True):
            note["errorCode"] = grpc.StatusCode[error.code].value[0]
        log.warning("attachment failed", attachment=attachment.name, what=field, reason=str(error))
        known = attachment.status.attach_error if field == "attachError" else attachment.status.detach_error
        if known is not None and known.message == note["message"]:
            return
        try:
            with suppress(NotFound):
                await self._status(attachment, {field: note})
        except ApiError as failure:
            log.warning("error could not be noted", attachment=attachment.name, reason=str(failure))
