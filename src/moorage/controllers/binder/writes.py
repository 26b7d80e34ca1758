"""What the binder writes: each function gives the patch that makes an object so, or None when it is so already.

Owns: the contents of the four writes of a binding, of unbinding, and of the phases.
May not touch: when to write; `plan.py` decides that, `execute.py` sends it.
Start reading at: `volume_binding`, `claim_binding`, `claim_status`.

Because a write that changes nothing is left out, a binding that was interrupted after any of its writes is finished by
doing it again from the start.
"""

from typing import Any

from moorage.kube.names import (
    BETA_STORAGE_PROVISIONER,
    BIND_COMPLETED,
    BOUND_BY_CONTROLLER,
    EXTERNAL_DELETION,
    IN_TREE_DELETION,
    IN_TREE_PREFIX,
    MIGRATED_PLUGINS,
    MIGRATED_TO,
    PRE_RESIZE_CAPACITY,
    PROVISIONED_BY,
    STORAGE_PROVISIONER,
)
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim
from moorage.kube.objects.meta import as_document, reference_to
from moorage.kube.quantity import BadQuantity, Quantity
from moorage.kube.volumes import capacity_bytes, is_meant_for, provisioner_of, storage_bytes

Patch = dict[str, Any]


def volume_binding(volume: PersistentVolume, claim: PersistentVolumeClaim) -> Patch | None:
    """First write: the volume names the claim in full. A volume that a user reserved does not get the mark that says
    the controller chose it, because that mark decides what unbinding takes away."""
    patch: Patch = {}
    reference = volume.spec.claim_ref
    if reference is None or not is_meant_for(volume, claim) or reference.uid != claim.uid:
        patch["spec"] = {"claimRef": as_document(reference_to(claim))}
    if not is_meant_for(volume, claim) and BOUND_BY_CONTROLLER not in volume.annotations:
        patch["metadata"] = {"annotations": {BOUND_BY_CONTROLLER: "yes"}}
    return patch or None


def volume_phase(volume: PersistentVolume, phase: str, message: str = "") -> Patch | None:
    """Second write, and every other change of a volume's phase."""
    if volume.status.phase == phase:
        return None
    return {"status": {"phase": phase, "message": message or None}}


def claim_binding(claim: PersistentVolumeClaim, volume: PersistentVolume) -> Patch | None:
    """Third write: the claim names the volume, and says that binding is complete."""
    marks, patch = {}, {}
    if claim.spec.volume_name != volume.name:
        patch["spec"] = {"volumeName": volume.name}
        if BOUND_BY_CONTROLLER not in claim.annotations:
            marks[BOUND_BY_CONTROLLER] = "yes"
    if BIND_COMPLETED not in claim.annotations:
        marks[BIND_COMPLETED] = "yes"
    return (patch | ({"metadata": {"annotations": marks}} if marks else {})) or None


def claim_status(claim: PersistentVolumeClaim, phase: str, volume: PersistentVolume | None) -> Patch | None:
    """Fourth write, and every other change of a claim's phase; without a volume what came from one is cleared."""
    status: Patch = {} if claim.status.phase == phase else {"phase": phase}
    if volume is None:
        if claim.status.access_modes:
            status["accessModes"] = None
        if claim.status.capacity:
            status["capacity"] = None
        if claim.status.current_volume_attributes_class_name is not None:
            status["currentVolumeAttributesClassName"] = None
    else:
        if claim.status.access_modes != volume.spec.access_modes:
            status["accessModes"] = volume.spec.access_modes
        if claim.status.phase != phase:
            status |= _capacity_at_binding(claim, volume)
        theirs = volume.spec.volume_attributes_class_name
        was_pending = claim.status.phase in ("", "Pending")
        if was_pending and phase == "Bound" and claim.status.current_volume_attributes_class_name != theirs:
            status["currentVolumeAttributesClassName"] = theirs
    return {"status": status} if status else None


def _capacity_at_binding(claim: PersistentVolumeClaim, volume: PersistentVolume) -> Patch:
    """The size that a claim shows when it becomes bound: what a pod can use, if the volume is still being expanded."""
    before = volume.annotations.get(PRE_RESIZE_CAPACITY)
    if before is not None and _is_quantity(before):
        return {"capacity": {"storage": before}}
    if storage_bytes(claim.status.capacity) == capacity_bytes(volume) and claim.status.capacity:
        return {}
    return {"capacity": volume.spec.capacity}


def unbinding(volume: PersistentVolume) -> Patch | None:
    """Return the patch that frees a volume. Of a user's reservation only the uid is removed."""
    reference = volume.spec.claim_ref
    if reference is None:
        return None
    if BOUND_BY_CONTROLLER in volume.annotations:
        return {"metadata": {"annotations": {BOUND_BY_CONTROLLER: None}}, "spec": {"claimRef": None}}
    return {"spec": {"claimRef": {"uid": None, "resourceVersion": None}}} if reference.uid else None


def provisioner_request(claim: PersistentVolumeClaim, provisioner: str) -> Patch | None:
    """Ask an external provisioner for a volume; old provisioners read the old annotation."""
    wanted = {STORAGE_PROVISIONER: provisioner, BETA_STORAGE_PROVISIONER: provisioner}
    if all(claim.annotations.get(key) == value for key, value in wanted.items()):
        return None
    return {"metadata": {"annotations": wanted}}


def volume_upkeep(volume: PersistentVolume) -> Patch | None:
    """Migration mark and deletion finalizers of volumes that an in-tree plugin made."""
    provisioner = volume.annotations.get(PROVISIONED_BY, "")
    driver = MIGRATED_PLUGINS.get(provisioner)
    meta: Patch = {}
    if driver is not None and volume.annotations.get(MIGRATED_TO) != driver:
        meta["annotations"] = {MIGRATED_TO: driver}
    finalizers = _deletion_finalizers(volume, is_migrated=driver is not None)
    if finalizers != volume.finalizers:
        meta["finalizers"] = finalizers
    return {"metadata": meta} if meta else None


def claim_upkeep(claim: PersistentVolumeClaim) -> Patch | None:
    """Migration mark of claims that asked an in-tree plugin."""
    driver = MIGRATED_PLUGINS.get(provisioner_of(claim))
    if driver is None or claim.annotations.get(MIGRATED_TO) == driver:
        return None
    return {"metadata": {"annotations": {MIGRATED_TO: driver}}}


def _deletion_finalizers(volume: PersistentVolume, *, is_migrated: bool) -> list[str]:
    """Only volumes of an in-tree plugin are kept from vanishing by us; a finalizer can only leave a dying object."""
    have = volume.finalizers
    if is_migrated:
        return [name for name in have if name != IN_TREE_DELETION]
    if not volume.annotations.get(PROVISIONED_BY, "").startswith(IN_TREE_PREFIX):
        return have
    kept = [name for name in have if name != EXTERNAL_DELETION]
    if volume.spec.persistent_volume_reclaim_policy in ("Retain", "Recycle"):
        return [name for name in kept if name != IN_TREE_DELETION]
    if IN_TREE_DELETION in kept or volume.is_deleting or volume.spec.persistent_volume_reclaim_policy != "Delete":
        return kept
    return [*kept, IN_TREE_DELETION]


def _is_quantity(text: str) -> bool:
    try:
        Quantity.parse(text)
    except BadQuantity:
        return False
    return True
