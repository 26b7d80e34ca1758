"""Two provisioners without leader election, one of which dies at a chosen point: the other one leaves nothing behind.

Each talks to a driver of its own, so that each can be scripted alone; both drivers serve the same back end.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moorage.kube.objects import Lease, PersistentVolume, PersistentVolumeClaim
from moorage.kube.objects.meta import Meta
from moorage.kube.objects.volumes import VolumeStatus
from moorage.sidecars.provisioner import intents as journal
from moorage.sidecars.provisioner.claims import ClaimWorker
from moorage.sidecars.roles import Role
from moorage.testing import Fault, ScriptedDriver

QUICK = {"timeout_s": 0.5}  # another instance counts as gone when it has written nothing for twice as long
PREFIX = "intent.moorage.dev/"
SURVIVOR, VICTIM = "survivor", "victim"


def refusing(code):
    """Every CreateVolume fails with the code and makes nothing."""
    return lambda method, request: Fault(code) if method == "CreateVolume" else None


@dataclass
class Pair:
    """The survivor uses the laboratory's driver, the victim the other one."""

    lab: Any
    driver: ScriptedDriver

    def start_survivor(self):
        return self.lab.start(Role.PROVISIONER, host=SURVIVOR, **QUICK)

    def start_victim(self):
        return self.lab.start(Role.PROVISIONER, host=VICTIM, csi_address=self.driver.endpoint, **QUICK)

    async def asked(self, times=1):
        """The victim has asked its driver for a volume so many times."""

        async def is_asked():
            return self.driver.count("CreateVolume") >= times

        await self.lab.until(is_asked)

    async def remove_claim(self):
        await self.lab.client.delete(PersistentVolumeClaim, "data", "default")

        async def is_gone():
            return await self.lab.claim("data") is None

        await self.lab.until(is_gone)

    async def notes(self):
        lease = await self.lab.client.find(Lease, "test-csi-moorage-dev-intents", "default")
        found = lease.annotations if lease is not None else {}
        return {key: text for key, text in found.items() if key.startswith(PREFIX)}

    async def one_note(self):
        """Only one instance is still at work on something."""

        async def is_one():
            found = await self.notes()
            return found if len(found) == 1 else None

        return await self.lab.until(is_one)

    async def all_gone(self):
        """No volume, no PersistentVolume, and nothing noted that might become one."""

        async def is_gone():
            return not self.lab.driver.backend.volumes and not await self.lab.volumes() and not await self.notes()

        await self.lab.until(is_gone)


@pytest.fixture
async def pair(lab, monkeypatch):
    monkeypatch.setattr(journal, "_FORGET_AFTER_S", 0.05)
    folder = Path(lab.driver.endpoint.removeprefix("unix://")).parent
    async with ScriptedDriver(f"unix://{folder}/other.sock", lab.driver.name) as driver:
        driver.backend = lab.driver.backend
        await lab.make_class()
        yield Pair(lab, driver)


@pytest.fixture
def hold(monkeypatch):
    """Let the victim stop for ever before or after one step of its work; the event says that it is there."""

    def arrange(step, *, after=False):
        reached, original = asyncio.Event(), getattr(ClaimWorker, step)

        async def held(worker, *words):
            if worker._context.around.hostname != VICTIM:
                return await original(worker, *words)
            if after:
                await original(worker, *words)
            reached.set()
            return await asyncio.Event().wait()

        monkeypatch.setattr(ClaimWorker, step, held)
        return reached

    return arrange


@contextlib.asynccontextmanager
async def killed_when(pair, point, hold):
    """Start the victim, let it come to the point, give back control, and kill it there."""
    reached = None
    if point == "noted":
        reached = hold("_create")
    elif point == "called":
        gate = pair.driver.hold("CreateVolume")
    elif point == "made":
        pair.driver.fail("CreateVolume", "DEADLINE_EXCEEDED", is_done=True)
        pair.driver.chooser = refusing("UNAVAILABLE")
    else:
        reached = hold("_save", after=point == "saved")
    victim = pair.start_victim()
    await (reached.wait() if reached is not None else pair.asked(2 if point == "made" else 1))
    yield
    await pair.lab.kill(victim)
    if point == "called":
        gate.set()  # what the dead one had asked for is carried out only now


@pytest.mark.parametrize("point", ["noted", "called", "made", "answered", "saved"])
async def test_an_instance_that_never_stopped_ends_what_a_dead_one_had_begun(pair, hold, point):
    """Its own attempts for the claim have all failed for good before, so that nothing but the note leads to it."""
    pair.lab.driver.chooser = refusing("FAILED_PRECONDITION")
    pair.start_survivor()
    await pair.lab.make_claim("data")

    async def has_tried():
        return pair.lab.driver.count("CreateVolume") > 0

    await pair.lab.until(has_tried)
    async with killed_when(pair, point, hold):
        await pair.remove_claim()
        await pair.one_note()
    pair.lab.driver.chooser = None
    if point not in ("noted", "saved"):

        async def is_made():
            return pair.driver.backend.volumes

        await pair.lab.until(is_made)
    await pair.all_gone()
    assert pair.lab.driver.count("DeleteVolume") > 0


async def test_a_living_instances_note_stays_until_it_dies_and_leads_to_what_it_made_last(pair):
    """It works on the attempt for longer than others are patient; they have long carried the attempt out themselves."""
    pair.driver.chooser = refusing("UNAVAILABLE")
    victim = pair.start_victim()
    await pair.lab.make_claim("data")
    await pair.asked()
    await pair.remove_claim()
    (key,) = await pair.one_note()
    pair.start_survivor()

    async def has_carried_out():
        return pair.lab.driver.count("DeleteVolume") > 0

    await pair.lab.until(has_carried_out)
    seen = set()

    async def is_long_past():
        found = await pair.notes()
        assert key in found, "the note of a living instance was removed"
        seen.add(found[key])
        return len(seen) > 9  # each is at least a quarter of the patience after the one before

    await pair.lab.until(is_long_past)
    gate = pair.driver.hold("CreateVolume")
    pair.driver.chooser = None
    await pair.asked(pair.driver.count("CreateVolume") + 1)
    await pair.lab.kill(victim)
    assert key in await pair.notes()
    gate.set()

    async def is_made():
        return pair.driver.backend.volumes

    await pair.lab.until(is_made)
    await pair.all_gone()


async def test_a_volume_that_only_seems_bound_does_not_end_an_attempt(pair, monkeypatch):
    """What this instance has seen is old: the claim and its PersistentVolume are gone, and a call made a new volume."""
    pair.lab.driver.fail("CreateVolume", "DEADLINE_EXCEEDED", is_done=True)
    pair.lab.driver.chooser = refusing("UNAVAILABLE")
    first = pair.start_survivor()
    claim = await pair.lab.make_claim("data")

    async def is_made():
        return pair.lab.driver.backend.volumes

    await pair.lab.until(is_made)
    await pair.remove_claim()
    await pair.lab.kill(first)
    pair.lab.driver.chooser = None
    bound = PersistentVolume(metadata=Meta(name="pv-gone"), status=VolumeStatus(phase="Bound"))
    asked = []

    def saved(worker, uid):
        asked.append(uid)
        return [bound]

    monkeypatch.setattr(ClaimWorker, "_saved", saved)
    pair.start_survivor()
    await pair.all_gone()
    assert claim.uid in asked


async def test_a_retained_volume_ends_the_attempt_that_led_to_it(pair, hold):
    """Nobody will ever delete its PersistentVolume, so there is nothing to wait for."""
    await pair.lab.make_class("kept", reclaimPolicy="Retain")
    reached = hold("_save", after=True)
    victim = pair.start_victim()
    await pair.lab.make_claim("data", storageClassName="kept")
    await reached.wait()
    await pair.lab.bound("data")
    await pair.remove_claim()

    async def is_released():
        return [v.status.phase for v in await pair.lab.volumes()] == ["Released"]

    await pair.lab.until(is_released)
    await pair.lab.kill(victim)
    assert len(await pair.notes()) == 1
    pair.start_survivor()

    async def is_over():
        return not await pair.notes()

    await pair.lab.until(is_over)
    (volume,) = await pair.lab.volumes()
    assert volume.spec.csi.volume_handle in pair.lab.driver.backend.volumes
    assert await pair.lab.events("ProvisioningFailed") == []
