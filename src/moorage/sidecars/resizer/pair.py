"""A bound claim and its volume, when both are of this driver and this process's to handle."""

from moorage.kube import names
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import is_of_driver
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError


def bound_pair(context: RoleContext, key: str) -> tuple[PersistentVolumeClaim, PersistentVolume] | None:
    """Return the pair, None if there is nothing to do. Raises SidecarError if the volume is not cached yet."""
    claim = context.caches.claims.get(key)
    if claim is None or claim.status.phase != "Bound" or not claim.spec.volume_name:
        return None
    volume = context.caches.volumes.get(claim.spec.volume_name)
    if volume is None:
        raise SidecarError(f"volume {claim.spec.volume_name} of claim {key} is not known (yet)")
    driver = context.driver.name
    if not is_of_driver(volume, driver) and claim.annotations.get(names.STORAGE_RESIZER) != driver:
        return None
    reference = volume.spec.claim_ref
    if reference is None or (reference.namespace, reference.uid) != (claim.namespace, claim.uid):
        return None
    if volume.spec.csi is None or not context.is_local(volume):
        return None
    return claim, volume
