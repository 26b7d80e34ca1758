"""Why a volume is Released, Failed, or will not go away."""

from moorage.insight.causes.model import Finding, cause, said
from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import holder_of, is_leaderless, nodes_that_fit
from moorage.kube.objects import PersistentVolume

_PROTECTION = "kubernetes.io/pv-protection"


@cause(
    "volume-deleting-bound",
    PersistentVolume,
    "The volume is being deleted and a claim holds it",
    "Delete the claim first; the volume then goes by itself.",
)
def deleting_bound(world: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The finalizer kubernetes.io/pv-protection stays for as long as the volume is Bound."""
    if not volume.is_deleting or _PROTECTION not in volume.finalizers or volume.status.phase != "Bound":
        return None
    reference = volume.spec.claim_ref
    claim = world.claims.get(holder_of(volume))
    step = f"kubectl -n {reference.namespace} delete pvc {reference.name}" if reference else ""
    return Finding(
        f"it is being deleted, and claim {holder_of(volume)} is bound to it", step, (f"finalizer {_PROTECTION}",), claim
    )


@cause(
    "volume-deleting-attached",
    PersistentVolume,
    "The volume is being deleted and is still attached",
    "The explanation follows the attachment.",
)
def deleting_attached(world: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The attacher's finalizer stays for as long as a VolumeAttachment names the volume."""
    attached = world.attachments_of(volume)
    if not volume.is_deleting or not attached:
        return None
    return Finding(
        f"it is being deleted, and it is still attached to node {attached[0].spec.node_name}", waits_for=attached[0]
    )


@cause(
    "volume-delete-fails",
    PersistentVolume,
    "The driver fails to delete the volume",
    "Read the driver's words; it is tried again with growing waits.",
)
def delete_fails(world: ClusterView, volume: PersistentVolume) -> Finding | None:
    """DeleteVolume fails; the volume is kept until it succeeds."""
    event = world.warning(volume, "VolumeFailedDelete")
    is_wanted = volume.status.phase in ("Released", "Failed") and (
        volume.spec.persistent_volume_reclaim_policy == "Delete" or volume.is_deleting
    )
    if event is None or not is_wanted:
        return None
    return Finding(f"deleting it fails: {event.message}", f"kubectl describe pv {volume.name}", said(event))


@cause(
    "volume-deleting-finalizer",
    PersistentVolume,
    "A finalizer holds the volume",
    "external-provisioner.volume.kubernetes.io/finalizer is removed by the driver's provisioner after DeleteVolume; "
    "external-attacher/… by its attacher.",
)
def deleting_finalizer(world: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The object is being deleted and waits for the component whose finalizer it carries."""
    others = [name for name in volume.finalizers if name != _PROTECTION]
    if not volume.is_deleting or not volume.finalizers:
        return None
    name = others[0] if others else _PROTECTION
    return Finding(
        f"it is being deleted and finalizer {name} holds it",
        f"kubectl get pv {volume.name} -o yaml",
        tuple(f"finalizer {one}" for one in volume.finalizers),
    )


@cause(
    "volume-released-retained",
    PersistentVolume,
    "The volume's claim is gone and its data is kept",
    "To use it again, remove spec.claimRef and create a claim with volumeName; to drop it, delete it and its storage.",
)
def released_retained(world: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The reclaim policy is Retain: after its claim was deleted the volume stays Released, and no claim gets it until a
    person clears claimRef."""
    if volume.status.phase != "Released" or volume.spec.persistent_volume_reclaim_policy != "Retain":
        return None
    step = f'kubectl patch pv {volume.name} --type json -p \'[{{"op":"remove","path":"/spec/claimRef"}}]\''
    return Finding(f"its claim {holder_of(volume)} is gone and its policy is Retain: it waits for a person", step)


@cause(
    "volume-released-undeleted",
    PersistentVolume,
    "The volume's claim is gone and nobody deletes it",
    "Start the driver's provisioner, which deletes volumes too (`moorage sidecars provisioner`).",
)
def released_undeleted(world: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The policy is Delete, and the driver's provisioner has neither deleted the volume nor said why not."""
    if volume.status.phase != "Released" or volume.spec.persistent_volume_reclaim_policy != "Delete":
        return None
    driver = (
        volume.spec.csi.driver if volume.spec.csi else volume.annotations.get("pv.kubernetes.io/provisioned-by", "?")
    )
    attached = world.attachments_of(volume)
    if attached:
        return Finding(
            f"it is to be deleted once it is detached from {attached[0].spec.node_name}", waits_for=attached[0]
        )
    stale = is_leaderless(world, driver, "provisioner")
    return Finding(
        f"it is to be deleted by the provisioner of {driver}, which has not done so"
        + (" (its lease has run out)" if stale else ""),
        "kubectl get pods -A | grep -i provisioner",
    )


@cause(
    "volume-failed",
    PersistentVolume,
    "Reclaiming the volume failed",
    "Read its message.",
)
def failed(world: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The phase is Failed: the volume could not be deleted or recycled, or its policy is unknown."""
    if volume.status.phase != "Failed":
        return None
    return Finding(
        f"reclaiming it failed: {volume.status.message or 'no message'}",
        f"kubectl describe pv {volume.name}",
        said(world.warning(volume)),
    )


@cause(
    "volume-node-gone",
    PersistentVolume,
    "The volume is on a node that does not exist",
    "Bring the node back under its name. If it is gone for good, so is the data; delete the claim and the volume.",
)
def node_gone(world: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The volume's node affinity matches no node of the cluster."""
    if volume.spec.node_affinity is None or volume.spec.node_affinity.required is None or nodes_that_fit(world, volume):
        return None
    values = [
        v
        for term in volume.spec.node_affinity.required.node_selector_terms
        for requirement in term.match_expressions
        for v in requirement.values
    ]
    return Finding(
        f"it can be reached only from {', '.join(values) or 'certain nodes'}, and no such node exists",
        "kubectl get nodes --show-labels",
    )
