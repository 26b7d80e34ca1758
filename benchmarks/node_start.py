"""How long pods take to start beyond what the driver itself takes.

Prints the time from the creation of one pod to its program running, less the driver's own time (goal: under 150 ms),
and for 200 pods at once the ratio of the whole to what the driver needs for the same 200 stages and publishes when a
bare client asks for them all at once (goal: at most 1.5; a driver that takes no time at all makes this hard).
Run: python benchmarks/node_start.py [--delay 0.05]
"""

import argparse
import asyncio
import time

from node_lab import lab


async def main(delay_s: float, count: int) -> None:
    async with lab() as bench:
        await bench.start_agent()
        await bench.volumes(count + 5)
        await asyncio.sleep(1)
        bench.driver.delay_s = delay_s
        overheads = []
        for number in range(5):
            bench.driver.spent_s = 0.0
            started = time.monotonic()
            await bench.pods([f"c{count + number}"])
            await bench.all_running(number + 1)
            overheads.append(time.monotonic() - started - bench.driver.spent_s)
        overheads.sort()
        print(f"one pod: {overheads[2] * 1000:.0f} ms over the driver's own time (median of 5, goal < 150 ms)")

        own = await bench.bare(count)
        cpu = bench.cpu_s()
        started = time.monotonic()
        await bench.pods([f"c{number}" for number in range(count)])
        await bench.all_running(count + 5)
        took = time.monotonic() - started
        print(f"{count} pods at once: {took:.2f} s, the driver alone {own:.2f} s, ratio {took / own:.2f} (goal <= 1.5)")
        print(f"agent's processor time: {bench.cpu_s() - cpu:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.05, help="seconds that the driver takes per stage and publish")
    parser.add_argument("--pods", type=int, default=200)
    options = parser.parse_args()
    asyncio.run(main(options.delay, options.pods))
