"""Why a pod does not start: its claims, its node, attaching, mounting."""

from moorage.insight.causes.advice import stop
from moorage.insight.causes.model import Finding, cause, names, said
from moorage.insight.causes.room import demand, most_room, places, show_room
from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import class_of, nodes_that_fit
from moorage.kube.names import SELECTED_NODE
from moorage.kube.objects import Event, Node, Pod
from moorage.kube.volumes import admits, ephemeral_claim_name, waits_for_consumer
from moorage.suggest import kubectl

_NOTHING_TO_BIND = "find available persistent volumes to bind"
_AFFINITY = ("match PersistentVolume's node affinity", "volume node affinity conflict")


def is_starting(pod: Pod) -> bool:
    """Not yet running, and not finished or going away."""
    return pod.status.phase in ("", "Pending") and not pod.is_deleting


@cause(
    "pod-claim-missing",
    Pod,
    "The pod names a claim that does not exist",
    "Create the claim in the pod's namespace, or correct the name.",
)
def claim_missing(view: ClusterView, pod: Pod) -> Finding | None:
    """A volume of the pod refers to a PersistentVolumeClaim that is not in its namespace."""
    if not is_starting(pod):
        return None
    for volume in pod.spec.volumes:
        source = volume.persistent_volume_claim
        if source is not None and f"{pod.namespace}/{source.claim_name}" not in view.claims:
            return Finding(
                f"it uses claim {source.claim_name}, which does not exist in namespace {pod.namespace}",
                kubectl("get", "pvc", namespace=pod.namespace),
                said(_unscheduled_event(view, pod)),
            )
    return None


@cause(
    "pod-quota",
    Pod,
    "A quota refuses the pod's claim",
    "Free some of the namespace's quota, raise it, or ask for less.",
)
def quota(view: ClusterView, pod: Pod) -> Finding | None:
    """The claim for a generic ephemeral volume would exceed a ResourceQuota of the namespace."""
    event = next((e for e in view.events_of(pod) if "exceeded quota" in e.message), None)
    missing = [
        ephemeral_claim_name(pod, volume)
        for volume in pod.spec.volumes
        if volume.ephemeral is not None and f"{pod.namespace}/{ephemeral_claim_name(pod, volume)}" not in view.claims
    ]
    if not is_starting(pod) or event is None or not missing:
        return None
    return Finding(
        f"claim {missing[0]} for its ephemeral volume exceeds the quota of namespace {pod.namespace}",
        kubectl("describe", "resourcequota", namespace=pod.namespace),
        said(event),
    )


@cause(
    "pod-ephemeral-claim-missing",
    Pod,
    "The pod's generic ephemeral claim has not been made",
    "Start the ephemeral volume controller (kube-controller-manager, or `moorage controllers ephemeral`).",
)
def ephemeral_claim_missing(view: ClusterView, pod: Pod) -> Finding | None:
    """The pod has a generic ephemeral volume, and the claim POD-VOLUME that a controller makes for it is not there."""
    for volume in pod.spec.volumes:
        if (
            is_starting(pod)
            and volume.ephemeral is not None
            and f"{pod.namespace}/{ephemeral_claim_name(pod, volume)}" not in view.claims
        ):
            event = view.warning(pod, "FailedCreate", "FailedBinding", "ProvisioningFailed")
            words = f": {event.message}" if event else ""
            return Finding(
                f"claim {ephemeral_claim_name(pod, volume)} for its ephemeral volume has not been made{words}",
                kubectl("get", "events", namespace=pod.namespace),
                said(event),
            )
    return None


@cause(
    "pod-ephemeral-claim-foreign",
    Pod,
    "A claim with the name of the pod's ephemeral claim belongs to something else",
    "Rename the pod or its volume, or remove the other claim.",
)
def ephemeral_claim_foreign(view: ClusterView, pod: Pod) -> Finding | None:
    """A claim called POD-VOLUME exists and is not owned by this pod; it is never used for it."""
    for volume in pod.spec.volumes:
        claim = (
            view.claims.get(f"{pod.namespace}/{ephemeral_claim_name(pod, volume)}")
            if volume.ephemeral is not None
            else None
        )
        if (
            is_starting(pod)
            and claim is not None
            and not any(o.uid == pod.uid for o in claim.metadata.owner_references)
        ):
            return Finding(
                f"claim {claim.name}, which its ephemeral volume needs, exists and is not its own",
                kubectl("get", "pvc", claim.name, namespace=pod.namespace, flags=("-o", "yaml")),
                said(view.warning(pod)),
            )
    return None


@cause(
    "pod-claim-deleting",
    Pod,
    "A claim of the pod is being deleted",
    "A claim that is being deleted takes no new pods. The explanation follows the claim and says how to keep its data.",
)
def claim_deleting(view: ClusterView, pod: Pod) -> Finding | None:
    """The scheduler gives no node to a pod whose claim is being deleted."""
    going = [claim for claim in view.claims_used_by(pod) if claim.is_deleting]
    if not is_starting(pod) or pod.spec.node_name or not going:
        return None
    return Finding(f"its claim {going[0].name} is being deleted", waits_for=going[0])


@cause(
    "pod-claim-lost",
    Pod,
    "A claim of the pod has lost its volume",
    "The explanation follows the claim.",
)
def claim_lost(view: ClusterView, pod: Pod) -> Finding | None:
    """A claim in phase Lost cannot be mounted."""
    lost = [claim for claim in view.claims_used_by(pod) if claim.status.phase == "Lost"]
    if not is_starting(pod) or not lost:
        return None
    return Finding(f"its claim {lost[0].name} has lost its volume", waits_for=lost[0])


@cause(
    "pod-rwop-conflict",
    Pod,
    "Another pod holds a ReadWriteOncePod claim",
    "Wait for the pod that holds it, or stop that pod; or use ReadWriteOnce.",
)
def rwop_conflict(view: ClusterView, pod: Pod) -> Finding | None:
    """A claim with access mode ReadWriteOncePod is for one pod at a time."""
    if not is_starting(pod):
        return None
    for claim in view.claims_used_by(pod):
        others = [p for p in view.pods_of(claim) if p.uid != pod.uid and p.spec.node_name]
        if "ReadWriteOncePod" in claim.spec.access_modes and others:
            return Finding(
                f"claim {claim.name} is ReadWriteOncePod, and pod {names(others)} has it",
                kubectl("describe", "pod", others[0].name, namespace=pod.namespace),
                said(_unscheduled_event(view, pod)),
                purpose="see what the other pod is for",
                then=(stop(others[0], "free the claim for this pod"),),
            )
    return None


@cause(
    "pod-node-name-late-binding",
    Pod,
    "The pod sets nodeName, and its claim waits for the scheduler",
    "Use a nodeSelector on kubernetes.io/hostname in place of nodeName.",
)
def node_name_late_binding(view: ClusterView, pod: Pod) -> Finding | None:
    """A claim of a WaitForFirstConsumer class is provisioned after the scheduler has chosen a node; a pod with
    nodeName never passes the scheduler."""
    waiting = [c for c in view.claims_used_by(pod) if c.status.phase in ("", "Pending") and not c.spec.volume_name]
    late = [c for c in waiting if waits_for_consumer(class_of(view, c)) and SELECTED_NODE not in c.annotations]
    if not is_starting(pod) or not pod.spec.node_name or not late:
        return None
    return Finding(
        f"it sets nodeName: {pod.spec.node_name}, and its claim {late[0].name} waits for the scheduler",
        waits_for=late[0],
    )


@cause(
    "pod-attach-limit",
    Pod,
    "The nodes have as many volumes as they take",
    "Remove pods with volumes from a node, add a node, or raise the driver's limit.",
)
def attach_limit(view: ClusterView, pod: Pod) -> Finding | None:
    """The driver says how many volumes a node takes (CSINode allocatable), and every node that fits has that many."""
    message = _unscheduled_message(pod)
    if not is_starting(pod) or "max volume count" not in message:
        return None
    return Finding(
        "no node can take another volume of the driver", kubectl("get", "csinodes", flags=("-o", "yaml")), (message,)
    )


@cause(
    "pod-volume-elsewhere",
    Pod,
    "No node that the pod may run on can reach its volume",
    "Let the pod run where the volume is (its node affinity), or bring that node back.",
)
def volume_elsewhere(view: ClusterView, pod: Pod) -> Finding | None:
    """A volume with node affinity lives on certain nodes; the pod has not been placed on one of them because they are
    gone, not ready, cordoned or excluded by the pod itself."""
    if not is_starting(pod) or pod.spec.node_name:
        return None
    for volume in view.volumes_used_by(pod):
        if volume.spec.node_affinity is None:
            continue
        fit = nodes_that_fit(view, volume)
        usable = [name for name in fit if _is_usable(view.nodes[name])]
        conflict = any(sign in _unscheduled_message(pod) for sign in _AFFINITY)
        if not usable or conflict:
            where = f"{', '.join(fit)} only, where the pod may not run" if fit else "no node that exists"
            if fit and not usable:
                where = f"{', '.join(fit)} only, which cannot take pods now"
            return Finding(
                f"its volume {volume.name} can be reached from {where}",
                kubectl("get", "pv", volume.name, flags=("-o", "jsonpath={.spec.nodeAffinity}")),
                (_unscheduled_message(pod),) if _unscheduled_message(pod) else (),
            )
    return None


@cause(
    "pod-no-capacity",
    Pod,
    "No node has room for the pod's new volumes",
    "Free space on a node, or ask for less; the capacity objects say what each node has.",
)
def no_capacity(view: ClusterView, pod: Pod) -> Finding | None:
    """The driver publishes how much room each node has (CSIStorageCapacity), and none has enough for all claims of the
    pod together."""
    message = _unscheduled_message(pod)
    if not is_starting(pod) or "enough free storage" not in message:
        return None
    waiting = [claim for claim in view.claims_used_by(pod) if claim.status.phase in ("", "Pending")]
    most = "; ".join(dict.fromkeys(filter(None, (most_room(view, claim) for claim in waiting))))
    numbers = f": it asks for {demand(waiting)}" + (f", and {most}" if most else "") if waiting else ""
    return Finding(f"no node has enough free storage for its claims{numbers}", show_room(), (message,))


@cause(
    "pod-topology-excluded",
    Pod,
    "The class of a claim makes volumes only where the pod may not run",
    "Let the pod run where the class makes volumes, or use a class that makes them where the pod runs. A class is "
    "immutable: delete it and create it again.",
)
def topology_excluded(view: ClusterView, pod: Pod) -> Finding | None:
    """The class's allowedTopologies name places for volumes, and the scheduler found no node there for the pod."""
    if not is_starting(pod) or pod.spec.node_name:
        return None
    for claim in view.claims_used_by(pod):
        found = class_of(view, claim)
        if claim.status.phase not in ("", "Pending") or found is None or not found.allowed_topologies:
            continue
        there = [node for node in view.nodes.values() if admits(found, node.labels)]
        if not there:
            return Finding(f"its claim {claim.name} can be given a volume on no node", waits_for=claim)
        if _NOTHING_TO_BIND in _unscheduled_message(pod):
            return Finding(
                f"its claim {claim.name} is of class {found.name}, which makes volumes only where {places(found)}: on "
                f"{names(there)}, where the pod may not run",
                kubectl("describe", "pod", pod.name, namespace=pod.namespace),
                (_unscheduled_message(pod), *(f"{node.name}: {_state(node)}" for node in there[:3])),
            )
    return None


@cause(
    "pod-claim-pending",
    Pod,
    "A claim of the pod is not bound",
    "The explanation follows the claim.",
)
def claim_pending(view: ClusterView, pod: Pod) -> Finding | None:
    """The pod cannot be placed before its claims are bound, except for claims that wait for the pod itself."""
    if not is_starting(pod):
        return None
    for claim in view.claims_used_by(pod):
        late = waits_for_consumer(class_of(view, claim)) and not claim.spec.volume_name
        chosen = SELECTED_NODE in claim.annotations
        if claim.status.phase in ("", "Pending") and (not late or chosen):
            return Finding(f"it waits for claim {claim.name} to be bound", waits_for=claim)
    return None


@cause(
    "pod-no-node-fits",
    Pod,
    "No node fits the pod",
    "Each node's reason is listed; change what the pod asks for, or the node.",
)
def no_node_fits(view: ClusterView, pod: Pod) -> Finding | None:
    """The scheduler looked at every node and none will do; it says why for each."""
    message = _unscheduled_message(pod)
    if not is_starting(pod) or pod.spec.node_name or not message:
        return None
    return Finding(
        f"no node fits: {message}",
        kubectl("describe", "pod", pod.name, namespace=pod.namespace),
        tuple(f"{node.name}: {_state(node)}" for node in view.nodes.values()),
    )


@cause(
    "pod-scheduler-not-running",
    Pod,
    "No scheduler works for the pod",
    "Start the scheduler (kube-scheduler, or `moorage controllers scheduler`), or correct schedulerName.",
)
def scheduler_not_running(view: ClusterView, pod: Pod) -> Finding | None:
    """The pod has no node, and no scheduler has said anything about it."""
    if not is_starting(pod) or pod.spec.node_name:
        return None
    name = pod.spec.scheduler_name or "default-scheduler"
    return Finding(
        f"no scheduler has looked at it (schedulerName is {name})",
        kubectl("get", "leases,pods", namespace="kube-system"),
    )


def _unscheduled_message(pod: Pod) -> str:
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return condition.message
    return ""


def _unscheduled_event(view: ClusterView, pod: Pod) -> Event | None:
    return view.warning(pod, "FailedScheduling")


def _is_usable(node: Node) -> bool:
    return node.is_ready and not node.spec.unschedulable


def _state(node: Node) -> str:
    words = ["ready" if node.is_ready else "not ready"]
    if node.spec.unschedulable:
        words.append("cordoned")
    words += [f"taint {taint.key}:{taint.effect}" for taint in node.spec.taints]
    return ", ".join(words)
