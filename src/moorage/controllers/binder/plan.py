"""What to do about one claim, and about one volume: pure decisions from what is known now.

Owns: the rules of binding, losing, releasing and reclaiming.
May not touch: the API, clocks, queues. `BinderView` answers questions; actions are data.
Start reading at: `plan_claim`, `plan_volume`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from moorage.controllers.binder.matching import mismatch
from moorage.kube.names import (
    BIND_COMPLETED,
    BOUND_BY_CONTROLLER,
    IN_TREE_PREFIX,
    MIGRATED_PLUGINS,
    MIGRATED_TO,
    PROVISIONED_BY,
    SELECTED_NODE,
)
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, StorageClass
from moorage.kube.volumes import claim_class, has_class, is_meant_for, volume_mode, waits_for_consumer

EventSubject = Literal["claim", "volume"]


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """An event for the user."""

    about: EventSubject
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class BindClaim:
    """Make the four writes that bind the claim to this volume."""

    volume: PersistentVolume


@dataclass(frozen=True, slots=True)
class SetClaimPhase:
    """Write Pending or Lost. The note becomes an event only if the phase changes."""

    phase: str
    note: EmitEvent | None = None


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the user."""

    note: EmitEvent


@dataclass(frozen=True, slots=True)
class AssignClass:
    """Give a claim that names no class the default one."""

    name: str


@dataclass(frozen=True, slots=True)
class RequestVolume:
    """Ask this external provisioner for a volume, and say so."""

    provisioner: str


@dataclass(frozen=True, slots=True)
class TellMissing:
    """The class seems not to exist. Ask the API itself, and tell the user only if it does not know the class either."""

    storage_class: str
    note: EmitEvent


@dataclass(frozen=True, slots=True)
class TryLater:
    """Nothing can be done now, and no event will tell when: come back after a delay."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetVolumePhase:
    phase: str
    note: EmitEvent | None = None


@dataclass(frozen=True, slots=True)
class Unbind:
    """The claim has another volume: let this one go, and make it Available."""


@dataclass(frozen=True, slots=True)
class LookAtClaim:
    """The claim has to finish what the volume has begun."""

    key: str


@dataclass(frozen=True, slots=True)
class ConfirmClaim:
    """The claim seems to be gone. Ask the API itself before anything is taken away, and plan again."""


ClaimAction = BindClaim | SetClaimPhase | Tell | TellMissing | AssignClass | RequestVolume | TryLater
VolumeAction = SetVolumePhase | Unbind | Tell | LookAtClaim | ConfirmClaim


class BinderView(Protocol):
    """What a decision about a claim may ask about everything else."""

    def volume(self, name: str) -> PersistentVolume | None: ...

    def best_volume(self, claim: PersistentVolumeClaim, *, only_reserved: bool) -> PersistentVolume | None: ...

    def storage_class(self, name: str) -> StorageClass | None: ...

    def default_class(self) -> StorageClass | None: ...

    def unscheduled_pods(self, claim: PersistentVolumeClaim) -> Sequence[str]: ...


def plan_claim(claim: PersistentVolumeClaim, around: BinderView) -> list[ClaimAction]:
    """What to do about a claim. Once binding was completed it is judged by other rules: it is bound, or it is lost."""
    if BIND_COMPLETED in claim.annotations:
        return _plan_bound(claim, around)
    if claim.spec.volume_name:
        return _plan_named(claim, around.volume(claim.spec.volume_name))
    return _plan_search(claim, around)


def _plan_bound(claim: PersistentVolumeClaim, around: BinderView) -> list[ClaimAction]:
    if not claim.spec.volume_name:
        return [_lost("ClaimLost", "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!")]
    volume = around.volume(claim.spec.volume_name)
    if volume is None:
        return [_lost("ClaimLost", "Bound claim has lost its PersistentVolume. Data on the volume is lost!")]
    reference = volume.spec.claim_ref
    if reference is None or reference.uid == claim.uid:
        return [BindClaim(volume)]
    text = "Two claims are bound to the same volume, this one is bound incorrectly"
    return [_lost("ClaimMisbound", text)]  # whose it is may be no business of this namespace


def _lost(reason: str, message: str) -> SetClaimPhase:
    return SetClaimPhase("Lost", EmitEvent("claim", "Warning", reason, message))


def _plan_named(claim: PersistentVolumeClaim, volume: PersistentVolume | None) -> list[ClaimAction]:
    if volume is None:
        return [SetClaimPhase("Pending")]
    if is_meant_for(volume, claim):
        return [BindClaim(volume)]  # both sides agree: no check at all
    if volume.spec.claim_ref is None:
        why_not = mismatch(volume, claim)
        if not why_not:
            return [BindClaim(volume)]
        text = f'Cannot bind to requested volume "{volume.name}": {why_not}'
        return [Tell(EmitEvent("claim", "Warning", "VolumeMismatch", text)), SetClaimPhase("Pending")]
    text = f'volume "{volume.name}" already bound to a different claim.'
    taken = Tell(EmitEvent("claim", "Warning", "FailedBinding", text))
    if BOUND_BY_CONTROLLER in claim.annotations:
        return [taken, TryLater(f"claim {claim.key} names volume {volume.name}, which belongs to another claim")]
    return [taken, SetClaimPhase("Pending")]


def _plan_search(claim: PersistentVolumeClaim, around: BinderView) -> list[ClaimAction]:
    wanted = claim_class(claim)
    storage_class = around.storage_class(wanted) if wanted else None
    is_delayed = waits_for_consumer(storage_class)
    volume = around.best_volume(claim, only_reserved=is_delayed)
    if volume is not None:
        return [BindClaim(volume)]
    default = around.default_class() if not has_class(claim) else None
    if default is not None:
        return [AssignClass(default.name)]
    if is_delayed and SELECTED_NODE not in claim.annotations:
        return [Tell(_waiting_note(around.unscheduled_pods(claim))), SetClaimPhase("Pending")]
    if wanted:
        return [_provisioning(claim, wanted, storage_class)]
    text = "no persistent volumes available for this claim and no storage class is set"
    return [Tell(EmitEvent("claim", "Normal", "FailedBinding", text)), SetClaimPhase("Pending")]


def _waiting_note(pods: Sequence[str]) -> EmitEvent:
    if pods:
        word = "pod" if len(pods) == 1 else "pods"
        return EmitEvent(
            "claim", "Normal", "WaitForPodScheduled", f"waiting for {word} {','.join(pods)} to be scheduled"
        )
    text = "waiting for first consumer to be created before binding"
    return EmitEvent("claim", "Normal", "WaitForFirstConsumer", text)


def _provisioning(claim: PersistentVolumeClaim, wanted: str, found: StorageClass | None) -> ClaimAction:
    """An external provisioner is asked; of in-tree ones only those remain that a driver has taken over."""
    if found is None:
        text = f'storageclass.storage.k8s.io "{wanted}" not found'
        return TellMissing(wanted, EmitEvent("claim", "Warning", "ProvisioningFailed", text))
    provisioner = MIGRATED_PLUGINS.get(found.provisioner, found.provisioner)
    if provisioner.startswith(IN_TREE_PREFIX):
        text = f"no volume plugin matched name: {provisioner}"
        return Tell(EmitEvent("claim", "Warning", "ProvisioningFailed", text))
    return RequestVolume(provisioner)


def plan_volume(
    volume: PersistentVolume, claim: PersistentVolumeClaim | None, *, is_confirmed: bool, pods: Sequence[str] = ()
) -> list[VolumeAction]:
    """What to do about a volume, given the claim of the name it refers to (any uid) or None.

    `is_confirmed` says that the claim was read from the API itself, not from a copy. `pods` are those, not finished,
    that name the claim: a volume in use is not recycled.
    """
    reference = volume.spec.claim_ref
    if reference is None or not reference.uid:  # free, or reserved: the claim's side does the rest
        return [SetVolumePhase("Available")]
    if claim is None or claim.uid != reference.uid:
        is_settled = claim is None and volume.status.phase in ("Released", "Failed")
        if not is_confirmed and not is_settled:
            return [ConfirmClaim()]
        return _release(volume, pods)
    if not claim.spec.volume_name:
        return _plan_unfinished(volume, claim)
    if claim.spec.volume_name == volume.name:
        return [SetVolumePhase("Bound")]
    if PROVISIONED_BY in volume.annotations and volume.spec.persistent_volume_reclaim_policy == "Delete":
        return _release(volume, pods)  # made for this claim, which is bound to another volume
    return [Unbind()]


def _plan_unfinished(volume: PersistentVolume, claim: PersistentVolumeClaim) -> list[VolumeAction]:
    if volume_mode(volume.spec.volume_mode) == volume_mode(claim.spec.volume_mode):
        return [LookAtClaim(claim.key)]
    text = "incompatible volumeMode"
    to_volume = f'Cannot bind PersistentVolume to requested PersistentVolumeClaim "{claim.name}" due to {text}.'
    to_claim = f'Cannot bind PersistentVolume "{volume.name}" to requested PersistentVolumeClaim due to {text}.'
    return [
        Tell(EmitEvent("volume", "Warning", "VolumeMismatch", to_volume)),
        Tell(EmitEvent("claim", "Warning", "VolumeMismatch", to_claim)),
    ]


def _release(volume: PersistentVolume, pods: Sequence[str]) -> list[VolumeAction]:
    """Released, then what the policy says; a phase Failed stays, so that the user sees it."""
    released: list[VolumeAction] = [] if volume.status.phase == "Failed" else [SetVolumePhase("Released")]
    return released + _plan_reclaim(volume, pods)


def _plan_reclaim(volume: PersistentVolume, pods: Sequence[str]) -> list[VolumeAction]:
    if volume.annotations.get(MIGRATED_TO):
        return []
    match volume.spec.persistent_volume_reclaim_policy:
        case "Retain":
            return []
        case "Delete":
            return [] if is_deleted_by_others(volume) else [_failed("VolumeFailedDelete", _no_deleter(volume))]
        case "Recycle" if pods:
            text = f"Volume is used by pods: {','.join(pods)}"
            return [Tell(EmitEvent("volume", "Normal", "VolumeFailedRecycle", text))]
        case "Recycle":
            return [_failed("VolumeFailedRecycle", "No recycler plugin found for the volume!")]
        case policy:
            text = f"Volume has unrecognized PersistentVolumeReclaimPolicy {policy!r}"
            return [_failed("VolumeUnknownReclaimPolicy", text)]


def is_deleted_by_others(volume: PersistentVolume) -> bool:
    """Whether an external component deletes the backend and then the volume."""
    provisioner = volume.annotations.get(PROVISIONED_BY, "")
    if provisioner:
        return not provisioner.startswith(IN_TREE_PREFIX) or provisioner in MIGRATED_PLUGINS
    return volume.spec.csi is not None


def _failed(reason: str, message: str) -> SetVolumePhase:
    return SetVolumePhase("Failed", EmitEvent("volume", "Warning", reason, message))


def _no_deleter(volume: PersistentVolume) -> str:
    provisioner = volume.annotations.get(PROVISIONED_BY, "")
    whose = f"made by {provisioner}" if provisioner else "of this kind"
    return f'error getting deleter volume plugin for volume "{volume.name}": no plugin deletes volumes {whose}'
