"""What an idle agent costs with many mounted volumes, and how fast it finds them again after a kill.

Prints the processor use at rest (goal: under 0.5 % of a core with 200 volumes) and the time from the start of a new
agent to its node being ready again, and to every volume confirmed (goal: reconstruction of 500 in under 3 s).
Run: python benchmarks/node_idle.py [--pods 200]
"""

import argparse
import asyncio
import re
import time

import uvloop
from figures import record
from node_lab import lab

from moorage.kube.objects.core import Event


async def main(count: int, seconds: float) -> None:
    async with lab() as bench:
        await bench.start_agent()
        await bench.volumes(count)
        names = [f"c{number}" for number in range(count)]
        await bench.pods(names)
        await bench.all_running(names)
        while len((await bench.client.list(Event)).items) < count:  # at rest is when all has been told, too
            await asyncio.sleep(0.5)
        await asyncio.sleep(5)
        cpu, started = bench.cpu_s()["agent"], time.monotonic()
        await asyncio.sleep(seconds)
        share = (bench.cpu_s()["agent"] - cpu) / (time.monotonic() - started)
        if count == 500:
            record("processor use of an idle agent with 500 volumes", f"{share * 100:.2f} %", share < 0.005)
        print(f"idle with {count} mounted volumes: {share * 100:.2f} % of a core (goal < 0.5 %)")

        await bench.kill_agent()
        await bench.client.request("PATCH", "/api/v1/nodes/n1/status", {"status": {"conditions": []}},
                                   content_type="application/merge-patch+json")  # fmt: skip
        before = bench.published()
        started = time.monotonic()
        ready_s = await bench.start_agent()
        while bench.published() < before + count:
            await asyncio.sleep(0.01)
        confirmed_s = time.monotonic() - started
        used_s = bench.cpu_s()["agent"]
        found = re.findall(r"disk read volumes=(\d+) seconds=([\d.]+)", (bench.base / "agent.log").read_text())[-1]
        if count == 500:
            record("agent ready after a restart with 500 volumes", f"{ready_s:.2f} s", ready_s < 3)
            record("every volume confirmed after a restart with 500 volumes", f"{confirmed_s:.2f} s", confirmed_s < 3)
        print(f"restart with {count} volumes: disk read in {found[1]} s, ready in {ready_s:.2f} s, "
              f"all confirmed by the driver in {confirmed_s:.2f} s (goal < 3 s), "
              f"{used_s:.2f} s of the agent's processor time")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pods", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    uvloop.run(main(options.pods, options.seconds))
