"""How long pods take to start beyond what the driver itself takes.

Prints the time from the creation of one pod to its program running, less the driver's own time for one volume (goal:
under 150 ms), and for 200 pods at once the ratio of the whole to what the driver needs for the same 200 stages and
publishes when a bare client asks for them all at once (goal: at most 1.5). Two drivers: `plain` only bind-mounts, which
takes almost no time and so makes the ratio hard; `image` is `moorage plugin`, whose volumes are formatted, attached to
loop devices and mounted.
Run: python benchmarks/node_start.py [--driver plain|image|both] [--delay 0.05] [--pods 200]
"""

import argparse
import asyncio
import time

from node_lab import IMAGE, PLAIN, lab


async def main(kind: str, delay_s: float, count: int) -> None:
    async with lab(kind, delay_s) as bench:
        await bench.start_agent()
        await bench.volumes(count + 5)
        await asyncio.sleep(1)
        overheads = []
        for number in range(5):
            own = await bench.bare(1)
            started = time.monotonic()
            await bench.pods([f"c{count + number}"])
            await bench.all_running(number + 1)
            overheads.append(time.monotonic() - started - own)
        overheads.sort()
        print(f"{kind}: one pod: {overheads[2] * 1000:.0f} ms over the driver's own time (median of 5, goal < 150 ms)")

        own = await bench.bare(count)
        cpu = bench.cpu_s()
        started = time.monotonic()
        await bench.pods([f"c{number}" for number in range(count)])
        await bench.all_running(count + 5)
        took = time.monotonic() - started
        print(f"{kind}: {count} pods at once: {took:.2f} s, the driver alone {own:.2f} s, "
              f"ratio {took / own:.2f} (goal <= 1.5)")  # fmt: skip
        print(f"{kind}: agent's processor time per pod: {(bench.cpu_s() - cpu) / count * 1000:.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", choices=[PLAIN, IMAGE, "both"], default="both")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds that plain takes per stage and publish")
    parser.add_argument("--pods", type=int, default=200)
    options = parser.parse_args()
    for driver in [PLAIN, IMAGE] if options.driver == "both" else [options.driver]:
        asyncio.run(main(driver, options.delay, options.pods))
