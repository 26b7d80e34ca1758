"""This node as the cluster sees it: registration, lease, conditions, capacity, and its end."""

import asyncio
import json
import os
import re

import pytest

from moorage.kube.cache.informer import Informer
from moorage.kube.errors import Unavailable
from moorage.kube.objects.core import Lease, Node
from moorage.kube.objects.storage import CSIDriver, CSINode
from moorage.node.config import REMOVE
from moorage.node.node_object import NodeFacts, NodeObject
from moorage.node.plugins.csi_node import NodeDrivers
from moorage.node.plugins.manager import PluginManager
from moorage.node.run import _refresh_period

pytestmark = pytest.mark.root
MANAGED = "volumes.kubernetes.io/controller-managed-attach-detach"


async def raw(lab, path):
    return json.loads(await lab.client.request("GET", path))


async def test_a_node_says_what_it_is_what_it_has_and_where_it_listens(lab):
    agent = await lab.start_agent(labels={"disk": "fast"})
    body = await raw(lab, "/api/v1/nodes/n1")
    labels = body["metadata"]["labels"]
    assert (labels["kubernetes.io/hostname"], labels["kubernetes.io/os"], labels["disk"]) == ("n1", "linux", "fast")
    assert body["metadata"]["annotations"][MANAGED] == "true"  # attaching is the controller's business
    status = body["status"]
    assert status["capacity"] == status["allocatable"]
    assert status["capacity"]["cpu"] == str(os.cpu_count())
    assert re.fullmatch(r"[1-9]\d*Ki", status["capacity"]["memory"])
    assert re.fullmatch(r"[1-9]\d*Ki", status["capacity"]["ephemeral-storage"])
    assert {"type": "InternalIP", "address": "127.0.0.1"} in status["addresses"]
    assert status["daemonEndpoints"]["kubeletEndpoint"]["Port"] == agent.endpoint.port
    conditions = {one["type"]: one for one in status["conditions"]}
    assert {name: one["status"] for name, one in conditions.items()} == {
        "Ready": "True", "MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False",
    }  # fmt: skip
    assert conditions["Ready"]["reason"] == "KubeletReady"
    assert all(one["message"] and one["lastHeartbeatTime"] for one in conditions.values())
    await lab.stop_agent()


async def test_a_node_that_is_there_keeps_what_others_gave_it(lab):
    body = {"metadata": {"name": "n1", "labels": {"mine": "1"}}, "spec": {"unschedulable": True}}
    before = await lab.client.create(Node, body)
    await lab.start_agent()
    found = await raw(lab, "/api/v1/nodes/n1")
    assert found["metadata"]["uid"] == before.uid
    assert found["metadata"]["labels"]["mine"] == "1"
    assert found["spec"]["unschedulable"] is True
    assert found["metadata"]["annotations"][MANAGED] == "true"
    await lab.stop_agent()


async def test_the_lease_belongs_to_the_node_and_is_renewed(lab, monkeypatch):
    monkeypatch.setattr("moorage.node.node_object.RENEW_S", 0.05)
    await lab.start_agent()
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1"

    async def lease():
        return await lab.client.find(Lease, "n1", "kube-node-lease") and await raw(lab, path)

    first = await lab.until(lease, what="lease")
    assert first["spec"]["holderIdentity"] == "n1"
    assert first["spec"]["leaseDurationSeconds"] == 40
    (owner,) = first["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Node", (await lab.client.get(Node, "n1")).uid)

    async def renewed():
        return (await raw(lab, path))["spec"]["renewTime"] > first["spec"]["renewTime"]

    await lab.until(renewed, what="lease renewed")
    await lab.stop_agent()


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_lease_gets_its_owner_however_early_it_is_written(lab, is_there):
    if is_there:
        await lab.client.create(Lease, {"metadata": {"name": "n1"}, "spec": {}}, "kube-node-lease")
    facts = NodeFacts("n1", lab.base, "127.0.0.1", 1)
    nodes = Informer(lab.client, Node, fields="metadata.name=n1")  # it has not begun
    node = NodeObject(lab.client, facts, nodes, frozenset, asyncio.Event())
    made = await node.register()
    await node._renew()
    lease = await lab.client.get(Lease, "n1", "kube-node-lease")
    assert [one.uid for one in lease.metadata.owner_references] == [made.uid]


async def test_a_stopped_agent_leaves_a_node_that_is_not_ready_since_then(lab):
    await lab.start_agent()
    await lab.stop_agent()
    status = (await raw(lab, "/api/v1/nodes/n1"))["status"]
    ready = next(one for one in status["conditions"] if one["type"] == "Ready")
    assert (ready["status"], ready["message"]) == ("False", "the node agent was stopped")
    for one in status["conditions"]:
        one["lastTransitionTime"] = "2020-01-01T00:00:00Z"
    await lab.client.patch(Node, "n1", {"status": {"conditions": status["conditions"]}}, subresource="status")
    await lab.start_agent()
    again = (await raw(lab, "/api/v1/nodes/n1"))["status"]["conditions"]
    since = {one["type"]: one["lastTransitionTime"] for one in again}
    assert since.pop("Ready") > "2026"
    assert set(since.values()) == {"2020-01-01T00:00:00Z"}  # these did not change
    await lab.stop_agent()


@pytest.mark.parametrize("conditions", [[{"type": "Ready", "status": "Unknown"}], None])
async def test_a_node_that_others_take_for_lost_says_at_once_that_it_is_not(lab, conditions):
    await lab.start_agent()
    lost = await lab.client.patch(Node, "n1", {"status": {"conditions": conditions}}, subresource="status")
    assert not lost.is_ready

    async def ready():
        return (await lab.client.get(Node, "n1")).is_ready

    await lab.until(ready, what="ready again")
    await lab.stop_agent()


async def test_a_node_deleted_behind_the_agents_back_comes_back_with_all_it_said(lab):
    await lab.driver_object(attachRequired=True)
    await lab.volume()
    agent = await lab.start_agent()
    async with lab.driver(topology={"zone": "z"}) as driver:
        await lab.until(lambda: driver.statuses, what="driver registered")
        await lab.pod()
        volume = "kubernetes.io/csi/scripted.dev^vol-c1"

        async def whole():
            node, drivers = await lab.client.find(Node, "n1"), await lab.client.find(CSINode, "n1")
            return (
                node is not None and node.is_ready and node.status.volumes_in_use == [volume]
                and node.labels.get("zone") == "z" and "scripted.dev" in str(node.annotations)
                and drivers is not None and drivers.metadata.owner_references[0].uid == node.uid
                and [one.name for one in drivers.spec.drivers] == ["scripted.dev"] and node
            )  # fmt: skip

        before = await lab.until(whole, what="volume reported in use")
        await lab.client.delete(Node, "n1")

        async def made_anew():
            node = await whole()
            return node and node.uid != before.uid

        await lab.until(made_anew, what="everything said again")
        assert agent.registry.find("scripted.dev") is not None
        await lab.end("p1")


async def test_a_removed_node_does_not_come_back_by_itself(lab):
    await lab.start_agent(on_stop=REMOVE)
    await lab.stop_agent()
    assert await lab.client.find(Node, "n1") is None
    assert await lab.client.find(CSINode, "n1") is None
    assert await lab.client.find(Lease, "n1", "kube-node-lease") is None


async def test_the_last_writes_of_a_removed_node_do_not_make_it_again(lab):
    facts = NodeFacts("n1", lab.base, "127.0.0.1", 1)
    node = NodeObject(lab.client, facts, Informer(lab.client, Node), frozenset, asyncio.Event())
    await node.register()
    await node.stopped(remove=True)
    await node._write_or_register()  # as when its disappearance is heard of before the agent has ended
    assert await lab.client.find(Node, "n1") is None


async def test_a_node_is_not_removed_while_a_volume_is_mounted_on_it(lab):
    async with lab.one_pod(on_stop=REMOVE, drain_timeout_s=2.0) as (driver, _):
        driver.fail("NodeUnpublishVolume", *["INTERNAL"] * 20)
        await lab.stop_agent()
        node = await lab.client.find(Node, "n1")
        assert node is not None
        assert not node.is_ready
        driver.recover()
        await lab.start_agent()  # the next one finishes the work
        await lab.end("p1")


async def test_a_node_is_not_ready_before_its_csi_node_is_there(lab, monkeypatch):
    is_open, ensure = asyncio.Event(), NodeDrivers.ensure_csi_node

    async def refused(published):
        if not is_open.is_set():
            raise Unavailable(503, "Unreachable", "scripted")
        return await ensure(published)

    monkeypatch.setattr(NodeDrivers, "ensure_csi_node", refused)
    starting = asyncio.create_task(lab.start_agent())

    async def registered():
        return await lab.client.find(Node, "n1")

    node = await lab.until(registered, what="node registered")
    assert not node.is_ready
    is_open.set()
    await starting
    assert (await lab.client.get(Node, "n1")).is_ready
    assert await lab.client.find(CSINode, "n1") is not None
    await lab.stop_agent()


async def test_the_period_of_a_drivers_limits_follows_its_object(lab, monkeypatch):
    heard, reconsider = [], PluginManager.reconsider
    monkeypatch.setattr(PluginManager, "reconsider", lambda manager: (heard.append(1), reconsider(manager)))
    agent = await lab.start_agent()
    async with lab.driver() as driver:
        await lab.until(lambda: driver.statuses, what="driver registered")
        assert _refresh_period(agent, "scripted.dev") == 0.0
        await lab.driver_object(nodeAllocatableUpdatePeriodSeconds=10)
        await lab.until(lambda: _refresh_period(agent, "scripted.dev") == 10.0, what="period heard of")
        patch = {"spec": {"nodeAllocatableUpdatePeriodSeconds": 30}}
        before = len(heard)
        await lab.client.patch(CSIDriver, "scripted.dev", patch)
        await lab.until(lambda: _refresh_period(agent, "scripted.dev") == 30.0, what="new period heard of")
        assert len(heard) > before  # those who wait for the old one are told
    await lab.stop_agent()
