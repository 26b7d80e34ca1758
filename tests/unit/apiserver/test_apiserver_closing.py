"""A server that closes while clients still come: each of them is told, and nothing is left open."""

import asyncio
import contextlib
import gc
import socket
import ssl
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from moorage.apiserver.http.listen import Listener
from moorage.apiserver.limits import ServerLimits
from moorage.testing import serve


async def answer(_request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="here")


async def told(client: socket.socket) -> bytes:
    """What a client hears that never said anything."""
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 100), 10.0)
    except ConnectionResetError:
        return b""


async def comes_while_it_closes(turns: int) -> bytes:
    """A client connects, and the server closes so many turns of the loop later: in turn 1 the connection waits to be
    taken, in turn 2 it has been taken and is nobody's yet, in the later ones it has an owner."""
    listener = Listener(answer, ServerLimits())
    port = await listener.open_plain("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        await listener.close()
        assert listener.connections == 0
        return await told(client)


@pytest.mark.parametrize("turns", range(6))
async def test_a_client_that_comes_while_the_server_closes_is_closed_with_it(turns: int) -> None:
    assert await comes_while_it_closes(turns) == b""
    gc.collect()  # a connection that was lost on the way would be found here, and fail this test


@pytest.mark.parametrize("turns", range(6))
def test_so_it_is_on_the_loop_that_the_commands_use(turns: int) -> None:
    assert uvloop.run(comes_while_it_closes(turns)) == b""


async def test_a_client_that_is_not_done_with_tls_when_the_server_closes_is_closed_when_it_is(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        port = int(server.url.rpartition(":")[2])
        context = ssl.create_default_context(cafile=str(server.identity.ca))
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setblocking(False)
            for _ in range(5):
                await asyncio.sleep(0)  # the server has taken the connection, and waits for what begins TLS
            await server.listener.close()
            async with asyncio.timeout(10.0):
                with contextlib.suppress(ConnectionError):  # told in the middle of TLS, or after it
                    reader, writer = await asyncio.open_connection(
                        sock=client, ssl=context, server_hostname="127.0.0.1"
                    )
                    assert await reader.read() == b""
                    writer.close()


async def test_a_server_that_has_closed_takes_nobody() -> None:
    listener = Listener(answer, ServerLimits())
    port = await listener.open_plain("127.0.0.1", 0)
    await listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
