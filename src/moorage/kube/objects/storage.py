"""The storage.k8s.io kinds: classes, attachments, drivers, node drivers, capacities.

Owns: their typed shapes, as far as Moorage's parts read them.
"""

from typing import Any, ClassVar

import msgspec

from moorage.kube.objects.meta import KubeObject, LabelSelector, Resource, Struct
from moorage.kube.objects.volumes import VolumeSpec

_GROUP = "storage.k8s.io"


class TopologyRequirement(Struct, frozen=True):
    key: str = ""
    values: list[str] = []


class TopologyTerm(Struct, frozen=True):
    match_label_expressions: list[TopologyRequirement] = []


class StorageClass(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(_GROUP, "v1", "storageclasses", "StorageClass", False)
    provisioner: str = ""
    parameters: dict[str, str] = {}
    reclaim_policy: str | None = None
    mount_options: list[str] = []
    allow_volume_expansion: bool | None = None
    volume_binding_mode: str | None = None
    allowed_topologies: list[TopologyTerm] = []


class AttachmentSource(Struct, frozen=True):
    persistent_volume_name: str | None = None
    inline_volume_spec: VolumeSpec | None = None


class AttachmentSpec(Struct, frozen=True):
    attacher: str = ""
    node_name: str = ""
    source: AttachmentSource = AttachmentSource()


class VolumeError(Struct, frozen=True):
    time: str | None = None
    message: str = ""
    error_code: int | None = None


class AttachmentStatus(Struct, frozen=True):
    attached: bool = False
    attachment_metadata: dict[str, str] = {}
    attach_error: VolumeError | None = None
    detach_error: VolumeError | None = None


class VolumeAttachment(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(_GROUP, "v1", "volumeattachments", "VolumeAttachment", False)
    spec: AttachmentSpec = AttachmentSpec()
    status: AttachmentStatus = AttachmentStatus()


class TokenRequest(Struct, frozen=True):
    audience: str = ""
    expiration_seconds: int | None = None


class CsiDriverSpec(Struct, frozen=True):
    """Fields are None when absent; the defaults of Kubernetes are applied by who reads them."""

    attach_required: bool | None = None
    pod_info_on_mount: bool | None = None
    volume_lifecycle_modes: list[str] = []
    storage_capacity: bool | None = None
    fs_group_policy: str | None = None
    token_requests: list[TokenRequest] = []
    requires_republish: bool | None = None
    se_linux_mount: bool | None = None
    node_allocatable_update_period_seconds: int | None = None
    service_account_token_in_secrets: bool | None = None
    prevent_pod_scheduling_if_missing: bool | None = None


class CSIDriver(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(_GROUP, "v1", "csidrivers", "CSIDriver", False)
    spec: CsiDriverSpec = CsiDriverSpec()


class NodeDriverAllocatable(Struct, frozen=True):
    count: int | None = None


class NodeDriver(Struct, frozen=True):
    name: str = ""
    node_id: str = msgspec.field(default="", name="nodeID")
    topology_keys: list[str] = []
    allocatable: NodeDriverAllocatable | None = None


class CsiNodeSpec(Struct, frozen=True):
    drivers: list[NodeDriver] = []


class CSINode(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(_GROUP, "v1", "csinodes", "CSINode", False)
    spec: CsiNodeSpec = CsiNodeSpec()


class CSIStorageCapacity(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(_GROUP, "v1", "csistoragecapacities", "CSIStorageCapacity", True)
    node_topology: LabelSelector | None = None
    storage_class_name: str = ""
    capacity: str | int | None = None
    maximum_volume_size: str | int | None = None


class VolumeAttributesClass(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(_GROUP, "v1", "volumeattributesclasses", "VolumeAttributesClass", False)
    driver_name: str = ""
    parameters: dict[str, str] = {}


class ReferenceGrant(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(
        "gateway.networking.k8s.io", "v1beta1", "referencegrants", "ReferenceGrant", True
    )
    spec: dict[str, Any] = {}
