"""Memory of the server: idle, and per object beyond its encoded size. Wanted: 60 MiB, and 2.5 KiB an object."""

import asyncio
import tempfile
from pathlib import Path

from apiserver_common import CLAIMS, Server, fill
from figures import record

COUNT = 10_000


async def restarted(running):
    """The memory after a start with what is there: neither keys to make nor a history of writes."""
    await running.stop()
    await running.start()
    async with running.client() as client, client.get("/version") as response:
        await response.read()
    return running.rss_bytes()


async def main():
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as made:
        running = Server(Path(made))
        await running.start()
        idle = await restarted(running)
        async with running.client() as client:
            await fill(client, COUNT)
            async with client.get(CLAIMS + "?limit=1000") as response:
                encoded = len(await response.read()) / 1000
        loaded = await restarted(running)
        await running.stop()
    over = (loaded - idle) / COUNT - encoded
    record("memory of the API server, idle", f"{idle / 2**20:.1f} MiB", idle <= 60 * 2**20)
    record("memory of the API server per object beyond its encoded size", f"{over:.0f} B", over <= 2560)
    print(
        f"idle {idle / 2**20:.1f} MiB, {idle / (60 * 2**20):.2f} of the 60 MiB allowed; {COUNT} objects of "
        f"{encoded:.0f} B cost {over:.0f} B each beyond that, {over / 2560:.2f} of the 2560 B allowed"
    )


asyncio.run(main())
