"""Steps that several causes advise, among them those that end or destroy something.

Owns: `Advice`, and the rule that a step that ends or destroys something says what.
"""

from dataclasses import dataclass

from moorage.kube.names import OUT_OF_SERVICE
from moorage.kube.objects import PersistentVolume, Pod
from moorage.suggest import Command, kubectl

MOORAGE = "csi.moorage.dev"


@dataclass(frozen=True)
class Advice:
    """A later step: its command, what it is for, and what it ends or destroys, if anything."""

    command: Command
    purpose: str
    harm: str = ""


def keep_data(volume: PersistentVolume) -> Command:
    """The command after which a volume's data outlives its claim and its object."""
    policy = '{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}'
    return kubectl("patch", "pv", volume.name, flags=("-p", policy))


def trash_note(volume: PersistentVolume) -> str:
    """Say where the data goes when a volume of Moorage's plugin is deleted; nothing of other drivers' volumes."""
    is_deleted = volume.spec.persistent_volume_reclaim_policy == "Delete"
    if not is_deleted or volume.spec.csi is None or volume.spec.csi.driver != MOORAGE:
        return ""
    return (
        "; its policy is Delete: deleted data stays in the trash of the pool for a day, unless the class says otherwise"
    )


def stop(pod: Pod, purpose: str, harm: str = "") -> Advice:
    """The step that ends a pod."""
    delete = kubectl("delete", "pod", pod.name, namespace=pod.namespace)
    return Advice(delete, purpose, f"stops pod {pod.key}" + (f"; {harm}" if harm else ""))


def out_of_service(node: str) -> Advice:
    """The step that takes a node's volumes away from it."""
    taint = kubectl("taint", "node", node, f"{OUT_OF_SERVICE}=nodeshutdown:NoExecute")
    harm = f"ends all pods of node {node}; if the machine still runs, they go on writing and damage the data"
    return Advice(taint, "move the volumes to other nodes, only if the machine is surely off", harm)
