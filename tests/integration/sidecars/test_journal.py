"""The journal's lease: what is over does not stay in it, and it never outgrows what an object may hold."""

import asyncio

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import Lease, ObjectReference
from moorage.sidecars.provisioner.attempt import ProvisionAttempt
from moorage.sidecars.provisioner.intents import Journal
from moorage.sidecars.roles import Role

PREFIX = "intent.moorage.dev/"


def attempt():
    return ProvisionAttempt(
        claim=ObjectReference(kind="PersistentVolumeClaim", namespace="default", name="data", uid="u1"),
        class_name="fast",
        class_uid="c1",
        request=pb.CreateVolumeRequest(name="pvc-u1"),
        skeleton={"metadata": {"name": "pvc-u1"}},
        secret=None,
        has_selected_node=False,
        source=None,
        source_is_required=False,
    )


async def notes(lab, name="test-csi-moorage-dev-intents"):
    lease = await lab.client.find(Lease, name, "default")
    return None if lease is None else {key for key in lease.annotations if key.startswith(PREFIX)}


async def test_stopping_leaves_no_notes_of_what_is_over(lab):
    running = lab.start(Role.PROVISIONER)
    await lab.make_class()
    for number in range(5):
        await lab.make_claim(f"c{number}")

    async def are_over():
        return len(await lab.events("ProvisioningSucceeded")) == 5

    await lab.until(are_over)
    await lab.kill(running)
    assert await notes(lab) == set()


async def test_stopping_keeps_the_notes_of_what_is_open(lab):
    gate = lab.driver.hold("CreateVolume")
    running = lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")

    async def is_asked():
        return lab.driver.count("CreateVolume")

    await lab.until(is_asked)
    await lab.kill(running)
    assert len(await notes(lab)) == 1
    gate.set()


async def test_a_lease_that_others_have_filled_is_not_written_too_large(lab):
    large = {"metadata": {"name": "j", "annotations": {"example.org/large": "x" * 199_990}}, "spec": {}}
    await lab.client.create(Lease, large, "default")
    journal = Journal(lab.client, "j", "default")
    await journal.load()
    writing = asyncio.create_task(journal.run())
    try:
        await asyncio.wait_for(journal.note("u1", attempt()), 30)  # comes back: the volume is made without a note
        assert journal.is_enabled
        assert await notes(lab, "j") == set()
        await lab.client.patch(Lease, "j", {"metadata": {"annotations": {"example.org/large": None}}}, "default")
        await journal.load()
        await asyncio.wait_for(journal.note("u1", attempt()), 30)
        assert len(await notes(lab, "j")) == 1
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


PATIENCE_S = 300.0


class Time:
    """A wall clock and a timer that go on only when told."""

    def __init__(self):
        self.now = 1000.0

    def timer(self):
        return self.now

    def clock(self):
        return self.now + 1_700_000_000.0


def instance(lab, time):
    """A journal of a further instance, on the lease `j`; nothing happens in it unless the test calls it."""
    return Journal(lab.client, "j", "default", patience_s=PATIENCE_S, clock=time.clock, timer=time.timer)


async def note(journal, uid="u1"):
    await asyncio.gather(journal.note(uid, attempt()), journal.look())


async def test_a_living_instances_note_outlives_every_other_instances_interest_in_it(lab):
    """The other one has taken it in, has long been done with the attempt, and looks again and again."""
    time = Time()
    working, other = instance(lab, time), instance(lab, time)
    await working.load()
    await note(working)
    assert set(await other.load()) == {"u1"}
    for _ in range(40):
        time.now += PATIENCE_S / 4
        await working.look()
        await other.look()
        assert other.abandoned("u1") == []
        other.forget("u1", other.abandoned("u1"))
        assert working.has("u1")
        assert len(await notes(lab, "j")) == 1


async def one_asleep(lab):
    """An instance that has noted an attempt and then slept for longer than others are patient, and another one."""
    time = Time()
    asleep, other = instance(lab, time), instance(lab, time)
    await asleep.load()
    await note(asleep)
    await other.load()
    time.now += PATIENCE_S
    return asleep, other


async def test_a_note_is_not_removed_when_its_writer_comes_back_before_the_write(lab):
    """It wakes up between the decision and the write of others."""
    asleep, other = await one_asleep(lab)
    left = other.abandoned("u1")
    assert len(left) == 1
    other.forget("u1", left)
    await asleep.look()  # renews the note, on the server, where the other one has not looked since
    await other.look()
    assert len(await notes(lab, "j")) == 1
    assert other.abandoned() == []


async def test_an_instance_whose_note_was_removed_knows_that_it_needs_another(lab):
    asleep, other = await one_asleep(lab)
    other.forget("u1", other.abandoned("u1"))
    await other.look()
    assert await notes(lab, "j") == set()
    assert not asleep.has("u1")
    await note(asleep)
    assert asleep.has("u1")
    assert len(await notes(lab, "j")) == 1


async def test_a_note_is_good_for_a_call_only_while_it_is_fresh(lab):
    time = Time()
    journal = instance(lab, time)
    await journal.load()
    await note(journal)
    time.now += PATIENCE_S / 2 - 1
    assert journal.has("u1")
    time.now += 1
    assert not journal.has("u1")
    journal.forget("u1")
    await note(journal)
    journal.forget("u1")
    assert not journal.has("u1"), "it is to be removed with the next write"


async def test_an_instance_learns_what_another_left_that_came_and_died_later(lab):
    time = Time()
    survivor, later = instance(lab, time), instance(lab, time)
    assert await survivor.load() == {}
    await later.load()
    await note(later)
    await survivor.look()
    time.now += PATIENCE_S - 1
    await survivor.look()
    assert survivor.abandoned() == []
    time.now += 1
    await survivor.look()
    left = survivor.abandoned()
    assert set(survivor.read(left)) == {"u1"}
    survivor.forget("u1", left)
    assert survivor.abandoned() == []
    await survivor.look()
    assert await notes(lab, "j") == set()


async def test_a_note_of_another_version_is_kept_while_its_writer_may_live(lab):
    time = Time()
    strange = {"metadata": {"name": "j", "annotations": {f"{PREFIX}u1.new": "1700001000.0:of a later version"}}}
    await lab.client.create(Lease, strange | {"spec": {}}, "default")
    journal = instance(lab, time)
    assert await journal.load() == {}
    await note(journal, "u2")
    assert len(await notes(lab, "j")) == 2
    time.now += PATIENCE_S
    assert journal.read(journal.abandoned()) == {}
    await journal.look()
    assert {key.partition(".new")[1] for key in await notes(lab, "j")} == {""}


async def test_leaving_removes_what_is_over_although_others_have_written_since(lab):
    leaving, other = (Journal(lab.client, "j", "default") for _ in range(2))
    await leaving.load()
    await note(leaving)
    await other.load()
    writing = asyncio.create_task(leaving.run())
    await asyncio.sleep(0)
    leaving.forget("u1")
    await note(other, "u2")
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert {key.removeprefix(PREFIX).partition(".")[0] for key in await notes(lab, "j")} == {"u2"}
