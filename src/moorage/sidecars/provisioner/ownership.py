"""With one provisioner per node: which of them takes a claim.

A claim with a selected node belongs to that node. An Immediate claim has none, so the nodes settle it among
themselves without talking: each ranks all nodes for the claim by the same hash; the first takes it at once by writing
the selected-node annotation, the next one only after a delay, and so on. So normally one write is made, by one node.
A node that cannot take the claim lets it pass; when all have had their turn in vain, the first few tell the user why.

Owns: the rank, the delays, the write that takes a claim, and the event when no node does.
Start reading at: `Ownership.wait_s`, `rank_of`.
"""

import hashlib
import time
from collections.abc import Iterable
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.kube import names
from moorage.kube.control.events import Recorder
from moorage.kube.errors import NotFound
from moorage.kube.objects import PersistentVolumeClaim, StorageClass
from moorage.kube.volumes import required_bytes, selected_node_of, waits_for_consumer
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.provisioner.topology import allows, term_of
from moorage.sidecars.retry_later import RetryLater

log = get_logger(__name__)

_DECLINED_S = 60.0
_SPEAKERS = 3  # so many nodes tell why they did not take a claim: one may be dead, and a thousand would be a flood


def rank_of(node: str, nodes: Iterable[str], uid: str) -> int:
    """Return how many nodes come before this one for the claim. Every node computes the same order."""

    def weight(name: str) -> bytes:
        return hashlib.sha256(f"{uid}/{name}".encode()).digest()

    mine = weight(node)
    return sum(1 for other in set(nodes) if other != node and weight(other) < mine)


class Ownership:
    """Decides which node takes a claim. Without --node-deployment it is always ours."""

    def __init__(self, context: RoleContext, events: Recorder) -> None:
        self._context = context
        self._events = events
        self._seen: dict[str, float] = {}
        self._declined: RetryLater[str] = RetryLater(_DECLINED_S)

    def decline(self, uid: str) -> None:
        """Leave the claim to other nodes for a while: this one has no room for it."""
        self._declined.add(uid)

    def forget(self, uid: str) -> None:
        """Drop what is remembered about a claim that is gone or has a node."""
        self._seen.pop(uid, None)
        self._declined.discard(uid)

    def what_follows(self, storage_class: StorageClass | None) -> str:
        """Return who chooses another place if this node has no room, as text for the user."""
        if self._context.settings.node_deployment and storage_class and not waits_for_consumer(storage_class):
            return f"other nodes may take the claim, and this one looks again in {_DECLINED_S:.0f} seconds"
        return "the scheduler is asked for another node"

    async def wait_s(self, claim: PersistentVolumeClaim, storage_class: StorageClass) -> float | None:
        """Return 0 to continue now, seconds to wait, None if the claim is another node's or was taken just now."""
        if not self._context.settings.node_deployment:
            return 0.0
        selected = selected_node_of(claim)
        if selected:
            self.forget(claim.uid)
            return 0.0 if selected == self._context.around.node_name else None
        if waits_for_consumer(storage_class) or not self._context.settings.node_deployment_immediate_binding:
            return None
        rank, nodes = self._place_of(claim)
        left_s = self._declined.left_s(claim.uid) or self._left_s(claim, rank)
        if left_s > 0:
            return left_s
        pause_s = self._context.settings.node_deployment_base_delay_s
        others_left_s = self._left_s(claim, nodes - 1, pause_s) if nodes > 1 else 0.0
        why_not = self._why_not_here(storage_class)
        if why_not and rank >= _SPEAKERS:
            return None
        why_not = why_not or await self._why_no_room(claim, storage_class, others_left_s > 0)
        if not why_not:
            await self._take(claim)
            return None
        if others_left_s > 0:
            return others_left_s
        if rank < _SPEAKERS or storage_class.allowed_topologies:
            self._tell(claim, storage_class, why_not)
        self.decline(claim.uid)
        return _DECLINED_S

    def _tell(self, claim: PersistentVolumeClaim, storage_class: StorageClass, why_not: str) -> None:
        log.warning("no node takes the claim", claim=claim.key, reason=why_not)
        message = (
            f'failed to provision volume with StorageClass "{storage_class.name}": no node has taken the claim; '
            f"node {self._context.around.node_name}: {why_not}; looked at again in {_DECLINED_S:.0f} seconds"
        )
        self._events.warning(claim, "ProvisioningFailed", message)

    def _why_not_here(self, storage_class: StorageClass) -> str:
        segments = self._context.driver.node.segments
        here = term_of(segments, segments) or ()
        return "" if allows(storage_class.allowed_topologies, here) else "not in the class's allowedTopologies"

    def _place_of(self, claim: PersistentVolumeClaim) -> tuple[int, int]:
        """How many nodes come before this one for the claim, and how many nodes there are."""
        driver, own = self._context.driver.name, self._context.around.node_name
        csi_nodes = self._context.caches.csi_nodes
        nodes = {node.name for node in csi_nodes if any(each.name == driver for each in node.spec.drivers)} | {own}
        return rank_of(own, nodes, claim.uid), len(nodes)

    def _left_s(self, claim: PersistentVolumeClaim, places: int, more_s: float = 0.0) -> float:
        """Seconds until so many nodes have had their turn for the claim."""
        settings = self._context.settings
        seen = self._seen.setdefault(claim.uid, time.monotonic())
        delay_s = min(places * settings.node_deployment_base_delay_s, settings.node_deployment_max_delay_s)
        return max(0.0, seen + delay_s + more_s - time.monotonic())

    async def _why_no_room(self, claim: PersistentVolumeClaim, storage_class: StorageClass, others_may: bool) -> str:
        """Why the claim should not be taken here, or the empty string.

        A driver that cannot say what room it has lets the others go first; when none of them takes the claim, it is
        tried here, and CreateVolume tells the user what is wrong.
        """
        driver = self._context.driver
        if not driver.capabilities.controller("GET_CAPACITY"):
            return ""
        request = pb.GetCapacityRequest(
            parameters=storage_class.parameters, accessible_topology=pb.Topology(segments=driver.node.segments)
        )
        try:
            timeout_s = self._context.settings.timeout_for("provisioner")
            answer = await driver.client.GetCapacity(request, timeout_s=timeout_s)
        except CsiError as error:
            log.info("capacity is not known", claim=claim.key, reason=str(error), tried_here=not others_may)
            return str(error) if others_may else ""
        wanted = required_bytes(claim)
        if answer.available_capacity >= wanted:
            return ""
        return f"{_mebibytes(answer.available_capacity)} are left there, {_mebibytes(wanted)} are asked for"

    async def _take(self, claim: PersistentVolumeClaim) -> None:
        """Write the annotation. Raises Conflict if the claim has changed since it was read."""

        def change(document: dict[str, Any]) -> bool:
            annotations = document["metadata"].setdefault("annotations", {})
            if annotations.get(names.SELECTED_NODE) or document["metadata"].get("uid") != claim.uid:
                return False
            annotations[names.SELECTED_NODE] = self._context.around.node_name
            return True

        try:
            await self._context.writer.update(PersistentVolumeClaim, claim.name, claim.namespace, change)
        except NotFound:
            return  # otherwise the handlers have seen the change, and the claim is enqueued with its node


def _mebibytes(size_bytes: int) -> str:
    """For a user to read: `12.5 MiB`."""
    return f"{size_bytes / (1 << 20):,.1f} MiB"
