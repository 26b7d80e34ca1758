"""Time from starting the process to its first answer, empty and with 20,000 objects. Wanted: 1 s and 2 s."""

import asyncio
import tempfile
from pathlib import Path

from apiserver_common import Server, fill
from figures import record


async def main():
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as made:
        running = Server(Path(made))
        await running.start()
        await running.stop()
        empty = await running.start()
        async with running.client() as client:
            await fill(client, 20_000)
        await running.stop()
        full = await running.start()
        await running.stop()
    record("start of the API server, empty", f"{empty:.2f} s", empty <= 1)
    record("start of the API server with 20,000 objects", f"{full:.2f} s", full <= 2)
    print(
        f"empty: {empty:.2f} s, {empty / 1:.2f} of the 1 s allowed; "
        f"20000 objects: {full:.2f} s, {full / 2:.2f} of the 2 s allowed"
    )


asyncio.run(main())
