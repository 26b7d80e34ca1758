"""A server and a client on a real socket: errors, limits, locks, reconnecting, stopping."""

import asyncio
import json
import logging
import os
import socket
import stat

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc, limits, redact
from moorage.csi.client import CsiClient, method_named
from moorage.csi.endpoint import socket_path_from
from moorage.csi.errors import CsiError, EndpointInUse, InvalidEndpoint, OperationPending
from moorage.csi.inflight import InFlight
from moorage.csi.metrics import CallMetrics
from moorage.csi.server import CsiServer
from moorage.errors import InvalidRequest, MoorageError


class PoolFull(MoorageError):
    code = "RESOURCE_EXHAUSTED"


class Driver(csi_pb2_grpc.IdentityServicer, csi_pb2_grpc.ControllerServicer, csi_pb2_grpc.SnapshotMetadataServicer):
    """A small driver with one behaviour per method."""

    def __init__(self):
        self.started = asyncio.Event()
        self.may_end = asyncio.Event()
        self.finished = []

    async def GetPluginInfo(self, request, context):
        return pb.GetPluginInfoResponse(name="test.moorage.dev", vendor_version="1")

    async def Probe(self, request, context):
        return pb.ProbeResponse()

    async def CreateVolume(self, request, context):
        raise PoolFull("pool main has no room for volume v")

    async def DeleteVolume(self, request, context):
        self.started.set()
        await self.may_end.wait()
        self.finished.append(request.volume_id)
        return pb.DeleteVolumeResponse()

    async def CreateSnapshot(self, request, context):
        raise ZeroDivisionError("a private detail")

    async def GetMetadataAllocated(self, request, context):
        yield pb.GetMetadataAllocatedResponse(volume_capacity_bytes=1)
        raise InvalidRequest("snapshot_id is of a filesystem volume")


@pytest.fixture
def endpoint(tmp_path):
    return f"unix://{tmp_path}/csi.sock"


@pytest.fixture
async def driver():
    return Driver()  # type: ignore[abstract]  # the other calls answer UNIMPLEMENTED


@pytest.fixture
async def metrics():
    return CallMetrics()


@pytest.fixture
async def server(endpoint, driver, metrics):
    server = served(endpoint, driver, metrics)
    async with server:
        yield server


def served(endpoint, driver, metrics=None):
    server = CsiServer(endpoint, driver_name="test.moorage.dev", metrics=metrics)
    csi_pb2_grpc.add_IdentityServicer_to_server(driver, server.grpc)
    csi_pb2_grpc.add_ControllerServicer_to_server(driver, server.grpc)
    csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(driver, server.grpc)
    return server


@pytest.fixture
async def client(server, endpoint):
    async with CsiClient(endpoint, timeout_s=20) as client:
        yield client


async def test_a_call_comes_back_typed_and_is_counted(client, metrics):
    info = await client.GetPluginInfo(pb.GetPluginInfoRequest())
    assert info.name == "test.moorage.dev"
    assert metrics.count("test.moorage.dev", "/csi.v1.Identity/GetPluginInfo", "OK") == 1
    parsed = {family.name: family for family in text_string_to_metric_families(metrics.render())}
    counts = [each for each in parsed["csi_plugin_operations_seconds"].samples if each.name.endswith("_count")]
    assert [each.value for each in counts] == [1]
    assert counts[0].labels["grpc_status_code"] == "OK"


async def test_a_call_by_name_reaches_the_same_method(client):
    answer = await client.call("Identity.GetPluginInfo", pb.GetPluginInfoRequest())
    assert answer == pb.GetPluginInfoResponse(name="test.moorage.dev", vendor_version="1")
    assert method_named("/csi.v1.Node/NodeGetInfo").full_name == "csi.v1.Node.NodeGetInfo"
    with pytest.raises(CsiError, match="no such CSI method"):
        method_named("Node.CreateVolume")


async def test_an_error_keeps_its_code_and_words(client):
    with pytest.raises(CsiError) as caught:
        await client.CreateVolume(pb.CreateVolumeRequest(name="v"))
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert caught.value.message == "pool main has no room for volume v"
    assert caught.value.is_final
    assert not CsiError("ControllerPublishVolume", "RESOURCE_EXHAUSTED", "").is_final
    assert not CsiError("CreateVolume", "ABORTED", "").is_final


async def test_a_programming_error_is_internal_and_tells_nothing(client, caplog):
    with pytest.raises(CsiError) as caught:
        await client.CreateSnapshot(pb.CreateSnapshotRequest(name="s"))
    assert caught.value.code == "INTERNAL"
    assert "private detail" not in caught.value.message
    assert "private detail" in caplog.text


async def test_a_method_that_a_service_leaves_out_is_unimplemented(client):
    with pytest.raises(CsiError) as left_out:
        await client.ListVolumes(pb.ListVolumesRequest())
    with pytest.raises(CsiError) as no_service:
        await client.NodeGetInfo(pb.NodeGetInfoRequest())
    assert left_out.value.is_unimplemented
    assert no_service.value.is_unimplemented
    assert left_out.value.message


async def test_a_broken_stream_ends_with_an_error(client):
    stream = client.GetMetadataAllocated(pb.GetMetadataAllocatedRequest(snapshot_id="s"))
    assert (await anext(stream)).volume_capacity_bytes == 1
    with pytest.raises(CsiError) as caught:
        await anext(stream)
    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("ask", [
    lambda client: client.GetPluginInfo(pb.GetPluginInfoRequest()),
    lambda client: anext(client.GetMetadataAllocated(pb.GetMetadataAllocatedRequest(snapshot_id="s"))),
    lambda client: client.wait_connected(20),
    lambda client: client.wait_ready(20),
], ids=["a call", "a stream", "a connection", "a driver that is ready"])  # fmt: skip
async def test_a_closed_client_says_so_as_it_says_everything(server, endpoint, ask):
    client = CsiClient(endpoint, timeout_s=20)
    await client.close()
    with pytest.raises(CsiError, match="was closed") as caught:
        await ask(client)
    assert caught.value.code == "UNAVAILABLE"


async def test_a_deadline_ends_the_wait_but_not_the_operation(client, driver):
    with pytest.raises(CsiError) as caught:
        await client.DeleteVolume(pb.DeleteVolumeRequest(volume_id="v"), timeout_s=0.2)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert not caught.value.is_final
    driver.may_end.set()
    async with asyncio.timeout(20):
        while driver.finished != ["v"]:
            await asyncio.sleep(0.01)


async def test_every_call_is_observed_with_how_it_ended(server, endpoint, driver):
    seen = []
    async with CsiClient(
        endpoint, observe=lambda path, code, _: seen.append((path.rpartition("/")[2], code))
    ) as client:
        await client.Probe(pb.ProbeRequest())
        with pytest.raises(CsiError):
            await client.CreateVolume(pb.CreateVolumeRequest(name="v"))
        given_up = asyncio.create_task(client.DeleteVolume(pb.DeleteVolumeRequest(volume_id="v")))
        await driver.started.wait()
        given_up.cancel()
        await asyncio.wait([given_up])
        driver.may_end.set()
    assert seen == [("Probe", "OK"), ("CreateVolume", "RESOURCE_EXHAUSTED"), ("DeleteVolume", "CANCELLED")]


async def test_a_stop_waits_for_running_operations(endpoint, driver):
    server = served(endpoint, driver)
    await server.start()
    async with CsiClient(endpoint) as client:
        call = asyncio.create_task(client.DeleteVolume(pb.DeleteVolumeRequest(volume_id="v")))
        await driver.started.wait()
        stop = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0)
        driver.may_end.set()
        await call
        await stop
    assert driver.finished == ["v"]
    assert not os.path.exists(server.path)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.CreateVolumeRequest(name="x" * 129), "name"),
        (pb.CreateVolumeRequest(name="é" * 65), "name"),
        (pb.CreateVolumeRequest(name="v", parameters={"k": "v" * 4096}), "parameters"),
        (
            pb.CreateVolumeRequest(
                name="v",
                volume_capabilities=[
                    pb.VolumeCapability(mount=pb.VolumeCapability.MountVolume(mount_flags=["f" * 100] * 41))
                ],
            ),
            r"volume_capabilities\[0\].mount.mount_flags",
        ),
    ],
)
async def test_a_field_that_is_too_long_is_named(client, request_, field):
    with pytest.raises(CsiError, match=field) as caught:
        await client.CreateVolume(request_)
    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("make", "largest"),
    [
        (lambda text: pb.CreateVolumeRequest(name=text), 128),
        (lambda text: pb.CreateVolumeGroupSnapshotRequest(source_volume_ids=["v", text]), 128),
        (lambda text: pb.ControllerPublishVolumeRequest(node_id=text), 256),
        (lambda text: pb.NodePublishVolumeRequest(target_path=text), 4095),
        (lambda text: pb.NodePublishVolumeRequest(staging_target_path=text), 4095),
        (lambda text: pb.NodeGetVolumeStatsRequest(volume_path=text), 4095),
        (lambda text: pb.NodeGetVolumeHealthRequest(volume_publish_path=text), 4095),
        (lambda text: pb.CreateVolumeRequest(secrets={"k": text[1:]}), 4096),
        (lambda text: pb.NodeStageVolumeRequest(volume_capability=flagged("ro", text[2:])), 4096),
    ],
)
def test_a_field_may_be_as_large_as_csi_says_and_no_byte_larger(make, largest):
    limits.check(make("ü" * (largest // 2) + "x" * (largest % 2)))
    with pytest.raises(InvalidRequest):
        limits.check(make("x" * (largest + 1)))


def flagged(*flags):
    return pb.VolumeCapability(mount=pb.VolumeCapability.MountVolume(mount_flags=flags))


async def test_the_socket_is_private(server):
    mode = os.lstat(server.path).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


async def test_a_dead_socket_is_replaced_and_a_live_one_refused(endpoint, driver):
    path = socket_path_from(endpoint)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with served(endpoint, driver):
        with pytest.raises(EndpointInUse, match=r"csi\.sock"):
            await served(endpoint, driver).start()
        async with CsiClient(endpoint) as client:
            await client.wait_ready(20)  # the refused one did not disturb the first


async def test_a_file_that_is_no_socket_is_left_alone(endpoint, driver):
    path = socket_path_from(endpoint)
    path.write_text("precious")
    with pytest.raises(InvalidEndpoint, match="not a socket"):
        await served(endpoint, driver).start()
    assert path.read_text() == "precious"


async def test_a_client_hears_of_a_lost_connection_and_connects_again(endpoint, driver):
    lost = asyncio.Event()
    server = served(endpoint, driver)
    await server.start()
    async with CsiClient(endpoint, on_connection_lost=lost.set) as client:
        await client.wait_ready(20)
        await server.stop(0)
        async with asyncio.timeout(20):
            await lost.wait()
        with pytest.raises(CsiError, match=r"no answer from .*csi\.sock") as caught:
            await client.GetPluginInfo(pb.GetPluginInfoRequest())
        assert caught.value.is_unreachable
        async with served(endpoint, driver):
            await client.wait_ready(20)


@pytest.mark.parametrize("endpoint_", ["tcp://127.0.0.1:1", "unix://relative.sock", "csi.sock", "unix:///" + "x" * 120])
def test_an_address_that_cannot_be_a_socket_is_refused(endpoint_):
    with pytest.raises(InvalidEndpoint, match="endpoint"):
        socket_path_from(endpoint_)


def test_one_operation_at_a_time_for_an_object():
    running = InFlight()
    with running.claim("CreateVolume", "a", "b"):
        with (
            pytest.raises(OperationPending, match="CreateVolume is still running for b") as caught,
            running.claim("DeleteVolume", "c", "b"),
        ):
            pass
        assert caught.value.code == "ABORTED"
        assert not running.is_busy("c")
    assert len(running) == 0


def test_secrets_never_reach_the_log_also_nested():
    request = pb.NodePublishVolumeRequest(
        volume_id="v",
        secrets={"password": "hunter2"},
        volume_context={"csi.storage.k8s.io/serviceAccount.tokens": "hunter3", "plain": "shown"},
        volume_capability=pb.VolumeCapability(
            mount=pb.VolumeCapability.MountVolume(fs_type="xfs", mount_flags=["password=hunter4"])
        ),
    )
    line = redact.one_line(request)
    assert "hunter" not in line
    assert json.loads(line)["secrets"] == redact.STRIPPED
    assert json.loads(line)["volume_context"]["plain"] == "shown"
    assert json.loads(line)["volume_capability"] == {"mount": {"fs_type": "xfs", "mount_flags": redact.STRIPPED}}


async def test_each_call_is_one_log_line_without_secrets(client, caplog):
    caplog.set_level(logging.INFO, logger="moorage")
    with pytest.raises(CsiError):
        await client.CreateVolume(pb.CreateVolumeRequest(name="v", secrets={"k": "hunter2"}))
    lines = [record for record in caplog.records if record.name == "moorage.csi.server"]
    assert len(lines) == 1
    assert lines[0].moorage_fields["code"] == "RESOURCE_EXHAUSTED"
    assert "hunter2" not in lines[0].moorage_fields["request"]
