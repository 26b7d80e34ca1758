"""Memory of the server: idle, and per object beyond its encoded size. Wanted: 60 MiB, and 2.5 KiB an object."""

import asyncio

from apiserver_common import CLAIMS, fill, server

COUNT = 10_000


async def main():
    async with server() as running, running.client() as client:
        idle = running.rss_bytes()
        await fill(client, COUNT)
        async with client.get(CLAIMS + "?limit=1000") as response:
            encoded = len(await response.read()) / 1000
        directory = running.directory
        await running.stop()
        await running.start()  # the history of the writes is gone: what is left is what the objects cost
        async with running.client() as again, again.get("/version") as response:
            await response.read()
        assert directory == running.directory
        loaded = running.rss_bytes()
    over = (loaded - idle) / COUNT - encoded
    print(
        f"idle {idle / 2**20:.1f} MiB, {idle / (60 * 2**20):.2f} of the 60 MiB allowed; {COUNT} objects of "
        f"{encoded:.0f} B cost {over:.0f} B each beyond that, {over / 2560:.2f} of the 2560 B allowed"
    )


asyncio.run(main())
