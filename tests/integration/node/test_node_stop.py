"""An agent that is asked to stop: what it still takes up, what it leaves, and that nothing holds it up."""

import asyncio

import pytest

from moorage.kube.api import config as kube_config
from moorage.kube.api.client import Client
from moorage.kube.errors import Forbidden
from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver
from moorage.node.config import DRAIN, REMOVE, AgentConfig
from moorage.node.node_object import NodeObject
from moorage.node.plugins.csi_node import NodeDrivers
from moorage.node.pods.manager import PodManager
from moorage.node.run import run

pytestmark = pytest.mark.root

SLOW = (
    "trap 'while [ ! -e /data/go ]; do sleep 0.05; done; exit' TERM; echo up > /data/up; while :; do sleep 0.05; done"
)


def running(lab):
    """Containers that have no end on record."""
    states = lab.root.glob("pods/*/containers/*/*/state.json")
    return [path for path in states if "exit_code" not in path.read_text()]


async def slow_pod(lab, name="p1"):
    """A pod that ends when it is let go, and how to let it; the drain waits for it."""
    shared = lab.base / "shared"
    shared.mkdir()
    volumes = [{"name": "data", "hostPath": {"path": str(shared)}}]
    mounts = [{"name": "data", "mountPath": "/data"}]
    await lab.pod(name, "", SLOW, volumes=volumes, mounts=mounts, terminationGracePeriodSeconds=60)
    await lab.until((shared / "up").exists, what="slow pod up")
    return (shared / "go").touch


@pytest.mark.parametrize("on_stop", [DRAIN, REMOVE])
async def test_a_node_that_drains_is_not_ready_and_takes_no_new_pod(lab, on_stop):
    agent = await lab.start_agent(on_stop=on_stop, drain_timeout_s=60.0)
    let_go = await slow_pod(lab)
    lab._stop.set()

    async def not_ready():
        return not (await lab.client.get(Node, "n1")).is_ready

    await lab.until(not_ready, what="node not ready while it drains")
    late = await lab.pod("late", claim="")
    await lab.until(lambda: agent.pods_informer.get(late.key), what="late pod heard of")
    assert agent.pods.find("default", "late") is None
    let_go()
    await lab.stop_agent()
    assert running(lab) == []
    assert (await lab.client.get(Pod, "late", "default")).status.phase == "Pending"
    node = await lab.client.find(Node, "n1")
    assert (node is None) == (on_stop == REMOVE)
    if on_stop == DRAIN:  # the next agent starts both
        await lab.start_agent()
        await lab.phase("late", "Running")
        await lab.end("late", "p1")


async def test_a_node_is_not_removed_while_a_container_runs_on_it(lab, monkeypatch):
    await lab.start_agent(on_stop=REMOVE)
    await lab.pod("p1", claim="")
    await lab.phase("p1", "Running")

    async def believed(_manager, _timeout_s):
        return True

    monkeypatch.setattr(PodManager, "drain", believed)
    await lab.stop_agent()
    node = await lab.client.find(Node, "n1")
    assert node is not None
    assert not node.is_ready
    assert len(running(lab)) == 1
    await lab.start_agent()
    await lab.end("p1")


async def stops_soon(lab, is_waiting, **settings):
    """Start an agent, and ask it to stop when it waits for what will not come."""
    stop = asyncio.Event()
    config = AgentConfig("n1", lab.root, kube_config.from_kubeconfig(lab.server.kubeconfig), **settings)
    task = asyncio.create_task(run(config, stop))
    try:
        await lab.until(is_waiting, what="agent waits")
        stop.set()
        async with asyncio.timeout(20):
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("settings", [{}, {"on_stop": REMOVE}])
async def test_an_agent_that_may_not_list_what_it_needs_can_be_stopped(lab, monkeypatch, settings):
    refused, watch, list_ = [], Client.watch, Client.list

    async def refusal():
        refused.append(1)
        raise Forbidden(403, "Forbidden", "scripted")
        yield

    async def no_list(client, kind, *rest, **more):
        if kind is CSIDriver:
            raise Forbidden(403, "Forbidden", "scripted")
        return await list_(client, kind, *rest, **more)

    def no_watch(client, kind, *rest, **more):
        return refusal() if kind is CSIDriver else watch(client, kind, *rest, **more)

    monkeypatch.setattr(Client, "watch", no_watch)
    monkeypatch.setattr(Client, "list", no_list)
    await stops_soon(lab, lambda: refused, **settings)
    node = await lab.client.get(Node, "n1")  # also with --on-stop remove: it is not known what runs here
    assert not node.is_ready


@pytest.mark.parametrize(("part", "method"), [(NodeObject, "register"), (NodeDrivers, "ensure_csi_node")])
async def test_an_agent_whose_api_server_does_not_answer_at_the_start_can_be_stopped(lab, monkeypatch, part, method):
    asked = []

    async def hangs(_part):
        asked.append(1)
        await asyncio.sleep(3600)

    monkeypatch.setattr(part, method, hangs)
    await stops_soon(lab, lambda: asked)
    assert asked == [1]  # and not once more after it was told to stop


async def test_draining_stops_pods_and_unmounts_but_keeps_the_objects(lab):
    async with lab.one_pod(on_stop="drain"):
        await lab.stop_agent()
        assert lab.mounted() == []
        status = (await lab.client.get(Pod, "p1", "default")).status
        assert status.phase == "Running"
        assert {one.type: one.status for one in status.conditions}["Ready"] == "False"  # else services would send there
        assert "terminated" in status.container_statuses[0].state
        agent = await lab.start_agent()
        await lab.until(
            lambda: any(c.is_running for w in agent.pods.workers.values() for a in w.containers.values() for c in a)
        )
        await lab.end("p1")


@pytest.mark.parametrize("policy", ["Never", "OnFailure"])
async def test_work_that_a_drain_has_cut_short_does_not_count_as_done(lab, policy):
    await lab.start_agent(on_stop="drain")
    command = "trap 'exit 0' TERM; while :; do sleep 0.05; done"
    await lab.pod("p1", claim="", command=command, restartPolicy=policy)
    await lab.phase("p1", "Running")
    await lab.stop_agent()
    if policy == "Never":
        status = (await lab.client.get(Pod, "p1", "default")).status
        assert (status.phase, status.reason) == ("Failed", "Terminated")
        return
    await lab.start_agent()

    async def again():
        return (await lab.client.get(Pod, "p1", "default")).status.container_statuses[0].restart_count == 1

    await lab.until(again, what="the work begun again")
    await lab.phase("p1", "Running")
    await lab.end("p1")
