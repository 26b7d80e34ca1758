"""A cluster as the scheduler sees it, from lists, and pods that ask for a place in it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from moorage.controllers.scheduler.plan import Nowhere, Placement, plan
from moorage.controllers.scheduler.state import SchedulerState
from moorage.kube.names import BIND_COMPLETED
from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver, CSIStorageCapacity, StorageClass, VolumeAttachment
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import node_attached_to

GI = 2**30
HOST = "kubernetes.io/hostname"


class Table(dict[str, Any]):
    """What an informer is to the scheduler: objects by key, iterated by value, with indexes."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def by(self, keys: Callable[[Any], Iterable[str]], value: str) -> list[Any]:
        return [obj for obj in self if value in keys(obj)]


@dataclass
class Cluster:
    """The scheduler's caches, as plain tables."""

    nodes: Table = field(default_factory=Table)
    claims: Table = field(default_factory=Table)
    volumes: Table = field(default_factory=Table)
    classes: Table = field(default_factory=Table)
    drivers: Table = field(default_factory=Table)
    csi_nodes: Table = field(default_factory=Table)
    capacities: Table = field(default_factory=Table)
    attachments: Table = field(default_factory=Table)
    world: SchedulerState = field(default_factory=SchedulerState)

    def attachments_on(self, node: str) -> list[VolumeAttachment]:
        return self.attachments.by(node_attached_to, node)

    # Setting the scene

    def add_node(self, name: str, cpu: str = "4", pods: str = "10", labels: Any = None, **spec: Any) -> None:
        room = {"cpu": cpu, "memory": "8Gi", "pods": pods}
        meta = {"name": name, "labels": {HOST: name, **(labels or {})}}
        self.nodes[name] = made(Node, {"metadata": meta, "spec": spec, "status": {"allocatable": room}})

    def add_class(self, name: str = "late", waits: bool = True, **fields: Any) -> None:
        mode = "WaitForFirstConsumer" if waits else "Immediate"
        body = {"metadata": {"name": name}, "provisioner": "csi.example.com", "volumeBindingMode": mode, **fields}
        self.classes[name] = made(StorageClass, body)

    def add_claim(self, name: str, size: str = "1Gi", storage_class: str = "late", **more: Any) -> None:
        meta = {"name": name, "namespace": "default", "uid": f"uid-{name}", "annotations": more.get("annotations", {})}
        spec = {
            "accessModes": more.get("modes", ["ReadWriteOnce"]),
            "resources": {"requests": {"storage": size}},
            "storageClassName": storage_class,
            "volumeName": more.get("volume", ""),
        }
        spec |= {"selector": more["selector"]} if "selector" in more else {}
        self.claims[f"default/{name}"] = made(PersistentVolumeClaim, {"metadata": meta, "spec": spec})

    def add_bound(self, name: str, *nodes: str, **more: Any) -> None:
        self.add_claim(name, volume=f"pv-{name}", annotations={BIND_COMPLETED: "yes"}, **more)
        self.add_volume(f"pv-{name}", *nodes, claimRef={"namespace": "default", "name": name, "uid": f"uid-{name}"})

    def add_volume(self, name: str, *nodes: str, size: str = "1Gi", storage_class: str = "late", **spec: Any) -> None:
        if nodes:
            terms = [{"matchExpressions": [{"key": HOST, "operator": "In", "values": list(nodes)}]}]
            spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": terms}}
        meta = {
            "name": name,
            "labels": spec.pop("labels", {}),
            "deletionTimestamp": spec.pop("deletionTimestamp", None),
        }
        status = {"phase": spec.pop("phase", "Available")}
        spec = {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": storage_class,
            "csi": {"driver": "csi.example.com", "volumeHandle": name},
        } | spec
        self.volumes[name] = made(PersistentVolume, {"metadata": meta, "spec": spec, "status": status})

    def add_capacity(self, node: str, amount: str, storage_class: str = "late", **more: Any) -> None:
        body = {
            "metadata": {"name": f"{node}-{storage_class}", "namespace": "default"},
            "nodeTopology": {"matchLabels": {HOST: node}},
            "storageClassName": storage_class,
            "capacity": amount,
            **more,
        }
        self.capacities[f"{node}-{storage_class}-{len(self.capacities)}"] = made(CSIStorageCapacity, body)

    def reports_capacity(self) -> None:
        spec = {"storageCapacity": True}
        self.drivers["csi.example.com"] = made(CSIDriver, {"metadata": {"name": "csi.example.com"}, "spec": spec})

    def runs(self, node: str, name: str, *claims: str, cpu: str = "0") -> None:
        self.world.see(f"uid-{name}", pod(name, *claims, cpu=cpu, nodeName=node))

    def place(self, pod: Pod, rejected: dict[str, int] | None = None) -> Placement | Nowhere:
        return plan(pod, cast(Any, self), self.world, rejected or {})

    def node_for(self, pod: Pod, rejected: dict[str, int] | None = None) -> str:
        found = self.place(pod, rejected)
        assert isinstance(found, Placement), found
        return found.node.name

    def complaint(self, pod: Pod) -> str:
        found = self.place(pod)
        assert isinstance(found, Nowhere), found
        return found.message


def made(kind: Any, body: dict[str, Any]) -> Any:
    return msgspec.convert(body, kind)


def pod(name: str, *claims: str, cpu: str = "0", **spec: Any) -> Pod:
    container = {"name": "main", "resources": {"requests": {"cpu": cpu}}, **spec.pop("container", {})}
    volumes = [{"name": f"v{n}", "persistentVolumeClaim": {"claimName": claim}} for n, claim in enumerate(claims)]
    meta = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
    return made(Pod, {"metadata": meta, "spec": {"containers": [container], "volumes": volumes, **spec}})
