"""Where a pod goes, or why nowhere. Pure.

Owns: putting the rules of `filters.py` and `volumes.py` together, choosing among suitable nodes, and the sentence that
tells people why none is.
May not touch: the API, the clock.
Start reading at: `plan`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from moorage.controllers.scheduler import filters, volumes
from moorage.controllers.scheduler.state import NodeUse, SchedulerState
from moorage.controllers.scheduler.volumes import Fit
from moorage.kube.cache.caches import Caches
from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.requests import Amounts, requests_of

_NOWHERE = NodeUse()
_NAMED_NODES = 12  # the condition names each node and its reason up to this many


@dataclass(frozen=True, slots=True)
class Placement:
    """The pod goes to `node`, and its claims are to be bound or provisioned as `fit` says."""

    node: Node
    fit: Fit


@dataclass(frozen=True, slots=True)
class Nowhere:
    """No node suits; `message` is Kubernetes' sentence, `detail` adds the nodes by name."""

    message: str
    detail: str


def plan(pod: Pod, caches: Caches, world: SchedulerState, rejected: Mapping[str, int]) -> Placement | Nowhere:
    """The best node for a pod; nodes that a provisioner turned down before come last."""
    nodes = list(caches.nodes)
    if not nodes:
        return Nowhere("no nodes available to schedule pods", "")
    claims = volumes.sort_claims(pod, caches)
    if claims.problem:
        return Nowhere(f"0/{len(nodes)} nodes are available: {claims.problem}.", "")
    requests = requests_of(pod)
    best: tuple[tuple[float, ...], Placement] | None = None
    against: dict[str, tuple[str, ...]] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        use = world.uses.get(node.name, _NOWHERE)
        reasons = tuple(filters.reasons_against(pod, requests, node, use))
        fit = volumes.fit(pod, claims, node, caches, world) if not reasons else Fit(reasons)
        if fit.reasons:
            against[node.name] = fit.reasons
            continue
        score = _score(pod, requests, node, use, fit, rejected)
        if best is None or score > best[0]:
            best = score, Placement(node, fit)
    return best[1] if best is not None else _nowhere(against)


def _score(
    pod: Pod, requests: Amounts, node: Node, use: NodeUse, fit: Fit, rejected: Mapping[str, int]
) -> tuple[float, ...]:
    """Compared in order: not turned down before, volumes that exist rather than new ones, then room."""
    room = filters.rank(pod, requests, node, use) + 50.0 * fit.free_share
    return (-rejected.get(node.name, 0), len(fit.static), room)


def _nowhere(against: Mapping[str, tuple[str, ...]]) -> Nowhere:
    counts = Counter(reason for reasons in against.values() for reason in reasons)
    listed = ", ".join(sorted(f"{count} {reason}" for reason, count in counts.items()))
    message = f"0/{len(against)} nodes are available: {listed}."
    named = [f"{node}: {', '.join(reasons)}" for node, reasons in list(against.items())[:_NAMED_NODES]]
    more = len(against) - len(named)
    detail = "; ".join(named) + (f"; and {more} more" if more else "")
    return Nowhere(message, detail)
