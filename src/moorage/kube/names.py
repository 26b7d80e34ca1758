"""Every annotation, label, finalizer and well-known name that Moorage shares with Kubernetes and its sidecars.

Owns: the spelling. Constants, and the names that are computed from other names.
Start reading at: the first section.
"""

import re
from collections.abc import Mapping
from typing import Final

# Annotations of claims and volumes.
BIND_COMPLETED: Final = "pv.kubernetes.io/bind-completed"
BOUND_BY_CONTROLLER: Final = "pv.kubernetes.io/bound-by-controller"
PROVISIONED_BY: Final = "pv.kubernetes.io/provisioned-by"
MIGRATED_TO: Final = "pv.kubernetes.io/migrated-to"
STORAGE_PROVISIONER: Final = "volume.kubernetes.io/storage-provisioner"
BETA_STORAGE_PROVISIONER: Final = "volume.beta.kubernetes.io/storage-provisioner"
BETA_STORAGE_CLASS: Final = "volume.beta.kubernetes.io/storage-class"
SELECTED_NODE: Final = "volume.kubernetes.io/selected-node"
ALPHA_SELECTED_NODE: Final = "volume.alpha.kubernetes.io/selected-node"
STORAGE_RESIZER: Final = "volume.kubernetes.io/storage-resizer"
PRE_RESIZE_CAPACITY: Final = "volume.alpha.kubernetes.io/pre-resize-capacity"
NODE_EXPANSION_NOT_REQUIRED: Final = "volume.kubernetes.io/node-expansion-not-required"
DELETION_SECRET_NAME: Final = "volume.kubernetes.io/provisioner-deletion-secret-name"
DELETION_SECRET_NAMESPACE: Final = "volume.kubernetes.io/provisioner-deletion-secret-namespace"
MODIFY_SECRET_NAME: Final = "volume.kubernetes.io/controller-modify-secret-name"
MODIFY_SECRET_NAMESPACE: Final = "volume.kubernetes.io/controller-modify-secret-namespace"

# Annotations of classes.
DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
BETA_DEFAULT_CLASS: Final = "storageclass.beta.kubernetes.io/is-default-class"
DEFAULT_SNAPSHOT_CLASS: Final = "snapshot.storage.kubernetes.io/is-default-class"
DEFAULT_GROUP_SNAPSHOT_CLASS: Final = "groupsnapshot.storage.kubernetes.io/is-default-class"

# Annotations, labels and taints of nodes, attachments and pods.
MANAGED_ATTACH: Final = "volumes.kubernetes.io/controller-managed-attach-detach"
DRIVER_EXITED: Final = "DriverExited"  # the reason of an event about a node, written by `moorage up`
NOT_READY: Final = "node.kubernetes.io/not-ready"
UNREACHABLE: Final = "node.kubernetes.io/unreachable"
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
UNSCHEDULABLE: Final = "node.kubernetes.io/unschedulable"
HOSTNAME: Final = "kubernetes.io/hostname"
ZONE: Final = "topology.kubernetes.io/zone"
REGION: Final = "topology.kubernetes.io/region"
BETA_ZONE: Final = "failure-domain.beta.kubernetes.io/zone"
BETA_REGION: Final = "failure-domain.beta.kubernetes.io/region"
ATTACHER_NODE_ID: Final = "csi.alpha.kubernetes.io/node-id"
CSI_NODE_IDS: Final = "csi.volume.kubernetes.io/nodeid"
CSI_NODE_MIGRATED: Final = "storage.alpha.kubernetes.io/migrated-plugins"
MIRROR_POD: Final = "kubernetes.io/config.mirror"
SERVING_CERTIFICATE: Final = "moorage.dev/serving-certificate"  # of a Node: its agent's, DER in base64

# Finalizers.
CLAIM_PROTECTION: Final = "kubernetes.io/pvc-protection"
VOLUME_PROTECTION: Final = "kubernetes.io/pv-protection"
CLASS_PROTECTION: Final = "kubernetes.io/vac-protection"
IN_TREE_DELETION: Final = "kubernetes.io/pv-controller"
EXTERNAL_DELETION: Final = "external-provisioner.volume.kubernetes.io/finalizer"
CLONE_PROTECTION: Final = "provisioner.storage.kubernetes.io/cloning-protection"
RESTORE_PROTECTION: Final = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection"
SNAPSHOT_AS_SOURCE: Final = "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection"
SNAPSHOT_BOUND: Final = "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection"
SNAPSHOT_IN_GROUP: Final = "snapshot.storage.kubernetes.io/volumesnapshot-in-group-protection"
SNAPSHOT_CONTENT_BOUND: Final = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"
CLAIM_AS_SOURCE: Final = "snapshot.storage.kubernetes.io/pvc-as-source-protection"
GROUP_BOUND: Final = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-bound-protection"
GROUP_CONTENT_BOUND: Final = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshotcontent-bound-protection"

# Annotations and labels of snapshots, and of the group snapshots beside them.
SNAPSHOT_GROUP: Final = "snapshot.storage.k8s.io"
ALLOW_MODE_CHANGE: Final = "snapshot.storage.kubernetes.io/allow-volume-mode-change"
SNAPSHOT_MANAGED_BY: Final = "snapshot.storage.kubernetes.io/managed-by"
SNAPSHOT_BEING_CREATED: Final = "snapshot.storage.kubernetes.io/volumesnapshot-being-created"
SNAPSHOT_BEING_DELETED: Final = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted"
SNAPSHOT_SECRET_NAME: Final = "snapshot.storage.kubernetes.io/deletion-secret-name"
SNAPSHOT_SECRET_NAMESPACE: Final = "snapshot.storage.kubernetes.io/deletion-secret-namespace"
GROUP_BEING_CREATED: Final = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-being-created"
GROUP_BEING_DELETED: Final = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-being-deleted"
GROUP_SECRET_NAME: Final = "groupsnapshot.storage.kubernetes.io/deletion-secret-name"
GROUP_SECRET_NAMESPACE: Final = "groupsnapshot.storage.kubernetes.io/deletion-secret-namespace"
GROUP_HANDLE: Final = "groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle"

# Parameters and attributes that belong to the sidecars, not to the driver.
RESERVED_PREFIX: Final = "csi.storage.k8s.io/"
CAPACITY_DRIVER: Final = "csi.storage.k8s.io/drivername"
CAPACITY_MANAGED_BY: Final = "csi.storage.k8s.io/managed-by"
IDENTITY_ATTRIBUTE: Final = "storage.kubernetes.io/csiProvisionerIdentity"

# Plugins and provisioners.
CSI_PLUGIN: Final = "kubernetes.io/csi"
IN_TREE_PREFIX: Final = "kubernetes.io/"
NO_PROVISIONER: Final = "kubernetes.io/no-provisioner"
MIGRATED_PLUGINS: Final[Mapping[str, str]] = {  # in-tree plugins that CSI drivers replaced
    "kubernetes.io/aws-ebs": "ebs.csi.aws.com",
    "kubernetes.io/azure-disk": "disk.csi.azure.com",
    "kubernetes.io/azure-file": "file.csi.azure.com",
    "kubernetes.io/cinder": "cinder.csi.openstack.org",
    "kubernetes.io/gce-pd": "pd.csi.storage.gke.io",
    "kubernetes.io/portworx-volume": "pxd.portworx.com",
    "kubernetes.io/vsphere-volume": "csi.vsphere.vmware.com",
}

_LEASES: Final[Mapping[str, str]] = {  # the official names, so that an official and a Moorage instance never both lead
    "provisioner": "{driver}",
    "attacher": "external-attacher-leader-{driver}",
    "resizer": "external-resizer-{driver}",
    "snapshotter": "external-snapshotter-leader-{driver}",
    "health": "external-health-monitor-leader-{driver}",
    "capacity": "external-capacity-{driver}",  # officially a part of the provisioner; only if it runs on its own
}


def lease_name(role: str, driver: str) -> str:
    """Return the name of the Lease that the leader of a sidecar role for `driver` holds; empty if the role has none.

    Drivers `a.b` and `a-b` share a lease, as they always have.
    """
    return sanitised(_LEASES[role].format(driver=sanitised(driver))) if role in _LEASES else ""


def sanitised(name: str) -> str:
    """Return a name as the official sidecars put it into leases and finalizers."""
    name = re.sub(r"[^A-Za-z0-9-]", "-", name)
    return name + "X" if name.endswith("-") else name
