"""With one provisioner per node: which of them takes a claim.

A claim with a selected node belongs to that node. An Immediate claim has none, so the nodes settle it among
themselves without talking: each ranks all nodes for the claim by the same hash; the first takes it at once by writing
the selected-node annotation, the next one only after a delay, and so on. So normally one write is made, by one node.

Owns: the rank, the delays, and the write that takes a claim.
Start reading at: `Ownership.wait_s`, `rank_of`.
"""

import hashlib
import time
from collections.abc import Iterable
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.kube.errors import NotFound
from moorage.kube.objects import PersistentVolumeClaim, StorageClass
from moorage.log import get_logger
from moorage.sidecars import names
from moorage.sidecars.context import Context
from moorage.sidecars.edits import update_whole
from moorage.sidecars.provisioner.decide import requested_bytes, selected_node_of, waits_for_consumer
from moorage.sidecars.provisioner.topology import flattened, is_subset, term_of
from moorage.sidecars.slow import SlowSet

log = get_logger(__name__)

_DECLINED_S = 60.0


def rank_of(node: str, nodes: Iterable[str], uid: str) -> int:
    """How many nodes come before this one for the claim; every node computes the same order."""

    def weight(name: str) -> bytes:
        return hashlib.sha256(f"{uid}/{name}".encode()).digest()

    mine = weight(node)
    return sum(1 for other in set(nodes) if other != node and weight(other) < mine)


class Ownership:
    """Whose claim is it? Without --node-deployment always ours."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: dict[str, float] = {}
        self._declined: SlowSet[str] = SlowSet(_DECLINED_S)

    def decline(self, uid: str) -> None:
        """This node has no room for the claim: let others have it for a while."""
        self._declined.add(uid)

    async def wait_s(self, claim: PersistentVolumeClaim, storage_class: StorageClass) -> float | None:
        """0 to go on now, seconds to look again later, None when the claim is another node's (or just became ours)."""
        if not self._context.settings.node_deployment:
            return 0.0
        selected = selected_node_of(claim)
        if selected:
            self._seen.pop(claim.uid, None)
            return 0.0 if selected == self._context.around.node_name else None
        if waits_for_consumer(storage_class) or not self._context.settings.node_deployment_immediate_binding:
            return None
        if not self._is_allowed_here(storage_class):
            return None
        left_s = self._declined.left_s(claim.uid) or self._turn_in_s(claim)
        if left_s > 0:
            return left_s
        if not await self._has_room(claim, storage_class):
            self.decline(claim.uid)
            return _DECLINED_S
        await self._take(claim)
        return None

    def _is_allowed_here(self, storage_class: StorageClass) -> bool:
        segments = self._context.driver.node.segments
        here = term_of(segments, segments) or ()
        allowed = flattened(storage_class.allowed_topologies)
        return not allowed or any(is_subset(term, here) for term in allowed)

    def _turn_in_s(self, claim: PersistentVolumeClaim) -> float:
        settings, driver = self._context.settings, self._context.driver.name
        nodes = [n.name for n in self._context.csi_nodes if any(d.name == driver for d in n.spec.drivers)]
        rank = rank_of(self._context.around.node_name, nodes, claim.uid)
        seen = self._seen.setdefault(claim.uid, time.monotonic())
        delay_s = min(rank * settings.node_deployment_base_delay_s, settings.node_deployment_max_delay_s)
        return max(0.0, seen + delay_s - time.monotonic())

    async def _has_room(self, claim: PersistentVolumeClaim, storage_class: StorageClass) -> bool:
        driver = self._context.driver
        if not driver.capabilities.controller("GET_CAPACITY"):
            return True
        request = pb.GetCapacityRequest(
            parameters=storage_class.parameters, accessible_topology=pb.Topology(segments=driver.node.segments)
        )
        try:
            timeout_s = self._context.settings.timeout_for("provisioner")
            answer = await driver.client.GetCapacity(request, timeout_s=timeout_s)
        except CsiError as error:
            log.debug("capacity is not known; the claim is tried", claim=claim.key, reason=str(error))
            return True
        return answer.available_capacity >= requested_bytes(claim)

    async def _take(self, claim: PersistentVolumeClaim) -> None:
        """Write the annotation on the version that we decided on; a Conflict brings the claim back."""

        def change(document: dict[str, Any]) -> bool:
            annotations = document["metadata"].setdefault("annotations", {})
            if annotations.get(names.SELECTED_NODE) or document["metadata"].get("uid") != claim.uid:
                return False
            annotations[names.SELECTED_NODE] = self._context.around.node_name
            return True

        try:
            taken = await update_whole(self._context.client, PersistentVolumeClaim, claim.name, claim.namespace, change)
        except NotFound:
            return
        if taken is not None:
            self._context.claims.remember(taken)  # tells the handlers, so the claim comes back with its node
