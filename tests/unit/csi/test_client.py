"""What a caller of `CsiClient` sees: large and many answers, deadlines, cancellation, and drivers that misbehave."""

import asyncio
import signal
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import LARGEST_ANSWER_BYTES, CsiClient
from moorage.csi.errors import CsiError

LIMIT_S = 20
CODES = [each.name for each in grpc.StatusCode if each is not grpc.StatusCode.OK]


class RawDriver:
    """A gRPC server that answers with bytes, so that it can also answer what no CSI driver should."""

    def __init__(self):
        self.started, self.may_end, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.answer = b""
        self.code, self.words = "", ""

    async def GetPluginInfo(self, request, context):
        if self.code:
            await context.abort(grpc.StatusCode[self.code], self.words)
        return self.answer

    async def Probe(self, request, context):
        return b""

    async def DeleteVolume(self, request, context):
        self.started.set()
        try:
            await self.may_end.wait()
        finally:
            self.ended.set()
        return b""

    async def CreateVolume(self, request, context):
        """Echo the name."""
        name = pb.CreateVolumeRequest.FromString(request).name
        return pb.CreateVolumeResponse(volume=pb.Volume(volume_id=name)).SerializeToString()

    async def GetMetadataAllocated(self, request, context):
        try:
            for number in range(pb.GetMetadataAllocatedRequest.FromString(request).max_results):
                yield pb.GetMetadataAllocatedResponse(volume_capacity_bytes=number).SerializeToString()
            self.started.set()
            if self.code:
                await context.abort(grpc.StatusCode[self.code], self.words)
            await self.may_end.wait()
        finally:
            self.ended.set()

    def handlers(self):
        unary = grpc.unary_unary_rpc_method_handler
        for service, methods in {
            "csi.v1.Identity": {"GetPluginInfo": unary(self.GetPluginInfo), "Probe": unary(self.Probe)},
            "csi.v1.Controller": {"DeleteVolume": unary(self.DeleteVolume), "CreateVolume": unary(self.CreateVolume)},
            "csi.v1.SnapshotMetadata": {
                "GetMetadataAllocated": grpc.unary_stream_rpc_method_handler(self.GetMetadataAllocated)
            },
        }.items():
            yield grpc.method_handlers_generic_handler(service, methods)


@asynccontextmanager
async def serving(path, driver):
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers(list(driver.handlers()))
    server.add_insecure_port(f"unix://{path}")
    async with asyncio.timeout(LIMIT_S):
        await server.start()
        try:
            yield server
        finally:
            await server.stop(0)


@pytest.fixture
def path(tmp_path):
    return f"{tmp_path}/csi.sock"


@pytest.fixture
async def driver(path):
    driver = RawDriver()
    async with serving(path, driver):
        yield driver


@pytest.fixture
async def client(path):
    async with CsiClient(path, timeout_s=LIMIT_S) as client:
        yield client


async def info(client, timeout_s=None):
    return await client.GetPluginInfo(pb.GetPluginInfoRequest(), timeout_s)


async def failure(call):
    with pytest.raises(CsiError) as caught:
        await call
    return caught.value


def delete(client, timeout_s=None):
    return asyncio.create_task(client.DeleteVolume(pb.DeleteVolumeRequest(volume_id="v"), timeout_s))


@pytest.mark.parametrize("code", CODES)
async def test_each_code_keeps_its_name_and_words(driver, client, code):
    driver.code, driver.words = code, "100% of 体積\nis full"
    error = await failure(info(client))
    assert error.code == code
    assert error.message.endswith("100% of 体積\nis full")
    assert error.method == "GetPluginInfo"


async def test_many_calls_run_at_once(driver, client):
    names = [f"v{number}" * (1 + number % 30) for number in range(300)]
    answers = await asyncio.gather(*(client.CreateVolume(pb.CreateVolumeRequest(name=name)) for name in names))
    assert [answer.volume.volume_id for answer in answers] == names


async def test_large_messages_go_both_ways(driver, client):
    name = "x" * (3 << 20)
    assert (await client.CreateVolume(pb.CreateVolumeRequest(name=name))).volume.volume_id == name


async def test_an_answer_that_is_too_large_is_refused(driver, client):
    driver.answer = bytes(LARGEST_ANSWER_BYTES + 1)
    assert (await failure(info(client))).code == "RESOURCE_EXHAUSTED"
    driver.answer = b""
    assert await info(client) == pb.GetPluginInfoResponse()  # the connection is still good


async def test_an_answer_that_is_no_message_is_internal(driver, path):
    codes = []
    driver.answer = b"\xff\xff\xff"
    async with CsiClient(path, observe=lambda _path, code, _seconds: codes.append(code)) as client:
        error = await failure(info(client))
    assert error.code == "INTERNAL"
    assert error.message == f"the answer from {path} is not a GetPluginInfoResponse"
    assert codes == ["INTERNAL"]


async def test_a_deadline_holds_and_the_next_call_works(driver, client):
    started = time.monotonic()
    assert (await failure(delete(client, 0.2))).code == "DEADLINE_EXCEEDED"
    assert time.monotonic() - started < 5
    driver.may_end.set()
    await delete(client)


async def test_a_cancelled_call_is_cancelled_at_the_driver(driver, client):
    call = delete(client)
    await driver.started.wait()
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    async with asyncio.timeout(LIMIT_S):
        await driver.ended.wait()


async def test_closing_ends_calls_as_unavailable(driver, path):
    client = CsiClient(path, timeout_s=LIMIT_S)
    call = delete(client)
    await driver.started.wait()
    stream = client.GetMetadataAllocated(pb.GetMetadataAllocatedRequest(max_results=1))
    await anext(stream)
    more = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await client.close()
    for each in (call, more):
        error = await failure(each)
        assert error.code == "UNAVAILABLE"
        assert "was closed" in error.message


async def test_closing_ends_a_wait_for_the_connection(path):
    client = CsiClient(path, timeout_s=LIMIT_S)
    waiting = asyncio.create_task(client.wait_connected(LIMIT_S))
    await asyncio.sleep(0.05)
    await client.close()
    async with asyncio.timeout(5):
        assert (await failure(waiting)).code == "UNAVAILABLE"


async def test_a_stream_comes_whole_and_then_its_error(driver, client):
    driver.code, driver.words = "DATA_LOSS", "no more"
    stream = client.GetMetadataAllocated(pb.GetMetadataAllocatedRequest(max_results=2000))
    assert [(await anext(stream)).volume_capacity_bytes for _ in range(2000)] == list(range(2000))
    error = await failure(anext(stream))
    assert (error.code, error.message) == ("DATA_LOSS", "no more")


async def test_a_stream_has_a_deadline(driver, client):
    stream = client.GetMetadataAllocated(pb.GetMetadataAllocatedRequest(max_results=1), 0.3)
    await anext(stream)
    assert (await failure(anext(stream))).code == "DEADLINE_EXCEEDED"


async def test_a_stream_that_is_left_is_cancelled_at_the_driver(driver, client):
    stream = client.GetMetadataAllocated(pb.GetMetadataAllocatedRequest(max_results=3))
    await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(LIMIT_S):
        await driver.ended.wait()


async def test_a_call_to_a_socket_without_a_driver_fails_at_once(path, client):
    for _ in range(3):
        started = time.monotonic()
        error = await failure(info(client))
        assert (error.code, error.is_final) == ("UNAVAILABLE", False)
        assert path in error.message
        assert time.monotonic() - started < 1


@pytest.mark.parametrize("down_s", [0.0, 3.0])
async def test_a_driver_that_comes_back_is_reached_within_a_second(path, client, down_s):
    """Three seconds are enough for gRPC's default back-off to grow well beyond one second."""
    async with serving(path, RawDriver()):
        await client.wait_connected(LIMIT_S)
    ends_at = time.monotonic() + down_s
    while time.monotonic() < ends_at:
        assert (await failure(info(client))).is_unreachable
        await asyncio.sleep(0.05)
    Path(path).unlink(missing_ok=True)
    async with serving(path, RawDriver()):
        back_at = time.monotonic()
        while True:
            with suppress(CsiError):
                await info(client)
                break
            await asyncio.sleep(0.02)
        assert time.monotonic() - back_at < 1


async def test_losing_a_connection_is_reported_once_each_time(path):
    losses = []
    async with CsiClient(path, timeout_s=LIMIT_S, on_connection_lost=lambda: losses.append(1)) as client:
        assert (await failure(info(client))).is_unreachable
        for expected in (1, 2, 3):
            async with serving(path, RawDriver()):
                await client.wait_connected(LIMIT_S)
                assert len(losses) == expected - 1
            async with asyncio.timeout(LIMIT_S):
                while len(losses) < expected:
                    await asyncio.sleep(0.01)
    assert losses == [1, 1, 1]  # closing the client is not a loss


HANGING = """
import asyncio, sys
from moorage.csi import csi_pb2_grpc
from moorage.csi.server import CsiServer

class Driver(csi_pb2_grpc.ControllerServicer):
    async def DeleteVolume(self, request, context):
        print("started", flush=True)
        await asyncio.sleep(600)

async def main():
    server = CsiServer(sys.argv[1])
    csi_pb2_grpc.add_ControllerServicer_to_server(Driver(), server.grpc)
    async with server:
        print("serving", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@asynccontextmanager
async def hanging_driver(path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HANGING, f"unix://{path}", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"serving\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_driver_that_dies_within_a_call_is_unavailable(path, client):
    async with hanging_driver(path) as process:
        call = delete(client)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"started\n"
        process.kill()
        error = await failure(call)
        assert (error.code, error.is_final) == ("UNAVAILABLE", False)


async def test_a_driver_that_stops_answering_ends_at_the_deadline(path, client):
    async with hanging_driver(path) as process:
        await client.wait_connected(LIMIT_S)
        process.send_signal(signal.SIGSTOP)
        for each in (info(client, 0.3), delete(client, 0.3)):
            error = await failure(each)
            assert (error.code, error.is_final) == ("DEADLINE_EXCEEDED", False)


async def say_nothing(reader, writer):
    await reader.read()


async def hang_up(reader, writer):
    return


async def speak_http1(reader, writer):
    await reader.read(100)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()


async def speak_nonsense(reader, writer):
    writer.write(bytes(range(256)) * 100)
    await writer.drain()


@pytest.mark.parametrize("peer", [hang_up, speak_http1, speak_nonsense, say_nothing])
async def test_a_peer_that_does_not_speak_grpc_is_a_clear_error(path, client, peer):
    connections = []

    async def answer(reader, writer):
        connections.append(writer)
        try:
            await peer(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_unix_server(answer, path):
        started = time.monotonic()
        error = await failure(info(client, 1.0))
        assert time.monotonic() - started < 5
        assert error.code == ("DEADLINE_EXCEEDED" if peer is say_nothing else "UNAVAILABLE")
        assert not error.is_final
        for connection in connections:
            connection.close()
    Path(path).unlink(missing_ok=True)
    async with serving(path, RawDriver()):
        await client.wait_ready(LIMIT_S)
