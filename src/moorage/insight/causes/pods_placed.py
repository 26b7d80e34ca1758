"""Why a pod that has a node does not start there: the node, the driver, attaching."""

from moorage.insight.causes.advice import Advice, out_of_service
from moorage.insight.causes.model import Finding, cause, names, said
from moorage.insight.causes.pods import is_starting
from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import holder_of
from moorage.insight.waiting import exits_on
from moorage.kube.objects import Event, Pod, VolumeAttachment
from moorage.kube.volumes import requires_attach
from moorage.suggest import Command, in_words, kubectl


@cause(
    "pod-node-gone",
    Pod,
    "The pod's node does not exist any more",
    "Bring the node back. Only if its machine is surely off, delete the pod with --force; its owner makes a new one.",
)
def node_gone(view: ClusterView, pod: Pod) -> Finding | None:
    """The pod was placed on a node that has been removed from the cluster."""
    if not pod.spec.node_name or pod.spec.node_name in view.nodes or pod.status.phase in ("Succeeded", "Failed"):
        return None
    return Finding(
        f"its node {pod.spec.node_name} does not exist",
        kubectl("get", "nodes", flags=("-o", "wide")),
        purpose="make sure that the machine is off, or bring the node back",
        then=(
            Advice(
                kubectl("delete", "pod", pod.name, namespace=pod.namespace, flags=("--force", "--grace-period=0")),
                "let the pod's owner make a new one",
                f"forgets pod {pod.key}; if its machine still runs, two pods may write to one volume",
            ),
        ),
    )


@cause(
    "pod-node-not-ready",
    Pod,
    "The pod's node is not ready",
    "Bring the node back; if it will not come back, taint it node.kubernetes.io/out-of-service so that volumes move on.",
)
def node_not_ready(view: ClusterView, pod: Pod) -> Finding | None:
    """The node agent of the pod's node does not report, so nothing is started, stopped or unmounted there."""
    node = view.nodes.get(pod.spec.node_name)
    if node is None or node.is_ready or pod.status.phase in ("Succeeded", "Failed"):
        return None
    sentence, look = f"its node {node.name} is not ready", kubectl("describe", "node", node.name)
    if not view.volumes_used_by(pod):
        return Finding(sentence, look, waits_for=node)
    return Finding(sentence, look, (), node, "find out whether the machine is off", (out_of_service(node.name),))


@cause(
    "pod-multi-attach",
    Pod,
    "The volume is still attached to another node",
    "Let both pods run on one node, or let the pod that has the volume end. If one is to replace the other, set the "
    "Deployment's strategy to Recreate. Only if that node's machine is surely off, taint it "
    "node.kubernetes.io/out-of-service.",
)
def multi_attach(view: ClusterView, pod: Pod) -> Finding | None:
    """A ReadWriteOnce volume can be on one node at a time, and another node has it."""
    if not is_starting(pod) or not pod.spec.node_name:
        return None
    for volume in view.volumes_used_by(pod):
        elsewhere = [a for a in view.attachments_of(volume) if a.spec.node_name != pod.spec.node_name]
        if not elsewhere or any(mode.endswith("Many") for mode in volume.spec.access_modes):
            continue
        node = elsewhere[0].spec.node_name
        holders = [each for each in view.pods_naming(holder_of(volume)) if each.spec.node_name == node]
        by = f" and used by pod {names(holders)}" if holders else ""
        return Finding(
            f"its volume {volume.name} is still attached to node {node}{by}",
            *_release(view, pod, holders, said(view.warning(pod, "FailedAttachVolume")), elsewhere[0]),
        )
    return None


def _release(
    view: ClusterView, pod: Pod, holders: list[Pod], evidence: tuple[str, ...], attachment: VolumeAttachment
) -> tuple[Command, tuple[str, ...], VolumeAttachment, str, tuple[Advice, ...]]:
    """Return the steps out of it: share the volume on its node, or take it from a node whose machine is off.

    None of them ends the pod that has the volume, because it works.
    """
    node = attachment.spec.node_name
    found = view.nodes.get(node)
    if attachment.is_deleting:
        return kubectl("describe", "node", node), evidence, attachment, "", ()
    if found is not None and found.is_ready and holders:
        look = kubectl("describe", "pod", holders[0].name, namespace=holders[0].namespace)
        move = in_words("recreate pod {} with nodeSelector kubernetes.io/hostname: {}", pod.name, node)
        then = (Advice(move, "both pods on one node share the volume"),)
        return look, evidence, attachment, "see what the other pod is for; when it ends, the volume is free", then
    lost = () if found is None or found.is_ready else (out_of_service(node),)
    return kubectl("describe", "node", node), evidence, attachment, "see how the node is", lost


@cause(
    "pod-driver-not-registered",
    Pod,
    "The driver is not registered on the pod's node",
    "Start the driver and its registrar on that node; `kubectl get csinode` must list it.",
)
def driver_not_registered(view: ClusterView, pod: Pod) -> Finding | None:
    """The node agent does not know the driver of the pod's volume: the CSINode object has no entry for it."""
    if not is_starting(pod) or not pod.spec.node_name:
        return None
    wanted = {volume.spec.csi.driver for volume in view.volumes_used_by(pod) if volume.spec.csi is not None}
    wanted |= {volume.csi.driver for volume in pod.spec.volumes if volume.csi is not None}
    for driver in sorted(wanted):
        if not view.has_driver(pod.spec.node_name, driver):
            crashed = exits_on(view, pod.spec.node_name)
            why = f": its process {crashed}" if crashed else ""
            return Finding(
                f"driver {driver} is not registered on node {pod.spec.node_name}{why}",
                kubectl("get", "csinode", pod.spec.node_name, flags=("-o", "yaml")),
                said(_mount_event(view, pod)),
            )
    return None


@cause(
    "pod-inline-not-allowed",
    Pod,
    "The driver does not take inline volumes",
    "Use a claim, or a driver whose CSIDriver lists Ephemeral in volumeLifecycleModes.",
)
def inline_not_allowed(view: ClusterView, pod: Pod) -> Finding | None:
    """The pod has a `csi:` volume of its own, and the driver's CSIDriver object does not say that it takes those."""
    for volume in pod.spec.volumes:
        driver = view.drivers.get(volume.csi.driver) if volume.csi is not None else None
        if is_starting(pod) and driver is not None and "Ephemeral" not in driver.spec.volume_lifecycle_modes:
            return Finding(
                f"driver {driver.name} does not take inline volumes (volume {volume.name})",
                kubectl("get", "csidriver", driver.name, flags=("-o", "yaml")),
                said(_mount_event(view, pod)),
            )
    return None


@cause(
    "pod-attaching",
    Pod,
    "The volume is not attached to the node yet",
    "The explanation follows the attachment.",
)
def attaching(view: ClusterView, pod: Pod) -> Finding | None:
    """The node mounts a volume only after it has been attached to it."""
    if not is_starting(pod) or not pod.spec.node_name:
        return None
    for volume in view.volumes_used_by(pod):
        for attachment in view.attachments_of(volume):
            if attachment.spec.node_name == pod.spec.node_name and not attachment.status.attached:
                return Finding(
                    f"it waits for volume {volume.name} to be attached to {pod.spec.node_name}", waits_for=attachment
                )
    return None


@cause(
    "pod-attach-not-begun",
    Pod,
    "No controller has begun to attach the volume",
    "Start the attach/detach controller (kube-controller-manager, or `moorage controllers attachdetach`).",
)
def attach_not_begun(view: ClusterView, pod: Pod) -> Finding | None:
    """The driver needs attaching (CSIDriver attachRequired), and there is no VolumeAttachment for the pod's node."""
    if not is_starting(pod) or not pod.spec.node_name:
        return None
    for volume in view.volumes_used_by(pod):
        if volume.spec.csi is None or not requires_attach(view.drivers.get(volume.spec.csi.driver)):
            continue
        if not any(a.spec.node_name == pod.spec.node_name for a in view.attachments_of(volume)):
            event: Event | None = view.warning(pod, "FailedAttachVolume")
            words = f": {event.message}" if event else ""
            return Finding(
                f"volume {volume.name} has not been attached to {pod.spec.node_name}{words}",
                kubectl("get", "volumeattachments"),
                said(event),
            )
    return None


def _mount_event(view: ClusterView, pod: Pod) -> Event | None:
    return view.warning(pod, "FailedMount", "FailedMapVolume")
