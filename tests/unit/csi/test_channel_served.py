"""Calls to a server of gRPC's own library."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import http2_peer as h2
from http2_peer import code_of, failure

from moorage.csi.channel import Channel


class Served:
    """A server of gRPC's own library, and what its methods wait for."""

    def __init__(self):
        self.started, self.may_end = asyncio.Event(), asyncio.Event()

    async def echo(self, request, context):
        return request

    async def size(self, request, context):
        return str(len(request)).encode()

    async def make(self, request, context):
        return bytes(range(256)) * (int(request) // 256)

    async def wait(self, request, context):
        self.started.set()
        await self.may_end.wait()
        return b"waited"

    async def refuse(self, request, context):
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "100% 体積\n")

    async def count(self, request, context):
        for number in range(int(request)):
            yield b"%d" % number
        if request.startswith(b"0"):
            await context.abort(grpc.StatusCode.DATA_LOSS, "counted out")

    def handlers(self):
        unary = (self.echo, self.size, self.make, self.wait, self.refuse)
        methods = {each.__name__: grpc.unary_unary_rpc_method_handler(each) for each in unary}
        return grpc.method_handlers_generic_handler(
            "test.Served", methods | {"count": grpc.unary_stream_rpc_method_handler(self.count)}
        )


@asynccontextmanager
async def serving(path):
    served, server = Served(), grpc.aio.server()
    server.add_generic_rpc_handlers([served.handlers()])
    server.add_insecure_port(f"unix://{path}")
    async with asyncio.timeout(h2.LIMIT_S):
        await server.start()
        channel = Channel(path)
        try:
            yield served, server, channel
        finally:
            await channel.close()
            await server.stop(0)


async def test_large_messages_go_both_ways(path):
    async with serving(path) as (_, _, channel):
        request = bytes(range(256)) * (3 << 12)
        assert await channel.unary("/test.Served/size", request, h2.LIMIT_S) == b"%d" % (3 << 20)
        assert await channel.unary("/test.Served/echo", request, h2.LIMIT_S) == request
        large = await channel.unary("/test.Served/make", b"%d" % (20 << 20), h2.LIMIT_S)
        assert large == bytes(range(256)) * (20 << 12)


async def test_many_calls_go_on_at_once(path):
    async with serving(path) as (_, _, channel):
        requests = [b"%d" % number * (1 + number % 50) for number in range(300)]
        calls = [channel.unary("/test.Served/echo", each, h2.LIMIT_S) for each in requests]
        assert await asyncio.gather(*calls) == requests


async def test_errors_of_a_real_server_are_understood(path):
    async with serving(path) as (_, _, channel):
        for _ in range(3):  # from the second time on, most headers only repeat
            error = await failure(channel.unary("/test.Served/refuse", b"", h2.LIMIT_S))
            assert (error.code, error.message) == ("FAILED_PRECONDITION", "100% 体積\n")
            assert await code_of(channel.unary("/test.Served/nothing", b"", h2.LIMIT_S)) == "UNIMPLEMENTED"
            assert await channel.unary("/test.Served/echo", b"", h2.LIMIT_S) == b""
        assert await code_of(channel.unary("/test.Served/echo", bytes(5 << 20), h2.LIMIT_S)) == "RESOURCE_EXHAUSTED"


async def test_a_deadline_holds_at_a_real_server(path):
    async with serving(path) as (served, _, channel):
        assert await code_of(channel.unary("/test.Served/wait", b"", 0.1)) == "DEADLINE_EXCEEDED"
        served.may_end.set()
        assert await channel.unary("/test.Served/wait", b"", h2.LIMIT_S) == b"waited"


async def test_a_stream_of_a_real_server_comes_whole(path):
    async with serving(path) as (_, _, channel):
        counted = [each async for each in channel.stream("/test.Served/count", b"2000", h2.LIMIT_S)]
        assert counted == [b"%d" % number for number in range(2000)]
        messages = channel.stream("/test.Served/count", b"03", h2.LIMIT_S)
        assert [await anext(messages) for _ in range(3)] == [b"0", b"1", b"2"]
        assert await code_of(anext(messages)) == "DATA_LOSS"


async def test_a_real_server_that_stops_ends_what_it_does(path):
    async with serving(path) as (served, server, channel):
        call = asyncio.create_task(channel.unary("/test.Served/wait", b"", h2.LIMIT_S))
        await served.started.wait()
        lost = asyncio.Event()
        channel._on_lost = lost.set
        stop = asyncio.create_task(server.stop(h2.LIMIT_S))
        await lost.wait()
        assert await code_of(channel.unary("/test.Served/echo", b"", h2.LIMIT_S)) == "UNAVAILABLE"
        served.may_end.set()
        assert await call == b"waited"
        await stop
        async with serving(path):
            assert await channel.unary("/test.Served/echo", b"again", h2.LIMIT_S) == b"again"
