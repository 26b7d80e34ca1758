"""Durable creates per second: one client at a time against 64 at once. Wanted: at least 5 times as many."""

import asyncio
import time

from apiserver_common import create, fill, server


async def main():
    async with server() as running, running.client() as client:
        await fill(client, 200, "warm")
        began = time.perf_counter()
        for n in range(400):
            await create(client, f"one-{n}")
        one = 400 / (time.perf_counter() - began)
        began = time.perf_counter()
        await fill(client, 4000, "many")
        many = 4000 / (time.perf_counter() - began)
    print(f"one creator: {one:.0f}/s, 64 creators: {many:.0f}/s, ratio {many / one:.2f} (wanted >= 5)")


asyncio.run(main())
