"""The plugin manager and what it publishes, against a real API server; drivers come, fail, change and go."""

import asyncio
import json
import shutil
import tempfile
from pathlib import Path

import pytest

from moorage.kube.api import config as kube_config
from moorage.kube.api.client import Client
from moorage.kube.errors import Unavailable
from moorage.kube.objects.core import Node
from moorage.kube.objects.storage import CSINode
from moorage.node.plugins.csi_node import DriverNodeInfo, NodeDrivers
from moorage.node.plugins.manager import PluginManager
from moorage.node.plugins.registry import DriverRegistry
from moorage.testing import HANG, ScriptedDriver, serve, until

NODE_ID = "csi.volume.kubernetes.io/nodeid"
MIGRATED = "storage.alpha.kubernetes.io/migrated-plugins"


class SlowToForget(NodeDrivers):
    """An API server that fails, or takes its time, when a driver's entry is to be removed."""

    failures = withdrawn = 0
    gate = None

    async def withdraw(self, driver):
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise Unavailable(503, "Unreachable", "scripted")
        await super().withdraw(driver)
        self.withdrawn += 1


class Setting:
    """A Node, a plugin manager without the rest of the agent, and drivers."""

    def __init__(self, base, client):
        self.base, self.client = base, client
        self.directory = base / "reg"
        self.periods = {}
        self.registry = DriverRegistry(call_timeout_s=5.0)
        self.published = SlowToForget(client, "n1")
        self._task = None

    def driver(self, name="a.dev", **settings):
        socket = self.base / f"{name}{len(list(self.base.iterdir()))}.sock"
        return ScriptedDriver(socket, name, data=self.base / "data", registry=self.directory, **settings)

    def start(self):
        self.manager = PluginManager(
            self.directory, self.registry, self.published, refresh_period_s=lambda name: self.periods.get(name, 0.0)
        )
        self._task = asyncio.create_task(self.manager.run())

    async def stop(self):
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self.registry = DriverRegistry(call_timeout_s=5.0)

    async def csi_node(self):
        return await self.client.find(CSINode, "n1")

    async def entries(self):
        found = await self.csi_node()
        return {one.name: one for one in found.spec.drivers} if found else {}

    async def ids(self):
        return json.loads((await self.client.get(Node, "n1")).annotations.get(NODE_ID, "{}"))

    async def registered(self, driver, times=1):
        return await until(
            lambda: sum(one.plugin_registered for one in driver.statuses) >= times, what=f"{driver.name} told"
        )

    async def without(self, name):
        async def gone():
            return name not in await self.entries() and name not in await self.ids()

        await until(gone, what=f"{name} withdrawn")


@pytest.fixture
async def node(tmp_path):
    base = Path(tempfile.mkdtemp(prefix="moorage-reg-", dir="/tmp"))  # a socket's path must be short
    async with (
        serve(tmp_path / "api") as server,
        Client(kube_config.from_values(server.insecure_url, server.token)) as c,
    ):
        await c.create(Node, {"metadata": {"name": "n1"}, "spec": {}})
        setting = Setting(base, c)
        try:
            yield setting
        finally:
            await setting.stop()
            shutil.rmtree(base)


async def test_the_csi_node_is_owned_by_the_node_and_says_nothing_of_migration(node):
    made = await node.published.ensure_csi_node()
    uid = (await node.client.get(Node, "n1")).uid
    (owner,) = made.metadata.owner_references
    assert (owner.api_version, owner.kind, owner.name, owner.uid) == ("v1", "Node", "n1", uid)
    assert not owner.controller
    assert MIGRATED not in made.annotations
    assert (await node.published.ensure_csi_node()).uid == made.uid


@pytest.mark.parametrize("owners", [[{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "another"}], []])
async def test_a_csi_node_that_is_not_this_nodes_is_replaced(node, owners):
    body = {"metadata": {"name": "n1", "ownerReferences": owners}, "spec": {"drivers": [{"name": "x", "nodeID": "y"}]}}
    before = await node.client.create(CSINode, body)
    after = await node.published.ensure_csi_node()
    assert after.uid != before.uid
    assert after.spec.drivers == []
    assert after.metadata.owner_references[0].uid == (await node.client.get(Node, "n1")).uid


async def test_what_a_kubelet_said_of_migration_is_taken_back(node):
    made = await node.published.ensure_csi_node()
    patch = {"metadata": {"annotations": {MIGRATED: "kubernetes.io/aws-ebs", "other": "kept"}}}
    await node.client.patch(CSINode, "n1", patch)
    after = await node.published.ensure_csi_node()
    assert (after.uid, after.annotations) == (made.uid, {"other": "kept"})


async def test_drivers_share_the_annotation_and_one_that_goes_leaves_the_others_alone(node):
    node.start()
    one, two = node.driver("a.dev", node_id="id-a"), node.driver("b.dev", node_id="id-b", topology={"t": "x"})
    async with two:
        async with one:
            await node.registered(one)
            await node.registered(two)
            assert await node.ids() == {"a.dev": "id-a", "b.dev": "id-b"}
            assert set(await node.entries()) == {"a.dev", "b.dev"}
        await node.without("a.dev")
        assert await node.ids() == {"b.dev": "id-b"}
        assert (await node.entries())["b.dev"].topology_keys == ["t"]


async def test_what_others_write_meanwhile_is_not_lost(node, monkeypatch):
    get, others = node.client.get, ["b.dev", "c.dev", "d.dev"]

    async def overtaken(kind, name, *rest):
        found = await get(kind, name, *rest)
        if kind is Node and others:  # somebody writes between our reading and our writing, as often as we try but once
            ids = {**json.loads(found.annotations.get(NODE_ID, "{}")), others.pop(): "x"}
            await node.client.patch(Node, "n1", {"metadata": {"annotations": {NODE_ID: json.dumps(ids)}}})
        return found

    monkeypatch.setattr(node.client, "get", overtaken)
    await node.published.publish(DriverNodeInfo("a.dev", "node-1", {}))
    assert await node.ids() == {"a.dev": "node-1", "b.dev": "x", "c.dev": "x", "d.dev": "x"}


async def test_an_annotation_of_nonsense_is_replaced(node):
    await node.client.patch(Node, "n1", {"metadata": {"annotations": {NODE_ID: "{nonsense"}}})
    node.start()
    async with node.driver() as driver:
        await node.registered(driver)
        assert await node.ids() == {"a.dev": "node-1"}


async def test_without_an_endpoint_the_registration_socket_is_the_drivers(node):
    node.start()
    async with node.driver(registered_endpoint="") as driver:
        await node.registered(driver)
        assert node.registry.get("a.dev").endpoint == str(driver.registration_socket)


async def test_an_endpoint_that_is_no_socket_is_refused_in_words(node):
    node.start()
    async with node.driver(registered_endpoint="tcp://1.2.3.4:5") as driver:
        await until(lambda: driver.statuses)
        assert not driver.statuses[0].plugin_registered
        assert "only unix sockets" in driver.statuses[0].error


@pytest.mark.parametrize(("limit", "count"), [(0, None), (-3, None), (5, 5), (2**40, 2**31 - 1)])
async def test_the_number_of_volumes_fits_the_api(node, limit, count):
    node.start()
    async with node.driver(max_volumes=limit) as driver:
        await node.registered(driver)
        found = (await node.entries())["a.dev"].allocatable
        assert (found.count if found else None) == count


async def test_an_id_and_topology_that_changed_while_nobody_looked_replace_the_entry(node, monkeypatch):
    node.start()
    async with node.driver(topology={"old": "1"}) as driver:
        await node.registered(driver)
    await node.without("a.dev")
    await node.stop()
    stale = [{"name": "a.dev", "nodeID": "old", "topologyKeys": ["old"]}, {"name": "b.dev", "nodeID": "b"}]
    await node.client.patch(CSINode, "n1", {"spec": {"drivers": stale}})
    node.start()
    written, write = [], node.published._write

    async def recorded(current, drivers):
        written.append([one.name for one in drivers])
        return await write(current, drivers)

    monkeypatch.setattr(node.published, "_write", recorded)
    async with node.driver(node_id="new", topology={"new": "2", "even": "3"}) as driver:
        await node.registered(driver)
        found = await node.entries()
        assert (found["a.dev"].node_id, found["a.dev"].topology_keys) == ("new", ["even", "new"])
        assert found["b.dev"].node_id == "b"
        assert written == [["b.dev"], ["b.dev", "a.dev"]]  # an entry must not be changed, only removed and made anew
        labels = (await node.client.get(Node, "n1")).labels
        assert (labels["old"], labels["new"]) == ("1", "2")  # labels are never taken away


@pytest.mark.parametrize(("method", "what"), [("NodeGetInfo", "INTERNAL"), ("NodeGetInfo", "garbage")])
async def test_a_driver_that_fails_at_first_is_told_so_and_tried_again(node, method, what):
    node.start()
    driver = node.driver()
    driver.fail(method, what)
    async with driver:
        await node.registered(driver)
        assert [one.plugin_registered for one in driver.statuses] == [False, True]
        assert "a.dev" in driver.statuses[0].error
        assert "NodeGetInfo" in driver.statuses[0].error
        assert set(await node.entries()) == {"a.dev"}


async def test_a_plugin_that_does_not_say_who_it_is_in_time_is_asked_again(node):
    node.start()
    slow, fine = node.driver("slow.dev"), node.driver("fine.dev")
    slow.fail("GetInfo", HANG, "garbage")
    async with slow, fine:
        await node.registered(fine)
        assert slow.statuses == []
        await node.registered(slow)
        assert len(slow.requests("GetInfo")) == 3


async def test_a_plugin_that_does_not_take_the_good_news_is_not_registered(node):
    node.start()
    driver = node.driver()
    driver.fail("NotifyRegistrationStatus", "INTERNAL")
    before = []
    node.registry.subscribe(lambda name: before.append((name, node.registry.find(name) is not None)))
    async with driver:
        await node.registered(driver)
        assert before == [("a.dev", True), ("a.dev", False), ("a.dev", True)]
        assert set(await node.entries()) == {"a.dev"}


async def test_a_second_driver_of_the_name_needs_a_higher_version(node):
    node.start()
    async with node.driver() as first:
        await node.registered(first)
        same = node.driver()
        same.registry = node.directory / "second"
        async with same:
            await until(lambda: same.statuses)
            assert not same.statuses[0].plugin_registered
            assert "already registered" in same.statuses[0].error
            assert node.registry.get("a.dev").endpoint == str(first.socket)
        higher = node.driver(versions=("1.0.0", "1.1.0"), node_id="node-2")
        higher.registry = node.directory / "third"
        await higher.start()
        await node.registered(higher)
        assert (await node.entries())["a.dev"].node_id == "node-2"
    async with node.driver("b.dev") as another:  # the manager has seen that the first one's socket is gone
        await node.registered(another)
    assert node.registry.get("a.dev").endpoint == str(higher.socket)
    assert (await node.entries())["a.dev"].node_id == "node-2"
    await higher.stop()
    await node.without("a.dev")


async def test_a_limit_is_read_again_as_often_as_the_cluster_asks(node):
    node.start()
    async with node.driver(max_volumes=3) as driver:
        await node.registered(driver)
        driver.max_volumes = 4
        node.periods["a.dev"] = 3600.0
        node.manager.reconsider()
        await asyncio.sleep(0)
        assert len(driver.requests("NodeGetInfo")) == 1

        async def counts(wanted):
            return (await node.entries())["a.dev"].allocatable.count == wanted

        node.periods["a.dev"] = 0.05  # a new period counts at once, not when the old one is over
        node.manager.reconsider()
        await until(lambda: counts(4))
        driver.fail("NodeGetInfo", "INTERNAL")
        driver.max_volumes = 5
        await until(lambda: counts(5))  # a failure leaves the entry, and the next time it is read
        assert [one.plugin_registered for one in driver.statuses] == [True]


async def test_a_node_made_anew_is_told_of_its_drivers_again(node):
    node.start()
    async with node.driver(topology={"zone": "z"}) as driver:
        await node.registered(driver)
        await node.client.delete(Node, "n1")
        await node.client.create(Node, {"metadata": {"name": "n1"}, "spec": {}})
        node.manager.publish_again()

        async def published():
            found, new = await node.csi_node(), await node.client.get(Node, "n1")
            owned = found is not None and found.metadata.owner_references[0].uid == new.uid
            return owned and found.spec.drivers and new.labels.get("zone") == "z" and await node.ids()

        await until(published)
        assert [one.plugin_registered for one in driver.statuses] == [True]


async def test_an_entry_that_cannot_be_removed_now_is_removed_later(node):
    node.start()
    node.published.failures = 2
    async with node.driver() as driver:
        await node.registered(driver)
    await node.without("a.dev")
    assert node.published.failures == 0


async def test_other_events_do_not_cut_a_withdrawal_short(node):
    node.start()
    node.published.gate = asyncio.Event()
    async with node.driver() as driver:
        await node.registered(driver)
    await until(lambda: node.registry.find("a.dev") is None)
    async with node.driver("b.dev") as another:  # the manager has looked at all sockets again
        await node.registered(another)
        assert set(await node.entries()) == {"a.dev", "b.dev"}, "the withdrawal is still under way"
        node.published.gate.set()
        await node.without("a.dev")
        assert (node.published.withdrawn, set(await node.entries())) == (1, {"b.dev"})


async def test_a_socket_made_anew_waits_until_the_old_one_is_withdrawn(node):
    node.start()
    node.published.gate = asyncio.Event()
    driver = node.driver()
    await driver.start()
    await node.registered(driver)
    await driver.stop(leave_sockets=True)
    await driver.start()
    await until(lambda: node.registry.find("a.dev") is None)
    async with node.driver("b.dev") as another:  # meanwhile the new socket has been seen
        await node.registered(another)
        assert len(driver.requests("GetInfo")) == 1
        node.published.gate.set()
        await node.registered(driver, times=2)
        assert node.published.withdrawn == 1
        assert set(await node.entries()) == {"a.dev", "b.dev"}
    await driver.stop()


async def test_a_socket_that_goes_while_its_driver_hangs_leaves_nothing(node):
    node.start()
    driver = node.driver()
    driver.fail("NodeGetInfo", HANG)
    await driver.start()
    await until(lambda: driver.requests("NodeGetInfo"))
    driver.registration_socket.unlink()
    await until(lambda: node.registry.find("a.dev") is None)
    await driver.stop()
    assert await node.entries() == {}
    async with node.driver() as another:
        await node.registered(another)


async def test_a_plugin_that_breaks_the_agents_own_code_is_asked_again(node, monkeypatch):
    failures = [RuntimeError("a fault of ours")]
    publish = node.published.publish

    async def faulty(info):
        if failures:
            raise failures.pop()
        await publish(info)

    monkeypatch.setattr(node.published, "publish", faulty)
    node.start()
    async with node.driver() as driver:
        await node.registered(driver)
        assert "a fault of ours" in driver.statuses[0].error


def newer(node, **settings):
    """A second driver of the same name, of a higher version, with a socket of its own."""
    made = node.driver(versions=("1.1.0",), node_id="node-2", **settings)
    made.registry = node.directory / "newer"
    return made


async def entry_of(node, wanted):
    async def there():
        found = (await node.entries()).get("a.dev")
        return found is not None and found.node_id == wanted and (await node.ids()).get("a.dev") == wanted

    await until(there, what=f"a.dev published as {wanted}")


async def test_a_newer_driver_that_does_not_work_does_not_take_the_name_from_one_that_does(node):
    node.start()
    async with node.driver() as good:
        await node.registered(good)
        heard = []
        node.registry.subscribe(heard.append)
        bad = newer(node)
        bad.fail("NodeGetInfo", *["INTERNAL"] * 50)
        async with bad:
            await until(lambda: len(bad.statuses) >= 2)
            assert not any(one.plugin_registered for one in bad.statuses)
            assert node.registry.get("a.dev").endpoint == str(good.socket)
        assert heard == []
        assert (await node.entries())["a.dev"].node_id == "node-1"
        assert node.published.withdrawn == 0


async def test_after_a_rollback_the_older_driver_is_used_and_published_again(node):
    node.start()
    async with node.driver() as older:
        await node.registered(older)
        connection = node.registry.get("a.dev")
        async with newer(node) as one:
            await node.registered(one)
            await entry_of(node, "node-2")
        await until(lambda: node.registry.find("a.dev") is connection, what="older one registered")
        await entry_of(node, "node-1")
        assert await connection.capabilities()  # its connection was never closed
    await node.without("a.dev")


async def test_a_newer_driver_that_fails_after_it_took_the_name_gives_it_back(node):
    node.start()
    async with node.driver() as older:
        await node.registered(older)
        failing = newer(node)
        failing.fail("NotifyRegistrationStatus", *["INTERNAL"] * 50)
        async with failing:
            await until(lambda: len(failing.requests("NotifyRegistrationStatus")) >= 2)
        await until(lambda: (found := node.registry.find("a.dev")) and found.endpoint == str(older.socket))
        await entry_of(node, "node-1")
        assert await node.registry.get("a.dev").capabilities()


async def test_of_two_older_drivers_the_higher_version_has_the_name_back(node):
    node.start()
    lowest, middle = node.driver(node_id="node-0"), node.driver(versions=("1.0.5",))
    middle.registry = node.directory / "middle"
    async with lowest:
        await node.registered(lowest)
        async with middle:
            await node.registered(middle)
            async with newer(node) as one:
                await node.registered(one)
                await entry_of(node, "node-2")
            await until(lambda: (found := node.registry.find("a.dev")) and found.endpoint == str(middle.socket))
            await entry_of(node, "node-1")
            assert node.registry.get("a.dev").version > (1, 0, 0)
        await entry_of(node, "node-0")
        assert node.registry.get("a.dev").endpoint == str(lowest.socket)
