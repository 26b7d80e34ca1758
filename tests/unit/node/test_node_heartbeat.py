"""The Node and its Lease while the API server does not answer, while the disk is dead, and when the agent stops."""

import asyncio
import errno
import os
import selectors
from types import SimpleNamespace

import msgspec
import pytest

from moorage.kube.errors import AlreadyExists, NotFound
from moorage.kube.objects.core import Lease, Node
from moorage.kube.objects.storage import CSINode
from moorage.node import node_object
from moorage.node.node_object import LEASE_S, RENEW_S, NodeFacts, NodeObject


class Jumping(selectors.DefaultSelector):
    """Nothing comes from outside: the time until the next timer is jumped over."""

    now = 1000.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._jumping = Jumping()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now


@pytest.fixture
def story():
    """Run a story on time that passes only while everybody waits."""

    def run(body):
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            return runner.run(body)

    return run


class Api:
    """Three objects; a request hangs for as long as a client waits, if it is among those that are to."""

    CLIENT_WAITS_S = 60.0

    def __init__(self):
        self.there = {Node: {}, CSINode: {}, Lease: {}}
        self.uid = "u1"
        self.hanging = []  # (method, kind), each for one request
        self.slow_s = {}  # (method, kind) to seconds that a request is under way before it has its effect
        self.done = []  # (time, method, kind)

    async def _arrive(self, method, kind):
        if (method, kind) in self.hanging:
            self.hanging.remove((method, kind))
            await asyncio.sleep(self.CLIENT_WAITS_S)
        await asyncio.sleep(self.slow_s.get((method, kind), 0.001))
        self.done.append((asyncio.get_running_loop().time(), method, kind))

    async def find(self, kind, name, namespace=""):
        return SimpleNamespace(name=name, uid=self.uid) if kind in self.there else None

    async def create(self, kind, body, namespace=""):
        await self._arrive("create", kind)
        if kind in self.there:
            raise AlreadyExists(409, "AlreadyExists", body["metadata"]["name"])
        self.there[kind] = body
        return self._seen(kind)

    async def patch(self, kind, name, patch, namespace="", **how):
        await self._arrive("patch", kind)
        if kind not in self.there:
            raise NotFound(404, "NotFound", name)
        known = self.there[kind]
        self.there[kind] = {**known, **{part: {**known.get(part, {}), **patch[part]} for part in patch}}
        return self._seen(kind)

    def _seen(self, kind):
        known = {"name": "n1", "uid": self.uid, "ownerReferences": [{"kind": "Node", "name": "n1", "uid": self.uid}]}
        return msgspec.convert({"status": self.there[kind].get("status", {}), "metadata": known}, kind)

    async def delete(self, kind, name, namespace=""):
        await self._arrive("delete", kind)
        if self.there.pop(kind, None) is None:
            raise NotFound(404, "NotFound", name)

    def times(self, method, kind):
        return [at for at, *what in self.done if what == [method, kind]]

    @property
    def is_ready(self):
        conditions = {one["type"]: one["status"] for one in self.there[Node]["status"]["conditions"]}
        return conditions["Ready"] == "True"


class Nodes:
    """The Node as everybody on this machine hears of it, at once."""

    def __init__(self):
        self._handlers = []
        self._node = None

    def subscribe(self, handler):
        self._handlers.append(handler)

    def get(self, _name):
        return self._node

    def remember(self, node):
        old, self._node = self._node, node
        for handler in self._handlers:
            handler(old, node)

    def forget(self):
        self.remember(None)


@pytest.fixture
def api():
    return Api()


@pytest.fixture
def nodes():
    return Nodes()


@pytest.fixture
def node(api, nodes, tmp_path):
    return NodeObject(api, NodeFacts("n1", tmp_path, "127.0.0.1", 1), nodes, frozenset, asyncio.Event())


class running:
    """The node is registered, and keeps itself current within the block."""

    def __init__(self, node):
        self._node = node

    async def __aenter__(self):
        await self._node.register()
        self._task = asyncio.create_task(self._node.run())

    async def __aexit__(self, *_):
        assert not self._task.done(), "the node's tasks have ended by themselves"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.mark.parametrize("in_a_row", [1, 2])
def test_requests_that_are_never_answered_do_not_cost_the_lease(story, api, node, in_a_row):
    async def body():
        async with running(node):
            await asyncio.sleep(RENEW_S / 2)
            api.hanging = [("patch", Lease)] * in_a_row
            await asyncio.sleep(LEASE_S * 2)
        first, second, *_ = api.times("patch", Lease)
        assert second - first < LEASE_S
        assert api.hanging == []

    story(body())


def test_a_report_of_use_that_is_never_answered_is_made_again_soon(story, api, nodes, tmp_path):
    facts = NodeFacts("n1", tmp_path, "127.0.0.1", 1)
    node = NodeObject(api, facts, nodes, lambda: frozenset({"v"}), asyncio.Event())

    async def body():
        async with running(node):
            api.hanging = [("patch", Node)]
            node.start_reporting_use()
            await asyncio.sleep(node_object.ANSWER_S * 2)
            assert api.there[Node]["status"]["volumesInUse"] == ["v"]

    story(body())


def test_an_api_server_that_hangs_does_not_hold_up_a_stop(story, api, node):
    async def body():
        async with running(node):
            await asyncio.sleep(1)
            api.hanging = [("patch", Node), ("patch", Lease)]
            began = asyncio.get_running_loop().time()
            await node.stopped(remove=False)
            assert asyncio.get_running_loop().time() - began <= node_object.LAST_WORD_S + 1 < Api.CLIENT_WAITS_S

    story(body())


def test_one_renewal_that_hangs_does_not_keep_the_node_from_being_removed(story, api, node):
    async def body():
        api.hanging = [("patch", Lease)]
        async with running(node):
            await asyncio.sleep(1)
            await node.stopped(remove=True)
            assert api.there == {}

    story(body())


def test_a_lease_that_is_being_made_while_the_node_is_removed_does_not_stay(story, api, node):
    async def body():
        del api.there[Lease]
        api.slow_s["create", Lease] = 2.0
        async with running(node):
            await asyncio.sleep(1)  # the request is under way
            await node.stopped(remove=True)
            await asyncio.sleep(LEASE_S)
        assert api.there == {}

    story(body())


def test_a_node_that_is_being_made_ready_while_the_agent_stops_is_not_ready_in_the_end(story, api, node):
    async def body():
        async with running(node):
            api.slow_s["patch", Node] = 2.0
            node.set_ready(True)
            await asyncio.sleep(1)
            del api.slow_s["patch", Node]  # the next request overtakes this one
            await node.stopped(remove=False)
            await asyncio.sleep(5)
        assert not api.is_ready

    story(body())


def test_two_agents_of_one_name_do_not_answer_each_other_without_pause(story, api, nodes, node, tmp_path):
    other = NodeObject(api, NodeFacts("n1", tmp_path, "127.0.0.1", 2), nodes, frozenset, asyncio.Event())

    async def body():
        async with running(node), running(other):
            node.set_ready(True)
            await asyncio.sleep(60)
        assert 60 < len(api.times("patch", Node)) <= 130  # each of them once a second

    story(body())


def test_a_dead_disk_does_not_end_the_agent_and_its_size_stays_as_it_was_told(story, api, node, monkeypatch):
    def dead(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    async def body():
        async with running(node):
            node.set_ready(True)
            await asyncio.sleep(1)
            assert "ephemeral-storage" in api.there[Node]["status"]["capacity"]
            monkeypatch.setattr(os, "statvfs", dead)
            node.set_ready(False)
            await asyncio.sleep(1)
            assert not api.is_ready
            assert "ephemeral-storage" not in api.there[Node]["status"]["capacity"]  # a patch that leaves it alone

    story(body())


def test_a_node_that_somebody_made_anew_is_registered_like_one_that_is_gone(story, api, nodes, tmp_path):
    made_anew = []
    facts = NodeFacts("n1", tmp_path, "127.0.0.1", 1, {"disk": "fast"})
    node = NodeObject(api, facts, nodes, frozenset, asyncio.Event(), on_made_anew=lambda: made_anew.append(1))

    async def body():
        async with running(node):
            node.set_ready(True)
            await asyncio.sleep(5)
            assert not made_anew
            api.there[Node], api.uid = {}, "u2"
            nodes.forget()
            await asyncio.sleep(5)
        assert api.there[Node]["metadata"]["labels"]["disk"] == "fast"
        assert api.is_ready
        assert made_anew == [1]

    story(body())


def test_a_node_whose_registration_was_cut_short_is_told_of_its_drivers_all_the_same(story, api, nodes, tmp_path):
    made_anew = []
    facts = NodeFacts("n1", tmp_path, "127.0.0.1", 1)
    node = NodeObject(api, facts, nodes, frozenset, asyncio.Event(), on_made_anew=lambda: made_anew.append(1))

    async def body():
        async with running(node):
            del api.there[Node]
            node.set_ready(True)
            await asyncio.sleep(0.0015)  # that it is gone has been heard, and it is being made
            api.hanging = [("patch", Node)]
            await asyncio.sleep(30)
        assert api.is_ready
        assert made_anew

    story(body())
