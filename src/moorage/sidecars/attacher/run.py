"""Wires the attacher: informers to queues, queues to workers, and the comparison with ListVolumes."""

import asyncio

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.kube.objects import PersistentVolume, VolumeAttachment
from moorage.log import get_logger
from moorage.sidecars import names
from moorage.sidecars.attacher.attach import AttachmentWorker
from moorage.sidecars.attacher.decide import Published, is_worth_a_look, node_id_on, releases_volume, source_spec
from moorage.sidecars.context import RoleContext, synced
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.roles import Role

log = get_logger(__name__)


class Attacher:
    """Stands for external-attacher; without PUBLISH_UNPUBLISH_VOLUME it only marks attachments as attached."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._attachments = context.queue("csi-attacher-va")
        self._volumes = context.queue("csi-attacher-pv")
        self._worker = AttachmentWorker(context)
        self._is_following = False
        self._follows_volumes = False

    async def run(self) -> None:
        """Attach and detach until cancelled."""
        context, can = self._context, self._context.driver.capabilities
        self._follow()
        await synced(context.attachments)
        if can.attaches:
            await synced(context.volumes, context.csi_nodes)
        self._look_at_everything()
        workers = context.settings.workers_for(Role.ATTACHER)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._attachments.run(self._worker.sync, workers), name="attachments")
            if can.attaches:
                tasks.create_task(self._volumes.run(self._worker.sync_volume, workers), name="attached-volumes")
            if can.attaches and can.controller("LIST_VOLUMES") and can.controller("LIST_VOLUMES_PUBLISHED_NODES"):
                tasks.create_task(self._compare_forever(), name="attachment-reconciler")

    def _follow(self) -> None:
        if not self._is_following:
            self._is_following = True
            self._context.attachments.subscribe(self._on_attachment)
        if self._context.driver.capabilities.attaches and not self._follows_volumes:
            self._follows_volumes = True
            self._context.volumes.subscribe(self._on_volume)

    def _look_at_everything(self) -> None:
        for attachment in self._context.attachments:
            self._attachments.forget(attachment.name)
            self._on_attachment(None, attachment)
        if self._follows_volumes:
            for volume in self._context.volumes:
                self._on_volume(None, volume)

    def _is_ours(self, attachment: VolumeAttachment) -> bool:
        """Of our driver; with one process per node, also of our node."""
        context = self._context
        if attachment.spec.attacher != context.driver.name:
            return False
        return not context.settings.node_deployment or attachment.spec.node_name == context.around.node_name

    def _on_attachment(self, old: VolumeAttachment | None, new: VolumeAttachment | None) -> None:
        if new is not None and self._is_ours(new) and is_worth_a_look(old, new):
            self._attachments.add(new.name)
        if new is None and old is not None and old.spec.source.persistent_volume_name:
            self._volumes.add(old.spec.source.persistent_volume_name)

    def _on_volume(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        if new is not None and releases_volume(new, self._context.driver.name):
            self._volumes.add(new.name)

    async def _compare_forever(self) -> None:
        while True:
            await asyncio.sleep(self._context.settings.reconcile_sync_s)
            try:
                await self.compare()
            except (CsiError, TimeoutError) as error:  # the whole list took too long, or one part of it failed
                log.warning("volumes could not be listed", reason=str(error) or "it took too long")

    async def compare(self) -> None:
        """Queue every attachment that the driver sees otherwise than its status says."""
        published = await self._published()
        for attachment in self._context.attachments:
            node_id = node_id_on(self._context.csi_nodes.get(attachment.spec.node_name), self._context.driver.name)
            node_id = node_id or attachment.annotations.get(names.NODE_ID, "")
            name = attachment.spec.source.persistent_volume_name
            try:
                spec = source_spec(attachment, self._context.volumes.get(name) if name else None)
            except SidecarError:
                continue
            if not self._is_ours(attachment) or not node_id or spec.csi is None:
                continue
            if published.disagrees(spec.csi.volume_handle, node_id, attachment.status.attached):
                log.info("attachment is looked at again", attachment=attachment.name)
                self._worker.force(attachment.name)
                self._attachments.add(attachment.name)

    async def _published(self) -> Published:
        entries: list[tuple[str, list[str]]] = []
        token = ""
        async with asyncio.timeout(max(60.0, self._context.settings.timeout_for(Role.ATTACHER))):
            while True:
                request = pb.ListVolumesRequest(max_entries=self._context.settings.max_entries, starting_token=token)
                timeout_s = self._context.settings.timeout_for(Role.ATTACHER)
                answer = await self._context.driver.client.ListVolumes(request, timeout_s=timeout_s)
                entries += [
                    (entry.volume.volume_id, list(entry.status.published_node_ids))
                    for entry in answer.entries
                    if entry.HasField("volume") and entry.HasField("status")
                ]
                token = answer.next_token
                if not token:
                    return Published.of(entries)
