"""fio on a published image volume against the pool's own filesystem. Wanted: at least 90 % for each pattern.

Both sides take turns in short runs on blocks that are allocated already. A loop device hands each request to a
thread of the kernel, so small requests cost CPU on a second core: the share of CPU that was idle is printed beside
each ratio. Where it is near zero, the ratio says how much CPU was left for that thread, not what the volume can do.
"""

import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path

from plugin_common import GIB, plugin_on, pool_on_disk

PATTERNS = {
    "random read 4k": ["--rw=randread", "--bs=4k", "--iodepth=16"],
    "random write 4k": ["--rw=randwrite", "--bs=4k", "--iodepth=16"],
    "sequential read 1m": ["--rw=read", "--bs=1m", "--iodepth=4"],
    "sequential write 1m": ["--rw=write", "--bs=1m", "--iodepth=4"],
}
SECONDS = 2
ROUNDS = 7


def cpu_ticks():
    """Idle ticks and all ticks of all cores until now."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def fio(directory, options):
    """Bytes per second, with the same engine and direct flag everywhere."""
    done = subprocess.run(
        ["fio", "--name=x", f"--filename={directory}/fio", "--size=512m", "--ioengine=libaio", "--direct=1",
         "--time_based", f"--runtime={SECONDS}", "--ramp_time=0.5", "--output-format=json", *options],
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
                idle, ticks = cpu_ticks()
                for _ in range(ROUNDS):
                    for directory, found in rates.items():
                        found.append(fio(directory, options))
                a, b = (statistics.median(rates[each]) for each in (bare, target))
                now_idle, now_ticks = cpu_ticks()
                free = (now_idle - idle) / (now_ticks - ticks) * 100
                print(
                    f"{name}: pool {a / 1e6:.0f} MB/s, volume {b / 1e6:.0f} MB/s, ratio {b / a:.2f} (wanted >= 0.9), "
                    f"best of each {max(rates[target]) / max(rates[bare]):.2f}, CPU idle {free:.0f} %"
                )


asyncio.run(main())
