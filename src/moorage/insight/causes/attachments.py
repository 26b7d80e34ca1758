"""Why an attachment is not made, or not undone."""

from moorage.insight.causes.advice import out_of_service
from moorage.insight.causes.model import Finding, cause, said
from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import is_leaderless
from moorage.kube.names import OUT_OF_SERVICE
from moorage.kube.objects import VolumeAttachment
from moorage.kube.volumes import csi_volume_name
from moorage.suggest import kubectl, pods_like


@cause(
    "attachment-node-gone",
    VolumeAttachment,
    "The node of the attachment does not exist",
    "The attach/detach controller removes it; if the driver needs the node to detach, delete the attachment's finalizer "
    "only when the node is surely off.",
)
def node_gone(view: ClusterView, attachment: VolumeAttachment) -> Finding | None:
    """The attachment names a node that has left the cluster."""
    if attachment.spec.node_name in view.nodes:
        return None
    return Finding(
        f"its node {attachment.spec.node_name} does not exist", kubectl("get", "nodes"), said(view.warning(attachment))
    )


@cause(
    "attachment-volume-gone",
    VolumeAttachment,
    "The volume of the attachment does not exist",
    "Recreate the PersistentVolume so that the driver can be told what to detach.",
)
def volume_gone(view: ClusterView, attachment: VolumeAttachment) -> Finding | None:
    """The attachment names a PersistentVolume that was deleted; the attacher cannot know what to attach or detach."""
    name = attachment.spec.source.persistent_volume_name
    if name is None or name in view.volumes:
        return None
    return Finding(f"its volume {name} does not exist", kubectl("get", "pv"))


@cause(
    "attachment-detach-fails",
    VolumeAttachment,
    "Detaching fails",
    "Read the driver's words; it is tried again.",
)
def detach_fails(view: ClusterView, attachment: VolumeAttachment) -> Finding | None:
    """ControllerUnpublishVolume fails; status.detachError holds the driver's words."""
    error = attachment.status.detach_error
    if not attachment.is_deleting or error is None:
        return None
    return Finding(
        f"detaching from {attachment.spec.node_name} fails: {error.message}",
        kubectl("get", "volumeattachment", attachment.name, flags=("-o", "yaml")),
        (error.message,),
    )


@cause(
    "attachment-detach-waits",
    VolumeAttachment,
    "Detaching waits for the attacher",
    "Start the driver's attacher (`moorage sidecars attacher`).",
)
def detach_waits(view: ClusterView, attachment: VolumeAttachment) -> Finding | None:
    """The attachment is being deleted; the driver's attacher detaches and then removes its finalizer."""
    if not attachment.is_deleting:
        return None
    return Finding(
        f"it is being detached from {attachment.spec.node_name} by {_attacher(view, attachment)}",
        pods_like("attacher"),
        tuple(f"finalizer {n}" for n in attachment.finalizers),
    )


@cause(
    "attachment-attach-fails",
    VolumeAttachment,
    "Attaching fails",
    "Read the driver's words; it is tried again.",
)
def attach_fails(view: ClusterView, attachment: VolumeAttachment) -> Finding | None:
    """ControllerPublishVolume fails; status.attachError holds the driver's words."""
    error = attachment.status.attach_error
    if attachment.status.attached or error is None:
        return None
    return Finding(
        f"attaching to {attachment.spec.node_name} fails: {error.message}",
        kubectl("get", "volumeattachment", attachment.name, flags=("-o", "yaml")),
        (error.message,),
    )


@cause(
    "attachment-driver-not-on-node",
    VolumeAttachment,
    "The driver is not registered on the node",
    "Start the driver and its registrar on that node.",
)
def driver_not_on_node(view: ClusterView, attachment: VolumeAttachment) -> Finding | None:
    """The attacher learns the driver's name for a node from CSINode, and there is no entry."""
    if attachment.status.attached or view.has_driver(attachment.spec.node_name, attachment.spec.attacher):
        return None
    return Finding(
        f"driver {attachment.spec.attacher} is not registered on node {attachment.spec.node_name}",
        kubectl("get", "csinode", attachment.spec.node_name, flags=("-o", "yaml")),
    )


@cause(
    "attachment-attacher-not-running",
    VolumeAttachment,
    "No attacher works for the driver",
    "Start the driver's attacher (`moorage sidecars attacher`).",
)
def attacher_not_running(view: ClusterView, attachment: VolumeAttachment) -> Finding | None:
    """The attachment has been asked for and its attacher has neither done it nor said why not."""
    if attachment.status.attached:
        return None
    return Finding(f"it waits for {_attacher(view, attachment)}", pods_like("attacher"))


@cause(
    "attachment-node-not-ready",
    VolumeAttachment,
    "The node of the attachment is not ready and may still use the volume",
    "Bring the node back. Only if the machine is surely off, taint it node.kubernetes.io/out-of-service.",
)
def in_use(view: ClusterView, attachment: VolumeAttachment) -> Finding | None:
    """The node does not report, and the last it said is that it uses the volume (status.volumesInUse). It may still write
    to it, so the volume is taken away only after six minutes, or at once when a person says that the node is off."""
    node = view.nodes.get(attachment.spec.node_name)
    volume = view.volumes.get(attachment.spec.source.persistent_volume_name or "")
    if node is None or volume is None or volume.spec.csi is None or node.is_ready:
        return None
    unique = csi_volume_name(volume.spec.csi.driver, volume.spec.csi.volume_handle)
    if unique not in node.status.volumes_in_use or any(t.key == OUT_OF_SERVICE for t in node.spec.taints):
        return None
    return Finding(
        f"node {node.name} is not ready and last said that it uses the volume",
        kubectl("describe", "node", node.name),
        waits_for=node,
        purpose="find out whether the machine is off",
        then=(out_of_service(node.name),),
    )


def _attacher(view: ClusterView, attachment: VolumeAttachment) -> str:
    driver = attachment.spec.attacher
    stale = is_leaderless(view, driver, "attacher")
    return f"the attacher of {driver}" + (", whose lease has run out" if stale else "")
