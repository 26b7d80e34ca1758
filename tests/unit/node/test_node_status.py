"""When a pod's status is written: at once, or with others while many pods move."""

import asyncio
import contextlib

import msgspec
import pytest
from msgspec import convert

from moorage.kube.api.wire import without_nulls
from moorage.kube.errors import Invalid
from moorage.kube.objects.pods import Pod
from moorage.node.pods import status_writer as status_module
from moorage.node.pods.lifecycle import ContainerAttempt, PodDecision
from moorage.node.pods.status_report import status_of
from moorage.node.pods.status_writer import StatusWriter


class Api:
    """Takes statuses and remembers whose, in which order."""

    def __init__(self):
        self.taken = []
        self.version = 0
        self.refused = None

    async def patch(self, kind, name, patch, namespace="", **how):
        if self.refused is not None:
            raise self.refused
        self.taken.append((name, patch["status"]["phase"]))
        return pod(name, self.version)


class Machine:
    """Says how many more it will have to tell of."""

    to_come = 500


def pod(name, version=0):
    meta = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return convert({"metadata": meta}, Pod)


def status(phase="Running"):
    return {"phase": phase, "containerStatuses": [{"name": "main", "state": {"running": {}}}]}


@contextlib.asynccontextmanager
async def writing(machine, patience_s, monkeypatch):
    monkeypatch.setattr(status_module, "_TOGETHER_S", patience_s)
    api = Api()
    writer = StatusWriter(api, lambda: machine.to_come)
    task = asyncio.create_task(writer.run())
    try:
        yield writer, api
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_taken(api, count):
    async with asyncio.timeout(5):
        while len(api.taken) < count:
            await asyncio.sleep(0.001)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_with_little_to_do_a_status_is_written_at_once(monkeypatch):
    machine = Machine()
    machine.to_come = 0
    async with writing(machine, 3600, monkeypatch) as (writer, api):
        writer.put(pod("a"), status())
        await settle()
        assert api.taken == [("a", "Running")]


@pytest.mark.parametrize(("field", "is_error"), [("metadata.uid", False), ("status.containerStatuses", True)])
async def test_only_a_refusal_that_is_not_about_another_pod_of_the_name_is_an_error(
    monkeypatch, caplog, field, is_error
):
    machine = Machine()
    machine.to_come = 0
    async with writing(machine, 3600, monkeypatch) as (writer, api):
        api.refused = Invalid(422, "Invalid", "not so", {"details": {"causes": [{"field": field}]}})
        writer.put(pod("a"), status())
        async with asyncio.timeout(5):
            await writer.flush("uid-a")  # neither is tried again
    assert any(one.levelname == "ERROR" for one in caplog.records) == is_error


async def test_while_much_is_going_on_statuses_wait_and_the_first_quiet_one_takes_them_along(monkeypatch):
    machine = Machine()
    async with writing(machine, 3600, monkeypatch) as (writer, api):
        writer.put(pod("a"), status())
        writer.put(pod("b"), status())
        await settle()
        assert api.taken == []
        machine.to_come = 0
        writer.put(pod("c"), status())
        await settle()
        assert [name for name, _ in api.taken] == ["a", "b", "c"]


async def test_none_waits_for_longer_than_a_moment(monkeypatch):
    async with writing(Machine(), 0.02, monkeypatch) as (writer, api):
        writer.put(pod("a"), status())
        await until_taken(api, 1)
        writer.put(pod("b"), status())
        await until_taken(api, 2)
        assert [name for name, _ in api.taken] == ["a", "b"]


async def test_enough_of_them_are_sent_without_waiting(monkeypatch):
    monkeypatch.setattr(status_module, "_TOGETHER", 3)
    async with writing(Machine(), 3600, monkeypatch) as (writer, api):
        for name in "abcd":
            writer.put(pod(name), status())
        await until_taken(api, 3)
        await settle()
        assert [name for name, _ in api.taken] == ["a", "b", "c"], "the fourth begins the next lot"


async def test_half_of_a_lot_is_under_way_at_once_and_the_rest_when_the_server_has_answered(monkeypatch):
    machine = Machine()
    async with writing(machine, 3600, monkeypatch) as (writer, api):
        may_answer = asyncio.Event()
        asked = []

        async def patch(kind, name, *_, **how):
            asked.append(name)
            await may_answer.wait()
            return pod(name)

        api.patch = patch
        for number in range(64):
            writer.put(pod(f"p{number}"), status())
        await settle()
        assert len(asked) == 32
        may_answer.set()
        await settle()
        assert len(asked) == 64


async def test_the_fewer_are_to_come_the_fewer_are_waited_for(monkeypatch):
    machine = Machine()
    lots = []
    async with writing(machine, 3600, monkeypatch) as (writer, api):
        for left in reversed(range(200)):
            machine.to_come = left
            before = len(api.taken)
            writer.put(pod(f"p{left}"), status())
            await settle()
            if len(api.taken) > before:
                await until_taken(api, 200 - left)
                lots.append(len(api.taken) - before)
    assert lots == [64, 64, 36, 18, 9, 5, 2, 1, 1]
    assert sum(lots) == 200


async def test_what_waits_is_written_as_it_is_by_then(monkeypatch):
    machine = Machine()
    async with writing(machine, 3600, monkeypatch) as (writer, api):
        writer.put(pod("a"), status("Running"))
        writer.put(pod("a"), status("Succeeded"))
        machine.to_come = 0
        writer.put(pod("b"), status())
        await settle()
        assert api.taken == [("a", "Succeeded"), ("b", "Running")]


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_whoever_needs_a_status_written_does_not_wait_for_others(monkeypatch, is_forgotten):
    async with writing(Machine(), 3600, monkeypatch) as (writer, api):
        writer.put(pod("a"), status())
        if is_forgotten:
            writer.forget("uid-a")
        async with asyncio.timeout(5):
            await writer.flush("uid-a")
        assert api.taken == ([] if is_forgotten else [("a", "Running")])


async def test_what_the_server_made_of_the_newest_status_is_known_as_an_echo(monkeypatch):
    machine = Machine()
    machine.to_come = 0
    async with writing(machine, 3600, monkeypatch) as (writer, api):
        api.version = 5
        assert not writer.is_echo(pod("a", version=5))
        writer.put(pod("a"), status())
        await settle()
        assert [writer.is_echo(pod("a", version=number)) for number in (4, 5, 6)] == [False, True, False]
        machine.to_come = 500
        writer.put(pod("a"), status("Pending"))  # which is still to be written
        assert not writer.is_echo(pod("a", version=5))


def known_pod(status=None, **more):
    """As the server has it: without what is nothing, and with what others have said."""
    meta = {"name": "a", "namespace": "ns", "uid": "uid-a", "resourceVersion": "7", "generation": 1}
    spec = {"containers": [{"name": "main", "image": "host"}]}
    found = without_nulls(status or {})
    gate = {"type": "example.com/gate", "status": "True"}
    found = (
        {**found, "conditions": [gate, *reversed(found["conditions"])], "qosClass": "BestEffort", **more}
        if status
        else {}
    )
    return convert({"metadata": meta, "spec": spec, "status": found}, Pod)


def said_of(found, number=0):
    attempts = {"main": ContainerAttempt(number, is_running=True, started=1.0, id="x")}
    return status_of(found, attempts, PodDecision(phase="Running"), host_ip="10.0.0.1", started_at=1.0, now=2.0)


@pytest.mark.parametrize(
    ("number", "more", "taken"),
    [
        pytest.param(0, {}, 0, id="the same"),
        pytest.param(1, {}, 1, id="a container was started again"),
        pytest.param(0, {"phase": "Unknown"}, 1, id="another phase"),
        pytest.param(0, {"podIP": "10.0.0.2"}, 1, id="another address"),
        pytest.param(0, {"conditions": []}, 1, id="no conditions"),
        pytest.param(0, {"reason": "NodeLost"}, 1, id="a reason that nobody has any more"),
    ],
)
async def test_an_agent_that_is_started_again_writes_only_what_is_news(monkeypatch, number, more, taken):
    machine = Machine()
    machine.to_come = 0
    found = known_pod(said_of(known_pod()), **more)
    async with writing(machine, 3600, monkeypatch) as (writer, api):
        said = said_of(found, number)
        writer.put(found, said)
        await settle()
        assert len(api.taken) == taken
        writer.put(found, said)
        await settle()
        assert len(api.taken) == taken
        assert writer.last("uid-a") == said


async def test_what_was_there_already_is_written_when_somebody_changes_it(monkeypatch):
    machine = Machine()
    machine.to_come = 0
    found = known_pod(said_of(known_pod()))
    said = said_of(found)
    async with writing(machine, 3600, monkeypatch) as (writer, api):
        writer.put(found, said)
        await settle()
        meta = msgspec.structs.replace(found.metadata, resource_version="8")
        status = msgspec.structs.replace(found.status, phase="Unknown")
        writer.put(msgspec.structs.replace(found, metadata=meta, status=status), said)
        await settle()
        assert len(api.taken) == 1
