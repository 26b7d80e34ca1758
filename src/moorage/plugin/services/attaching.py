"""Controller calls that attach, which only a shared pool has: they hand out the pool's fencing tokens.

Start reading at: `Attaching`.
"""

from typing import ClassVar

from moorage.errors import InvalidRequest
from moorage.plugin.access import why_unsupported_by
from moorage.plugin.context import PluginContext
from moorage.plugin.services.values import TOKEN_KEY
from moorage.sdk.model import Access, Attachment
from moorage.sdk.operations import ControllerOperations
from moorage.storage import ids


class Attaching(ControllerOperations):
    """Part of the controller's operations."""

    _parts: PluginContext
    why_not_served: ClassVar[str] = "volumes of a node's own pool need no attaching (--scope node)"

    def serves(self, *operations: str) -> bool:
        return self._parts.settings.is_shared or not {"attach", "detach"} & set(operations)

    def attach(self, volume_id: str, node_id: str, access: Access, is_read_only: bool) -> Attachment:
        pool = self._parts.persistent_pool(volume_id)
        if why := why_unsupported_by(pool.volumes.get(volume_id), access):
            raise InvalidRequest(f"volume_capability: {why}")
        made = pool.attachments.attach(pool.volumes.get(volume_id).id, node_id, access.mode.name, readonly=is_read_only)
        return Attachment({TOKEN_KEY: str(made.token)})

    def detach(self, volume_id: str, node_id: str) -> None:
        """Unknown volumes and nodes are detached by definition."""
        pool = None if ids.is_ephemeral(volume_id) else self._parts.pools.of_volume(volume_id)
        if pool is not None:
            pool.attachments.detach(volume_id, node_id)
