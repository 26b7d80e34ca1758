"""Why a volume is Released, Failed, or will not go away."""

from moorage.insight.causes.advice import Advice, keep_data, stop, trash_note
from moorage.insight.causes.model import Finding, cause, said
from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import holder_of, is_leaderless, nodes_that_fit
from moorage.kube.names import PROVISIONED_BY, VOLUME_PROTECTION
from moorage.kube.objects import PersistentVolume, Pod
from moorage.suggest import command, in_words, kubectl, pods_like, saved


@cause(
    "volume-deleting-bound",
    PersistentVolume,
    "The volume is being deleted and a claim holds it",
    "A deletion cannot be taken back, but the data can be kept: set the reclaim policy to Retain, save both objects, "
    "delete the claim, and create both again with the same volumeHandle.",
)
def deleting_bound(view: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The finalizer kubernetes.io/pv-protection stays for as long as the volume is Bound."""
    if not volume.is_deleting or VOLUME_PROTECTION not in volume.finalizers or volume.status.phase != "Bound":
        return None
    claim = view.claims.get(holder_of(volume))
    users = view.pods_of(claim) if claim is not None else []
    return Finding(
        f"it is being deleted, and claim {holder_of(volume)} is bound to it",
        keep_data(volume),
        (f"finalizer {VOLUME_PROTECTION}",),
        claim if claim is not None and claim.is_deleting else None,
        "keep the data when the volume object is gone",
        _recreation(volume, users),
    )


def _recreation(volume: PersistentVolume, users: list[Pod]) -> tuple[Advice, ...]:
    """The steps after Retain that lead to a volume object that is not being deleted."""
    reference = volume.spec.claim_ref
    if reference is None:
        return ()
    harm = f"deletes claim {holder_of(volume)}; its data stays with the volume's storage if the first step was done"
    tidy = (
        "remove metadata.uid, metadata.resourceVersion, metadata.deletionTimestamp and spec.claimRef.uid from "
        "volume.yaml, and the first three and the annotation pv.kubernetes.io/bind-completed from claim.yaml"
    )
    show = ("get", "pvc", reference.name)
    return (
        Advice(saved(kubectl("get", "pv", volume.name, flags=("-o", "yaml")), "volume.yaml"), "save the volume object"),
        Advice(
            saved(kubectl(*show, namespace=reference.namespace, flags=("-o", "yaml")), "claim.yaml"), "save the claim"
        ),
        *(stop(pod, "free the claim; scale the pod's owner to 0 if it has one") for pod in users),
        Advice(
            kubectl("delete", "pvc", reference.name, namespace=reference.namespace), "let the volume object go", harm
        ),
        Advice(in_words(tidy), "make the objects new ones"),
        Advice(command("kubectl", "create", flags=("-f", "volume.yaml", "-f", "claim.yaml")), "bring both back"),
    )


@cause(
    "volume-deleting-attached",
    PersistentVolume,
    "The volume is being deleted and is still attached",
    "The explanation follows the attachment.",
)
def deleting_attached(view: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The attacher's finalizer stays for as long as a VolumeAttachment names the volume."""
    attached = view.attachments_of(volume)
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
def delete_fails(view: ClusterView, volume: PersistentVolume) -> Finding | None:
    """DeleteVolume fails; the volume is kept until it succeeds."""
    event = view.warning(volume, "VolumeFailedDelete")
    is_wanted = volume.status.phase in ("Released", "Failed") and (
        volume.spec.persistent_volume_reclaim_policy == "Delete" or volume.is_deleting
    )
    if event is None or not is_wanted:
        return None
    return Finding(f"deleting it fails: {event.message}", kubectl("describe", "pv", volume.name), said(event))


@cause(
    "volume-deleting-finalizer",
    PersistentVolume,
    "A finalizer holds the volume",
    "external-provisioner.volume.kubernetes.io/finalizer is removed by the driver's provisioner after DeleteVolume; "
    "external-attacher/… by its attacher.",
)
def deleting_finalizer(view: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The object is being deleted and waits for the component whose finalizer it carries."""
    others = [name for name in volume.finalizers if name != VOLUME_PROTECTION]
    if not volume.is_deleting or not volume.finalizers:
        return None
    name = others[0] if others else VOLUME_PROTECTION
    return Finding(
        f"it is being deleted and finalizer {name} holds it",
        kubectl("get", "pv", volume.name, flags=("-o", "yaml")),
        tuple(f"finalizer {one}" for one in volume.finalizers),
    )


@cause(
    "volume-released-retained",
    PersistentVolume,
    "The volume's claim is gone and its data is kept",
    "To use it again, remove spec.claimRef.uid, which reserves it for a new claim of the same name, and create that "
    "claim with volumeName. To drop it, delete it and its storage.",
)
def released_retained(view: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The reclaim policy is Retain: after its claim was deleted the volume stays Released, and no claim gets it until a
    person clears claimRef."""
    if volume.status.phase != "Released" or volume.spec.persistent_volume_reclaim_policy != "Retain":
        return None
    reference = volume.spec.claim_ref
    name, namespace = (reference.name, reference.namespace) if reference is not None else ("", "")
    free = '{"spec":{"claimRef":{"uid":null,"resourceVersion":null}}}'
    create = in_words("create claim {} in namespace {} with volumeName: {}", name, namespace, volume.name)
    return Finding(
        f"its claim {holder_of(volume)} is gone and its policy is Retain: it waits for a person",
        kubectl("patch", "pv", volume.name, flags=("--type", "merge", "-p", free)),
        purpose="reserve the volume for a new claim of the same name",
        then=(Advice(create, "use the data again"),),
    )


@cause(
    "volume-released-undeleted",
    PersistentVolume,
    "The volume's claim is gone and the volume is not deleted",
    "Start the driver's provisioner, which deletes volumes too (`moorage sidecars provisioner`). Moorage's plugin keeps "
    "the data of deleted volumes in the trash of the pool, for a day by default: see `moorage volume undelete`.",
)
def released_undeleted(view: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The policy is Delete, and the driver's provisioner has neither deleted the volume nor said why not."""
    if volume.status.phase != "Released" or volume.spec.persistent_volume_reclaim_policy != "Delete":
        return None
    driver = volume.spec.csi.driver if volume.spec.csi else volume.annotations.get(PROVISIONED_BY, "?")
    attached = view.attachments_of(volume)
    if attached:
        return Finding(
            f"it is to be deleted once it is detached from {attached[0].spec.node_name}", waits_for=attached[0]
        )
    stale = is_leaderless(view, driver, "provisioner")
    return Finding(
        f"it is to be deleted by the provisioner of {driver}, which has not done so"
        + (" (its lease has run out)" if stale else "")
        + trash_note(volume),
        pods_like("provisioner"),
    )


@cause(
    "volume-failed",
    PersistentVolume,
    "Reclaiming the volume failed",
    "Read its message.",
)
def failed(view: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The phase is Failed: the volume could not be deleted or recycled, or its policy is unknown."""
    if volume.status.phase != "Failed":
        return None
    return Finding(
        f"reclaiming it failed: {volume.status.message or 'no message'}",
        kubectl("describe", "pv", volume.name),
        said(view.warning(volume)),
    )


@cause(
    "volume-node-gone",
    PersistentVolume,
    "The volume is on a node that does not exist",
    "Bring the node back under its name. Only if it is gone for good, and the data with it, delete the claim and the "
    "volume.",
)
def node_gone(view: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The volume's node affinity matches no node of the cluster."""
    if volume.spec.node_affinity is None or volume.spec.node_affinity.required is None or nodes_that_fit(view, volume):
        return None
    values = [
        v
        for term in volume.spec.node_affinity.required.node_selector_terms
        for requirement in term.match_expressions
        for v in requirement.values
    ]
    return Finding(
        f"it can be reached only from {', '.join(values) or 'certain nodes'}, and no such node exists",
        kubectl("get", "nodes", flags=("--show-labels",)),
    )
