"""Expansion: says who is to make a volume larger when its claim asks for more.

Owns: the event `ExternalExpanding`, and the resizer annotation of claims whose in-tree plugin a driver has taken over.
May not touch: sizes. The backend and the claim's status belong to the resizer beside the driver, the file system to the
node; there is no in-tree plugin left here that could expand anything itself.
Start reading at: `plan_expansion`, `run`.
"""

from dataclasses import dataclass

from moorage.controllers.context import ControllerContext
from moorage.kube.control.queue import WorkQueue
from moorage.kube.errors import NotFound
from moorage.kube.names import MIGRATED_PLUGINS, PRE_RESIZE_CAPACITY, PROVISIONED_BY, STORAGE_RESIZER
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import reference_key, requested_bytes, storage_bytes

COMPONENT = "volume_expand"


@dataclass(frozen=True, slots=True)
class TellWaiting:
    """Tell the user that an external component is to expand the claim."""

    message: str


@dataclass(frozen=True, slots=True)
class SetResizer:
    """Name the driver that is to expand the claim."""

    name: str


ExpansionAction = TellWaiting | SetResizer


def plan_expansion(claim: PersistentVolumeClaim, volume: PersistentVolume | None) -> list[ExpansionAction]:
    """What to do about a claim that may ask for more than it has."""
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


def wants_a_look(old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> bool:
    """Whether a change of a claim can matter here: it is new, bound now, asks for more, or has become larger."""
    if new is None or new.status.phase != "Bound":
        return False
    if old is None or old.status.phase != "Bound":
        return True
    has_grown = storage_bytes(new.status.capacity) > storage_bytes(old.status.capacity)
    return has_grown or requested_bytes(new) > requested_bytes(old)


def _is_pair(claim: PersistentVolumeClaim, volume: PersistentVolume) -> bool:
    reference = volume.spec.claim_ref
    return reference is not None and reference.uid == claim.uid and reference.namespace == claim.namespace


async def run(context: ControllerContext) -> None:
    """Watch claims grow until cancelled."""
    claims, volumes = context.informers.of(PersistentVolumeClaim), context.informers.of(PersistentVolume)
    recorder = await context.recorders.of(COMPONENT)
    options = context.options
    queue: WorkQueue[str] = WorkQueue("expansion", start_s=options.retry_start_s, max_s=options.retry_max_s)
    context.activity.register(queue)

    async def sync(key: str) -> None:
        claim = claims.get(key)
        if claim is None:
            return
        for action in plan_expansion(claim, volumes.get(claim.spec.volume_name)):
            match action:
                case TellWaiting(message):
                    recorder.normal(claim, "ExternalExpanding", message)
                case SetResizer(name):
                    patch = {"metadata": {"annotations": {STORAGE_RESIZER: name}}}
                    version = claim.metadata.resource_version
                    try:
                        claims.remember(
                            await context.client.patch(
                                PersistentVolumeClaim, claim.name, patch, claim.namespace, version=version
                            )
                        )
                    except NotFound:
                        return

    def on_claim(old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        if new is not None and wants_a_look(old, new):
            queue.add(new.key)

    def on_volume(old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        if new is not None and new.spec.claim_ref is not None and (old is None or old.spec.claim_ref is None):
            queue.add(reference_key(new.spec.claim_ref))  # the claim may have been seen before its volume

    await claims.wait_synced()
    await volumes.wait_synced()
    claims.subscribe(on_claim)
    volumes.subscribe(on_volume)
    await queue.run(sync, options.workers)
