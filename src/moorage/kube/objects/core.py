"""The core kinds beside pods and volumes: namespaces, nodes, secrets, config maps, accounts, events, leases.

Owns: their typed shapes, as far as Moorage's parts read them.
"""

from typing import ClassVar

import msgspec

from moorage.kube.objects.meta import Condition, KubeObject, ObjectReference, Resource, Struct


class NamespaceStatus(Struct, frozen=True):
    phase: str = ""


class Namespace(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource("", "v1", "namespaces", "Namespace", False)
    status: NamespaceStatus = NamespaceStatus()


class Taint(Struct, frozen=True):
    key: str = ""
    value: str = ""
    effect: str = ""
    time_added: str | None = None


class NodeSpec(Struct, frozen=True):
    unschedulable: bool = False
    taints: list[Taint] = []
    provider_id: str = msgspec.field(default="", name="providerID")


class AttachedVolume(Struct, frozen=True):
    name: str = ""
    device_path: str = ""


class NodeAddress(Struct, frozen=True):
    type: str = ""
    address: str = ""


class DaemonEndpoint(Struct, frozen=True):
    port: int = msgspec.field(default=0, name="Port")


class NodeDaemonEndpoints(Struct, frozen=True):
    kubelet_endpoint: DaemonEndpoint = DaemonEndpoint()


class NodeStatus(Struct, frozen=True):
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    conditions: list[Condition] = []
    addresses: list[NodeAddress] = []
    daemon_endpoints: NodeDaemonEndpoints = NodeDaemonEndpoints()
    volumes_in_use: list[str] = []
    volumes_attached: list[AttachedVolume] = []


class Node(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource("", "v1", "nodes", "Node", False)
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def is_ready(self) -> bool:
        return any(c.type == "Ready" and c.status == "True" for c in self.status.conditions)


class Secret(KubeObject, frozen=True):
    """A secret; its `data` stays base64 text until it is used, and is never logged."""

    resource: ClassVar[Resource] = Resource("", "v1", "secrets", "Secret", True)
    type: str = ""
    data: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Secret({self.key!r})"


class ConfigMap(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource("", "v1", "configmaps", "ConfigMap", True)
    data: dict[str, str] = {}
    binary_data: dict[str, str] = {}


class ServiceAccount(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource("", "v1", "serviceaccounts", "ServiceAccount", True)


class EventSource(Struct, frozen=True):
    component: str = ""
    host: str = ""


class Event(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource("", "v1", "events", "Event", True)
    involved_object: ObjectReference = ObjectReference()
    reason: str = ""
    message: str = ""
    type: str = ""
    count: int = 0
    first_timestamp: str | None = None
    last_timestamp: str | None = None
    event_time: str | None = None
    source: EventSource = EventSource()
    reporting_component: str = ""
    action: str = ""


class LeaseSpec(Struct, frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource("coordination.k8s.io", "v1", "leases", "Lease", True)
    spec: LeaseSpec = LeaseSpec()
