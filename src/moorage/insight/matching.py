"""Why a volume does not fit a claim, field by field; which class a claim means; which sidecars serve a driver.

Owns: comparisons that several causes share. Every function is pure.
Start reading at: `mismatches`.
"""

import msgspec

from moorage.insight.cluster_view import ClusterView, grouped
from moorage.kube.names import lease_name
from moorage.kube.objects import Lease, PersistentVolume, PersistentVolumeClaim, StorageClass
from moorage.kube.quantity import bytes_text
from moorage.kube.selectors import LabelMatch, node_matches
from moorage.kube.volumes import (
    capacity_bytes,
    claim_class,
    is_default,
    reference_key,
    requested_bytes,
    volume_class,
    volume_mode,
)

_ROLES = ("provisioner", "attacher", "resizer", "snapshotter")


def class_of(view: ClusterView, claim: PersistentVolumeClaim) -> StorageClass | None:
    return view.classes.get(claim_class(claim))


def mismatches(claim: PersistentVolumeClaim, volume: PersistentVolume) -> list[str]:
    """Return a phrase for each field in which the volume falls short of the claim; empty if it fits."""
    found = []
    want, have = requested_bytes(claim), capacity_bytes(volume)
    if have < want:
        found.append(f"capacity is {bytes_text(have)}, the claim wants {bytes_text(want)}")
    if volume_class(volume) != claim_class(claim):
        found.append(f"class is {volume_class(volume) or 'empty'!r}, the claim's is {claim_class(claim) or 'empty'!r}")
    missing = [mode for mode in claim.spec.access_modes if mode not in volume.spec.access_modes]
    if missing:
        found.append(f"access modes are {', '.join(volume.spec.access_modes)}, the claim wants {', '.join(missing)}")
    mine, its = volume_mode(claim.spec.volume_mode), volume_mode(volume.spec.volume_mode)
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
    """Return the key of the claim that a volume is bound to or reserved for; empty if it is free."""
    return reference_key(volume.spec.claim_ref) if volume.spec.claim_ref is not None else ""


def default_classes(view: ClusterView) -> list[StorageClass]:
    return [found for found in view.classes.values() if is_default(found)]


def lease_names(driver: str) -> list[str]:
    """Return the names of the leases that the sidecars of a driver hold."""
    return [lease_name(role, driver) for role in _ROLES] if driver else []


def leases_of(view: ClusterView, driver: str, role: str = "provisioner") -> list[Lease]:
    """Return the leases of one sidecar of the driver; none if it runs without election."""
    wanted = lease_name(role, driver)
    by_name = view.once("leases by name", lambda: grouped((lease.name, lease) for lease in view.leases.values()))
    return by_name.get(wanted, [])


def is_leaderless(view: ClusterView, driver: str, role: str) -> bool:
    """Whether the sidecar elects a leader, and no leader has renewed its lease in time."""
    found = leases_of(view, driver, role)
    return bool(found) and not any(view.is_fresh(lease) for lease in found)


def nodes_that_fit(view: ClusterView, volume: PersistentVolume) -> list[str]:
    """Return the names of the nodes that satisfy the volume's node affinity."""
    required = volume.spec.node_affinity.required if volume.spec.node_affinity else None

    def fitting() -> list[str]:
        return [node.name for node in view.nodes.values() if node_matches(required, node.labels, node.name)]

    return view.once(("nodes", msgspec.json.encode(required)), fitting)  # many volumes are on the same node
