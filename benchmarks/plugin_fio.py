"""fio on a published image volume against the pool's own filesystem. Wanted: at least 90 % for each pattern."""

import asyncio
import json
import statistics
import subprocess
import sys

from plugin_common import GIB, plugin_on, pool_on_disk

PATTERNS = {
    "random read 4k": ["--rw=randread", "--bs=4k", "--iodepth=16"],
    "random write 4k": ["--rw=randwrite", "--bs=4k", "--iodepth=16"],
    "sequential read 1m": ["--rw=read", "--bs=1m", "--iodepth=4"],
    "sequential write 1m": ["--rw=write", "--bs=1m", "--iodepth=4"],
}
SECONDS = 5
ROUNDS = 3


def fio(directory, options):
    """Bytes per second, with the same engine and direct flag everywhere."""
    done = subprocess.run(
        ["fio", "--name=x", f"--filename={directory}/fio", "--size=512m", "--ioengine=libaio", "--direct=1",
         "--time_based", f"--runtime={SECONDS}", "--ramp_time=1", "--output-format=json", *options],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job["read"]["bw_bytes"] + job["write"]["bw_bytes"]


async def main():
    with pool_on_disk(sys.argv[1] if len(sys.argv) > 1 else None) as (base, pool):
        async with plugin_on(pool, base) as (_, caller):
            volume = (await caller.create("v", size=2 * GIB)).volume_id
            target = await caller.up(volume)
            bare = pool / "bare"
            bare.mkdir()
            for directory in (bare, target):  # blocks are allocated before anything is measured
                fio(directory, ["--rw=write", "--bs=1m", "--iodepth=4"])
            for name, options in PATTERNS.items():
                rates = {bare: [], target: []}
                for _ in range(ROUNDS):
                    for directory, found in rates.items():
                        found.append(fio(directory, options))
                a, b = (statistics.median(rates[each]) for each in (bare, target))
                print(f"{name}: pool {a / 1e6:.0f} MB/s, volume {b / 1e6:.0f} MB/s, ratio {b / a:.2f} (wanted >= 0.9)")


asyncio.run(main())
