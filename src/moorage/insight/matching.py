"""Why a volume does not fit a claim, field by field; which class a claim means; who serves a driver.

Owns: comparisons that several causes share. Pure.
Start reading at: `mismatches`.
"""

from moorage.insight.world import World
from moorage.kube.objects import Lease, PersistentVolume, PersistentVolumeClaim, StorageClass
from moorage.kube.quantity import bytes_of, bytes_text
from moorage.kube.selectors import LabelMatch, node_matches

_DEFAULTS = ("storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class")
_CLASS = "volume.beta.kubernetes.io/storage-class"


def class_name_of(obj: PersistentVolumeClaim | PersistentVolume) -> str | None:
    """The class that counts; the old annotation wins over the field."""
    return obj.annotations.get(_CLASS, obj.spec.storage_class_name)


def default_classes(world: World) -> list[StorageClass]:
    return [c for c in world.classes.values() if any(c.annotations.get(key) == "true" for key in _DEFAULTS)]


def class_of(world: World, claim: PersistentVolumeClaim) -> StorageClass | None:
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


def leases_of(world: World, driver: str, *prefixes: str) -> list[Lease]:
    """The leases under which a sidecar of the driver would lead."""
    sanitised = "".join(c if c.isalnum() or c == "-" else "-" for c in driver)
    wanted = {f"{prefix}{sanitised}" for prefix in (prefixes or ("",))}
    return [lease for lease in world.leases.values() if lease.name in wanted]


def nodes_that_fit(world: World, volume: PersistentVolume) -> list[str]:
    """Nodes that satisfy the volume's node affinity."""
    required = volume.spec.node_affinity.required if volume.spec.node_affinity else None
    return [node.name for node in world.nodes.values() if node_matches(required, node.labels, node.name)]
