"""Rules about claims, classes, volumes and pods that every part of the storage stack must agree on.

Owns: the unique name of a CSI volume, the name of its VolumeAttachment, and pure readings of storage objects.
Start reading at: `claim_class`, `claims_of`, `attachment_name`.

Every function takes values and returns values.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NewType

from moorage.kube.names import (
    ALPHA_SELECTED_NODE,
    BETA_DEFAULT_CLASS,
    BETA_STORAGE_CLASS,
    BETA_STORAGE_PROVISIONER,
    CSI_PLUGIN,
    DEFAULT_CLASS,
    SELECTED_NODE,
    STORAGE_PROVISIONER,
)
from moorage.kube.objects.meta import ObjectReference
from moorage.kube.objects.pods import Pod, PodVolume
from moorage.kube.objects.storage import CSIDriver, StorageClass, VolumeAttachment
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.quantity import BadQuantity, bytes_of

VolumeName = NewType("VolumeName", str)  # unique in the cluster: kubernetes.io/csi/<driver>^<handle>
NodeName = NewType("NodeName", str)

_CSI_PREFIX = f"{CSI_PLUGIN}/"


def csi_volume_name(driver: str, handle: str) -> VolumeName:
    """Return the unique name of a CSI volume, as a node's status lists it."""
    return VolumeName(f"{_CSI_PREFIX}{driver}^{handle}")


def driver_and_handle(name: str) -> tuple[str, str] | None:
    """Return the driver and the handle in a unique name. Returns None for a volume of another plugin.

    A driver's name cannot contain `^`, so the first one separates; the handle may contain more.
    """
    driver, caret, handle = name.removeprefix(_CSI_PREFIX).partition("^")
    if not name.startswith(_CSI_PREFIX) or not caret or not driver or not handle:
        return None
    return driver, handle


@lru_cache(maxsize=8192)
def attachment_name(driver: str, handle: str, node: str) -> str:
    """Return the name of the VolumeAttachment of a CSI volume on a node, as Kubernetes computes it."""
    return "csi-" + hashlib.sha256(f"{handle}{driver}{node}".encode()).hexdigest()


def ephemeral_handle(pod_uid: str, pod_volume: str) -> str:
    """Return the volume handle of an inline CSI volume."""
    return "csi-" + hashlib.sha256(f"{pod_uid}{pod_volume}".encode()).hexdigest()


def is_of_driver(volume: PersistentVolume, driver: str) -> bool:
    """Whether the volume is a CSI volume of this driver."""
    return volume.spec.csi is not None and volume.spec.csi.driver == driver


def requires_attach(driver: CSIDriver | None) -> bool:
    """Whether volumes of a driver must be attached. True if the driver has no CSIDriver object."""
    return driver is None or driver.spec.attach_required is not False


def claim_class(claim: PersistentVolumeClaim) -> str:
    """Return the class that a claim asks for. The old annotation wins over the field, even if it is empty."""
    return claim.annotations.get(BETA_STORAGE_CLASS, claim.spec.storage_class_name or "")


def has_class(claim: PersistentVolumeClaim) -> bool:
    """Whether the claim names a class at all; the empty name counts."""
    return BETA_STORAGE_CLASS in claim.annotations or claim.spec.storage_class_name is not None


def volume_class(volume: PersistentVolume) -> str:
    return volume.annotations.get(BETA_STORAGE_CLASS, volume.spec.storage_class_name)


def is_default(storage_class: StorageClass) -> bool:
    notes = storage_class.annotations
    return "true" in (notes.get(DEFAULT_CLASS), notes.get(BETA_DEFAULT_CLASS))


def default_class(classes: Iterable[StorageClass]) -> StorageClass | None:
    """Return the default class: of those marked, the newest; of equally new ones, the first by name."""
    marked = sorted((c for c in classes if is_default(c)), key=lambda c: c.name)
    return max(marked, key=lambda c: c.metadata.creation_timestamp or "", default=None)


def waits_for_consumer(storage_class: StorageClass | None) -> bool:
    return storage_class is not None and storage_class.volume_binding_mode == "WaitForFirstConsumer"


def provisioner_of(claim: PersistentVolumeClaim) -> str:
    """Return the driver that is asked for the claim's volume, empty if none is asked yet."""
    return claim.annotations.get(STORAGE_PROVISIONER) or claim.annotations.get(BETA_STORAGE_PROVISIONER, "")


def selected_node_of(claim: PersistentVolumeClaim) -> str:
    """Return the node that the scheduler chose for the claim's first pod, empty before that."""
    return claim.annotations.get(SELECTED_NODE) or claim.annotations.get(ALPHA_SELECTED_NODE, "")


def admits(storage_class: StorageClass, node_labels: Mapping[str, str]) -> bool:
    """Whether the class's allowedTopologies admit a node: any term, all of its expressions. Empty terms admit none."""
    if not storage_class.allowed_topologies:
        return True
    return any(
        term.match_label_expressions
        and all(node_labels.get(wanted.key) in wanted.values for wanted in term.match_label_expressions)
        for term in storage_class.allowed_topologies
    )


def storage_bytes(quantities: Mapping[str, str | int | float]) -> int:
    """Return the storage in a resource list. Returns 0 if it is absent or unreadable."""
    return readable_bytes(quantities.get("storage"))


def readable_bytes(quantity: str | int | float | None) -> int:
    """Return the size that a quantity stands for. Returns 0 if it is absent or unreadable."""
    try:
        return bytes_of(quantity)
    except BadQuantity:
        return 0


def requested_bytes(claim: PersistentVolumeClaim) -> int:
    """Return the size that a claim asks for, 0 if it is unreadable: it then asks for no more than it has."""
    return storage_bytes(claim.spec.resources.requests)


def required_bytes(claim: PersistentVolumeClaim) -> int:
    """Return the size of the volume to create. Raises BadQuantity if it is unreadable: no size can be guessed."""
    return bytes_of(claim.spec.resources.requests.get("storage"))


def capacity_bytes(volume: PersistentVolume) -> int:
    return storage_bytes(volume.spec.capacity)


def volume_mode(mode: str | None) -> str:
    return mode or "Filesystem"


def reference_key(reference: ObjectReference) -> str:
    """Return the key of the claim that a volume's claimRef names."""
    return f"{reference.namespace}/{reference.name}"


def is_meant_for(volume: PersistentVolume, claim: PersistentVolumeClaim) -> bool:
    """Whether the volume is bound to this claim or reserved for it. Without a uid, the name decides."""
    reference = volume.spec.claim_ref
    if reference is None or reference_key(reference) != claim.key:
        return False
    return not reference.uid or reference.uid == claim.uid


def ephemeral_claim_name(pod: Pod, volume: PodVolume) -> str:
    """Return the name of the claim that is created for a pod's generic ephemeral volume."""
    return f"{pod.name}-{volume.name}"


def is_owned_by(claim: PersistentVolumeClaim, pod: Pod) -> bool:
    """Whether the claim was created for exactly this pod."""
    return any(owner.controller and owner.uid == pod.uid for owner in claim.metadata.owner_references)


def claim_name_of(pod: Pod, volume: PodVolume) -> str:
    """Return the name of the claim behind a pod's volume, empty if it has none."""
    if volume.persistent_volume_claim is not None:
        return volume.persistent_volume_claim.claim_name
    return ephemeral_claim_name(pod, volume) if volume.ephemeral is not None else ""


def claims_of(pod: Pod) -> list[str]:
    """Return the keys of all claims that a pod names or that are created for it."""
    names = (claim_name_of(pod, volume) for volume in pod.spec.volumes)
    return [f"{pod.namespace}/{name}" for name in names if name]


def refers_to(pod: Pod, claim: PersistentVolumeClaim) -> bool:
    """Whether the pod names the claim, or the claim was created for a volume of exactly this pod."""
    return pod.namespace == claim.namespace and any(
        claim_name_of(pod, volume) == claim.name and (volume.ephemeral is None or is_owned_by(claim, pod))
        for volume in pod.spec.volumes
    )


def node_of(pod: Pod) -> list[str]:
    """Return the node of a pod, for an index: a list with one name, or none before it is scheduled."""
    return [pod.spec.node_name] if pod.spec.node_name else []


def claim_uid_of(volume: PersistentVolume) -> list[str]:
    """Return the uid of the claim that a volume is bound to, for an index."""
    reference = volume.spec.claim_ref
    return [reference.uid] if reference is not None and reference.uid else []


def handle_of(volume: PersistentVolume) -> list[str]:
    """Return `driver^handle` of a CSI volume, for an index."""
    csi = volume.spec.csi
    return [f"{csi.driver}^{csi.volume_handle}"] if csi is not None else []


def volume_named_by(claim: PersistentVolumeClaim) -> list[str]:
    """Return the volume that a claim names, for an index."""
    return [claim.spec.volume_name] if claim.spec.volume_name else []


def volume_attached_by(attachment: VolumeAttachment) -> list[str]:
    """Return the PersistentVolume of an attachment, for an index."""
    name = attachment.spec.source.persistent_volume_name
    return [name] if name else []


def node_attached_to(attachment: VolumeAttachment) -> list[str]:
    """Return the node of an attachment, for an index."""
    return [attachment.spec.node_name]


def uid_of(claim: PersistentVolumeClaim) -> list[str]:
    """Return the claim's uid, for an index."""
    return [claim.uid]
