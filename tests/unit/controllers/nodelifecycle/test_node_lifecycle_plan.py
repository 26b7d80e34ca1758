"""Which conditions and taints a node gets, and when its pods have to leave."""

import pytest

from moorage.controllers.nodelifecycle.plan import (
    Heartbeat,
    eviction_delay_s,
    is_orphan,
    plan_conditions,
    plan_taints,
    sign_of_life,
)
from moorage.kube.names import NOT_READY, OUT_OF_SERVICE, UNREACHABLE, UNSCHEDULABLE
from moorage.kube.objects.core import Lease, LeaseSpec, Node, NodeSpec, NodeStatus, Taint
from moorage.kube.objects.meta import Condition, Meta
from moorage.kube.objects.pods import Pod, PodSpec, Toleration

NOW = "2026-01-01T00:00:00Z"


def node(ready="True", *taints, unschedulable=False, **pressures):
    conditions = [Condition(kind, status) for kind, status in pressures.items()]
    if ready:
        conditions.append(Condition("Ready", ready, last_heartbeat_time="t0"))
    spec = NodeSpec(unschedulable=unschedulable, taints=list(taints))
    return Node(metadata=Meta(name="n1"), spec=spec, status=NodeStatus(conditions=conditions))


def pod(*tolerations, node_name="n1", deleting=False):
    meta = Meta(name="p", namespace="default", deletion_timestamp=NOW if deleting else None)
    return Pod(metadata=meta, spec=PodSpec(node_name=node_name, tolerations=list(tolerations)))


def keys(taints):
    return [(taint.key, taint.effect) for taint in taints]


def test_a_heartbeat_counts_from_its_last_change_not_from_what_the_node_writes():
    lease = Lease(spec=LeaseSpec(renew_time="1970-01-01T00:00:00.000000Z"))
    first = Heartbeat(sign_of_life(node(), lease), 100.0)
    assert first.after(sign_of_life(node(), lease), 130.0) is first
    renewed = Lease(spec=LeaseSpec(renew_time="1970-01-01T00:00:10.000000Z"))
    assert first.after(sign_of_life(node(), renewed), 130.0).since == 130.0


def test_a_silent_node_has_all_watched_conditions_unknown_once():
    silent = node("True", MemoryPressure="False")
    changed = plan_conditions(silent, has_agent=True)
    assert {one["type"]: one["reason"] for one in changed} == dict.fromkeys(
        ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure"), "NodeStatusUnknown"
    )
    known = {"MemoryPressure": "Unknown", "DiskPressure": "Unknown", "PIDPressure": "Unknown"}
    assert plan_conditions(node("Unknown", **known), has_agent=True) == []


def test_a_node_that_never_wrote_its_status_is_told_apart():
    changed = plan_conditions(node(""), has_agent=False)
    assert {one["reason"] for one in changed} == {"NodeStatusNeverUpdated"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(node("True"), [], id="ready"),
        pytest.param(node(""), [(NOT_READY, "NoSchedule")], id="new"),
        pytest.param(node("False"), [(NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")], id="not-ready"),
        pytest.param(node("Unknown"), [(UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")], id="silent"),
        pytest.param(
            node("True", DiskPressure="True"), [("node.kubernetes.io/disk-pressure", "NoSchedule")], id="disk-pressure"
        ),
        pytest.param(node("True", unschedulable=True), [(UNSCHEDULABLE, "NoSchedule")], id="cordoned"),
        pytest.param(node("True", Taint(UNREACHABLE, "", "NoExecute", NOW)), [], id="back"),
        pytest.param(node("True", Taint("mine", "", "NoSchedule")), [("mine", "NoSchedule")], id="of-others"),
    ],
)
def test_taints_follow_the_conditions(given, expected):
    assert keys(plan_taints(given, NOW)) == expected


def test_a_taint_that_is_there_keeps_its_time():
    known = [Taint(UNREACHABLE, "", "NoSchedule"), Taint(UNREACHABLE, "", "NoExecute", "earlier")]
    assert plan_taints(node("Unknown", *known), NOW) == known


TAINTS = [Taint(UNREACHABLE, "", "NoSchedule"), Taint(UNREACHABLE, "", "NoExecute", NOW)]


@pytest.mark.parametrize(
    ("given", "taints", "expected"),
    [
        pytest.param(pod(), TAINTS[:1], None, id="only-noexecute-evicts"),
        pytest.param(pod(), TAINTS, 0.0, id="not-tolerated"),
        pytest.param(pod(Toleration(UNREACHABLE, "Exists", "", "NoExecute", 300)), TAINTS, 300, id="for-a-while"),
        pytest.param(pod(Toleration("", "Exists")), TAINTS, None, id="for-ever"),
        pytest.param(
            pod(Toleration(UNREACHABLE, "Exists", "", "", 300), Toleration("", "Exists", "", "", 20)),
            TAINTS,
            20,
            id="the-shortest-counts",
        ),
        pytest.param(
            pod(Toleration("", "Exists", "", "", 300)), [*TAINTS, Taint("x", "", "NoExecute")], 300, id="all-tolerated"
        ),
    ],
)
def test_how_long_a_pod_tolerates_taints(given, taints, expected):
    assert eviction_delay_s(given, taints) == expected


OFF = Taint(OUT_OF_SERVICE, "nodeshutdown", "NoExecute")


@pytest.mark.parametrize(
    ("given", "where", "expected"),
    [
        pytest.param(pod(), node(), False, id="runs"),
        pytest.param(pod(deleting=True), node("Unknown"), False, id="the-node-may-come-back"),
        pytest.param(pod(deleting=True), node("Unknown", OFF), True, id="out-of-service"),
        pytest.param(pod(deleting=True), node("True", OFF), False, id="out-of-service-but-ready"),
        pytest.param(pod(), node("Unknown", OFF), False, id="out-of-service-not-deleted"),
        pytest.param(pod(), None, True, id="node-gone"),
        pytest.param(pod(node_name=""), None, False, id="not-scheduled"),
        pytest.param(pod(node_name="", deleting=True), None, True, id="not-scheduled-and-deleted"),
    ],
)
def test_which_pods_can_only_end_by_force(given, where, expected):
    assert is_orphan(given, where) is expected
