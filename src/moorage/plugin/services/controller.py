"""The controller's operations, put together.

Start reading at: `volumes`, `snapshots`, `attaching`.
"""

from moorage.plugin.context import PluginContext
from moorage.plugin.services.attaching import Attaching
from moorage.plugin.services.snapshots import Snapshots
from moorage.plugin.services.volumes import Volumes
from moorage.sdk.operations import ALPHA


class PoolController(Volumes, Snapshots, Attaching):
    """Controller calls on the pools of this plugin."""

    def __init__(self, parts: PluginContext) -> None:
        self._parts = parts
        self.hidden = frozenset() if parts.settings.shows_alpha else ALPHA
