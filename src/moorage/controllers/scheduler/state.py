"""What the scheduler knows: nodes, what runs on them, and what it has promised but not yet written.

Owns: the sums per node, and the promises (assumed pods, claims and volumes).
Start reading at: `SchedulerState`.

`filters.py` and `volumes.py` read it. Sums are updated pod by pod, so that reading a node's sum does not depend on the
number of its pods.
"""

from dataclasses import dataclass, field
from decimal import Decimal

from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.requests import Amounts, amounts_of, requests_of
from moorage.kube.volumes import claims_of


@dataclass(slots=True)
class NodeUse:
    """What is placed on one node, promises included."""

    pods: dict[str, Pod] = field(default_factory=dict)  # by uid
    requested: Amounts = field(default_factory=dict)
    ports: dict[tuple[str, str, int], int] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)  # how many pods here use a claim


class SchedulerState:
    """Who is where. A pod that is being bound counts as if it were there."""

    def __init__(self) -> None:
        self.uses: dict[str, NodeUse] = {}
        self.claim_users: dict[str, set[str]] = {}  # claim to the uids of placed pods
        self.promised_volumes: dict[str, str] = {}  # volume to the uid of the claim that will get it
        self.promised_bytes: dict[str, tuple[str, str, int]] = {}  # claim uid to (class, node, size) being provisioned
        self._placed: dict[str, str] = {}
        self._assumed: set[str] = set()

    def use(self, node: str) -> NodeUse:
        found = self.uses.get(node)
        if found is None:
            found = self.uses[node] = NodeUse()
        return found

    def see(self, uid: str, pod: Pod | None) -> None:
        """A pod as the server has it; one that ended or went takes no room."""
        node = pod.spec.node_name if pod is not None and pod.status.phase not in ("Succeeded", "Failed") else ""
        if uid in self._assumed and pod is not None and not pod.spec.node_name and not pod.is_deleting:
            return  # our own promise is newer than this
        self._assumed.discard(uid)
        self._place(uid, pod, node)

    def assume(self, pod: Pod, node: str) -> None:
        """Count a pod as placed before the server says so."""
        self._place(pod.uid, pod, node)
        self._assumed.add(pod.uid)

    def unassume(self, uid: str) -> None:
        if uid in self._assumed:
            self._assumed.discard(uid)
            self._place(uid, None, "")

    def _place(self, uid: str, pod: Pod | None, node: str) -> None:
        before = self._placed.get(uid)
        if before is not None:
            use = self.uses[before]
            _count(self, use, use.pods.pop(uid), -1)
            del self._placed[uid]
            if not use.pods:
                del self.uses[before]
        if pod is not None and node:
            self._placed[uid] = node
            use = self.use(node)
            use.pods[uid] = pod
            _count(self, use, pod, 1)


def _count(world: SchedulerState, use: NodeUse, pod: Pod, sign: int) -> None:
    for name, amount in requests_of(pod).items():
        use.requested[name] = use.requested.get(name, Decimal(0)) + sign * amount
    for port in ports_of(pod):
        use.ports[port] = use.ports.get(port, 0) + sign
    for claim in set(claims_of(pod)):
        use.claims[claim] = use.claims.get(claim, 0) + sign
        if not use.claims[claim]:
            del use.claims[claim]
        users = world.claim_users.setdefault(claim, set())
        (users.add if sign > 0 else users.discard)(pod.uid)
        if not users:
            del world.claim_users[claim]


def ports_of(pod: Pod) -> list[tuple[str, str, int]]:
    """The host's ports that a pod takes: address, protocol, number."""
    found = []
    for container in pod.spec.containers:
        for port in container.ports:
            number = port.get("hostPort") or 0
            if isinstance(number, int) and number > 0:
                found.append((str(port.get("hostIP") or "0.0.0.0"), str(port.get("protocol") or "TCP"), number))
    return found


def allocatable(node: Node) -> Amounts | None:
    """What a node can give; None when it does not say anything, and is then not limited."""
    said = node.status.allocatable or node.status.capacity
    return amounts_of(said) if said else None
