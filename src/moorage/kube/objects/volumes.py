"""Claims and persistent volumes.

Owns: their typed shapes, as far as Moorage's parts read them.
"""

from typing import Any, ClassVar

from moorage.kube.objects.meta import (
    Condition,
    KubeObject,
    LabelSelector,
    Meta,
    NodeSelector,
    ObjectReference,
    Resource,
    SecretReference,
    Struct,
    TypedReference,
)


class ResourceRequirements(Struct, frozen=True):
    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}


class ClaimSpec(Struct, frozen=True):
    access_modes: list[str] = []
    selector: LabelSelector | None = None
    resources: ResourceRequirements = ResourceRequirements()
    volume_name: str = ""
    storage_class_name: str | None = None
    volume_mode: str | None = None
    data_source: TypedReference | None = None
    data_source_ref: TypedReference | None = None
    volume_attributes_class_name: str | None = None


class ModifyVolumeStatus(Struct, frozen=True):
    target_volume_attributes_class_name: str = ""
    status: str = ""


class ClaimStatus(Struct, frozen=True):
    phase: str = ""
    access_modes: list[str] = []
    capacity: dict[str, str | int | float] = {}
    conditions: list[Condition] = []
    allocated_resources: dict[str, str | int | float] = {}
    allocated_resource_statuses: dict[str, str] = {}
    current_volume_attributes_class_name: str | None = None
    modify_volume_status: ModifyVolumeStatus | None = None


class PersistentVolumeClaim(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", True)
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()


class ClaimTemplate(Struct, frozen=True):
    metadata: Meta = Meta()
    spec: ClaimSpec = ClaimSpec()


class HostPathSource(Struct, frozen=True):
    path: str = ""
    type: str = ""


class CsiVolumeSource(Struct, frozen=True):
    driver: str = ""
    volume_handle: str = ""
    read_only: bool = False
    fs_type: str = ""
    volume_attributes: dict[str, str] = {}
    controller_publish_secret_ref: SecretReference | None = None
    node_stage_secret_ref: SecretReference | None = None
    node_publish_secret_ref: SecretReference | None = None
    controller_expand_secret_ref: SecretReference | None = None
    node_expand_secret_ref: SecretReference | None = None


class VolumeNodeAffinity(Struct, frozen=True):
    required: NodeSelector | None = None


class VolumeSpec(Struct, frozen=True):
    capacity: dict[str, str | int | float] = {}
    access_modes: list[str] = []
    claim_ref: ObjectReference | None = None
    persistent_volume_reclaim_policy: str = ""
    storage_class_name: str = ""
    mount_options: list[str] = []
    volume_mode: str | None = None
    node_affinity: VolumeNodeAffinity | None = None
    volume_attributes_class_name: str | None = None
    csi: CsiVolumeSource | None = None
    host_path: HostPathSource | None = None
    local: HostPathSource | None = None
    nfs: dict[str, Any] | None = None


class VolumeStatus(Struct, frozen=True):
    phase: str = ""
    message: str = ""
    reason: str = ""
    last_phase_transition_time: str | None = None


class PersistentVolume(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource("", "v1", "persistentvolumes", "PersistentVolume", False)
    spec: VolumeSpec = VolumeSpec()
    status: VolumeStatus = VolumeStatus()
