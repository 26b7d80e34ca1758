"""What a snapshot is taken of: the claim, its volume, the class, and the secret the class names.

Owns: resolving and checking them; every failure is a `Fault` worded for the user.
May not touch: writes, except protecting the source claim.
Start reading at: `volume_of`, `class_of`.
"""

from moorage.controllers.snapshots import names
from moorage.controllers.snapshots.store import SnapshotProblem, SnapshotStore
from moorage.kube.objects.core import PersistentVolume, PersistentVolumeClaim
from moorage.kube.objects.snapshots import (
    VolumeGroupSnapshot,
    VolumeGroupSnapshotClass,
    VolumeSnapshot,
    VolumeSnapshotClass,
)
from moorage.kube.selectors import BadSelector, node_matches


def is_member(snapshot: VolumeSnapshot) -> bool:
    """Whether the snapshot was made as part of a group."""
    return any(owner.kind == "VolumeGroupSnapshot" for owner in snapshot.metadata.owner_references)


def is_preprovisioned(snapshot: VolumeSnapshot) -> bool:
    return bool(snapshot.spec.source.volume_snapshot_content_name)


def claim_of(store: SnapshotStore, snapshot: VolumeSnapshot, reason: str) -> PersistentVolumeClaim:
    name = snapshot.spec.source.persistent_volume_claim_name
    claim = store.claims.get(f"{snapshot.namespace}/{name}")
    if claim is None:
        raise SnapshotProblem(reason, f"the source claim {snapshot.namespace}/{name} does not exist")
    return claim


def volume_of(claim: PersistentVolumeClaim, volume: PersistentVolume | None, reason: str) -> PersistentVolume:
    """The CSI volume that a claim is bound to, checked from both sides."""
    if claim.status.phase != "Bound" or not claim.spec.volume_name:
        raise SnapshotProblem(reason, f"the source claim {claim.key} is not bound yet")
    if volume is None:
        raise SnapshotProblem(reason, f"volume {claim.spec.volume_name} of claim {claim.key} does not exist")
    ref = volume.spec.claim_ref
    if ref is None or (ref.namespace, ref.name) != (claim.namespace, claim.name) or ref.uid not in ("", claim.uid):
        raise SnapshotProblem(reason, f"volume {volume.name} is not bound to claim {claim.key}")
    if volume.spec.csi is None:
        raise SnapshotProblem(reason, f"volume {volume.name} of claim {claim.key} is no CSI volume")
    return volume


def driver_of(store: SnapshotStore, claim: PersistentVolumeClaim, reason: str) -> str:
    volume = volume_of(claim, store.volumes.get(claim.spec.volume_name), reason)
    return volume.spec.csi.driver if volume.spec.csi is not None else ""


def default_class(store: SnapshotStore, driver: str) -> VolumeSnapshotClass:
    """The one default class of a driver."""
    marked = [c for c in store.classes if c.driver == driver and c.annotations.get(names.IS_DEFAULT) == "true"]
    if len(marked) != 1:
        found = ", ".join(sorted(c.name for c in marked)) or "none"
        raise SnapshotProblem(
            "SetDefaultSnapshotClassFailed", f"driver {driver} needs exactly one default snapshot class; found: {found}"
        )
    return marked[0]


def default_group_class(store: SnapshotStore, driver: str) -> VolumeGroupSnapshotClass:
    marked = [
        c for c in store.group_classes if c.driver == driver and c.annotations.get(names.GROUP_IS_DEFAULT) == "true"
    ]
    if len(marked) != 1:
        found = ", ".join(sorted(c.name for c in marked)) or "none"
        raise SnapshotProblem(
            "SetDefaultGroupSnapshotClassFailed",
            f"driver {driver} needs exactly one default group snapshot class; found: {found}",
        )
    return marked[0]


def secrets_for(found: VolumeSnapshotClass, snapshot: VolumeSnapshot, content: str) -> dict[str, str]:
    """The annotations that name the secret of a snapshot's class."""
    words = {
        "volumesnapshotcontent.name": content,
        "volumesnapshot.namespace": snapshot.namespace,
        "volumesnapshot.name": snapshot.name,
    }
    start = "csi.storage.k8s.io/snapshotter-secret-"
    return _secrets(found.parameters, start, names.DELETION_SECRET, words, "CreateSnapshotContentFailed")


def group_secrets_for(found: VolumeGroupSnapshotClass, group: VolumeGroupSnapshot, content: str) -> dict[str, str]:
    words = {
        "volumegroupsnapshotcontent.name": content,
        "volumegroupsnapshot.namespace": group.namespace,
        "volumegroupsnapshot.name": group.name,
    }
    start = "csi.storage.k8s.io/group-snapshotter-secret-"
    return _secrets(found.parameters, start, names.GROUP_DELETION_SECRET, words, "CreateGroupSnapshotContentFailed")


def _secrets(
    parameters: dict[str, str], start: str, annotation: str, words: dict[str, str], reason: str
) -> dict[str, str]:
    try:
        return names.secret_annotations(parameters, start, annotation, words)
    except names.BadSecretTemplate as error:
        raise SnapshotProblem(reason, str(error)) from error


def managing_node(store: SnapshotStore, volume: PersistentVolume) -> str:
    """The node whose snapshotter handles the volume: the first, by name, that its affinity admits."""
    for node in sorted(store.nodes or (), key=lambda node: node.name):
        affinity = volume.spec.node_affinity
        try:
            if affinity is None or node_matches(affinity.required, node.labels, node.name):
                return node.name
        except BadSelector:
            break
    raise SnapshotProblem(
        "SnapshotContentCreationFailed", f"no node can reach volume {volume.name}, so none can snapshot it"
    )
