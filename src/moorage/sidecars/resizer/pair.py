"""A bound claim and its volume, when both are of this driver and this process's to handle."""

from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim
from moorage.sidecars import names
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError


def bound_pair(context: RoleContext, key: str) -> tuple[PersistentVolumeClaim, PersistentVolume] | None:
    """The pair, None when there is nothing to do; SidecarError when the volume has not been seen yet."""
    claim = context.claims.get(key)
    if claim is None or claim.status.phase != "Bound" or not claim.spec.volume_name:
        return None
    volume = context.volumes.get(claim.spec.volume_name)
    if volume is None:
        raise SidecarError(f"volume {claim.spec.volume_name} of claim {key} is not known (yet)")
    driver = context.driver.name
    is_ours = volume.spec.csi is not None and volume.spec.csi.driver == driver
    if not is_ours and claim.annotations.get(names.RESIZER) != driver:
        return None
    reference = volume.spec.claim_ref
    if reference is None or (reference.namespace, reference.uid) != (claim.namespace, claim.uid):
        return None
    if volume.spec.csi is None or not context.is_local(volume):
        return None
    return claim, volume
