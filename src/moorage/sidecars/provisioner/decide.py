"""Is this claim ours to provision, is this volume ours to delete? Pure decisions on typed objects.

Owns: the conditions of the claim and volume syncs.
Start reading at: `why_not_provision`, `should_delete`, `finalizer_wanted`.
"""

from moorage.csi.errors import CsiError
from moorage.kube import names
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, StorageClass
from moorage.kube.volumes import is_of_driver, provisioner_of, selected_node_of, waits_for_consumer
from moorage.sidecars.errors import ProvisioningState


def is_candidate(claim: PersistentVolumeClaim, driver: str) -> bool:
    """Whether the claim is unbound and asked of this driver. The worker decides everything else."""
    if claim.spec.volume_name or claim.is_deleting:
        return False
    return provisioner_of(claim) == driver or claim.annotations.get(names.MIGRATED_TO) == driver


def why_not_provision(claim: PersistentVolumeClaim, storage_class: StorageClass | None, driver: str) -> str:
    """Return why nothing is to be done for a candidate now, empty if something is. A missing class is no reason."""
    if not is_candidate(claim, driver):
        return "not asked of this driver, or already bound"
    if storage_class is None:
        return ""
    if storage_class.provisioner != driver and claim.annotations.get(names.MIGRATED_TO) != driver:
        return "its class now names another provisioner"
    if waits_for_consumer(storage_class) and not selected_node_of(claim):
        return "waits for its first consumer"
    return ""


def volume_name(prefix: str, uuid_length: int, uid: str) -> str:
    """Return the name of both the CSI volume and the PersistentVolume."""
    return f"{prefix}-{uid}" if uuid_length < 0 else f"{prefix}-{uid.replace('-', '')[:uuid_length]}"


def state_after(error: CsiError, has_topology: bool, has_selected_node: bool) -> ProvisioningState:
    """Return what is known about the volume after a failed CreateVolume."""
    if not error.is_final:
        return ProvisioningState.BACKGROUND
    if error.code == "RESOURCE_EXHAUSTED":
        return ProvisioningState.RESCHEDULE if has_topology and has_selected_node else ProvisioningState.FINISHED
    return ProvisioningState.INFEASIBLE if error.code == "INVALID_ARGUMENT" else ProvisioningState.FINISHED


def is_our_volume(volume: PersistentVolume, driver: str) -> bool:
    """Whether the volume was created by us, migrated to us, or written by hand for our driver."""
    made_by = volume.annotations.get(names.PROVISIONED_BY)
    if made_by is not None:
        return driver in (made_by, volume.annotations.get(names.MIGRATED_TO))
    return is_of_driver(volume, driver)


def should_delete(volume: PersistentVolume, driver: str) -> bool:
    """Whether the volume is released and is to be deleted."""
    spec = volume.spec
    if not is_our_volume(volume, driver) or spec.csi is None:
        return False
    if volume.status.phase != "Released" or spec.persistent_volume_reclaim_policy != "Delete":
        return False
    return not volume.is_deleting or names.EXTERNAL_DELETION in volume.finalizers


def finalizer_wanted(volume: PersistentVolume, driver: str) -> bool | None:
    """Return True to add our finalizer, False to remove it, None to leave it as it is."""
    has = names.EXTERNAL_DELETION in volume.finalizers
    if not is_our_volume(volume, driver) or volume.spec.csi is None:
        return None
    if volume.spec.persistent_volume_reclaim_policy != "Delete":
        return False if has else None
    if not has and not volume.is_deleting and volume.status.phase == "Bound":
        return True
    return None
