"""The requests of the attach/detach controller. What they return is cached before they return.

Owns: the bodies of the requests, and how many are in flight.
Start reading at: `AttachRequests`.
"""

import asyncio
from collections.abc import Sequence

from moorage.kube.api.client import Client
from moorage.kube.control.writer import Writer
from moorage.kube.errors import NotFound
from moorage.kube.objects.core import Node
from moorage.kube.objects.meta import Meta
from moorage.kube.objects.storage import VolumeAttachment
from moorage.kube.volumes import NodeName
from moorage.log import get_logger

log = get_logger(__name__)

_IN_FLIGHT = 64


class AttachRequests:
    """Writes VolumeAttachments and the lists of attached volumes in the status of nodes."""

    def __init__(self, client: Client, writer: Writer) -> None:
        self._client = client
        self._writer = writer
        self._slots = asyncio.Semaphore(_IN_FLIGHT)

    async def create_attachment(self, name: str, driver: str, node: str, pv_name: str) -> None:
        """Create a VolumeAttachment. Raises AlreadyExists if there is one."""
        spec = {"attacher": driver, "nodeName": node, "source": {"persistentVolumeName": pv_name}}
        async with self._slots:
            await self._writer.create(VolumeAttachment, {"metadata": {"name": name}, "spec": spec})

    async def delete_attachment(self, name: str) -> None:
        """Delete a VolumeAttachment. Raises NotFound if there is none."""
        async with self._slots:
            await self._client.delete(VolumeAttachment, name)

    async def refresh_attachment(self, name: str) -> None:
        """Read a VolumeAttachment from the API server into the cache."""
        await self._writer.fresh(VolumeAttachment, name)

    async def live_node(self, name: str) -> Node | None:
        """Return a node as the API server has it now. Returns None if it is gone."""
        return await self._writer.fresh(Node, name)

    async def list_attached(self, node: NodeName, entries: Sequence[tuple[str, str]]) -> None:
        """Write (volume, device path) entries into the node's status. A node that is gone needs none."""
        attached = [{"name": name, "devicePath": path} for name, path in entries]
        try:
            async with self._slots:
                status = {"volumesAttached": attached}
                await self._writer.patch_status(Node(metadata=Meta(name=node)), status, guarded=False)
        except NotFound:
            log.debug("node is gone; its status needs no list", node=node)
