"""Calls that a driver has not answered: what their callers say about it, for every kind of object."""

from moorage.insight.causes.model import Finding, cause, said
from moorage.insight.cluster_view import ClusterView
from moorage.insight.waiting import WaitingCall, call_in_flight, calls_on
from moorage.kube.objects import (
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
    VolumeSnapshot,
)
from moorage.suggest import Command, kubectl, pods_like

_REMEDY = (
    "Look at the driver's process and its log. A driver that hangs can be restarted: every call is repeated, and none "
    "is done twice."
)


def on_node(node: str) -> Command:
    """Return the command that lists the pods of a node; the driver's is among them."""
    return kubectl("get", "pods", flags=("-A", "-o", "wide", "--field-selector", f"spec.nodeName={node}"))


def _finding(call: WaitingCall | None) -> Finding | None:
    return Finding(call.sentence, pods_like("csi"), said(call.event)) if call is not None else None


@cause("claim-driver-waits", PersistentVolumeClaim, "The driver has not answered a call for the claim", _REMEDY)
def of_claim(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """A sidecar has called the driver (CreateVolume, ControllerExpandVolume, ControllerModifyVolume) and waits."""
    volume = view.volumes.get(claim.spec.volume_name)
    if claim.is_deleting or (volume is not None and volume.is_deleting):
        return None  # what to do about the data comes first
    return _finding(call_in_flight(view, claim))


@cause("pod-driver-waits", Pod, "The driver has not answered a call for the pod", _REMEDY)
def of_pod(view: ClusterView, pod: Pod) -> Finding | None:
    """The node agent has called the driver to mount, grow or unmount a volume of the pod and waits."""
    node = view.nodes.get(pod.spec.node_name)
    if pod.is_terminated or node is None or not node.is_ready:
        return None
    call = call_in_flight(view, pod)
    return Finding(call.sentence, on_node(pod.spec.node_name), said(call.event)) if call is not None else None


@cause("volume-driver-waits", PersistentVolume, "The driver has not answered a call for the volume", _REMEDY)
def of_volume(view: ClusterView, volume: PersistentVolume) -> Finding | None:
    """The provisioner has called DeleteVolume and waits."""
    return _finding(call_in_flight(view, volume))


@cause("attachment-driver-waits", VolumeAttachment, "The driver has not answered a call for the attachment", _REMEDY)
def of_attachment(view: ClusterView, attachment: VolumeAttachment) -> Finding | None:
    """The attacher has called ControllerPublishVolume or ControllerUnpublishVolume and waits."""
    return _finding(call_in_flight(view, attachment))


@cause("snapshot-driver-waits", VolumeSnapshot, "The driver has not answered a call for the snapshot", _REMEDY)
def of_snapshot(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """The snapshotter has called CreateSnapshot, ListSnapshots or DeleteSnapshot and waits."""
    name = snapshot.status.bound_volume_snapshot_content_name if snapshot.status is not None else None
    content = view.contents.get(name or "")
    return _finding(call_in_flight(view, content)) if content is not None else None


@cause("node-driver-waits", Node, "A driver on the node has not answered a call", _REMEDY)
def of_node(view: ClusterView, node: Node) -> Finding | None:
    """The node's agent has called a driver to mount, grow or unmount a volume and waits. Other volumes go on."""
    calls = calls_on(view, node)
    if not calls or not node.is_ready:
        return None
    about = calls[0].event.involved_object
    more = f", and {len(calls) - 1} more calls wait" if len(calls) > 1 else ""
    whom = f" (for pod {about.namespace}/{about.name})" if about.kind == "Pod" else ""
    return Finding(f"{calls[0].sentence}{whom}{more}", on_node(node.name), said(calls[0].event))
