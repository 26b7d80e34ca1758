"""Keep each node's status.volumesAttached equal to what the state says is attached there.

Owns: writing `AttachState.listing`, one write at a time for a node.
Start reading at: `StatusReporter.begin`.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from moorage.controllers.attachdetach.requests import AttachRequests
from moorage.controllers.attachdetach.state import AttachState
from moorage.kube.errors import ApiError
from moorage.kube.volumes import NodeName
from moorage.log import get_logger

log = get_logger(__name__)

_RETRY_S = 0.5

Spawn = Callable[[Coroutine[Any, Any, None], str], None]


class StatusReporter:
    """Writes the lists of all nodes, those of different nodes in parallel."""

    def __init__(self, world: AttachState, requests: AttachRequests, clock: Callable[[], float]) -> None:
        self._world = world
        self._requests = requests
        self._clock = clock
        self._writing: set[NodeName] = set()

    def begin(self, spawn: Spawn) -> None:
        """Start a write for every node that changed. A write in flight repeats until the list is right."""
        for node in sorted(self._world.dirty_nodes - self._writing):
            self._world.dirty_nodes.discard(node)
            if self._is_due(node):
                self._writing.add(node)
                spawn(self._write_until_equal(node), f"report-{node}")

    async def _write(self, node: NodeName) -> bool:
        """Write the list of one node. Returns False if that failed."""
        known = self._world.nodes.get(node)
        if known is None or not known.exists:
            return True
        wanted = self._world.listing(node)
        entries = [*known.foreign, *((name, "") for name in wanted)]
        try:
            await self._requests.list_attached(node, entries)
        except ApiError as error:
            log.warning("node status was not written", node=node, reason=str(error))
            return False
        return True

    async def _write_until_equal(self, node: NodeName) -> None:
        try:
            while self._is_due(node):
                self._world.dirty_nodes.discard(node)
                if not await self._write(node):
                    self._world.wake_node_at(self._clock() + _RETRY_S, node)
                    return
        finally:
            self._writing.discard(node)

    def _is_due(self, node: NodeName) -> bool:
        known = self._world.nodes.get(node)
        return known is not None and known.exists and known.listed != frozenset(self._world.listing(node))
