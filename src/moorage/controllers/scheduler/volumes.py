"""Whether a pod can have its volumes on a node, and which claims to bind or provision there. Pure.

Owns: sorting a pod's claims, node affinity and zones of volumes, finding free volumes, storage capacity (of all claims
of the pod together), attach limits, and the rule that a ReadWriteOncePod claim has one pod.
Start reading at: `sort_claims`, `fit`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from moorage.controllers.binder.matching import selects, shelf_of_claim, shelf_of_volume
from moorage.controllers.scheduler.state import SchedulerState
from moorage.kube.cache.caches import Caches
from moorage.kube.names import (
    BETA_REGION,
    BETA_ZONE,
    BIND_COMPLETED,
    MIGRATED_PLUGINS,
    NO_PROVISIONER,
    REGION,
    SELECTED_NODE,
    ZONE,
)
from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIStorageCapacity, StorageClass
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.quantity import BadQuantity, bytes_of
from moorage.kube.selectors import BadSelector, LabelMatch, node_matches
from moorage.kube.volumes import (
    admits,
    capacity_bytes,
    claim_class,
    claim_name_of,
    is_meant_for,
    is_owned_by,
    reference_key,
    requested_bytes,
    volume_class,
    waits_for_consumer,
)

NO_AFFINITY = "node(s) didn't match PersistentVolume's node affinity"
NO_VOLUME = "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"
NOTHING_TO_BIND = "node(s) didn't find available persistent volumes to bind"
NO_SPACE = "node(s) did not have enough free storage"
NO_ZONE = "node(s) had no available volume zone"
TOO_MANY = "node(s) exceed max volume count"
IN_USE = (
    "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by another pod"
)
_ZONES = {  # what a volume's label may be called on a node that lacks it
    ZONE: ZONE,
    REGION: REGION,
    BETA_ZONE: ZONE,
    BETA_REGION: REGION,
}


@dataclass(frozen=True, slots=True)
class PodClaims:
    """A pod's claims by what they need; `problem` says why no node can help."""

    bound: tuple[PersistentVolumeClaim, ...] = ()
    delayed: tuple[PersistentVolumeClaim, ...] = ()  # by size, smallest first
    exclusive: tuple[str, ...] = ()  # keys of ReadWriteOncePod claims
    offers: dict[str, tuple[PersistentVolume, ...]] = field(default_factory=dict)  # what each delayed one could get
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Fit:
    """What choosing a node means for the pod's claims, or why it cannot be chosen."""

    reasons: tuple[str, ...] = ()
    static: tuple[tuple[PersistentVolumeClaim, PersistentVolume], ...] = ()
    provision: tuple[PersistentVolumeClaim, ...] = ()
    free_share: float = 1.0  # of the tightest capacity that would be used


@dataclass(slots=True)
class _Search:
    """What was found for a node so far."""

    static: list[tuple[PersistentVolumeClaim, PersistentVolume]] = field(default_factory=list)
    provision: list[tuple[PersistentVolumeClaim, StorageClass]] = field(default_factory=list)


def sort_claims(pod: Pod, caches: Caches) -> PodClaims:
    """Split a pod's claims into bound ones and those that wait for a node; say what stands in the way of any node."""
    bound, delayed, exclusive = {}, {}, []
    unbound = False
    for volume in pod.spec.volumes:
        name, is_made = claim_name_of(pod, volume), volume.ephemeral is not None
        if not name:
            continue
        claim = caches.claims.get(f"{pod.namespace}/{name}")
        problem = _problem_of(pod, claim, name, is_made)
        if claim is None or problem:
            return PodClaims(problem=problem)
        if "ReadWriteOncePod" in claim.spec.access_modes:
            exclusive.append(claim.key)
        if claim.spec.volume_name:
            unbound = unbound or BIND_COMPLETED not in claim.annotations
            bound[claim.key] = claim
        elif waits_for_consumer(caches.classes.get(claim_class(claim))):
            delayed[claim.key] = claim
        else:
            unbound = True
    if unbound:
        return PodClaims(problem="pod has unbound immediate PersistentVolumeClaims")
    by_size = sorted(delayed.values(), key=lambda claim: (requested_bytes(claim), claim.name))
    offers = {claim.key: _offers(claim, caches) for claim in by_size}
    return PodClaims(tuple(bound.values()), tuple(by_size), tuple(exclusive), offers)


def _problem_of(pod: Pod, claim: PersistentVolumeClaim | None, name: str, is_made: bool) -> str:
    if claim is None:
        if is_made:
            return f'waiting for ephemeral volume controller to create the persistentvolumeclaim "{name}"'
        return f'persistentvolumeclaim "{name}" not found'
    if claim.status.phase == "Lost":
        volume = claim.spec.volume_name
        return f'persistentvolumeclaim "{name}" bound to non-existent persistentvolume "{volume}"'
    if claim.is_deleting:
        return f'persistentvolumeclaim "{name}" is being deleted'
    if is_made and not is_owned_by(claim, pod):
        return f"PVC {claim.key} was not created for pod {pod.key} (pod is not owner)"
    return ""


def fit(pod: Pod, claims: PodClaims, node: Node, caches: Caches, world: SchedulerState) -> Fit:
    """Whether the pod's claims can be had on a node, and how."""
    if any(world.claim_users.get(key, set()) - {pod.uid} for key in claims.exclusive):
        return Fit((IN_USE,))
    limit = _limit_reached(claims, node, caches, world)
    if limit:
        return Fit((limit,))
    reasons = _bound_reasons(claims.bound, node, caches)
    search = _Search()
    reasons += _find(claims, node, caches, world, search)
    if reasons:
        return Fit(tuple(dict.fromkeys(reasons)))
    share, problem = _capacity(search.provision, node, caches, world)
    if problem:
        return Fit((problem,))
    return Fit((), tuple(search.static), tuple(claim for claim, _ in search.provision), share)


def reaches(volume: PersistentVolume, node: Node) -> bool:
    """Whether a volume's node affinity admits a node."""
    if volume.spec.node_affinity is None:
        return True
    try:
        return node_matches(volume.spec.node_affinity.required, node.labels, node.name)
    except BadSelector:
        return False


def _bound_reasons(bound: Iterable[PersistentVolumeClaim], node: Node, caches: Caches) -> list[str]:
    for claim in bound:
        volume = caches.volumes.get(claim.spec.volume_name)
        if volume is None:
            return [NO_VOLUME]
        if not reaches(volume, node):
            return [NO_AFFINITY]
        if not _is_in_zone(volume, node):
            return [NO_ZONE]
    return []


def _is_in_zone(volume: PersistentVolume, node: Node) -> bool:
    if not any(key in node.labels for key in _ZONES):
        return True
    for key, newer in _ZONES.items():
        zones = volume.labels.get(key)
        if zones is not None and node.labels.get(key, node.labels.get(newer)) not in zones.split("__"):
            return False
    return True


def _find(claims: PodClaims, node: Node, caches: Caches, world: SchedulerState, search: _Search) -> list[str]:
    """Find a free volume for each claim that waits for a node, or see whether its class can provision there."""
    taken: set[str] = set()
    for claim in claims.delayed:
        selected = claim.annotations.get(SELECTED_NODE) or _promised_node(claim, world)
        if selected is not None and selected != node.name and caches.nodes.get(selected) is not None:
            return [NOTHING_TO_BIND]
        volume = _free_volume(claim, claims.offers[claim.key], node, world, taken) if selected is None else None
        if volume is not None:
            taken.add(volume.name)
            search.static.append((claim, volume))
            continue
        found = caches.classes.get(claim_class(claim))
        if found is None or found.provisioner in ("", NO_PROVISIONER) or not admits(found, node.labels):
            return [NOTHING_TO_BIND]
        search.provision.append((claim, found))
    return []


def _promised_node(claim: PersistentVolumeClaim, world: SchedulerState) -> str | None:
    """The node that another pod's placement is about to select for the claim."""
    promise = world.promised_bytes.get(claim.uid)
    return promise[1] if promise is not None else None


def offered_to(volume: PersistentVolume) -> list[str]:
    """Return the claim that a volume is reserved for, or else its class, for an index."""
    if volume.spec.claim_ref is not None:
        return [f"claim {reference_key(volume.spec.claim_ref)}"]
    return [f"class {volume_class(volume)}"]


def class_of_capacity(capacity: CSIStorageCapacity) -> list[str]:
    """Return the class of a capacity object, for an index."""
    return [capacity.storage_class_name]


def _offered(claim: PersistentVolumeClaim, caches: Caches) -> Iterable[PersistentVolume]:
    """Return the volumes that a claim could get: those that name it, and free ones of its class."""
    yield from caches.volumes.by(offered_to, f"claim {claim.key}")
    yield from caches.volumes.by(offered_to, f"class {claim_class(claim)}")


def _offers(claim: PersistentVolumeClaim, caches: Caches) -> tuple[PersistentVolume, ...]:
    """The volumes that suit a claim on some node: those reserved for it first, then by size."""
    size, shelf, modes = requested_bytes(claim), shelf_of_claim(claim), set(claim.spec.access_modes)
    reserved, free = [], []
    for volume in _offered(claim, caches):
        offered = shelf_of_volume(volume)
        if volume.is_deleting or capacity_bytes(volume) < size or offered[1:] != shelf[1:]:
            continue
        if is_meant_for(volume, claim):
            reserved.append(volume)
        elif (
            volume.spec.claim_ref is None
            and volume.status.phase == "Available"
            and offered == shelf
            and modes <= set(volume.spec.access_modes)
            and selects(claim, volume)
        ):
            free.append(volume)
    free.sort(key=lambda volume: (capacity_bytes(volume), volume.name))
    return (*reserved, *free)


def _free_volume(
    claim: PersistentVolumeClaim, offers: Iterable[PersistentVolume], node: Node, world: SchedulerState, taken: set[str]
) -> PersistentVolume | None:
    """The first offer that reaches the node and is not promised to another claim; a claim has one promise."""
    has_promise = claim.uid in world.promised_volumes.values()
    for volume in offers:
        promised = world.promised_volumes.get(volume.name)
        if volume.name in taken or ((has_promise or promised is not None) and promised != claim.uid):
            continue
        if reaches(volume, node):
            return volume
        if is_meant_for(volume, claim):
            return None
    return None


def _capacity(
    provision: Iterable[tuple[PersistentVolumeClaim, StorageClass]], node: Node, caches: Caches, world: SchedulerState
) -> tuple[float, str]:
    """Whether the storage that drivers report holds all these claims together; the tightest free share after that."""
    share = 1.0
    wanted: dict[str, list[int]] = {}
    for claim, found in provision:
        driver = caches.drivers.get(found.provisioner)
        if driver is not None and driver.spec.storage_capacity:
            wanted.setdefault(found.name, []).append(requested_bytes(claim))
    for name, sizes in wanted.items():
        promised = sum(
            size
            for uid, (class_name, where, size) in world.promised_bytes.items()
            if class_name == name and where == node.name and all(claim.uid != uid for claim, _ in provision)
        )
        shares = [
            _share_left(c, sizes, promised) for c in caches.capacities.by(class_of_capacity, name) if _covers(c, node)
        ]
        best = max(shares, default=-1.0)
        if best < 0:
            return 0.0, NO_SPACE
        share = min(share, best)
    return share, ""


def _share_left(capacity: CSIStorageCapacity, sizes: list[int], promised: int) -> float:
    """The share of a capacity that is left with these volumes in it; negative when they do not fit."""
    try:
        total = bytes_of(capacity.capacity) if capacity.capacity is not None else None
        largest = bytes_of(capacity.maximum_volume_size) if capacity.maximum_volume_size is not None else total
    except BadQuantity:
        return -1.0
    if largest is None or max(sizes) > largest:
        return -1.0
    if total is None:
        return 0.0  # only the largest size is known: nothing speaks against it
    left = total - promised - sum(sizes)
    return left / total if left >= 0 and total else (0.0 if left == 0 else -1.0)


def _covers(capacity: CSIStorageCapacity, node: Node) -> bool:
    if capacity.node_topology is None:
        return False
    try:
        return LabelMatch.of(capacity.node_topology).matches(node.labels)
    except BadSelector:
        return False


def _limit_reached(claims: PodClaims, node: Node, caches: Caches, world: SchedulerState) -> str:
    """Whether the pod's volumes would be more than the node's drivers can attach."""
    wanted = _handles([*claims.bound, *claims.delayed], caches)
    if not wanted:
        return ""
    csi_node = caches.csi_nodes.get(node.name)
    installed = {driver.name: driver for driver in csi_node.spec.drivers} if csi_node is not None else {}
    for driver, handles in wanted.items():
        described = caches.drivers.get(driver)
        if driver not in installed:
            if described is not None and described.spec.prevent_pod_scheduling_if_missing:
                return f"{driver} CSI driver is not installed on the node"
            continue
        offered = installed[driver].allocatable
        count = offered.count if offered is not None else None
        if count is None:
            continue
        attached = _attached(driver, node, caches, world)
        if not handles <= attached and len(attached | handles) > count:
            return TOO_MANY
    return ""


def _attached(driver: str, node: Node, caches: Caches, world: SchedulerState) -> set[str]:
    """The handles of a driver's volumes that pods use on a node, or that are attached there."""
    use = world.uses.get(node.name)
    placed = [claim for claim in map(caches.claims.get, use.claims if use is not None else ()) if claim is not None]
    found = _handles(placed, caches).get(driver, set())
    for attachment in caches.attachments_on(node.name):
        volume = caches.volumes.get(attachment.spec.source.persistent_volume_name or "")
        if attachment.spec.attacher == driver and volume is not None and volume.spec.csi is not None:
            found.add(volume.spec.csi.volume_handle)
    return found


def _handles(claims: Iterable[PersistentVolumeClaim], caches: Caches) -> dict[str, set[str]]:
    """What claims need by driver; one without a volume yet counts as one volume of its class's provisioner."""
    found: dict[str, set[str]] = {}
    for claim in claims:
        volume = caches.volumes.get(claim.spec.volume_name) if claim.spec.volume_name else None
        if volume is not None:
            if volume.spec.csi is not None:
                found.setdefault(volume.spec.csi.driver, set()).add(volume.spec.csi.volume_handle)
            continue
        storage_class = caches.classes.get(claim_class(claim))
        if storage_class is not None and storage_class.provisioner not in ("", NO_PROVISIONER):
            driver = MIGRATED_PLUGINS.get(storage_class.provisioner, storage_class.provisioner)
            found.setdefault(driver, set()).add(f"claim {claim.key}")
    return found
