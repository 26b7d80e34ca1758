"""What keeps volumes from a node."""

from moorage.insight.causes.model import Finding, cause
from moorage.insight.cluster_view import ClusterView
from moorage.insight.waiting import exits_on
from moorage.kube.names import OUT_OF_SERVICE
from moorage.kube.objects import Node
from moorage.suggest import kubectl


@cause(
    "node-out-of-service",
    Node,
    "The node is marked as out of service",
    "Remove the taint when the node is back; its volumes were detached without asking it.",
)
def out_of_service(view: ClusterView, node: Node) -> Finding | None:
    """The taint node.kubernetes.io/out-of-service says that the node is surely off: pods and volumes move on at once."""
    if not any(taint.key == OUT_OF_SERVICE for taint in node.spec.taints):
        return None
    return Finding(
        "it is marked as out of service: its volumes are taken away at once",
        kubectl("taint", "node", node.name, f"{OUT_OF_SERVICE}-"),
    )


@cause("node-not-ready", Node, "The node is not ready", "Look at the node agent (kubelet, or `moorage node`) on it.")
def not_ready(view: ClusterView, node: Node) -> Finding | None:
    """The node agent has not reported in time; volumes that it uses stay attached for six minutes, for safety."""
    if node.is_ready:
        return None
    ready = next((c for c in node.status.conditions if c.type == "Ready"), None)
    words = f" ({ready.reason}: {ready.message})" if ready is not None else ""
    return Finding(f"it does not report that it is ready{words}", kubectl("describe", "node", node.name))


@cause(
    "node-cordoned",
    Node,
    "The node takes no new pods",
    "If its maintenance is over, let it take pods again: `kubectl uncordon`.",
)
def cordoned(view: ClusterView, node: Node) -> Finding | None:
    """The node is marked unschedulable."""
    if not node.spec.unschedulable:
        return None
    return Finding("it is cordoned and takes no new pods", kubectl("uncordon", "", node.name))


@cause(
    "node-without-drivers",
    Node,
    "No CSI driver is registered on the node",
    "Start the driver and its registrar on the node.",
)
def without_drivers(view: ClusterView, node: Node) -> Finding | None:
    """CSINode lists what the node agent knows; it is empty or missing."""
    found = view.node_drivers.get(node.name)
    if found is not None and found.spec.drivers:
        return None
    crashed = exits_on(view, node.name)
    why = f": its driver's process {crashed}" if crashed else ""
    return Finding(f"no CSI driver is registered on it{why}", kubectl("get", "csinodes"))


@cause(
    "node-attach-limit",
    Node,
    "The node has as many volumes as it takes",
    "Move pods to another node, or raise the driver's limit.",
)
def attach_limit(view: ClusterView, node: Node) -> Finding | None:
    """A driver's allocatable count on the node is used up."""
    found = view.node_drivers.get(node.name)
    for driver in found.spec.drivers if found is not None else []:
        limit = driver.allocatable.count if driver.allocatable is not None else None
        used = sum(each.spec.attacher == driver.name for each in view.attachments_on(node.name))
        if limit is not None and used >= limit:
            return Finding(
                f"driver {driver.name} takes {limit} volumes on it, and {used} are attached",
                kubectl("get", "csinode", node.name, flags=("-o", "yaml")),
            )
    return None
