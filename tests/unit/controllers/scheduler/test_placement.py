"""Where pods go, and what is said when they can go nowhere: clusters in, placements out."""

from typing import Any

import pytest
from tests.unit.controllers.scheduler.scheduler_objects import HOST, Cluster, pod

from moorage.controllers.scheduler.plan import Nowhere, Placement
from moorage.kube.requests import requests_of


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
    port: Any = {"container": {"ports": [{"hostPort": 80}]}}
    for name in ("a", "b", "c"):
        cluster.world.see(f"uid-{name}", pod(name, nodeName=name, **port))
    expected = "0/3 nodes are available: 3 node(s) didn't have free ports for the requested pod ports."
    assert cluster.complaint(pod("p", **port)) == expected


def test_requests_count_init_containers_sidecars_and_overhead():
    asking = {"resources": {"requests": {"cpu": "3"}}, "name": "i"}
    sidecar = {"resources": {"requests": {"cpu": "1"}}, "name": "s", "restartPolicy": "Always"}
    found = requests_of(pod("p", cpu="1", initContainers=[sidecar, asking], overhead={"cpu": "100m"}))
    assert float(found["cpu"]) == 4.1


def test_what_a_pod_requests_as_a_whole_counts_before_what_its_containers_do():
    whole = {"requests": {"cpu": "2", "example.com/gpu": "3"}, "limits": {"cpu": "4", "memory": "1Gi"}}
    found = requests_of(pod("p", cpu="1", resources=whole, overhead={"cpu": "100m"}))
    assert {name: float(amount) for name, amount in found.items()} == {"cpu": 2.1, "memory": float(1 << 30)}
    limited = requests_of(pod("p", cpu="1", resources={"limits": {"cpu": "4"}}))
    assert float(limited["cpu"]) == 1  # what containers request stands before the limit of all
