"""The controller's operations, put together.

Start reading at: `volumes`, `snapshots`, `attaching`.
"""

from moorage.plugin.context import PluginContext
from moorage.plugin.services.attaching import Attaching
from moorage.plugin.services.snapshots import Snapshots
from moorage.plugin.services.volumes import Volumes


class PoolController(Volumes, Snapshots, Attaching):
    """Controller calls on the pools of this plugin."""

    def __init__(self, parts: PluginContext) -> None:
        self._parts = parts
        is_hidden = not parts.settings.shows_alpha
        self.hidden = frozenset({"GET_VOLUME_HEALTH", "LIST_VOLUME_HEALTH"} if is_hidden else ())
