"""fio on a published image volume against the pool's own filesystem. Wanted: at least 90 % for each pattern.

All sides take turns in short runs on blocks that are allocated already. A loop device hands each direct request to a
thread of the kernel, so small requests cost CPU on a second core: the share of CPU that was idle is printed beside
each ratio. A third side is the same filesystem on a loop device made with losetup: what it loses, the kernel's driver
costs; what the volume loses beyond it, Moorage does. Buffered patterns end with an fsync inside the measured time.
"""

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
from pathlib import Path

from figures import record
from plugin_common import GIB, plugin_on, pool_on_disk

DIRECT = ["--ioengine=libaio", "--direct=1"]
BUFFERED = ["--ioengine=psync", "--direct=0", "--end_fsync=1"]
PATTERNS = {
    "direct random read 4k": [*DIRECT, "--rw=randread", "--bs=4k", "--iodepth=16"],
    "direct random write 4k": [*DIRECT, "--rw=randwrite", "--bs=4k", "--iodepth=16"],
    "direct random read 64k": [*DIRECT, "--rw=randread", "--bs=64k", "--iodepth=16"],
    "direct random write 64k": [*DIRECT, "--rw=randwrite", "--bs=64k", "--iodepth=16"],
    "direct sequential read 1m": [*DIRECT, "--rw=read", "--bs=1m", "--iodepth=4"],
    "direct sequential write 1m": [*DIRECT, "--rw=write", "--bs=1m", "--iodepth=4"],
    "buffered random read 4k": [*BUFFERED, "--rw=randread", "--bs=4k"],
    "buffered random write 4k": [*BUFFERED, "--rw=randwrite", "--bs=4k"],
}
SECONDS = 1
ROUNDS = 5


def cpu_ticks():
    """Idle ticks and all ticks of all cores until now."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def fio(directory, options):
    """Bytes per second; the options name the engine and the direct flag, the same on every side."""
    done = subprocess.run(
        ["fio", "--name=x", f"--filename={directory}/fio", "--size=512m",
         "--time_based", f"--runtime={SECONDS}", "--ramp_time=0.5", "--output-format=json", *options],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job["read"]["bw_bytes"] + job["write"]["bw_bytes"]


@contextlib.contextmanager
def loop_by_hand(base, fstype):
    """The filesystem of the volume on a loop device as a person would make it, on the pool's disk."""
    image, target = base / "hand.img", base / "hand"
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(2 * GIB)
    subprocess.run([f"mkfs.{fstype}", "-q", str(image)], check=True, capture_output=True)
    attach = ["losetup", "--find", "--show", "--direct-io=on", str(image)]
    device = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
    try:
        subprocess.run(["mount", device, str(target)], check=True)
        try:
            yield target
        finally:
            subprocess.run(["umount", str(target)], check=True)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def compare(name, options, bare, hand, volume):
    """One pattern on the three sides in turns, and the line that says how they stand."""
    rates = {bare: [], hand: [], volume: []}
    idle, ticks = cpu_ticks()
    for _ in range(ROUNDS):
        for directory, found in rates.items():
            found.append(fio(directory, options))
    a, h, b = (statistics.median(found) for found in rates.values())
    now_idle, now_ticks = cpu_ticks()
    free = (now_idle - idle) / (now_ticks - ticks) * 100
    record(f"{name} over the pool's filesystem", f"{b / a:.2f}", b / a >= 0.9)
    print(
        f"{name}: pool {a / 1e6:.0f} MB/s, volume {b / 1e6:.0f} MB/s, ratio {b / a:.2f} (wanted >= 0.9), "
        f"losetup by hand {h / a:.2f}, CPU idle {free:.0f} %",
        flush=True,
    )


async def main():
    with pool_on_disk(sys.argv[1] if len(sys.argv) > 1 else None) as (base, pool):
        async with plugin_on(pool, base) as (_, caller):
            volume = await caller.up((await caller.create("v", size=2 * GIB)).volume_id)
            fstype = subprocess.run(
                ["findmnt", "--noheadings", "--output=FSTYPE", str(volume)], check=True, capture_output=True, text=True
            ).stdout.strip()
            bare = pool / "bare"
            bare.mkdir()
            with loop_by_hand(base, fstype) as hand:
                for directory in (bare, hand, volume):  # blocks are allocated before anything is measured
                    fio(directory, [*DIRECT, "--rw=write", "--bs=1m", "--iodepth=4"])
                for name, options in PATTERNS.items():
                    compare(name, options, bare, hand, volume)


asyncio.run(main())
