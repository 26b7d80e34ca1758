"""Where a claim is in Provision → Attach → Mount. Pure functions.

Start reading at: `place_of`.
"""

from dataclasses import dataclass
from enum import StrEnum

from moorage.insight.cluster_view import ClusterView
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod, VolumeAttachment
from moorage.kube.volumes import csi_volume_name, requires_attach


class ClaimStage(StrEnum):
    """The phase that a claim is in; IDLE is bound and used by no pod, MOUNTED is done."""

    PROVISION = "provision"
    ATTACH = "attach"
    MOUNT = "mount"
    MOUNTED = "mounted"
    IDLE = "idle"


IN_FLIGHT = (ClaimStage.PROVISION, ClaimStage.ATTACH, ClaimStage.MOUNT)


@dataclass(frozen=True)
class ClaimPlace:
    """What a claim's life looks like at one moment: its volume, its pods, and its attachments."""

    stage: ClaimStage
    volume: PersistentVolume | None
    pods: tuple[Pod, ...]
    attachments: tuple[VolumeAttachment, ...]
    needs_attach: bool
    staged_on: tuple[str, ...]  # nodes whose agents report the volume as in use


def place_of(view: ClusterView, claim: PersistentVolumeClaim) -> ClaimPlace:
    """Return where a claim is, with the objects that show it."""
    volume = view.volumes.get(claim.spec.volume_name)
    pods = tuple(sorted(view.pods_of(claim), key=lambda pod: pod.name))
    if claim.status.phase != "Bound" or volume is None:
        return ClaimPlace(ClaimStage.PROVISION, volume, pods, (), False, ())
    attachments = tuple(view.attachments_of(volume))
    csi = volume.spec.csi
    needs = csi is not None and requires_attach(view.drivers.get(csi.driver))
    name = csi_volume_name(csi.driver, csi.volume_handle) if csi is not None else ""
    nodes = {pod.spec.node_name for pod in pods} - {""}
    staged = tuple(
        sorted(node for node in nodes if node in view.nodes and name in view.nodes[node].status.volumes_in_use)
    )
    return ClaimPlace(_stage(pods, attachments, needs), volume, pods, attachments, needs, staged)


def _stage(pods: tuple[Pod, ...], attachments: tuple[VolumeAttachment, ...], needs_attach: bool) -> ClaimStage:
    """Return the stage of a bound claim: that of the pod that has come least far."""
    if not pods:
        return ClaimStage.IDLE
    attached = {each.spec.node_name for each in attachments if each.status.attached}
    starting = [pod for pod in pods if pod.status.phase != "Running"]
    if needs_attach and any(pod.spec.node_name not in attached for pod in starting):
        return ClaimStage.ATTACH
    return ClaimStage.MOUNT if starting else ClaimStage.MOUNTED
