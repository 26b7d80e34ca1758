"""What to do about a node and its pods, decided from values.

Owns: when a node counts as silent, its conditions and taints then, how long a pod tolerates a taint, and which pods
are removed by force. The rules and times are those of kube-controller-manager.
Start reading at: `Heartbeat`, `plan_conditions`, `plan_taints`, `eviction_delay_s`, `is_orphan`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moorage.kube.names import NOT_READY, OUT_OF_SERVICE, UNREACHABLE, UNSCHEDULABLE
from moorage.kube.objects.core import Lease, Node, Taint
from moorage.kube.objects.meta import Condition
from moorage.kube.objects.pods import Pod
from moorage.kube.tolerations import tolerates

_OF_PRESSURE = {
    "MemoryPressure": "node.kubernetes.io/memory-pressure",
    "DiskPressure": "node.kubernetes.io/disk-pressure",
    "PIDPressure": "node.kubernetes.io/pid-pressure",
}
_OWNED = {NOT_READY, UNREACHABLE, UNSCHEDULABLE, *_OF_PRESSURE.values()}
_WATCHED = ("Ready", *_OF_PRESSURE)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last sign of life of a node and when it changed, by this controller's own clock.

    Only changes count, never the times that a node writes: its clock may be wrong.
    """

    sign: tuple[str, str]
    since: float

    def after(self, sign: tuple[str, str], now: float) -> "Heartbeat":
        """Return this heartbeat if `sign` is known already, else a new one that begins now."""
        return self if sign == self.sign else Heartbeat(sign, now)


def sign_of_life(node: Node, lease: Lease | None) -> tuple[str, str]:
    """Return what changes while a node's agent lives: the time of its lease and of its Ready condition."""
    ready = condition_of(node, "Ready")
    return (lease.spec.renew_time or "" if lease else "", ready.last_heartbeat_time or "" if ready else "")


def condition_of(node: Node, kind: str) -> Condition | None:
    """Return the node's condition of this type, None if it has none."""
    return next((condition for condition in node.status.conditions if condition.type == kind), None)


def plan_conditions(node: Node, has_agent: bool) -> list[dict[str, str]]:
    """Return the conditions to write for a silent node: those that do not say Unknown yet."""
    never = ("NodeStatusNeverUpdated", "Kubelet never posted node status.")
    stopped = ("NodeStatusUnknown", "Kubelet stopped posting node status.")
    changed = []
    for kind in _WATCHED:
        known = condition_of(node, kind)
        if known is not None and known.status == "Unknown":
            continue
        reason, message = stopped if known is not None or has_agent else never
        changed.append({"type": kind, "status": "Unknown", "reason": reason, "message": message})
    return changed


def plan_taints(node: Node, now_text: str) -> list[Taint]:
    """Return all taints that the node should have; those of others are kept as they are."""
    kept = [taint for taint in node.spec.taints if taint.key not in _OWNED]
    known = {(taint.key, taint.effect): taint for taint in node.spec.taints}
    return kept + [
        known.get((key, effect)) or Taint(key, "", effect, now_text if effect == "NoExecute" else None)
        for key, effect in _due_taints(node)
    ]


def _due_taints(node: Node) -> Iterable[tuple[str, str]]:
    ready = condition_of(node, "Ready")
    if ready is None:
        yield NOT_READY, "NoSchedule"  # a new node: its agent has written no status yet
    elif ready.status != "True":
        key = NOT_READY if ready.status == "False" else UNREACHABLE
        yield key, "NoSchedule"
        yield key, "NoExecute"
    for kind, key in _OF_PRESSURE.items():
        pressure = condition_of(node, kind)
        if pressure is not None and pressure.status == "True":
            yield key, "NoSchedule"
    if node.spec.unschedulable:
        yield UNSCHEDULABLE, "NoSchedule"


def eviction_delay_s(pod: Pod, taints: Sequence[Taint]) -> float | None:
    """Return the seconds until the pod has to leave a node with these taints, None if it may stay for good.

    A taint without a toleration evicts at once; otherwise the shortest `tolerationSeconds` counts.
    """
    shortest: float | None = None
    for taint in (taint for taint in taints if taint.effect == "NoExecute"):
        matching = [toleration for toleration in pod.spec.tolerations if tolerates(toleration, taint)]
        if not matching:
            return 0.0
        limits = [max(0, t.toleration_seconds) for t in matching if t.toleration_seconds is not None]
        if limits:
            shortest = min(limits) if shortest is None else min(shortest, *limits)
    return shortest


def is_orphan(pod: Pod, node: Node | None) -> bool:
    """Return whether the pod can only end by force, because no agent will ever end it.

    True if its node is gone, if it terminates without having been scheduled, or if it terminates on a node
    that is not ready and tainted out of service.
    """
    is_terminating = pod.metadata.deletion_timestamp is not None
    if not pod.spec.node_name:
        return is_terminating
    if node is None:
        return True
    is_off = any(taint.key == OUT_OF_SERVICE for taint in node.spec.taints) and not node.is_ready
    return is_terminating and is_off
