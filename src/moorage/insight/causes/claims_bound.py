"""Why a claim that was bound is not well: lost, held while being deleted, growing, or being modified."""

import json

from moorage.insight.causes.advice import Advice, keep_data, stop
from moorage.insight.causes.model import Finding, cause, code_in, names, said
from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import holder_of, is_leaderless
from moorage.kube.names import CLAIM_AS_SOURCE, CLAIM_PROTECTION, CLONE_PROTECTION
from moorage.kube.objects import PersistentVolumeClaim
from moorage.kube.quantity import bytes_text
from moorage.kube.volumes import requested_bytes, storage_bytes
from moorage.suggest import Command, in_words, kubectl, pods_like


@cause(
    "claim-deleting-in-use",
    PersistentVolumeClaim,
    "The claim is being deleted and a pod still uses it",
    "A deletion cannot be taken back. To keep the data, set the volume's reclaim policy to Retain first. Then stop the "
    "pods that use the claim: the claim goes, and the volume can be given to a new claim.",
)
def deleting_in_use(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The finalizer kubernetes.io/pvc-protection stays for as long as a pod that names the claim and has a node
    exists, finished pods included."""
    if not claim.is_deleting or CLAIM_PROTECTION not in claim.finalizers:
        return None
    users = [pod for pod in view.pods_naming(claim.key) if pod.spec.node_name]
    if not users:
        return None
    look = kubectl("describe", "pod", users[0].name, namespace=claim.namespace)
    first, purpose, then = _keeping(view, claim, look, "see what the pod is for")
    harm = "the claim is then deleted, and its data with it unless the volume's policy is Retain"
    last = () if users[0].is_deleting else (stop(users[0], "let the deletion go on", harm),)
    return Finding(
        f"it is being deleted, and pod {names(users)} still uses it"
        + (" (it has ended)" if users[0].is_terminated else ""),
        first,
        (f"finalizer {CLAIM_PROTECTION}",),
        users[0] if users[0].is_deleting else None,
        purpose,
        (*then, *last),
    )


@cause(
    "claim-deleting-unreleased",
    PersistentVolumeClaim,
    "The claim is being deleted and its protection is not removed",
    "Start the protection controller (kube-controller-manager, or `moorage controllers protection`).",
)
def deleting_unreleased(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """No pod uses the claim, and its protection finalizer is still there: the controller that removes it is not
    running."""
    if not claim.is_deleting or claim.finalizers != [CLAIM_PROTECTION]:
        return None
    look = kubectl("get", "leases,pods", namespace="kube-system")
    first, purpose, then = _keeping(view, claim, look, "see whether the controller runs; it ends the deletion")
    return Finding(
        "it is being deleted, no pod uses it, and the protection controller has not released it",
        first,
        (f"finalizer {CLAIM_PROTECTION}",),
        None,
        purpose,
        then,
    )


@cause(
    "claim-deleting-finalizer",
    PersistentVolumeClaim,
    "A finalizer of another component holds the claim",
    "Find out who set the finalizer; it is removed by its owner when its work is done.",
)
def deleting_finalizer(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim is being deleted and carries a finalizer that is not Kubernetes' own protection: a clone or snapshot of
    it is being made, or another controller has work to do."""
    others = [name for name in claim.finalizers if name != CLAIM_PROTECTION]
    if not claim.is_deleting or not others:
        return None
    released_by = {
        CLONE_PROTECTION: "the provisioner, when no clone of it is pending",
        CLAIM_AS_SOURCE: "the snapshot controller, when no snapshot of it is pending",
    }
    who = released_by.get(others[0], "the component that set it")
    look = kubectl("get", "pvc", claim.name, namespace=claim.namespace, flags=("-o", "yaml"))
    first, purpose, then = _keeping(view, claim, look, "see all finalizers")
    return Finding(
        f"it is being deleted and finalizer {others[0]} holds it; released by {who}",
        first,
        tuple(f"finalizer {n}" for n in others),
        None,
        purpose,
        then,
    )


@cause(
    "claim-lost",
    PersistentVolumeClaim,
    "The claim's volume is gone",
    "If the volume's data still exists, recreate the PersistentVolume under its name with a claimRef to this claim; the "
    "claim binds again. For a volume of Moorage, `moorage gc --pool POOL` prints the command that does it.",
)
def lost(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim was bound, and its PersistentVolume was deleted or given to another claim."""
    if claim.status.phase != "Lost":
        return None
    volume = view.volumes.get(claim.spec.volume_name)
    event = view.warning(claim, "ClaimLost", "ClaimMisbound")
    if volume is None:
        return Finding(
            f"it is Lost: its volume {claim.spec.volume_name or '(none named)'} does not exist any more",
            kubectl("describe", "pvc", claim.name, namespace=claim.namespace),
            said(event),
        )
    return Finding(
        f"it is Lost: its volume {volume.name} is now held by {holder_of(volume) or 'no claim'}",
        kubectl("get", "pv", volume.name, flags=("-o", "yaml")),
        said(event),
        volume,
    )


@cause(
    "claim-volume-deleting",
    PersistentVolumeClaim,
    "The claim's volume is being deleted",
    "The claim works until it is deleted; the explanation follows the volume and says how to keep the data.",
)
def volume_deleting(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The PersistentVolume object was deleted while the claim is bound to it. A finalizer keeps it as long as the claim
    exists."""
    volume = view.volumes.get(claim.spec.volume_name)
    if claim.is_deleting or volume is None or not volume.is_deleting:
        return None
    return Finding(f"its volume {volume.name} is being deleted", waits_for=volume)


@cause(
    "claim-resize-not-allowed",
    PersistentVolumeClaim,
    "The class does not allow growing",
    "Set allowVolumeExpansion: true on the class.",
)
def resize_not_allowed(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim asks for more than it has, and its class has no allowVolumeExpansion: true."""
    storage_class = view.classes.get(claim.spec.storage_class_name or "")
    if not _is_growing(claim) or storage_class is None or storage_class.allow_volume_expansion:
        return None
    return Finding(
        f"it wants to grow, and class {storage_class.name} does not allow expansion",
        kubectl("patch", "storageclass", storage_class.name, flags=("-p", '{"allowVolumeExpansion": true}')),
    )


@cause(
    "claim-resize-infeasible",
    PersistentVolumeClaim,
    "The driver refuses the size",
    "Ask for a smaller size, still above the present one; the expansion is then tried with that.",
)
def resize_infeasible(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The driver said that the new size can never be reached (status ControllerResizeInfeasible or
    NodeResizeInfeasible)."""
    state = claim.status.allocated_resource_statuses.get("storage", "")
    if state not in ("ControllerResizeInfeasible", "NodeResizeInfeasible"):
        return None
    have, want = storage_bytes(claim.status.capacity), requested_bytes(claim)
    half = bytes_text(have + max(1, (want - have) // 2))
    smaller = json.dumps({"spec": {"resources": {"requests": {"storage": half}}}})
    return Finding(
        f"growing to {_wanted(claim)} was refused for good ({state})",
        kubectl("patch", "pvc", claim.name, namespace=claim.namespace, flags=("-p", smaller)),
        said(view.warning(claim, "VolumeResizeFailed", "FileSystemResizeFailed")),
        purpose=f"ask for half of the growth; any size above {bytes_text(have)} may be asked for",
    )


@cause(
    "claim-resize-needs-pod",
    PersistentVolumeClaim,
    "Growing ends when a pod uses the claim",
    "Start a pod that uses the claim; the node then grows the filesystem.",
)
def resize_needs_pod(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The volume has been grown and its filesystem has not (condition FileSystemResizePending); the node does that
    when it mounts the volume for a pod, and no pod uses the claim."""
    if not _has(claim, "FileSystemResizePending") or view.pods_of(claim):
        return None
    return Finding(
        f"the volume has grown to {_wanted(claim)}; its filesystem grows when a pod uses the claim",
        in_words("start a pod that uses claim {}", claim.name),
    )


@cause(
    "claim-resize-on-node",
    PersistentVolumeClaim,
    "The node has yet to grow the filesystem",
    "Wait for the node; if its event says that it failed, read the driver's words. A driver that grows offline only "
    "needs the pod to be restarted.",
)
def resize_on_node(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The volume has been grown and the node agent where the pod runs has not finished growing the filesystem."""
    if not _has(claim, "FileSystemResizePending"):
        return None
    pod = view.pods_of(claim)[0]
    event = view.warning(pod, "VolumeResizeFailed", "FileSystemResizeFailed")
    event = event or view.warning(claim, "VolumeResizeFailed", "FileSystemResizeFailed")
    words = f": {event.message}" if event else ""
    return Finding(
        f"node {pod.spec.node_name or '(none yet)'} has yet to grow its filesystem to {_wanted(claim)}{words}",
        kubectl("describe", "pod", pod.name, namespace=pod.namespace),
        said(event),
    )


@cause(
    "claim-resize-offline",
    PersistentVolumeClaim,
    "The driver grows volumes only while no pod uses them",
    "Stop the pods that use the claim; it grows, and they can be started again.",
)
def resize_offline(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The driver answered FAILED_PRECONDITION to ControllerExpandVolume because the volume is in use."""
    event, users = view.warning(claim, "VolumeResizeFailed"), view.pods_of(claim)
    if not _is_growing(claim) or event is None or not users:
        return None
    if "offline expansion" not in event.message and code_in(event.message) != "FAILED_PRECONDITION":
        return None
    return Finding(
        f"its driver grows volumes only while no pod uses them, and pod {names(users)} does",
        kubectl("describe", "pod", users[0].name, namespace=claim.namespace),
        said(event),
        purpose="find the pod's owner; scaling the owner to 0 stops it cleanly",
        then=(stop(users[0], "let the volume grow"),),
    )


@cause(
    "claim-resize-fails",
    PersistentVolumeClaim,
    "Growing fails",
    "Read the driver's words; it is tried again. FAILED_PRECONDITION means that the volume must not be in use.",
)
def resize_fails(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """ControllerExpandVolume fails; the event holds the driver's words."""
    event = view.warning(claim, "VolumeResizeFailed")
    if not _is_growing(claim) or event is None:
        return None
    return Finding(
        f"growing to {_wanted(claim)} fails: {event.message}",
        kubectl("describe", "pvc", claim.name, namespace=claim.namespace),
        said(event),
    )


@cause(
    "claim-resizer-not-running",
    PersistentVolumeClaim,
    "No resizer works for the driver",
    "Start the driver's resizer (`moorage sidecars resizer --csi-address …`).",
)
def resizer_not_running(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim asks for more than it has, and the driver's resizer has not begun."""
    has_begun = claim.status.allocated_resource_statuses or any(
        event.reason == "Resizing" for event in view.events_of(claim)
    )
    if not _is_growing(claim) or has_begun:
        return None
    volume = view.volumes.get(claim.spec.volume_name)
    driver = volume.spec.csi.driver if volume is not None and volume.spec.csi is not None else "its driver"
    stale = " (its lease has run out)" if is_leaderless(view, driver, "resizer") else ""
    return Finding(
        f"it wants to grow to {_wanted(claim)}, and the resizer of {driver} has not begun{stale}",
        pods_like("resizer"),
    )


@cause("claim-resizing", PersistentVolumeClaim, "The volume is growing", "Wait; the driver is at work.")
def resizing(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The resizer has begun and has not finished."""
    if not _is_growing(claim):
        return None
    return Finding(f"its volume is being grown to {_wanted(claim)}")


@cause(
    "claim-modify-infeasible",
    PersistentVolumeClaim,
    "The driver refuses the attributes",
    "Choose a VolumeAttributesClass whose parameters the driver takes, or go back to the one before.",
)
def modify_infeasible(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The driver answered INVALID_ARGUMENT to ControllerModifyVolume (modifyVolumeStatus Infeasible)."""
    status = claim.status.modify_volume_status
    if status is None or status.status != "Infeasible":
        return None
    return Finding(
        f"the driver refuses the attributes of {status.target_volume_attributes_class_name}",
        kubectl("get", "volumeattributesclass", status.target_volume_attributes_class_name, flags=("-o", "yaml")),
        said(view.warning(claim, "VolumeModifyFailed")),
    )


@cause(
    "claim-modify-pending",
    PersistentVolumeClaim,
    "The attributes have not been changed yet",
    "Wait for the driver; if its event says that it failed, read its words.",
)
def modify_pending(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim names a VolumeAttributesClass that its volume does not have yet."""
    target, current = claim.spec.volume_attributes_class_name, claim.status.current_volume_attributes_class_name
    if claim.status.phase != "Bound" or not target or target == current:
        return None
    event = view.warning(claim, "VolumeModifyFailed")
    begun = claim.status.modify_volume_status is not None or event is not None
    words = f": {event.message}" if event else ""
    return Finding(
        f"its volume is still to be given the attributes of {target}"
        + (words if begun else "; the driver's resizer has not begun"),
        kubectl("describe", "pvc", claim.name, namespace=claim.namespace),
        said(event),
    )


def _keeping(
    view: ClusterView, claim: PersistentVolumeClaim, look: Command, purpose: str
) -> tuple[Command, str, tuple[Advice, ...]]:
    """The first step for a claim that is being deleted: if its data goes with it, keep the data before anything else."""
    volume = view.volumes.get(claim.spec.volume_name)
    if volume is None or volume.spec.persistent_volume_reclaim_policy != "Delete":
        return look, purpose, ()
    return keep_data(volume), "if the data is still needed: keep it when the claim is gone", (Advice(look, purpose),)


def _is_growing(claim: PersistentVolumeClaim) -> bool:
    want, have = requested_bytes(claim), storage_bytes(claim.status.capacity)
    return claim.status.phase == "Bound" and not claim.is_deleting and 0 < have < want


def _wanted(claim: PersistentVolumeClaim) -> str:
    return bytes_text(requested_bytes(claim))


def _has(claim: PersistentVolumeClaim, condition: str) -> bool:
    return any(c.type == condition and c.status == "True" for c in claim.status.conditions)
