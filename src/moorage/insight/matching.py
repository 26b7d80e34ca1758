"""Why a volume does not fit a claim, field by field; which class a claim means; who serves a driver.

Owns: comparisons that several causes share. Pure.
Start reading at: `mismatches`.
"""

import re

from moorage.insight.cluster_view import ClusterView
from moorage.kube.objects import Lease, PersistentVolume, PersistentVolumeClaim, StorageClass
from moorage.kube.quantity import bytes_of, bytes_text
from moorage.kube.selectors import LabelMatch, node_matches

_DEFAULTS = ("storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class")
_CLASS = "volume.beta.kubernetes.io/storage-class"


def class_name_of(obj: PersistentVolumeClaim | PersistentVolume) -> str | None:
    """The class that counts; the old annotation wins over the field."""
    return obj.annotations.get(_CLASS, obj.spec.storage_class_name)


def default_classes(world: ClusterView) -> list[StorageClass]:
    return [c for c in world.classes.values() if any(c.annotations.get(key) == "true" for key in _DEFAULTS)]


def newest_default(world: ClusterView) -> StorageClass | None:
    """The default class that counts: the newest of those marked, by name where they are equally new."""
    marked = sorted(default_classes(world), key=lambda c: c.name)
    return max(marked, key=lambda c: c.metadata.creation_timestamp or "", default=None)


def class_of(world: ClusterView, claim: PersistentVolumeClaim) -> StorageClass | None:
    return world.classes.get(class_name_of(claim) or "")


def mismatches(claim: PersistentVolumeClaim, volume: PersistentVolume) -> list[str]:
    """Every field in which the volume falls short of the claim; empty when it fits."""
    found = []
    want, have = bytes_of(claim.spec.resources.requests.get("storage")), bytes_of(volume.spec.capacity.get("storage"))
    if have < want:
        found.append(f"capacity is {bytes_text(have)}, the claim wants {bytes_text(want)}")
    if (class_name_of(volume) or "") != (class_name_of(claim) or ""):
        found.append(
            f"class is {class_name_of(volume) or 'empty'!r}, the claim's is {class_name_of(claim) or 'empty'!r}"
        )
    missing = [mode for mode in claim.spec.access_modes if mode not in volume.spec.access_modes]
    if missing:
        found.append(f"access modes are {', '.join(volume.spec.access_modes)}, the claim wants {', '.join(missing)}")
    mine, its = claim.spec.volume_mode or "Filesystem", volume.spec.volume_mode or "Filesystem"
    if mine != its:
        found.append(f"volumeMode is {its}, the claim's is {mine}")
    if claim.spec.selector is not None and not LabelMatch.of(claim.spec.selector).matches(volume.labels):
        found.append("its labels do not match the claim's selector")
    if (claim.spec.volume_attributes_class_name or "") != (volume.spec.volume_attributes_class_name or ""):
        found.append("volumeAttributesClassName differs")
    if volume.is_deleting:
        found.append("it is being deleted")
    return found


def holder_of(volume: PersistentVolume) -> str:
    reference = volume.spec.claim_ref
    return f"{reference.namespace}/{reference.name}" if reference else ""


def is_held_for(volume: PersistentVolume, claim: PersistentVolumeClaim) -> bool:
    """Whether the volume is bound to or reserved for exactly this claim."""
    reference = volume.spec.claim_ref
    if reference is None or (reference.namespace, reference.name) != (claim.namespace, claim.name):
        return False
    return reference.uid in ("", claim.uid)


_ROLES = {
    "provisioner": "",
    "attacher": "external-attacher-leader-",
    "resizer": "external-resizer-",
    "snapshotter": "external-snapshotter-leader-",
}


def lease_name(driver: str, role: str) -> str:
    """The lease under which a sidecar of the driver leads, as the official ones name it."""
    name = re.sub(r"[^A-Za-z0-9-]", "-", f"{_ROLES[role]}{driver}")
    return name + "X" if name.endswith("-") else name


def lease_names(driver: str) -> list[str]:
    return [lease_name(driver, role) for role in _ROLES] if driver else []


def leases_of(world: ClusterView, driver: str, role: str = "provisioner") -> list[Lease]:
    """The leases of one sidecar of the driver; none where it runs without election."""
    wanted = lease_name(driver, role)
    return [lease for lease in world.leases.values() if lease.name == wanted]


def is_leaderless(world: ClusterView, driver: str, role: str) -> bool:
    """Whether the sidecar elects a leader and none has renewed its lease in time."""
    found = leases_of(world, driver, role)
    return bool(found) and not any(world.is_fresh(lease) for lease in found)


def nodes_that_fit(world: ClusterView, volume: PersistentVolume) -> list[str]:
    """Nodes that satisfy the volume's node affinity."""
    required = volume.spec.node_affinity.required if volume.spec.node_affinity else None
    return [node.name for node in world.nodes.values() if node_matches(required, node.labels, node.name)]
