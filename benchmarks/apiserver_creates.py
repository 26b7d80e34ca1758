"""Durable creates per second: one client at a time against 64 at once. Wanted: at least 5 times as many.

The clients are as thin as can be (a TLS connection each, requests made of bytes), so that it is the server that is
measured, and they run in a process of their own.
"""

import asyncio
import json
import ssl
import time

from apiserver_common import CLAIMS, claim, server
from figures import record


async def connect(running):
    context = ssl.create_default_context(cafile=str(running.directory / "pki" / "ca.crt"))
    host, port = running.url.removeprefix("https://").split(":")
    return await asyncio.open_connection(host, int(port), ssl=context)


async def create_all(running, names):
    """Create every claim of the shared iterator over one connection."""
    reader, writer = await connect(running)
    for name in names:
        body = json.dumps(claim(name)).encode()
        head = (
            f"POST {CLAIMS} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {running.token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 201 " in answer[:16], answer
        at = answer.index(b"Content-Length: ") + 16
        await reader.readexactly(int(answer[at : answer.index(b"\r", at)]))
    writer.close()


async def rate(running, clients, count, prefix):
    names = iter([f"{prefix}-{n}" for n in range(count)])
    began = time.perf_counter()
    await asyncio.gather(*(create_all(running, names) for _ in range(clients)))
    return count / (time.perf_counter() - began)


async def main():
    async with server() as running:
        await rate(running, 8, 500, "warm")
        rounds = [
            (await rate(running, 1, 400, f"one-{n}"), await rate(running, 64, 4000, f"many-{n}")) for n in range(3)
        ]
    one, many = (sorted(column)[1] for column in zip(*rounds, strict=True))
    record("creates of 64 clients over creates of one", f"{many / one:.1f}", many / one >= 5)
    print(f"one creator: {one:.0f}/s, 64 creators: {many:.0f}/s, ratio {many / one:.2f} (wanted >= 5)")


asyncio.run(main())
