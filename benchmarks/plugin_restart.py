"""Restart with 1,000 staged volumes, and memory. Wanted: ready in 2 s; 50 MiB idle, 80 MiB with 10,000 volumes."""

import asyncio
import sys
import time

from figures import record
from plugin_common import MIB, block, plugin_on, pool_in_file, rss_mib

STAGED = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
VOLUMES = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000


async def many(count, call, at_once=16):
    """`call(number)` for each number, some at once."""
    numbers = iter(range(count))

    async def worker():
        for number in numbers:
            await call(number)

    await asyncio.gather(*(worker() for _ in range(at_once)))


async def restart(process):
    """Seconds from a kill until the plugin says that it is ready."""
    await process.kill()
    began = time.perf_counter()
    await process.start()
    return time.perf_counter() - began


async def main():
    with pool_in_file() as (base, pool):
        async with plugin_on(pool, base) as (process, caller):
            idle = rss_mib(process.pid)
            ids = {}

            async def create(number):
                ids[number] = (await caller.create(f"v{number}", block(), 8 * MIB)).volume_id

            async def stage(number):
                await caller.stage(ids[number], block())

            await many(STAGED, create)
            await many(STAGED, stage)
            took = await restart(process)
            await many(VOLUMES, create)
            full = rss_mib(process.pid)
            more = await restart(process)
            again = rss_mib(process.pid)
    record("restart of the plugin with 1,000 staged volumes", f"{took:.2f} s", took <= 2)
    record("memory of the plugin, idle", f"{idle:.0f} MiB", idle <= 50)
    print(f"restart with {STAGED} staged volumes: {took:.2f} s, {took / 2:.2f} of the 2 s allowed")
    print(f"restart with {VOLUMES} volumes, {STAGED} of them staged: {more:.2f} s")
    print(f"RSS idle {idle:.1f} MiB, {idle / 50:.2f} of the 50 MiB allowed")
    largest = max(full, again)
    record("memory of the plugin with 10,000 volumes", f"{largest:.0f} MiB", largest <= 80)
    print(f"RSS with {VOLUMES} volumes {largest:.1f} MiB, {largest / 80:.2f} of the 80 MiB allowed")


asyncio.run(main())
