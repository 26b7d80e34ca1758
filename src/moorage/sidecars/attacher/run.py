"""Wires the attacher: informers to queues, queues to workers, and the comparison with ListVolumes."""

import asyncio

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.kube import names
from moorage.kube.control.controller import Watch, run
from moorage.kube.objects import PersistentVolume, VolumeAttachment
from moorage.log import get_logger
from moorage.sidecars.attacher.attach import AttachmentWorker
from moorage.sidecars.attacher.decide import Published, is_relevant_change, node_id_on, releases_volume, source_spec
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.listing import pages
from moorage.sidecars.roles import Role

log = get_logger(__name__)


class Attacher:
    """Stands for external-attacher; without PUBLISH_UNPUBLISH_VOLUME it only marks attachments as attached."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._events = context.recorder(f"external-attacher {context.driver.name}")
        self._worker = AttachmentWorker(context, self._events)
        workers = context.settings.workers_for(Role.ATTACHER)
        self._attachments = context.controller("csi-attacher-va", self._worker.sync, workers)
        self._volumes = context.controller("csi-attacher-pv", self._worker.sync_volume, workers)

    async def run(self) -> None:
        """Attach and detach until cancelled."""
        caches, can = self._context.caches, self._context.driver.capabilities
        of_attachments = Watch(caches.attachments, self._on_attachment)
        if not can.attaches:
            await run([self._attachments], [of_attachments])
            return
        compares = can.controller("LIST_VOLUMES") and can.controller("LIST_VOLUMES_PUBLISHED_NODES")
        async with self._events:
            await run(
                [self._attachments, self._volumes],
                [of_attachments, Watch(caches.volumes, self._on_volume)],
                reads=[caches.csi_nodes],
                beside=[self._compare_forever] if compares else [],
            )

    def _is_ours(self, attachment: VolumeAttachment) -> bool:
        """Of our driver; with one process per node, also of our node."""
        context = self._context
        if attachment.spec.attacher != context.driver.name:
            return False
        return not context.settings.node_deployment or attachment.spec.node_name == context.around.node_name

    def _on_attachment(self, old: VolumeAttachment | None, new: VolumeAttachment | None) -> None:
        if new is not None and self._is_ours(new) and is_relevant_change(old, new):
            self._attachments.queue.add(new.name)
        if new is None and old is not None and old.spec.source.persistent_volume_name:
            self._volumes.queue.add(old.spec.source.persistent_volume_name)

    def _on_volume(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        if new is not None and releases_volume(new, self._context.driver.name):
            self._volumes.queue.add(new.name)

    async def _compare_forever(self) -> None:
        while True:
            await asyncio.sleep(self._context.settings.reconcile_sync_s)
            try:
                await self.compare()
            except (CsiError, TimeoutError) as error:  # the whole list took too long, or one part of it failed
                log.warning("volumes could not be listed", reason=str(error) or "it took too long")

    async def compare(self) -> None:
        """Enqueue every attachment whose status the driver contradicts."""
        published, caches = await self._published(), self._context.caches
        for attachment in caches.attachments:
            node_id = node_id_on(caches.csi_nodes.get(attachment.spec.node_name), self._context.driver.name)
            node_id = node_id or attachment.annotations.get(names.ATTACHER_NODE_ID, "")
            name = attachment.spec.source.persistent_volume_name
            try:
                spec = source_spec(attachment, caches.volumes.get(name) if name else None)
            except SidecarError:
                continue
            if not self._is_ours(attachment) or not node_id or spec.csi is None:
                continue
            if published.disagrees(spec.csi.volume_handle, node_id, attachment.status.attached):
                log.info("driver contradicts an attachment; reconciled again", attachment=attachment.name)
                self._worker.force(attachment.name)
                self._attachments.queue.add(attachment.name)

    async def _published(self) -> Published:
        entries: list[tuple[str, list[str]]] = []
        settings, client = self._context.settings, self._context.driver.client
        timeout_s = settings.timeout_for(Role.ATTACHER)

        async def page(token: str) -> pb.ListVolumesResponse:
            request = pb.ListVolumesRequest(max_entries=settings.max_entries, starting_token=token)
            return await client.ListVolumes(request, timeout_s=timeout_s)

        async with asyncio.timeout(max(60.0, timeout_s)):
            async for answer in pages("ListVolumes", page):
                entries += [
                    (entry.volume.volume_id, list(entry.status.published_node_ids))
                    for entry in answer.entries
                    if entry.HasField("volume") and entry.HasField("status")
                ]
        return Published.of(entries)
