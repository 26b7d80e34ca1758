"""A driver that takes connections and never answers: the process says so, and goes on when the driver does."""

import asyncio
import contextlib
import socket

import aiohttp
import pytest

from moorage.csi.client import CsiClient
from moorage.kube.objects import PersistentVolumeClaim
from moorage.sidecars.liveness import LivenessProbe
from moorage.sidecars.roles import Role
from moorage.testing import Abilities

CAPABILITIES = [
    "Probe",
    "GetPluginCapabilities",
    "ControllerGetCapabilities",
    "GroupControllerGetCapabilities",
    "NodeGetCapabilities",
    "NodeGetInfo",
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("moorage.sidecars.driver._DISCOVER_TIMEOUT_S", 0.2)
    monkeypatch.setattr("moorage.sidecars.driver._CONNECT_TRY_S", 0.2)
    monkeypatch.setattr("moorage.sidecars.driver._PROBE_PAUSE_S", 0.02)


@pytest.fixture
def warnings(monkeypatch):
    """What the process said about the driver, as an operator would read it."""
    told = []

    class Log:
        def warning(self, event, **fields):
            told.append(f"{event}: {fields.get('reason', '')}")

        def info(self, event, **fields):
            told.append(event)

    monkeypatch.setattr("moorage.sidecars.driver.log", Log())
    return told


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def health(port):
    """Status and text of /healthz; None while nobody listens yet."""
    with contextlib.suppress(aiohttp.ClientConnectionError):
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/healthz") as answer:
            return answer.status, await answer.text()
    return None


async def asked(lab, method, times=2):
    """The method has been called again, so the first call was given up."""

    async def came_back():
        return lab.driver.count(method) >= times

    await lab.until(came_back)


async def is_registered(socket_path):
    async with CsiClient(f"unix://{socket_path}", timeout_s=2) as kubelet:
        return (await kubelet.registration_info(timeout_s=2)).name


@pytest.mark.parametrize("method", ["GetPluginInfo", *CAPABILITIES])
async def test_each_question_is_asked_again_until_it_is_answered(lab, warnings, method):
    gate = lab.driver.hold(method)
    lab.driver.topology = {"zone": "a"}
    await lab.make_node("node-1", keys=("zone",), zone="a")
    await lab.make_class()
    await lab.make_claim("data", annotations={"volume.kubernetes.io/selected-node": "node-1"})
    lab.start(Role.PROVISIONER, node="node-1", node_deployment=True)
    await asked(lab, method, 3)
    assert f"driver does not answer: {method}: DEADLINE_EXCEEDED" in " ".join(warnings)
    assert lab.driver.count("CreateVolume") == 0
    gate.set()
    await lab.bound("data")


@pytest.mark.parametrize("method", CAPABILITIES)
async def test_the_registrar_needs_the_name_only(lab, tmp_path, method):
    """A driver may wait for its registration before it is ready; a registrar alone would not ask more either."""
    gate = lab.driver.hold(method)
    await lab.make_class()
    await lab.make_claim("data", annotations={"volume.kubernetes.io/selected-node": "node-1"})
    folder = {"kubelet_registration_path": "/k/csi.sock", "plugin_registration_path": str(tmp_path)}
    lab.start(Role.REGISTRAR, Role.PROVISIONER, node="node-1", node_deployment=True, **folder)
    path = tmp_path / f"{lab.driver.name}-reg.sock"

    async def is_there():
        return path.exists()

    await lab.until(is_there)
    assert await is_registered(path) == lab.driver.name
    assert (await lab.claim("data")).status.phase == "Pending"
    gate.set()
    await lab.bound("data")


async def test_the_registrars_health_is_bad_until_the_driver_has_said_its_name(lab, tmp_path):
    gate, port = lab.driver.hold("GetPluginInfo"), free_port()
    folder = {"kubelet_registration_path": "/k/csi.sock", "plugin_registration_path": str(tmp_path)}
    lab.start(Role.REGISTRAR, http_endpoint=f"127.0.0.1:{port}", **folder)
    await asked(lab, "GetPluginInfo")
    status, text = await health(port)
    assert (status, "has not said its name" in text) == (500, True)
    assert not list(tmp_path.iterdir())
    gate.set()

    async def is_well():
        return await health(port) == (200, "ok")

    await lab.until(is_well)


async def test_liveness_says_that_the_driver_hangs_and_that_it_is_back(lab):
    gate, port = lab.driver.hold("Probe"), free_port()
    lab.start(http_endpoint=f"127.0.0.1:{port}", probe_timeout_s=0.3)
    await asked(lab, "Probe")
    status, text = await health(port)
    assert (status, "DEADLINE_EXCEEDED" in text) == (500, True)
    gate.set()

    async def is_well():
        return await health(port) == (200, "ok")

    await lab.until(is_well)


async def test_a_driver_that_hangs_later_is_reported_while_the_roles_keep_working(lab):
    """Probe hangs, nothing else does: only the liveness probe may mind."""
    port = free_port()
    lab.start(Role.PROVISIONER, Role.LIVENESS, http_endpoint=f"127.0.0.1:{port}", probe_timeout_s=0.3)
    await lab.make_class()
    await lab.make_claim("one")
    await lab.bound("one")
    gate = lab.driver.hold("Probe")
    assert (await health(port))[0] == 500
    await lab.make_claim("two")
    await lab.bound("two")
    await lab.client.delete(PersistentVolumeClaim, "two", "default")
    gate.set()
    assert await health(port) == (200, "ok")


async def test_a_socket_that_takes_connections_and_says_nothing_is_waited_for(lab, warnings):
    """Not even the protocol's greeting comes, as from a process that is stopped."""
    await lab.driver.stop()
    path = lab.driver.endpoint.removeprefix("unix://")

    callers = []

    async def say_nothing(reader, writer):
        callers.append(writer)

    mute = await asyncio.start_unix_server(say_nothing, path)
    probe = LivenessProbe(lab.driver.endpoint, 0.3)
    status, text = await probe.check()
    assert (status, "nothing answered" in text) == (500, True)
    lab.start(Role.PROVISIONER)

    async def has_told():
        return "still connecting" in warnings

    await lab.until(has_told)
    mute.close()
    for caller in callers:
        caller.close()
    await mute.wait_closed()
    await lab.driver.start()
    await lab.make_class()
    await lab.make_claim("data")
    await lab.bound("data")
    assert await probe.check() == (200, "ok")


@pytest.mark.parametrize(
    ("rpcs", "method"),
    [
        (("VOLUME_CONDITION", "LIST_VOLUMES"), "ListVolumes"),
        (("VOLUME_CONDITION", "GET_VOLUME"), "ControllerGetVolume"),
        (("GET_VOLUME_HEALTH",), "ControllerGetVolumeHealth"),
        (("LIST_VOLUME_HEALTH",), "ControllerListVolumeHealth"),
    ],
)
async def test_health_goes_on_in_each_of_its_ways_and_holds_no_other_role_up(make_lab, rpcs, method):
    async with make_lab(Abilities(rpcs=("CREATE_DELETE_VOLUME", *rpcs))) as lab:
        gate = lab.driver.hold(method)
        often = {"list_volumes_interval_s": 0.05, "monitor_interval_s": 0.05}
        lab.start(Role.PROVISIONER, Role.HEALTH, timeout_s=0.2, **often)
        await lab.make_class()
        await lab.make_claim("data")
        await lab.bound("data")
        await asked(lab, method)
        assert not await lab.events("VolumeConditionAbnormal")  # not to know is not a condition of the volume
        await lab.make_claim("more")
        await lab.bound("more")
        for volume in await lab.volumes():
            lab.driver.backend.abnormal[volume.spec.csi.volume_handle] = "disk on fire"
        gate.set()

        async def is_told():
            return len(await lab.events("VolumeConditionAbnormal")) >= 2

        await lab.until(is_told)
