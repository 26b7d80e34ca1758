"""Drivers that come, go, come back, lie about themselves or hang."""

import json
import socket

import pytest

from moorage.kube.objects.core import Node
from moorage.kube.objects.storage import CSINode
from moorage.testing import HANG

pytestmark = pytest.mark.root


async def entries(lab):
    found = await lab.client.find(CSINode, "n1")
    return {one.name: one for one in found.spec.drivers} if found else {}


async def test_a_driver_is_published_with_its_id_topology_and_limit_and_withdrawn_when_its_socket_goes(lab):
    await lab.start_agent()
    driver = lab.driver(topology={"topology.scripted.dev/zone": "z1"}, max_volumes=7)
    async with driver:
        found = await lab.until(lambda: entries(lab), what="driver in CSINode")
        entry = found["scripted.dev"]
        assert (entry.node_id, entry.topology_keys) == ("node-1", ["topology.scripted.dev/zone"])
        assert entry.allocatable.count == 7
        node = await lab.client.get(Node, "n1")
        assert node.labels["topology.scripted.dev/zone"] == "z1"
        assert json.loads(node.annotations["csi.volume.kubernetes.io/nodeid"]) == {"scripted.dev": "node-1"}
        await lab.until(lambda: driver.statuses, what="driver told")
        assert driver.statuses[-1].plugin_registered

    async def withdrawn():
        return not await entries(lab)

    await lab.until(withdrawn, what="driver withdrawn")

    async def annotation_gone():
        return "csi.volume.kubernetes.io/nodeid" not in (await lab.client.get(Node, "n1")).annotations

    await lab.until(annotation_gone, what="annotation removed")
    assert (await lab.client.get(Node, "n1")).labels["topology.scripted.dev/zone"] == "z1"


async def test_a_driver_that_hangs_does_not_hold_up_another(lab):
    await lab.start_agent()
    stuck, fine = lab.driver("stuck.dev"), lab.driver("fine.dev")
    stuck.fail("NodeGetInfo", HANG)
    async with stuck, fine:

        async def fine_is_there():
            return "fine.dev" in await entries(lab)

        await lab.until(fine_is_there)
        assert "stuck.dev" not in await entries(lab)
        stuck.release()


async def test_a_socket_made_anew_is_registered_anew(lab):
    agent = await lab.start_agent()
    driver = lab.driver()
    await driver.start()
    await lab.until(lambda: agent.registry.find("scripted.dev"))
    first = agent.registry.find("scripted.dev")
    await driver.stop(leave_sockets=True)
    driver.node_id = "node-2"
    await driver.start()

    async def changed():
        entry = (await entries(lab)).get("scripted.dev")
        return entry is not None and entry.node_id == "node-2"

    await lab.until(changed, what="new id published")
    second = await lab.until(lambda: (found := agent.registry.find("scripted.dev")) is not first and found)
    assert second.name == "scripted.dev"
    await driver.stop()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"versions": ("0.3.0",)}, "major 1"),
        ({"versions": ()}, "none"),
        ({"plugin_type": "DevicePlugin"}, "DevicePlugin"),
        ({"node_id": ""}, "empty node_id"),
    ],
)
async def test_a_driver_that_cannot_be_taken_is_told_why(lab, settings, words):
    agent = await lab.start_agent()
    driver = lab.driver(**settings)
    async with driver:
        await lab.until(lambda: driver.statuses, what="driver told")
        assert not driver.statuses[0].plugin_registered
        assert words in driver.statuses[0].error
        assert agent.registry.find("scripted.dev") is None
        assert await entries(lab) == {}


async def test_a_topology_label_that_contradicts_the_node_is_refused(lab):
    await lab.start_agent(labels={"zone": "here"})
    driver = lab.driver(topology={"zone": "elsewhere"})
    async with driver:
        await lab.until(lambda: driver.statuses)
        assert "zone=elsewhere" in driver.statuses[0].error
        assert await entries(lab) == {}


async def test_drivers_stay_published_over_a_restart_of_the_agent(lab):
    await lab.start_agent()
    driver = lab.driver()
    async with driver:
        await lab.until(lambda: entries(lab))
        await lab.stop_agent()
        assert "scripted.dev" in await entries(lab)
        agent = await lab.start_agent()
        await lab.until(lambda: agent.registry.find("scripted.dev"))


async def test_after_a_restart_no_volume_fails_for_want_of_a_driver_that_is_there(lab):
    async with lab.one_pod() as (driver, pod):
        before = len(await lab.failed_mounts())
        await lab.crash_agent()
        agent = await lab.start_agent()
        await lab.until(lambda: agent.volumes.is_mounted(pod), what="volume confirmed")
        assert len(driver.requests("NodePublishVolume")) == 2
        assert len(await lab.failed_mounts()) == before
        await lab.end("p1")


async def test_a_driver_that_does_not_answer_at_a_restart_holds_the_agent_up_for_a_moment_only(lab):
    async with lab.one_pod() as (driver, pod):
        await lab.crash_agent()
        deaf = lab.root / "plugins_registry" / "deaf.sock"
        with socket.socket(socket.AF_UNIX) as listener:  # takes connections and says nothing
            listener.bind(str(deaf))
            listener.listen()
            agent = await lab.start_agent()
            await lab.until(lambda: agent.volumes.is_mounted(pod), what="volume confirmed")
        deaf.unlink()
        assert driver.requests("NodeUnpublishVolume") == []
        await lab.end("p1")
