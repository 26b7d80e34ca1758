"""Where pods go, and what is said when they can go nowhere: clusters in, placements out."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from moorage.controllers.scheduler.plan import Nowhere, Placement, plan
from moorage.controllers.scheduler.world import World, requests_of
from moorage.controllers.vocabulary import BIND_COMPLETED, SELECTED_NODE, claim_class, reference_key, volume_class
from moorage.kube.objects.core import Node, PersistentVolume, PersistentVolumeClaim, Pod
from moorage.kube.objects.storage import CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment

GI = 2**30
HOST = "kubernetes.io/hostname"


@dataclass
class Cluster:
    """The scheduler's views, as plain lists."""

    node_list: list[Node] = field(default_factory=list)
    claims: dict[str, PersistentVolumeClaim] = field(default_factory=dict)
    volumes: dict[str, PersistentVolume] = field(default_factory=dict)
    classes: dict[str, StorageClass] = field(default_factory=dict)
    drivers: dict[str, CSIDriver] = field(default_factory=dict)
    csi_nodes: dict[str, CSINode] = field(default_factory=dict)
    capacity_list: list[CSIStorageCapacity] = field(default_factory=list)
    attachment_list: list[VolumeAttachment] = field(default_factory=list)
    world: World = field(default_factory=World)

    def nodes(self) -> Iterable[Node]:
        return self.node_list

    def node(self, name: str) -> Node | None:
        return next((node for node in self.node_list if node.name == name), None)

    def claim(self, key: str) -> PersistentVolumeClaim | None:
        return self.claims.get(key)

    def pv(self, name: str) -> PersistentVolume | None:
        return self.volumes.get(name)

    def storage_class(self, name: str) -> StorageClass | None:
        return self.classes.get(name)

    def driver(self, name: str) -> CSIDriver | None:
        return self.drivers.get(name)

    def csi_node(self, name: str) -> CSINode | None:
        return self.csi_nodes.get(name)

    def volumes_for(self, claim: PersistentVolumeClaim) -> Iterable[PersistentVolume]:
        for volume in self.volumes.values():
            ref = volume.spec.claim_ref
            if reference_key(ref) == claim.key if ref else volume_class(volume) == claim_class(claim):
                yield volume

    def capacities(self, class_name: str) -> Iterable[CSIStorageCapacity]:
        return [capacity for capacity in self.capacity_list if capacity.storage_class_name == class_name]

    def attachments(self, node: str) -> Iterable[VolumeAttachment]:
        return [attachment for attachment in self.attachment_list if attachment.spec.node_name == node]

    # Setting the scene

    def add_node(self, name: str, cpu: str = "4", pods: str = "10", labels: Any = None, **spec: Any) -> None:
        room = {"cpu": cpu, "memory": "8Gi", "pods": pods}
        meta = {"name": name, "labels": {HOST: name, **(labels or {})}}
        self.node_list.append(made(Node, {"metadata": meta, "spec": spec, "status": {"allocatable": room}}))

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
        self.claims[f"default/{name}"] = made(PersistentVolumeClaim, {"metadata": meta, "spec": spec})

    def add_bound(self, name: str, *nodes: str, **more: Any) -> None:
        self.add_claim(name, volume=f"pv-{name}", annotations={BIND_COMPLETED: "yes"}, **more)
        self.add_volume(f"pv-{name}", *nodes, claimRef={"namespace": "default", "name": name, "uid": f"uid-{name}"})

    def add_volume(self, name: str, *nodes: str, size: str = "1Gi", storage_class: str = "late", **spec: Any) -> None:
        if nodes:
            terms = [{"matchExpressions": [{"key": HOST, "operator": "In", "values": list(nodes)}]}]
            spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": terms}}
        spec |= {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": storage_class,
            "csi": {"driver": "csi.example.com", "volumeHandle": name},
        }
        self.volumes[name] = made(
            PersistentVolume, {"metadata": {"name": name}, "spec": spec, "status": {"phase": "Available"}}
        )

    def add_capacity(self, node: str, amount: str, storage_class: str = "late", **more: Any) -> None:
        body = {
            "metadata": {"name": f"{node}-{storage_class}", "namespace": "default"},
            "nodeTopology": {"matchLabels": {HOST: node}},
            "storageClassName": storage_class,
            "capacity": amount,
            **more,
        }
        self.capacity_list.append(made(CSIStorageCapacity, body))

    def reports_capacity(self) -> None:
        spec = {"storageCapacity": True}
        self.drivers["csi.example.com"] = made(CSIDriver, {"metadata": {"name": "csi.example.com"}, "spec": spec})

    def runs(self, node: str, name: str, *claims: str, cpu: str = "0") -> None:
        self.world.see(f"uid-{name}", pod(name, *claims, cpu=cpu, nodeName=node))

    def place(self, pod: Pod, rejected: dict[str, int] | None = None) -> Placement | Nowhere:
        return plan(pod, self, self.world, rejected or {})

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


@pytest.fixture
def cluster() -> Cluster:
    found = Cluster()
    for name in ("a", "b", "c"):
        found.add_node(name)
    found.add_class()
    return found


def test_without_nodes_there_is_nothing_to_choose_from():
    assert Cluster().complaint(pod("p")) == "no nodes available to schedule pods"


def test_a_pod_goes_where_most_room_is(cluster):
    cluster.runs("a", "busy", cpu="3")
    cluster.runs("b", "busier", cpu="3500m")
    assert cluster.node_for(pod("p", cpu="100m")) == "c"


def test_each_reason_is_counted_as_kubernetes_counts_it():
    cluster = Cluster()
    cluster.add_node("a", cpu="1")
    cluster.add_node("b", taints=[{"key": "dedicated", "value": "db", "effect": "NoSchedule"}])
    cluster.add_node("c", unschedulable=True)
    cluster.add_node("d", pods="0")
    found = cluster.place(pod("p", cpu="2"))
    assert found == Nowhere(
        "0/4 nodes are available: 1 Insufficient cpu, 1 Too many pods, 1 node(s) had untolerated taint(s), "
        "1 node(s) were unschedulable.",
        "a: Insufficient cpu; b: node(s) had untolerated taint(s); c: node(s) were unschedulable; d: Too many pods",
    )


@pytest.mark.parametrize(
    ("toleration", "is_tolerated"),
    [
        ({"key": "dedicated", "operator": "Equal", "value": "db", "effect": "NoSchedule"}, True),
        ({"key": "dedicated", "value": "db"}, True),
        ({"key": "dedicated", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "dedicated", "value": "web"}, False),
        ({"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}, False),
        ({}, False),
    ],
)
def test_taints_and_tolerations(toleration, is_tolerated):
    cluster = Cluster()
    cluster.add_node("a", taints=[{"key": "dedicated", "value": "db", "effect": "NoSchedule"}])
    found = cluster.place(pod("p", tolerations=[toleration]))
    assert isinstance(found, Placement) is is_tolerated


def test_a_soft_taint_only_makes_a_node_less_liked():
    cluster = Cluster()
    cluster.add_node("a", taints=[{"key": "old", "effect": "PreferNoSchedule"}])
    assert cluster.node_for(pod("p")) == "a"
    cluster.add_node("b", cpu="1")
    assert cluster.node_for(pod("p", cpu="500m")) == "b"


def test_node_selectors_and_affinity(cluster):
    assert cluster.node_for(pod("p", nodeSelector={HOST: "b"})) == "b"
    term = {"matchExpressions": [{"key": HOST, "operator": "NotIn", "values": ["a", "b"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    assert cluster.node_for(pod("p", affinity={"nodeAffinity": required})) == "c"
    wish = {"weight": 10, "preference": {"matchExpressions": [{"key": HOST, "operator": "In", "values": ["b"]}]}}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}
    assert cluster.node_for(pod("p", affinity={"nodeAffinity": preferred})) == "b"
    complaint = cluster.complaint(pod("p", nodeSelector={"disk": "ssd"}))
    assert complaint == "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."


def test_host_ports_are_not_given_twice(cluster):
    port = {"container": {"ports": [{"hostPort": 80}]}}
    for name in ("a", "b", "c"):
        cluster.world.see(f"uid-{name}", pod(name, nodeName=name, **port))
    expected = "0/3 nodes are available: 3 node(s) didn't have free ports for the requested pod ports."
    assert cluster.complaint(pod("p", **port)) == expected


def test_requests_count_init_containers_sidecars_and_overhead():
    asking = {"resources": {"requests": {"cpu": "3"}}, "name": "i"}
    sidecar = {"resources": {"requests": {"cpu": "1"}}, "name": "s", "restartPolicy": "Always"}
    found = requests_of(pod("p", cpu="1", initContainers=[sidecar, asking], overhead={"cpu": "100m"}))
    assert float(found["cpu"]) == 4.1


def test_a_bound_volume_decides_the_node(cluster):
    cluster.add_bound("data", "b")
    assert cluster.node_for(pod("p", "data")) == "b"
    cluster.node_list = [node for node in cluster.node_list if node.name != "b"]
    expected = "0/2 nodes are available: 2 node(s) didn't match PersistentVolume's node affinity."
    assert cluster.complaint(pod("p", "data")) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, 'persistentvolumeclaim "data" not found'),
        ({"storage_class": "soon"}, "pod has unbound immediate PersistentVolumeClaims"),
        ({"storage_class": "unknown"}, "pod has unbound immediate PersistentVolumeClaims"),
        ({"volume": "pv-data"}, "pod has unbound immediate PersistentVolumeClaims"),
    ],
)
def test_claims_that_no_node_can_help(cluster, change, said):
    cluster.add_class("soon", waits=False)
    if change:
        cluster.add_claim("data", **change)
    assert cluster.complaint(pod("p", "data")) == f"0/3 nodes are available: {said}."


def test_a_volume_that_is_gone_is_said_to_be_gone(cluster):
    cluster.add_bound("data")
    cluster.volumes.clear()
    said = "3 node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"
    assert cluster.complaint(pod("p", "data")) == f"0/3 nodes are available: {said}."


def test_a_zone_label_on_a_volume_is_honoured(cluster):
    zone = "topology.kubernetes.io/zone"
    cluster.node_list.clear()
    cluster.add_node("x", labels={zone: "one"})
    cluster.add_node("y", labels={zone: "two"})
    cluster.add_bound("data")
    volume = cluster.volumes["pv-data"]
    labelled = msgspec.structs.replace(volume.metadata, labels={zone: "zero__two"})
    cluster.volumes["pv-data"] = msgspec.structs.replace(volume, metadata=labelled)
    assert cluster.node_for(pod("p", "data")) == "y"


def test_the_smallest_free_volume_that_fits_is_taken_and_each_only_once(cluster):
    cluster.add_claim("one", "1Gi")
    cluster.add_claim("two", "2Gi")
    cluster.add_volume("large", "b", size="5Gi")
    cluster.add_volume("small", "b", size="2Gi")
    cluster.add_volume("elsewhere", "a", size="1Gi")
    found = cluster.place(pod("p", "two", "one"))
    assert isinstance(found, Placement)
    assert found.node.name == "b"
    assert [(claim.name, volume.name) for claim, volume in found.fit.static] == [("one", "small"), ("two", "large")]


def test_a_volume_promised_to_another_claim_is_not_free(cluster):
    cluster.classes.clear()
    cluster.add_class(provisioner="kubernetes.io/no-provisioner")
    cluster.add_claim("data")
    cluster.add_volume("only", "b")
    assert cluster.node_for(pod("p", "data")) == "b"
    cluster.world.promised_volumes["only"] = "uid-other"
    expected = "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind."
    assert cluster.complaint(pod("p", "data")) == expected


def test_a_claim_whose_node_is_selected_stays_there(cluster):
    cluster.add_claim("data", annotations={SELECTED_NODE: "b"})
    assert cluster.node_for(pod("p", "data")) == "b"
    cluster.add_claim("data", annotations={SELECTED_NODE: "gone"})
    assert cluster.node_for(pod("p", "data")) == "a"  # a node that is no more holds nobody


def test_allowed_topologies(cluster):
    cluster.add_class("late", allowedTopologies=[{"matchLabelExpressions": [{"key": HOST, "values": ["c"]}]}, {}])
    cluster.add_claim("data")
    assert cluster.node_for(pod("p", "data")) == "c"


def test_capacity_counts_for_all_claims_of_the_pod_together(cluster):
    cluster.reports_capacity()
    cluster.add_capacity("a", "5Gi")
    cluster.add_capacity("b", "10Gi")
    cluster.add_claim("one", "4Gi")
    cluster.add_claim("two", "4Gi")
    assert cluster.node_for(pod("p", "one", "two")) == "b"
    cluster.add_claim("three", "4Gi")
    expected = "0/3 nodes are available: 3 node(s) did not have enough free storage."
    assert cluster.complaint(pod("p", "one", "two", "three")) == expected


def test_capacity_promised_to_other_pods_is_not_given_again(cluster):
    cluster.reports_capacity()
    cluster.add_capacity("a", "5Gi")
    cluster.add_claim("one", "4Gi")
    assert cluster.node_for(pod("p", "one")) == "a"
    cluster.world.promised_bytes["uid-other"] = ("late", "a", 4 * GI)
    assert "enough free storage" in cluster.complaint(pod("p", "one"))


def test_no_single_volume_may_be_larger_than_the_driver_says(cluster):
    cluster.reports_capacity()
    cluster.add_capacity("a", "100Gi", maximumVolumeSize="2Gi")
    cluster.add_claim("one", "2Gi")
    assert cluster.node_for(pod("p", "one")) == "a"
    cluster.add_claim("one", "3Gi")
    assert "enough free storage" in cluster.complaint(pod("p", "one"))


def test_a_driver_that_reports_no_capacity_is_not_asked(cluster):
    cluster.add_claim("one", "4000Gi")
    assert cluster.node_for(pod("p", "one")) == "a"


def test_attach_limits_count_pods_attachments_and_new_claims(cluster):
    for name in ("a", "b", "c"):
        drivers = [{"name": "csi.example.com", "nodeID": name, "allocatable": {"count": 2}}]
        cluster.csi_nodes[name] = made(CSINode, {"metadata": {"name": name}, "spec": {"drivers": drivers}})
    for name in ("one", "two", "three", "four"):
        cluster.add_bound(name)
    for node in ("a", "b"):
        cluster.runs(node, f"runs-{node}", "one")
        spec = {"attacher": "csi.example.com", "nodeName": node, "source": {"persistentVolumeName": "pv-two"}}
        cluster.attachment_list.append(made(VolumeAttachment, {"metadata": {"name": f"va-{node}"}, "spec": spec}))
    assert cluster.node_for(pod("p", "three")) == "c"
    assert cluster.node_for(pod("p", "one", nodeSelector={HOST: "a"})) == "a"  # it is there already
    cluster.add_claim("new")
    assert cluster.node_for(pod("p", "three", "new")) == "c"
    expected = "0/3 nodes are available: 3 node(s) exceed max volume count."
    assert cluster.complaint(pod("p", "three", "four", "new")) == expected


def test_a_driver_may_insist_on_being_installed(cluster):
    spec = {"preventPodSchedulingIfMissing": True}
    cluster.drivers["csi.example.com"] = made(CSIDriver, {"metadata": {"name": "csi.example.com"}, "spec": spec})
    drivers = [{"name": "csi.example.com", "nodeID": "b"}]
    cluster.csi_nodes["b"] = made(CSINode, {"metadata": {"name": "b"}, "spec": {"drivers": drivers}})
    cluster.add_bound("data")
    assert cluster.node_for(pod("p", "data")) == "b"


def test_a_claim_for_one_pod_has_one_pod(cluster):
    cluster.add_bound("data", modes=["ReadWriteOncePod"])
    assert cluster.node_for(pod("p", "data")) == "a"
    cluster.runs("b", "first", "data")
    assert cluster.complaint(pod("p", "data")).startswith(
        "0/3 nodes are available: 3 node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod"
    )


def test_a_node_that_was_turned_down_is_tried_last(cluster):
    cluster.add_claim("data")
    assert cluster.node_for(pod("p", "data"), {"a": 1, "b": 1}) == "c"
    assert cluster.node_for(pod("p", "data"), {"a": 1, "b": 2, "c": 2}) == "a"


def test_a_pod_that_ended_takes_no_room(cluster):
    cluster.runs("a", "old", cpu="4")
    ended = msgspec.structs.replace(
        pod("old", nodeName="a"), status=msgspec.convert({"phase": "Succeeded"}, type(pod("x").status))
    )
    cluster.world.see("uid-old", ended)
    assert not cluster.world.uses


def test_broken_quantities_and_selectors_break_nothing(cluster):
    cluster.add_claim("data", size="lots")
    cluster.reports_capacity()
    cluster.add_capacity("a", "much")
    cluster.add_capacity("b", "1Gi")
    assert cluster.node_for(pod("p", "data", cpu="plenty")) == "b"
