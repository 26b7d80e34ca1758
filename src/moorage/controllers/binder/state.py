"""What the binder knows: the shared caches of claims, volumes, classes and pods, and its own indexes.

Owns: `BinderState`, which answers what `plan.py` asks, and the keys that a change affects.
Start reading at: `BinderState.keys_for_volume`, `BinderState.keys_for_claim`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moorage.controllers.binder import writes
from moorage.controllers.binder.matching import FreeVolumes, WaitingClaims, is_free
from moorage.kube.cache.informer import Informer
from moorage.kube.names import BIND_COMPLETED
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod, StorageClass
from moorage.kube.volumes import (
    claim_class,
    claims_of,
    default_class,
    has_class,
    is_default,
    reference_key,
    volume_named_by,
)


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys to enqueue."""

    claims: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)


def _wanted_class(claim: PersistentVolumeClaim) -> Iterable[str]:
    """Return the class of an unbound claim, for an index; `*`, which no class can be called, if it names none."""
    if BIND_COMPLETED in claim.annotations:
        return []
    return [claim_class(claim) if has_class(claim) else "*"]


class BinderState:
    """Claims, volumes, classes and pods as cached, never older than our own last write."""

    def __init__(
        self,
        claims: Informer[PersistentVolumeClaim],
        volumes: Informer[PersistentVolume],
        classes: Informer[StorageClass],
        pods: Informer[Pod],
    ) -> None:
        self.claims = claims
        self.volumes = volumes
        self.classes = classes
        self.pods = pods
        self.free = FreeVolumes(volumes.get)
        self.waiting = WaitingClaims()

    # What plan.py asks.

    def volume(self, name: str) -> PersistentVolume | None:
        return self.volumes.get(name)

    def best_volume(self, claim: PersistentVolumeClaim, *, only_reserved: bool) -> PersistentVolume | None:
        return self.free.best_for(claim, only_reserved=only_reserved)

    def storage_class(self, name: str) -> StorageClass | None:
        return self.classes.get(name)

    def default_class(self) -> StorageClass | None:
        return default_class(self.classes)

    def unscheduled_pods(self, claim: PersistentVolumeClaim) -> Sequence[str]:
        pods = self.pods.by(claims_of, claim.key)
        return sorted(pod.name for pod in pods if not pod.spec.node_name and not pod.is_terminated)

    def pods_using(self, claim_key: str) -> Sequence[str]:
        return sorted(pod.key for pod in self.pods.by(claims_of, claim_key) if not pod.is_terminated)

    # Keys that a change affects.

    def keys_for_volume(self, old: PersistentVolume | None, new: PersistentVolume | None) -> Keys:
        """Return the volume, the claims at either end of a reference, and one waiting claim if the volume is free."""
        claims = []
        for volume in (old, new):
            if volume is not None and volume.spec.claim_ref is not None:
                claims.append(reference_key(volume.spec.claim_ref))
            if volume is not None:
                claims += [claim.key for claim in self.claims.by(volume_named_by, volume.name)]
        if new is None:
            return Keys(claims)
        if is_free(new):
            waiting = self.waiting.take_for(new)
            claims += [waiting] if waiting is not None else []
        return Keys(claims, [new.name])

    def keys_for_claim(self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> Keys:
        """Return the claim, the volume it names or named, and the volumes that name it."""
        known = [claim for claim in (old, new) if claim is not None]
        volumes = [claim.spec.volume_name for claim in known if claim.spec.volume_name]
        for key in {claim.key for claim in known}:
            volumes += [volume.name for volume in self.free.reserved_for(key)]
        return Keys([new.key] if new is not None else [], [name for name in volumes if self.volumes.get(name)])

    def keys_for_class(self, old: StorageClass | None, new: StorageClass | None) -> Keys:
        """Return the unbound claims of the class, and those without a class if it is a default."""
        claims: list[PersistentVolumeClaim] = []
        for changed in (old, new):
            if changed is not None:
                claims += self.claims.by(_wanted_class, changed.name)
                claims += self.claims.by(_wanted_class, "*") if is_default(changed) else []
        return Keys([claim.key for claim in claims])

    def keys_for_pod(self, pod: Pod) -> Keys:
        """Return the unbound claims of a pod: they may wait for their first consumer."""
        claims = (self.claims.get(key) for key in claims_of(pod))
        return Keys([c.key for c in claims if c is not None and BIND_COMPLETED not in c.annotations])

    # Settled claims and volumes are not enqueued, neither by unrelated changes nor by the resync.

    def unsettled_of(self, keys: Keys) -> Keys:
        """Return those of the keys about which there may be something to do."""
        claims = ((key, self.claims.get(key)) for key in keys.claims)
        volumes = ((name, self.volumes.get(name)) for name in keys.volumes)
        return Keys(
            [key for key, claim in claims if claim is None or not self._is_settled_claim(claim)],
            [name for name, volume in volumes if volume is not None and not self._is_settled_volume(volume)],
        )

    def unsettled(self) -> Keys:
        """Return every key except claims and volumes that are bound to each other and say so."""
        return Keys(
            [claim.key for claim in self.claims if not self._is_settled_claim(claim)],
            [volume.name for volume in self.volumes if not self._is_settled_volume(volume)],
        )

    def _is_settled_claim(self, claim: PersistentVolumeClaim) -> bool:
        volume = self.volumes.get(claim.spec.volume_name) if claim.spec.volume_name else None
        return (
            volume is not None
            and writes.claim_upkeep(claim) is None
            and claim.status.phase == "Bound"
            and BIND_COMPLETED in claim.annotations
            and volume.spec.claim_ref is not None
            and volume.spec.claim_ref.uid == claim.uid
            and volume.status.phase == "Bound"
            and volume.spec.access_modes == claim.status.access_modes
        )

    def _is_settled_volume(self, volume: PersistentVolume) -> bool:
        reference = volume.spec.claim_ref
        if writes.volume_upkeep(volume) is not None:
            return False
        if reference is None or not reference.uid:
            return volume.status.phase == "Available"
        claim = self.claims.get(reference_key(reference))
        if claim is None or claim.uid != reference.uid:
            return volume.status.phase == "Released" and volume.spec.persistent_volume_reclaim_policy == "Retain"
        return claim.spec.volume_name == volume.name and volume.status.phase == "Bound"
