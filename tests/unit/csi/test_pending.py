"""Calls that a driver has not answered: what their caller logs, tells in events and exports."""

import asyncio
import logging

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi import pending
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.csi.pending import Calls, in_flight_text, on_behalf_of
from moorage.testing import ScriptedDriver, until

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
async def driver(tmp_path, monkeypatch):
    monkeypatch.setattr(pending, "FIRST_S", 0.02)
    async with ScriptedDriver(tmp_path / "s") as made:
        yield made


@pytest.fixture
async def client(driver):
    async with CsiClient(driver.endpoint) as made:
        made.calls.driver = "d.example.com"
        yield made


async def test_a_call_that_waits_is_told_again_and_again_and_its_end_once(driver, client):
    gate, told = driver.hold("DeleteVolume"), []
    with on_behalf_of(lambda *event: told.append(event), "the claim"):
        call = client.calls
        sent = asyncio.create_task(client.DeleteVolume(pb.DeleteVolumeRequest(volume_id="v-1")))
    await until(lambda: len(told) == 2, what="two events")
    about, kind, reason, message = told[0]
    assert (about, kind, reason) == ("the claim", "Normal", "WaitingForDriver")
    assert message.startswith("DeleteVolume has been waiting for driver d.example.com since 20")
    assert told[1] == told[0]  # one event, counted
    [one] = call.pending
    assert (one.method, one.subject) == ("DeleteVolume", "v-1")
    assert 'driver_name="d.example.com",method_name="DeleteVolume"} 0.' in in_flight_text([one])
    gate.set()
    await sent
    assert told[-1][2:] == ("DriverAnswered", "driver d.example.com answered DeleteVolume after 0 s")
    assert call.pending == set()


async def test_a_failure_is_told_by_the_caller_and_a_quick_answer_by_nobody(driver, client, caplog):
    told = []
    driver.fail("DeleteVolume", "OK", "INTERNAL")
    with on_behalf_of(lambda *event: told.append(event), "the claim"), caplog.at_level(logging.INFO, "moorage.csi"):
        await client.DeleteVolume(pb.DeleteVolumeRequest(volume_id="v-1"))
        with pytest.raises(CsiError):
            await client.DeleteVolume(pb.DeleteVolumeRequest(volume_id="v-1"))
    assert told == []
    fields = [record.moorage_fields for record in caplog.records if record.message == "call"]
    assert [(one["driver"], one["method"], one["volume"], one["code"]) for one in fields] == [
        ("d.example.com", "DeleteVolume", "v-1", "OK"),
        ("d.example.com", "DeleteVolume", "v-1", "INTERNAL"),
    ]


def test_a_caller_that_does_not_know_the_driver_leaves_no_record():
    calls = Calls()
    call = calls.begin("Probe", pb.ProbeRequest())
    assert calls.pending == set()
    calls.end(call, "OK", 0.1)
