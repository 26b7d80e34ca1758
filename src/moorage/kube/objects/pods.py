"""Pods: their containers, volumes, placement and status.

Owns: their typed shapes, as far as Moorage's parts read them.
"""

from typing import Any, ClassVar

import msgspec

from moorage.kube.objects.meta import (
    Condition,
    KubeObject,
    LocalReference,
    NodeSelector,
    NodeSelectorTerm,
    Resource,
    Struct,
)
from moorage.kube.objects.volumes import ClaimTemplate, HostPathSource, ResourceRequirements


class KeyToPath(Struct, frozen=True):
    key: str = ""
    path: str = ""
    mode: int | None = None


class ClaimVolumeSource(Struct, frozen=True):
    claim_name: str = ""
    read_only: bool = False


class EphemeralVolumeSource(Struct, frozen=True):
    volume_claim_template: ClaimTemplate | None = None


class CsiInlineSource(Struct, frozen=True):
    driver: str = ""
    read_only: bool = False
    fs_type: str | None = None
    volume_attributes: dict[str, str] = {}
    node_publish_secret_ref: LocalReference | None = None


class SecretVolumeSource(Struct, frozen=True):
    secret_name: str = ""
    items: list[KeyToPath] = []
    default_mode: int | None = None
    optional: bool = False


class ConfigMapVolumeSource(Struct, frozen=True):
    name: str = ""
    items: list[KeyToPath] = []
    default_mode: int | None = None
    optional: bool = False


class EmptyDirSource(Struct, frozen=True):
    medium: str = ""
    size_limit: str | int | None = None


class PodVolume(Struct, frozen=True):
    """One of a pod's volumes; exactly one source is set."""

    name: str = ""
    persistent_volume_claim: ClaimVolumeSource | None = None
    ephemeral: EphemeralVolumeSource | None = None
    csi: CsiInlineSource | None = None
    secret: SecretVolumeSource | None = None
    config_map: ConfigMapVolumeSource | None = None
    empty_dir: EmptyDirSource | None = None
    host_path: HostPathSource | None = None
    projected: dict[str, Any] | None = None
    downward_api: dict[str, Any] | None = msgspec.field(default=None, name="downwardAPI")


class VolumeMount(Struct, frozen=True):
    name: str = ""
    mount_path: str = ""
    read_only: bool = False
    recursive_read_only: str | None = None
    sub_path: str = ""
    sub_path_expr: str = ""
    mount_propagation: str | None = None


class VolumeDevice(Struct, frozen=True):
    name: str = ""
    device_path: str = ""


class Container(Struct, frozen=True):
    name: str = ""
    image: str = ""
    command: list[str] = []
    args: list[str] = []
    working_dir: str = ""
    env: list[dict[str, Any]] = []
    env_from: list[dict[str, Any]] = []
    ports: list[dict[str, Any]] = []
    resources: ResourceRequirements = ResourceRequirements()
    volume_mounts: list[VolumeMount] = []
    volume_devices: list[VolumeDevice] = []
    security_context: dict[str, Any] | None = None
    restart_policy: str | None = None
    restart_policy_rules: list[dict[str, Any]] = []
    liveness_probe: dict[str, Any] | None = None
    readiness_probe: dict[str, Any] | None = None
    startup_probe: dict[str, Any] | None = None
    lifecycle: dict[str, Any] | None = None
    tty: bool = False
    stdin: bool = False


class SELinuxOptions(Struct, frozen=True):
    user: str = ""
    role: str = ""
    type: str = ""
    level: str = ""


class PodSecurityContext(Struct, frozen=True):
    run_as_user: int | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None
    supplemental_groups: list[int] = []
    fs_group: int | None = None
    fs_group_change_policy: str | None = None
    se_linux_options: SELinuxOptions | None = None
    se_linux_change_policy: str | None = None
    seccomp_profile: dict[str, Any] | None = None
    app_armor_profile: dict[str, Any] | None = None
    sysctls: list[dict[str, Any]] = []


class Toleration(Struct, frozen=True):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class PreferredSchedulingTerm(Struct, frozen=True):
    weight: int = 0
    preference: NodeSelectorTerm = NodeSelectorTerm()


class NodeAffinity(Struct, frozen=True):
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: list[PreferredSchedulingTerm] = []


class Affinity(Struct, frozen=True):
    node_affinity: NodeAffinity | None = None
    pod_affinity: dict[str, Any] | None = None
    pod_anti_affinity: dict[str, Any] | None = None


class PodSpec(Struct, frozen=True):
    node_name: str = ""
    scheduler_name: str = ""
    service_account_name: str = ""
    automount_service_account_token: bool | None = None
    restart_policy: str = ""
    termination_grace_period_seconds: int | None = None
    active_deadline_seconds: int | None = None
    hostname: str = ""
    hostname_override: str | None = None
    host_network: bool = False
    host_pid: bool = msgspec.field(default=False, name="hostPID")
    host_ipc: bool = msgspec.field(default=False, name="hostIPC")
    host_users: bool | None = None
    host_aliases: list[dict[str, Any]] = []
    runtime_class_name: str | None = None
    dns_policy: str = ""
    dns_config: dict[str, Any] | None = None
    share_process_namespace: bool | None = None
    priority: int | None = None
    node_selector: dict[str, str] = {}
    affinity: Affinity | None = None
    tolerations: list[Toleration] = []
    security_context: PodSecurityContext | None = None
    scheduling_gates: list[dict[str, Any]] = []
    readiness_gates: list[dict[str, Any]] = []
    overhead: dict[str, str] = {}
    resources: ResourceRequirements = ResourceRequirements()  # of all containers together
    containers: list[Container] = []
    init_containers: list[Container] = []
    ephemeral_containers: list[dict[str, Any]] = []
    volumes: list[PodVolume] = []


class ContainerStatus(Struct, frozen=True):
    name: str = ""
    state: dict[str, Any] = {}
    last_state: dict[str, Any] = {}
    ready: bool = False
    restart_count: int = 0
    image: str = ""
    container_id: str = msgspec.field(default="", name="containerID")


class PodStatus(Struct, frozen=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: list[Condition] = []
    start_time: str | None = None
    pod_ip: str = msgspec.field(default="", name="podIP")
    nominated_node_name: str = ""
    container_statuses: list[ContainerStatus] = []
    init_container_statuses: list[ContainerStatus] = []
    ephemeral_container_statuses: list[ContainerStatus] = []


class Pod(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource("", "v1", "pods", "Pod", True)
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def is_terminated(self) -> bool:
        """Finished, or being deleted with every container ended or waiting: what controllers treat as gone."""
        if self.status.phase in ("Failed", "Succeeded"):
            return True
        if not self.is_deleting:
            return False
        status = self.status
        every = (
            *status.container_statuses,
            *status.init_container_statuses,
            *status.ephemeral_container_statuses,
        )
        return all("terminated" in container.state or "waiting" in container.state for container in every)
