"""The PersistentVolume that a CreateVolume response becomes. Pure.

Owns: the document's fields. It is made in two steps: a skeleton from claim and class before the call, so that the
volume can be saved even when both have been deleted meanwhile, and the rest from the response.
Start reading at: `skeleton`, `document`.
"""

import random
import time
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.kube import names
from moorage.kube.objects import PersistentVolumeClaim, SecretReference, StorageClass
from moorage.kube.objects.meta import as_document, reference_to
from moorage.kube.quantity import bytes_text
from moorage.kube.volumes import volume_mode
from moorage.sidecars.provisioner.parameters import ClaimParameters
from moorage.sidecars.provisioner.topology import node_terms

_REFERENCES = {
    "controller_publish": "controllerPublishSecretRef",
    "node_stage": "nodeStageSecretRef",
    "node_publish": "nodePublishSecretRef",
    "controller_expand": "controllerExpandSecretRef",
    "node_expand": "nodeExpandSecretRef",
}


def identity_of(driver: str, node: str = "") -> str:
    """Who made a volume: different for each start of a provisioner."""
    identity = f"{int(time.time() * 1000)}-{random.randrange(10000)}-{driver}"
    return f"{identity}-{node}" if node else identity


def skeleton(
    name: str,
    claim: PersistentVolumeClaim,
    storage_class: StorageClass,
    read: ClaimParameters,
    *,
    driver: str,
    read_only: bool,
) -> dict[str, Any]:
    """Everything of the volume that claim and class decide."""
    secret = read.secrets.get("provision", SecretReference())
    annotations = {
        names.PROVISIONED_BY: storage_class.provisioner,
        names.DELETION_SECRET_NAME: secret.name,
        names.DELETION_SECRET_NAMESPACE: secret.namespace,
    }
    if "controller_modify" in read.secrets:
        annotations[names.MODIFY_SECRET_NAME] = read.secrets["controller_modify"].name
        annotations[names.MODIFY_SECRET_NAMESPACE] = read.secrets["controller_modify"].namespace
    is_block = claim.spec.volume_mode == "Block"
    csi: dict[str, Any] = {"driver": driver, "volumeHandle": ""}
    if not is_block and read.fs_type:
        csi["fsType"] = read.fs_type
    if read_only:
        csi["readOnly"] = True
    for use, field in _REFERENCES.items():
        if use in read.secrets:
            csi[field] = {"name": read.secrets[use].name, "namespace": read.secrets[use].namespace}
    spec: dict[str, Any] = {
        "accessModes": list(claim.spec.access_modes),
        "claimRef": as_document(reference_to(claim)),
        "persistentVolumeReclaimPolicy": storage_class.reclaim_policy or "Delete",
        "storageClassName": storage_class.name,
        "volumeMode": volume_mode(claim.spec.volume_mode),
        "csi": csi,
    }
    if storage_class.mount_options:
        spec["mountOptions"] = list(storage_class.mount_options)
    if claim.spec.volume_attributes_class_name:
        spec["volumeAttributesClassName"] = claim.spec.volume_attributes_class_name
    metadata = {"name": name, "annotations": annotations, "finalizers": [names.EXTERNAL_DELETION]}
    return {"metadata": metadata, "spec": spec}


def document(skeleton: dict[str, Any], volume: pb.Volume, requested_bytes: int, identity: str) -> dict[str, Any]:
    """The whole volume: the skeleton and what the driver answered."""
    attributes = {**dict(volume.volume_context), names.IDENTITY_ATTRIBUTE: identity}
    csi = {**skeleton["spec"]["csi"], "volumeHandle": volume.volume_id, "volumeAttributes": attributes}
    size_bytes = volume.capacity_bytes or requested_bytes
    spec = {**skeleton["spec"], "csi": csi, "capacity": {"storage": bytes_text(size_bytes)}}
    terms = node_terms(volume.accessible_topology)
    if terms:
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": terms}}
    return {**skeleton, "spec": spec}
