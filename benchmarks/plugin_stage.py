"""Stage and publish a formatted image, against losetup, mount and mount --bind by hand. Wanted: at most 1.3 times."""

import asyncio
import statistics
import subprocess
import time

from figures import record
from plugin_common import MIB, plugin_on, pool_in_file

ROUNDS = 20


def by_hand(image, staging, target):
    """The same commands that a person would type; returns the seconds of putting up."""
    began = time.perf_counter()
    done = subprocess.run(
        ["losetup", "--find", "--show", "--direct-io=on", str(image)], check=True, capture_output=True, text=True
    )
    device = done.stdout.strip()
    subprocess.run(["mount", device, str(staging)], check=True)
    target.mkdir()
    subprocess.run(["mount", "--bind", str(staging), str(target)], check=True)
    took = time.perf_counter() - began
    subprocess.run(["umount", str(target)], check=True)
    target.rmdir()
    subprocess.run(["umount", str(staging)], check=True)
    subprocess.run(["losetup", "--detach", device], check=True)
    return took


async def main():
    with pool_in_file() as (base, pool):
        async with plugin_on(pool, base) as (_, caller):
            volume = (await caller.create("v", size=256 * MIB)).volume_id
            await caller.up(volume)
            await caller.down(volume)
            staging, target = base / "hand-staging", base / "hand-target"
            staging.mkdir()
            image = pool / "volumes" / volume / "data"
            hand, ours = [], []
            for _ in range(ROUNDS):
                hand.append(by_hand(image, staging, target))
                began = time.perf_counter()
                await caller.up(volume)
                ours.append(time.perf_counter() - began)
                await caller.down(volume)
    a, b = statistics.median(hand), statistics.median(ours)
    record("stage and publish over losetup, mount and mount --bind", f"{b / a:.2f}", b / a <= 1.3)
    print(f"by hand {a * 1000:.1f} ms, plugin {b * 1000:.1f} ms, ratio {b / a:.2f} (wanted <= 1.3)")


asyncio.run(main())
