"""Which volume suits a claim, and which waiting claim a volume that has come free could suit.

Owns: the rules of matching, and two indexes that answer them in logarithmic time: `FreeVolumes` and `WaitingClaims`.
May not touch: the API. The indexes are told of changes; they never ask.
Start reading at: `FreeVolumes.best_for`, `mismatch`.

Volumes are grouped by their set of access modes, and within a group by class, volume mode and attributes class, sorted
by size: the smallest that fits is found by bisection, so binding n claims to n volumes costs n log n.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim
from moorage.kube.selectors import BadSelector, LabelMatch
from moorage.kube.volumes import (
    capacity_bytes,
    claim_class,
    is_meant_for,
    reference_key,
    requested_bytes,
    volume_class,
    volume_mode,
)


class Shelf(NamedTuple):
    """Volumes that differ only in size and labels stand on one shelf."""

    storage_class: str
    mode: str
    attributes_class: str


Modes = tuple[str, ...]
VolumeAt = Callable[[str], PersistentVolume | None]


def modes_of(modes: list[str]) -> Modes:
    """A set of access modes, always written alike."""
    return tuple(sorted(set(modes)))


def shelf_of_volume(volume: PersistentVolume) -> Shelf:
    spec = volume.spec
    return Shelf(volume_class(volume), volume_mode(spec.volume_mode), spec.volume_attributes_class_name or "")


def shelf_of_claim(claim: PersistentVolumeClaim) -> Shelf:
    spec = claim.spec
    return Shelf(claim_class(claim), volume_mode(spec.volume_mode), spec.volume_attributes_class_name or "")


def is_free(volume: PersistentVolume) -> bool:
    """Whether any claim may have it."""
    return volume.spec.claim_ref is None and volume.status.phase == "Available" and not volume.is_deleting


def selects(claim: PersistentVolumeClaim, volume: PersistentVolume) -> bool:
    """Whether the claim's selector admits the volume; one that cannot be read admits none."""
    if claim.spec.selector is None:
        return True
    try:
        return LabelMatch.of(claim.spec.selector).matches(volume.labels)
    except BadSelector:
        return False


def mismatch(volume: PersistentVolume, claim: PersistentVolumeClaim) -> str:
    """Why a volume that the claim names cannot be bound to it, or nothing. Selector and affinity do not count here."""
    wanted, offered = shelf_of_claim(claim), shelf_of_volume(volume)
    if volume.is_deleting:
        return f'the volume is marked for deletion "{volume.name}"'
    if capacity_bytes(volume) < requested_bytes(claim):
        return "requested PV is too small"
    if offered.storage_class != wanted.storage_class:
        return "storageClassName does not match"
    if offered.attributes_class != wanted.attributes_class:
        return "volumeAttributesClassName does not match"
    if offered.mode != wanted.mode:
        return "incompatible volumeMode"
    if not set(claim.spec.access_modes) <= set(volume.spec.access_modes):
        return "incompatible accessMode"
    return ""


def takes_reserved(volume: PersistentVolume, claim: PersistentVolumeClaim) -> bool:
    """Whether a claim that looks for a volume takes one reserved for it; class, selector and phase do not count."""
    return (
        is_meant_for(volume, claim)
        and not volume.is_deleting
        and capacity_bytes(volume) >= requested_bytes(claim)
        and shelf_of_volume(volume)[1:] == shelf_of_claim(claim)[1:]
    )


class FreeVolumes:
    """All volumes that a claim could be given, found by claim in O(log n)."""

    def __init__(self, volume_at: VolumeAt) -> None:
        self._volume_at = volume_at
        self._shelves: dict[Modes, dict[Shelf, list[tuple[int, str]]]] = {}
        self._places: dict[str, tuple[Modes, Shelf, int]] = {}
        self._reserved: dict[str, dict[str, None]] = {}  # claim key -> names of volumes that name it
        self._reserved_for: dict[str, str] = {}

    def see(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        """Take note of a change; the same change twice is the same as once."""
        if old is not None:
            self._remove(old.name)
        if new is None:
            return
        name = new.name
        self._remove(name)
        if new.spec.claim_ref is not None:
            key = reference_key(new.spec.claim_ref)
            self._reserved.setdefault(key, {})[name] = None
            self._reserved_for[name] = key
        elif is_free(new):
            place = (modes_of(new.spec.access_modes), shelf_of_volume(new), capacity_bytes(new))
            self._places[name] = place
            insort(self._shelves.setdefault(place[0], {}).setdefault(place[1], []), (place[2], name))

    def take(self, name: str) -> None:
        """The volume is being given to a claim: offer it to no other until it is seen again."""
        self._unshelve(name)

    def reserved_for(self, claim_key: str) -> list[PersistentVolume]:
        """The volumes whose claimRef names a claim."""
        found = (self._volume_at(name) for name in sorted(self._reserved.get(claim_key, {})))
        return [volume for volume in found if volume is not None]

    def best_for(self, claim: PersistentVolumeClaim, *, only_reserved: bool = False) -> PersistentVolume | None:
        """Return the volume for a claim, None if there is none.

        Groups with the fewest access modes come first. In a group, volumes reserved for the claim come before others;
        then the smallest that fits is taken, the first by name among equals.
        """
        wanted = set(claim.spec.access_modes)
        reserved = [volume for volume in self.reserved_for(claim.key) if takes_reserved(volume, claim)]
        reserved.sort(key=lambda volume: (capacity_bytes(volume), volume.name))
        groups = {modes_of(volume.spec.access_modes) for volume in reserved}
        groups |= set() if only_reserved else set(self._shelves)
        for modes in sorted((modes for modes in groups if wanted <= set(modes)), key=lambda modes: (len(modes), modes)):
            for volume in reserved:
                if modes_of(volume.spec.access_modes) == modes:
                    return volume
            if not only_reserved:
                for volume in self._fitting(modes, claim):
                    return volume
        return None

    def _fitting(self, modes: Modes, claim: PersistentVolumeClaim) -> Iterator[PersistentVolume]:
        shelf = self._shelves.get(modes, {}).get(shelf_of_claim(claim), [])
        for at in range(bisect_left(shelf, (requested_bytes(claim), "")), len(shelf)):
            volume = self._volume_at(shelf[at][1])
            if volume is not None and is_free(volume) and selects(claim, volume):
                yield volume

    def _remove(self, name: str) -> None:
        self._unshelve(name)
        key = self._reserved_for.pop(name, None)
        if key is not None:
            names = self._reserved[key]
            names.pop(name, None)
            if not names:
                del self._reserved[key]

    def _unshelve(self, name: str) -> None:
        place = self._places.pop(name, None)
        if place is None:
            return
        modes, shelf_name, size = place
        shelves = self._shelves[modes]
        shelf = shelves[shelf_name]
        del shelf[bisect_left(shelf, (size, name))]
        if not shelf:
            del shelves[shelf_name]
            if not shelves:
                del self._shelves[modes]


class WaitingClaims:
    """Claims that found no volume, so that one that comes free wakes a claim it could suit, and not all of them."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[Shelf, Modes], list[tuple[int, int, str]]] = {}
        self._places: dict[str, tuple[tuple[Shelf, Modes], tuple[int, int, str]]] = {}
        self._choosy: dict[str, PersistentVolumeClaim] = {}  # those with a selector are looked at one by one
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._places) + len(self._choosy)

    def add(self, claim: PersistentVolumeClaim) -> None:
        """The claim found nothing and waits from now on, behind those of its size that wait already."""
        self.drop(claim.key)
        if claim.spec.selector is not None:
            self._choosy[claim.key] = claim
            return
        self._arrivals += 1
        shelf = (shelf_of_claim(claim), modes_of(claim.spec.access_modes))
        entry = (requested_bytes(claim), -self._arrivals, claim.key)
        insort(self._shelves.setdefault(shelf, []), entry)
        self._places[claim.key] = (shelf, entry)

    def drop(self, key: str) -> None:
        self._choosy.pop(key, None)
        place = self._places.pop(key, None)
        if place is not None:
            shelf = self._shelves[place[0]]
            del shelf[bisect_left(shelf, place[1])]
            if not shelf:
                del self._shelves[place[0]]

    def take_for(self, volume: PersistentVolume) -> str | None:
        """The waiting claim that would use the most of this volume, which then waits no longer."""
        key = self._choosy_for(volume) or self._largest_for(volume)
        if key is not None:
            self.drop(key)
        return key

    def _choosy_for(self, volume: PersistentVolume) -> str | None:
        for key, claim in self._choosy.items():
            if not mismatch(volume, claim) and selects(claim, volume):
                return key
        return None

    def _largest_for(self, volume: PersistentVolume) -> str | None:
        offered, shelf_name, best = set(volume.spec.access_modes), shelf_of_volume(volume), None
        for (wanted_shelf, modes), shelf in self._shelves.items():
            if wanted_shelf == shelf_name and set(modes) <= offered:
                at = bisect_left(shelf, (capacity_bytes(volume) + 1,)) - 1
                if at >= 0 and (best is None or shelf[at] > best):
                    best = shelf[at]
        return best[2] if best is not None else None
