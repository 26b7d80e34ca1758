"""Words that the volume controllers share: annotations, finalizers, classes, and which claims a pod speaks of.

Owns: constants of the API and pure readings of claims, volumes and pods.
May not touch: clients, informers. Every function takes values and returns values.
Start reading at: `claim_class`, `claims_of`.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from moorage.kube.objects import (
    ObjectReference,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    PodVolume,
    StorageClass,
)
from moorage.kube.quantity import BadQuantity, bytes_of

BIND_COMPLETED: Final = "pv.kubernetes.io/bind-completed"
BOUND_BY_CONTROLLER: Final = "pv.kubernetes.io/bound-by-controller"
PROVISIONED_BY: Final = "pv.kubernetes.io/provisioned-by"
MIGRATED_TO: Final = "pv.kubernetes.io/migrated-to"
STORAGE_PROVISIONER: Final = "volume.kubernetes.io/storage-provisioner"
BETA_STORAGE_PROVISIONER: Final = "volume.beta.kubernetes.io/storage-provisioner"
SELECTED_NODE: Final = "volume.kubernetes.io/selected-node"
BETA_STORAGE_CLASS: Final = "volume.beta.kubernetes.io/storage-class"
DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
BETA_DEFAULT_CLASS: Final = "storageclass.beta.kubernetes.io/is-default-class"
PRE_RESIZE_CAPACITY: Final = "volume.alpha.kubernetes.io/pre-resize-capacity"
STORAGE_RESIZER: Final = "volume.kubernetes.io/storage-resizer"

CLAIM_PROTECTION: Final = "kubernetes.io/pvc-protection"
VOLUME_PROTECTION: Final = "kubernetes.io/pv-protection"
CLASS_PROTECTION: Final = "kubernetes.io/vac-protection"
IN_TREE_DELETION: Final = "kubernetes.io/pv-controller"
EXTERNAL_DELETION: Final = "external-provisioner.volume.kubernetes.io/finalizer"

PODS_BY_CLAIM: Final = "pods-by-claim"  # the name of the index that `claims_of` makes over pods

NO_PROVISIONER: Final = "kubernetes.io/no-provisioner"
IN_TREE_PREFIX: Final = "kubernetes.io/"

# In-tree plugins whose work CSI drivers have taken over; the in-tree name means the driver.
MIGRATED_PLUGINS: Final[Mapping[str, str]] = {
    "kubernetes.io/aws-ebs": "ebs.csi.aws.com",
    "kubernetes.io/azure-disk": "disk.csi.azure.com",
    "kubernetes.io/azure-file": "file.csi.azure.com",
    "kubernetes.io/cinder": "cinder.csi.openstack.org",
    "kubernetes.io/gce-pd": "pd.csi.storage.gke.io",
    "kubernetes.io/portworx-volume": "pxd.portworx.com",
    "kubernetes.io/vsphere-volume": "csi.vsphere.vmware.com",
}


def claim_class(claim: PersistentVolumeClaim) -> str:
    """The class a claim asks for; the old annotation wins over the field."""
    return claim.annotations.get(BETA_STORAGE_CLASS, claim.spec.storage_class_name or "")


def has_class(claim: PersistentVolumeClaim) -> bool:
    """Whether the claim says anything about its class; the empty class counts as said."""
    return BETA_STORAGE_CLASS in claim.annotations or claim.spec.storage_class_name is not None


def volume_class(volume: PersistentVolume) -> str:
    return volume.annotations.get(BETA_STORAGE_CLASS, volume.spec.storage_class_name)


def is_default(storage_class: StorageClass) -> bool:
    notes = storage_class.annotations
    return "true" in (notes.get(DEFAULT_CLASS), notes.get(BETA_DEFAULT_CLASS))


def default_class(classes: Iterable[StorageClass]) -> StorageClass | None:
    """The default class: the newest of those marked, by name where they are equally new."""
    marked = sorted((c for c in classes if is_default(c)), key=lambda c: c.name)
    return max(marked, key=lambda c: c.metadata.creation_timestamp or "", default=None)


def waits_for_consumer(storage_class: StorageClass | None) -> bool:
    return storage_class is not None and storage_class.volume_binding_mode == "WaitForFirstConsumer"


def storage_bytes(quantities: Mapping[str, str | int | float]) -> int:
    """The storage in a resource list; an absent or unreadable one is 0."""
    try:
        return bytes_of(quantities.get("storage"))
    except BadQuantity:
        return 0


def requested_bytes(claim: PersistentVolumeClaim) -> int:
    return storage_bytes(claim.spec.resources.requests)


def capacity_bytes(volume: PersistentVolume) -> int:
    return storage_bytes(volume.spec.capacity)


def volume_mode(mode: str | None) -> str:
    return mode or "Filesystem"


def reference_key(reference: ObjectReference) -> str:
    """The key of the claim that a volume's claimRef names."""
    return f"{reference.namespace}/{reference.name}"


def is_meant_for(volume: PersistentVolume, claim: PersistentVolumeClaim) -> bool:
    """Whether the volume is bound to this claim or reserved for it; without a uid, the name decides."""
    reference = volume.spec.claim_ref
    if reference is None or reference_key(reference) != claim.key:
        return False
    return not reference.uid or reference.uid == claim.uid


def ephemeral_claim_name(pod: Pod, volume: PodVolume) -> str:
    """The name of the claim that is made for a pod's generic ephemeral volume."""
    return f"{pod.name}-{volume.name}"


def is_owned_by(claim: PersistentVolumeClaim, pod: Pod) -> bool:
    """Whether the claim was made for exactly this pod."""
    return any(owner.controller and owner.uid == pod.uid for owner in claim.metadata.owner_references)


def claims_of(pod: Pod) -> list[str]:
    """The keys of all claims that a pod names or that are made for it."""
    keys = []
    for volume in pod.spec.volumes:
        if volume.persistent_volume_claim is not None:
            keys.append(f"{pod.namespace}/{volume.persistent_volume_claim.claim_name}")
        elif volume.ephemeral is not None:
            keys.append(f"{pod.namespace}/{ephemeral_claim_name(pod, volume)}")
    return keys


def refers_to(pod: Pod, claim: PersistentVolumeClaim) -> bool:
    """Whether the pod names the claim, or the claim is the one made for a volume of this very pod."""
    if pod.namespace != claim.namespace:
        return False
    for volume in pod.spec.volumes:
        named = volume.persistent_volume_claim
        if named is not None and named.claim_name == claim.name:
            return True
        if volume.ephemeral is not None and ephemeral_claim_name(pod, volume) == claim.name and is_owned_by(claim, pod):
            return True
    return False
