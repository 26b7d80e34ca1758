"""What a snapshot is taken of: the claim, its volume and the class.

Owns: resolving and checking them. Every failure is a `SnapshotProblem` with a message for the user.
Start reading at: `volume_of`, `default_class`.
"""

from collections.abc import Iterable
from typing import TypeVar

from moorage.controllers.snapshots.flavour import C, Flavour, S
from moorage.controllers.snapshots.reconciler import SnapshotProblem
from moorage.kube.cache.caches import Caches
from moorage.kube.control.writer import Writer
from moorage.kube.objects.core import Node
from moorage.kube.objects.snapshots import VolumeGroupSnapshotClass, VolumeSnapshot, VolumeSnapshotClass
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.selectors import BadSelector, node_matches
from moorage.kube.volumes import is_meant_for

K = TypeVar("K", bound=VolumeSnapshotClass | VolumeGroupSnapshotClass)


def is_member(snapshot: VolumeSnapshot) -> bool:
    """Whether the snapshot was taken as part of a group."""
    return any(owner.kind == "VolumeGroupSnapshot" for owner in snapshot.metadata.owner_references)


def source_claim(snapshot: VolumeSnapshot) -> list[str]:
    """Return the key of the claim that a snapshot is taken of, for an index."""
    name = snapshot.spec.source.persistent_volume_claim_name
    return [f"{snapshot.namespace}/{name}"] if name else []


def claim_of(caches: Caches, snapshot: VolumeSnapshot, reason: str) -> PersistentVolumeClaim:
    """Return the source claim of a snapshot."""
    name = snapshot.spec.source.persistent_volume_claim_name
    claim = caches.claims.get(f"{snapshot.namespace}/{name}")
    if claim is None:
        raise SnapshotProblem(reason, f"the source claim {snapshot.namespace}/{name} does not exist")
    return claim


def volume_of(claim: PersistentVolumeClaim, volume: PersistentVolume | None, reason: str) -> PersistentVolume:
    """Return the CSI volume that a claim is bound to, checked from both sides."""
    if claim.status.phase != "Bound" or not claim.spec.volume_name:
        raise SnapshotProblem(reason, f"the source claim {claim.key} is not bound yet")
    if volume is None:
        raise SnapshotProblem(reason, f"volume {claim.spec.volume_name} of claim {claim.key} does not exist")
    if not is_meant_for(volume, claim):
        raise SnapshotProblem(reason, f"volume {volume.name} is not bound to claim {claim.key}")
    if volume.spec.csi is None:
        raise SnapshotProblem(reason, f"volume {volume.name} of claim {claim.key} is no CSI volume")
    return volume


async def live_volume(writer: Writer, claim: PersistentVolumeClaim, reason: str) -> PersistentVolume:
    """Read the CSI volume that a claim is bound to from the API server."""
    live = await writer.fresh(PersistentVolume, claim.spec.volume_name) if claim.spec.volume_name else None
    return volume_of(claim, live, reason)


def driver_of(caches: Caches, claim: PersistentVolumeClaim, reason: str) -> str:
    """Return the driver of the volume that a claim is bound to."""
    volume = volume_of(claim, caches.volumes.get(claim.spec.volume_name), reason)
    return volume.spec.csi.driver if volume.spec.csi is not None else ""


def default_class(classes: Iterable[K], driver: str, flavour: Flavour[S, C]) -> K:
    """Return the only default class of a driver."""
    marked = [c for c in classes if c.driver == driver and c.annotations.get(flavour.is_default_class) == "true"]
    if len(marked) != 1:
        found = ", ".join(sorted(c.name for c in marked)) or "none"
        message = f"driver {driver} needs exactly one default {flavour.noun} class; found: {found}"
        raise SnapshotProblem(f"SetDefault{flavour.word}ClassFailed", message)
    return marked[0]


def managing_node(nodes: Iterable[Node], volume: PersistentVolume) -> str:
    """Return the node whose snapshotter handles the volume: the first, by name, that its affinity admits."""
    for node in sorted(nodes, key=lambda node: node.name):
        affinity = volume.spec.node_affinity
        try:
            if affinity is None or node_matches(affinity.required, node.labels, node.name):
                return node.name
        except BadSelector:
            break
    raise SnapshotProblem(
        "SnapshotContentCreationFailed", f"no node can reach volume {volume.name}, so none can snapshot it"
    )
