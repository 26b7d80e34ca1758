"""Expansion: tell the user which component expands a volume whose claim asks for more.

Owns: the event `ExternalExpanding`, and the resizer annotation of claims whose in-tree plugin a CSI driver replaced.
Start reading at: `plan_expansion`, `run`.

The resizer beside the driver changes the backend and the claim's status, the node grows the filesystem. This
controller expands nothing itself.
"""

from dataclasses import dataclass

from moorage.controllers.context import ControllerContext
from moorage.kube.errors import NotFound
from moorage.kube.names import MIGRATED_PLUGINS, PRE_RESIZE_CAPACITY, PROVISIONED_BY, STORAGE_RESIZER
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import reference_key, requested_bytes, storage_bytes

COMPONENT = "volume_expand"


@dataclass(frozen=True, slots=True)
class TellWaiting:
    """Tell the user that an external component will expand the claim."""

    message: str


@dataclass(frozen=True, slots=True)
class SetResizer:
    """Annotate the claim with the driver that will expand it."""

    name: str


ExpansionAction = TellWaiting | SetResizer


def plan_expansion(claim: PersistentVolumeClaim, volume: PersistentVolume | None) -> list[ExpansionAction]:
    """Return what to do about a claim that may ask for more than it has."""
    if claim.status.phase != "Bound" or volume is None or not _is_pair(claim, volume):
        return []
    is_content = requested_bytes(claim) <= storage_bytes(claim.status.capacity)
    if is_content and PRE_RESIZE_CAPACITY not in volume.annotations:
        return []
    plugin = volume.annotations.get(PROVISIONED_BY, "")
    driver = MIGRATED_PLUGINS.get(plugin)
    if driver is None:
        return [TellWaiting("waiting for an external controller to expand this PVC")]
    told = TellWaiting(f"CSI migration enabled for {plugin}; waiting for external resizer to expand the pvc")
    return [told] if claim.annotations.get(STORAGE_RESIZER) == driver else [told, SetResizer(driver)]


def keys_for_claim(old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> list[str]:
    """Return the claim's key if it is new, bound now, asks for more, or has become larger."""
    if new is None or new.status.phase != "Bound":
        return []
    if old is None or old.status.phase != "Bound":
        return [new.key]
    has_grown = storage_bytes(new.status.capacity) > storage_bytes(old.status.capacity)
    return [new.key] if has_grown or requested_bytes(new) > requested_bytes(old) else []


def keys_for_volume(old: PersistentVolume | None, new: PersistentVolume | None) -> list[str]:
    """Return the claim of a volume that has just been bound: the claim's event may have come before the volume's."""
    if new is None or new.spec.claim_ref is None or (old is not None and old.spec.claim_ref is not None):
        return []
    return [reference_key(new.spec.claim_ref)]


def _is_pair(claim: PersistentVolumeClaim, volume: PersistentVolume) -> bool:
    reference = volume.spec.claim_ref
    return reference is not None and reference.uid == claim.uid and reference.namespace == claim.namespace


async def run(context: ControllerContext) -> None:
    """Watch claims grow until cancelled."""
    caches = context.caches
    recorder = await context.recorders.of(COMPONENT)

    async def sync(key: str) -> None:
        claim = caches.claims.get(key)
        if claim is None:
            return
        for action in plan_expansion(claim, caches.volumes.get(claim.spec.volume_name)):
            match action:
                case TellWaiting(message):
                    recorder.normal(claim, "ExternalExpanding", message)
                case SetResizer(name):
                    try:
                        claim = await context.writer.annotate(claim, {STORAGE_RESIZER: name})
                    except NotFound:
                        return

    controller = context.controller("expansion", sync)
    watches = [controller.watch(caches.claims, keys_for_claim), controller.watch(caches.volumes, keys_for_volume)]
    await context.run([controller], watches)
