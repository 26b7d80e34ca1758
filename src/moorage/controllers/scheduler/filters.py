"""Whether a node suits a pod, volumes aside, and how well. Pure.

Owns: unschedulable nodes, taints, node selectors and affinity, host ports, resources, and the ranking of nodes.
May not touch: volumes (`volumes.py`), the API.
Start reading at: `reasons_against`, `rank`.

Each reason is worded as Kubernetes words it, because people search for these sentences.
"""

from decimal import Decimal

from moorage.controllers.scheduler.state import NodeUse, allocatable, ports_of
from moorage.kube.names import UNSCHEDULABLE
from moorage.kube.objects.core import Node, Taint
from moorage.kube.objects.pods import Pod
from moorage.kube.requests import Amounts
from moorage.kube.selectors import BadSelector, node_matches, term_matches
from moorage.kube.tolerations import is_tolerated

_UNSCHEDULABLE_TAINT = Taint(key=UNSCHEDULABLE, effect="NoSchedule")
_HARD = ("NoSchedule", "NoExecute")


def reasons_against(pod: Pod, requests: Amounts, node: Node, use: NodeUse) -> list[str]:
    """Why the node does not suit the pod; empty when it does. The first rule that fails gives the reasons."""
    if node.spec.unschedulable and not is_tolerated(_UNSCHEDULABLE_TAINT, pod.spec.tolerations):
        return ["node(s) were unschedulable"]
    if any(t.effect in _HARD and not is_tolerated(t, pod.spec.tolerations) for t in node.spec.taints):
        return ["node(s) had untolerated taint(s)"]
    if not _is_selected(pod, node):
        return ["node(s) didn't match Pod's node affinity/selector"]
    if _ports_clash(pod, use):
        return ["node(s) didn't have free ports for the requested pod ports"]
    return _lacking(requests, node, use)


def rank(pod: Pod, requests: Amounts, node: Node, use: NodeUse) -> float:
    """How well a suitable node suits, higher is better: wished-for labels, no soft taints, much room, few pods."""
    score = 0.0
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity else None
    for term in affinity.preferred_during_scheduling_ignored_during_execution if affinity else []:
        try:
            score += term.weight * term_matches(term.preference, node.labels, node.name)
        except BadSelector:
            continue  # a wish that cannot be read is no wish
    soft = [t for t in node.spec.taints if t.effect == "PreferNoSchedule"]
    score -= 100.0 * sum(not is_tolerated(taint, pod.spec.tolerations) for taint in soft)
    return score + 100.0 * _room_left(requests, node, use) - 0.01 * len(use.pods)


def _is_selected(pod: Pod, node: Node) -> bool:
    if any(node.labels.get(key) != value for key, value in pod.spec.node_selector.items()):
        return False
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity else None
    if affinity is None:
        return True
    try:
        return node_matches(affinity.required_during_scheduling_ignored_during_execution, node.labels, node.name)
    except BadSelector:
        return False


def _ports_clash(pod: Pod, use: NodeUse) -> bool:
    for address, protocol, number in ports_of(pod):
        for taken_address, taken_protocol, taken in use.ports:
            same_address = address == taken_address or "0.0.0.0" in (address, taken_address)
            if (
                taken == number
                and taken_protocol == protocol
                and same_address
                and use.ports[(taken_address, taken_protocol, taken)]
            ):
                return True
    return False


def _lacking(requests: Amounts, node: Node, use: NodeUse) -> list[str]:
    offered = allocatable(node)
    if offered is None:
        return []
    reasons = []
    if len(use.pods) + 1 > offered.get("pods", Decimal(0)):
        reasons.append("Too many pods")
    for name, amount in requests.items():
        if amount > 0 and amount > offered.get(name, Decimal(0)) - use.requested.get(name, Decimal(0)):
            reasons.append(f"Insufficient {name}")
    return reasons


def _room_left(requests: Amounts, node: Node, use: NodeUse) -> float:
    """The mean share of cpu and memory that stays free with the pod there."""
    offered = allocatable(node) or {}
    shares = []
    for name in ("cpu", "memory"):
        have = offered.get(name, Decimal(0))
        if have > 0:
            taken = use.requested.get(name, Decimal(0)) + requests.get(name, Decimal(0))
            shares.append(max(0.0, 1.0 - float(taken / have)))
    return sum(shares) / len(shares) if shares else 0.0
