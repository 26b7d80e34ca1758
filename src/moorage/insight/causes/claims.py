"""Why a claim is Pending before provisioning: the volume that it names, its class, or no volume that fits."""

import json

from moorage.insight.causes.advice import Advice, keep_data
from moorage.insight.causes.model import Finding, cause, names, said
from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import (
    class_of,
    default_classes,
    holder_of,
    mismatches,
)
from moorage.kube.names import BETA_STORAGE_PROVISIONER, NO_PROVISIONER, STORAGE_PROVISIONER
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, StorageClass
from moorage.kube.volumes import claim_class, has_class, is_meant_for
from moorage.suggest import kubectl

_PENDING = ("", "Pending")
_PROVISIONER = (STORAGE_PROVISIONER, BETA_STORAGE_PROVISIONER)


def is_waiting(claim: PersistentVolumeClaim) -> bool:
    return claim.status.phase in _PENDING and not claim.is_deleting


def asked_of(claim: PersistentVolumeClaim) -> str:
    """The provisioner that was asked to make a volume, if one was."""
    return next((claim.annotations[key] for key in _PROVISIONER if key in claim.annotations), "")


def needs_provisioning(view: ClusterView, claim: PersistentVolumeClaim) -> StorageClass | None:
    """The class that should provision this claim, when it waits for that."""
    if not is_waiting(claim) or claim.spec.volume_name:
        return None
    return class_of(view, claim)


@cause(
    "claim-volume-missing",
    PersistentVolumeClaim,
    "The claim names a volume that does not exist",
    "Create the volume, or delete the claim and create it without volumeName.",
)
def volume_missing(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.volumeName` is set to a name that no PersistentVolume has; the binder waits for it to appear."""
    name = claim.spec.volume_name
    if not is_waiting(claim) or not name or name in view.volumes:
        return None
    return Finding(
        f"it asks for volume {name} by name, and there is no such volume",
        kubectl("get", "pv"),
    )


@cause(
    "claim-volume-taken",
    PersistentVolumeClaim,
    "The volume that the claim names belongs to another claim",
    "Use another volume. If the other claim is gone for good, set the volume's policy to Retain and point its claimRef "
    "at this claim.",
)
def volume_taken(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.volumeName` names a volume whose claimRef points at another claim, or at a deleted claim of the same name
    (the uid differs). Kubernetes never takes a volume away from the claim it was given to."""
    volume = view.volumes.get(claim.spec.volume_name)
    if not is_waiting(claim) or volume is None or volume.spec.claim_ref is None or is_meant_for(volume, claim):
        return None
    same = holder_of(volume) == claim.key
    who = "an earlier claim of the same name (another uid)" if same else f"claim {holder_of(volume)}"
    reference, evidence = volume.spec.claim_ref, said(view.warning(claim, "FailedBinding"))
    if not same and holder_of(volume) in view.claims:
        look = kubectl("get", "pvc", reference.name, namespace=reference.namespace, flags=("-o", "yaml"))
        return Finding(f"volume {volume.name} is held by {who}", look, evidence, volume)
    reserve = json.dumps(
        {"spec": {"claimRef": {"namespace": claim.namespace, "name": claim.name, "uid": None, "resourceVersion": None}}}
    )
    give = kubectl("patch", "pv", volume.name, flags=("--type", "merge", "-p", reserve))
    purpose = "reserve the volume for this claim; the claim then gets the data of the earlier one"
    sentence = f"volume {volume.name} is held by {who}"
    if volume.spec.persistent_volume_reclaim_policy == "Retain":
        return Finding(sentence, give, evidence, volume, purpose)
    return Finding(
        sentence,
        keep_data(volume),
        evidence,
        volume,
        purpose="keep the volume's data",
        then=(Advice(give, purpose),),
    )


@cause(
    "claim-volume-mismatch",
    PersistentVolumeClaim,
    "The volume that the claim names does not fit it",
    "Change the field that differs; a claim's size, class and modes must be met by the volume.",
)
def volume_mismatch(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.volumeName` names a free volume, but its size, class, access modes, volume mode or attributes class do not
    satisfy the claim; or a volume that is reserved for the claim has another volume mode."""
    volume = view.volumes.get(claim.spec.volume_name)
    event = view.warning(claim, "VolumeMismatch")
    if not is_waiting(claim) or (volume is not None and volume.spec.claim_ref is not None):
        return None
    if volume is None:
        is_reserved = event is not None and not claim.spec.volume_name
        return Finding(event.message, kubectl("get", "pv"), said(event)) if event is not None and is_reserved else None
    found = mismatches(claim, volume)
    if not found:
        return None
    step = kubectl("get", "pv", volume.name, flags=("-o", "yaml"))
    return Finding(f"volume {volume.name} does not fit: {'; '.join(found)}", step, said(event))


@cause(
    "claim-class-missing",
    PersistentVolumeClaim,
    "The claim's storage class does not exist",
    "Create the class, or delete the claim and create it with a class that exists.",
)
def class_missing(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.storageClassName` names a class that is not there. A volume of that class name could still be bound by
    hand, but nothing will be provisioned."""
    name = claim_class(claim)
    if not is_waiting(claim) or claim.spec.volume_name or not name or name in view.classes:
        return None
    have = names(sorted(view.classes.values(), key=lambda c: c.name)) or "none"
    return Finding(
        f"storage class {name!r} does not exist (there is: {have})",
        kubectl("get", "storageclass"),
        said(view.warning(claim, "ProvisioningFailed")),
    )


@cause(
    "claim-class-none",
    PersistentVolumeClaim,
    "The claim names no class and there is no default class",
    "Mark a class as the default, or name one in the claim, or create a volume that fits.",
)
def class_none(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """Without a class nothing provisions a volume; the claim can only be bound to an existing volume without class."""
    if not is_waiting(claim) or claim.spec.volume_name or has_class(claim) or default_classes(view):
        return None
    free = _free(view)
    if any(not mismatches(claim, volume) for volume in free):
        return None
    sentence = "it names no storage class and no class is the default"
    usable = sorted(name for name, one in view.classes.items() if one.provisioner != NO_PROVISIONER)
    if not usable:
        return Finding(sentence, kubectl("get", "storageclass"), _closest(claim, free))
    mark = kubectl("annotate", "storageclass", usable[0], flags=("storageclass.kubernetes.io/is-default-class=true",))
    purpose = f"make class {usable[0]} the default" + (f" (others: {', '.join(usable[1:4])})" if usable[1:] else "")
    return Finding(sentence, mark, _closest(claim, free), purpose=purpose)


@cause(
    "claim-static-no-match",
    PersistentVolumeClaim,
    "No existing volume fits a claim that is not provisioned",
    "Create a volume that fits, or change the field that is named; an empty storageClassName is never provisioned.",
)
def static_no_match(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim's class is empty, or its provisioner is kubernetes.io/no-provisioner, so it can only be bound to a
    volume that is already there; none is free and fits. The closest ones are compared field by field."""
    storage_class = class_of(view, claim)
    static = (has_class(claim) and not claim_class(claim)) or (
        storage_class is not None and storage_class.provisioner == NO_PROVISIONER
    )
    if not is_waiting(claim) or claim.spec.volume_name or not static:
        return None
    free = _free(view)
    if any(not mismatches(claim, volume) for volume in free):
        return None  # the binder takes it, or the scheduler does when a pod comes
    why = f"class {storage_class.name} has no provisioner" if storage_class is not None else "its class is empty"
    return Finding(
        f"{why}, so it needs a volume that exists, and no free one fits",
        kubectl("get", "pv"),
        _closest(claim, free) or ("there is no free volume at all",),
    )


@cause(
    "claim-modifier-missing",
    PersistentVolumeClaim,
    "The claim's VolumeAttributesClass does not exist",
    "Create the VolumeAttributesClass, or remove volumeAttributesClassName from the claim.",
)
def modifier_missing(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.volumeAttributesClassName` names a class that is not there; neither creation nor modification goes on."""
    name = claim.spec.volume_attributes_class_name
    if claim.is_deleting or not name or name in view.modifiers or "VolumeAttributesClass" in view.unreadable:
        return None
    return Finding(
        f"VolumeAttributesClass {name!r} does not exist",
        kubectl("get", "volumeattributesclass"),
        said(view.warning(claim)),
    )


def _free(view: ClusterView) -> list[PersistentVolume]:
    """Return the volumes that no claim holds."""
    return view.once("free volumes", lambda: [each for each in view.volumes.values() if each.spec.claim_ref is None])


def _closest(claim: PersistentVolumeClaim, free: list[PersistentVolume]) -> tuple[str, ...]:
    """The free volumes that fit best, and what is wrong with each."""
    close = sorted(free, key=lambda volume: len(mismatches(claim, volume)))[:3]
    return tuple(f"{volume.name}: {'; '.join(mismatches(claim, volume))}" for volume in close)
