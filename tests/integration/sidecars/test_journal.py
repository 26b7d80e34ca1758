"""The journal's lease: what is over does not stay in it, and it never outgrows what an object may hold."""

import asyncio

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import Lease, ObjectReference
from moorage.sidecars.provisioner.attempt import Attempt
from moorage.sidecars.provisioner.journal import Journal
from moorage.sidecars.roles import Role

PREFIX = "intent.moorage.dev/"


def attempt():
    return Attempt(
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
