"""Whether a claim, a volume or an attributes class is in use, and what that means for its finalizer.

Owns: the rules about being in use, and the condition `Unused` of claims.
May not touch: the API. Every function takes values and returns values.
Start reading at: `plan_claim`, `plan_guard`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from moorage.kube.names import CLAIM_PROTECTION
from moorage.kube.objects import KubeObject, PersistentVolume, PersistentVolumeClaim, Pod
from moorage.kube.volumes import claim_name_of, is_owned_by, refers_to

UNUSED = "Unused"


@dataclass(frozen=True, slots=True)
class AddGuard:
    """Put the protection finalizer there."""


@dataclass(frozen=True, slots=True)
class RemoveGuard:
    """Take the protection finalizer away, which lets the object go."""


@dataclass(frozen=True, slots=True)
class AskForPods:
    """No pod is known to use the claim. List the pods before it is released, and plan again."""


@dataclass(frozen=True, slots=True)
class SetUnused:
    """Write the condition `Unused`."""

    is_unused: bool


ProtectionAction = AddGuard | RemoveGuard | AskForPods | SetUnused


def plan_claim(claim: PersistentVolumeClaim, pods: Iterable[Pod], *, is_confirmed: bool) -> list[ProtectionAction]:
    """What to do about a claim, given the pods that may use it; `is_confirmed` says they were listed just now."""
    pods = list(pods)
    if claim.is_deleting:
        if CLAIM_PROTECTION not in claim.finalizers or any(holds(pod, claim) for pod in pods):
            return []
        return [RemoveGuard()] if is_confirmed else [AskForPods()]
    actions: list[ProtectionAction] = []
    if claim.status.phase == "Bound":  # before that the binder is at work on the status
        is_unused = not any(refers_to(pod, claim) and not pod.is_terminated for pod in pods)
        if unused_condition(claim) != is_unused:
            actions.append(SetUnused(is_unused))
    if CLAIM_PROTECTION not in claim.finalizers:
        actions.append(AddGuard())
    return actions


def plan_guard(obj: KubeObject, finalizer: str, *, is_used: bool) -> list[ProtectionAction]:
    """What to do about a volume or an attributes class."""
    if obj.is_deleting:
        return [RemoveGuard()] if finalizer in obj.finalizers and not is_used else []
    return [] if finalizer in obj.finalizers else [AddGuard()]


def holds(pod: Pod, claim: PersistentVolumeClaim) -> bool:
    """Whether a pod keeps a claim from going: once it is on a node, until its object is gone, finished or not.

    For an ephemeral volume it is enough that the kubelet is done with the pod: otherwise the claim, which waits for its
    pod, and a pod whose finalizer waits for the claim would wait for each other.
    """
    if not pod.spec.node_name or pod.namespace != claim.namespace:
        return False
    is_shut_down = pod.is_deleting and pod.metadata.deletion_grace_period_seconds == 0
    for volume in pod.spec.volumes:
        if claim_name_of(pod, volume) != claim.name:
            continue
        if volume.ephemeral is None or (is_owned_by(claim, pod) and not is_shut_down):
            return True
    return False


def unused_condition(claim: PersistentVolumeClaim) -> bool | None:
    """What the condition `Unused` says now; None when it is not there."""
    for condition in claim.status.conditions:
        if condition.type == UNUSED:
            return condition.status == "True"
    return None


def attributes_classes_of(obj: PersistentVolume | PersistentVolumeClaim) -> list[str]:
    """The attributes classes that a volume or a claim names: asked for, in force, or on the way."""
    names = {obj.spec.volume_attributes_class_name}
    if isinstance(obj, PersistentVolumeClaim):
        names.add(obj.status.current_volume_attributes_class_name)
        if obj.status.modify_volume_status is not None:
            names.add(obj.status.modify_volume_status.target_volume_attributes_class_name)
    return sorted(name for name in names if name)
