"""How long pods take to start beyond what the driver itself takes.

Prints the time from the creation of one pod to its program running, less the driver's own time for one volume (goal:
under 150 ms), and for 200 pods at once the ratio of the whole to what the driver needs for the same 200 stages and
publishes: when a bare client asks for one after the other, which is the total of the driver's own time (goal: at most
1.5), and when it asks for all at once, which is the same total as far as the driver does not work in parallel. On a
machine whose speed changes from second to second, the time over what the driver took in the same seconds compares best.

Three drivers: `plain` only bind-mounts, which takes almost no time and so makes the ratio hard; `image` is `moorage
plugin`, whose volumes are formatted, attached to loop devices and mounted; `other` is the program given after `--`,
in whose words `{socket}`, `{name}` and `{directory}` are filled in. The API server is ours, in this process, or that of
`--kubeconfig`: one to throw away, for what is made there is left. For each `--pid` its memory and processor time are
printed.
Run: python benchmarks/node_start.py [--driver plain|image|both|other] [--delay 0.05] [--pods 200] [--rounds 1]
[--kubeconfig FILE [--pid PID …]] [-- PROGRAM …]
"""

import argparse
import asyncio
import os
import statistics
import time
from typing import NamedTuple

import uvloop
from figures import record
from node_lab import IDLE, IMAGE, OTHER, PLAIN, STOLEN, Lab, lab, machine_s, quiet

_GOAL = 1.5


async def main(kind: str, options: argparse.Namespace) -> None:
    count, rounds = options.pods, options.rounds
    async with lab(kind, options.delay, options.command, options.kubeconfig) as bench:
        bench.beside = options.pid
        await bench.start_agent()
        await bench.volumes(count + 5)
        single, one_by_one, together = [await bench.make(number) for number in (5, count, count)]
        await asyncio.sleep(1)
        overheads = []
        for number in range(5):
            own = await bench.bare([single[number]])
            started = time.monotonic()
            await bench.pods([f"c{count + number}"])
            await bench.all_running([f"c{count + number}"])
            overheads.append(time.monotonic() - started - own)
        overheads.sort()
        print(f"{kind}: one pod: {overheads[2] * 1000:.0f} ms over the driver's own time (median of 5, goal < 150 ms)")

        if kind == IMAGE:
            record("one pod beyond the driver's own time", f"{overheads[2] * 1000:.0f} ms", overheads[2] < 0.15)

        at_once = await bench.bare(together)
        least = await bench.without_agent(together)
        names = [f"c{number}" for number in range(count)]
        await bench.bare(one_by_one)  # every volume is used once before it is measured: then it may be formatted
        await start(bench, names)
        await bench.remove_pods(names)
        ratios: list[float] = []
        meanwhile: list[float] = []
        total = await bench.bare(one_by_one, at_once=1)
        for _ in range(rounds):
            await quiet()
            run = await start(bench, names)
            await bench.remove_pods(names)
            before, total = total, await bench.bare(one_by_one, at_once=1)
            own = (before + total) / 2  # the machine may be faster or slower a moment later
            ratios.append(run.took / own)
            print(f"{kind}: {count} pods at once: {run.took:.2f} s, the driver's own total {before:.2f} s before and "
                  f"{total:.2f} s after, ratio {run.took / own:.2f} (goal <= {_GOAL}); the last was created after "
                  f"{run.created:.2f} s")  # fmt: skip
            every = {**run.spent, "idle": run.idle}
            every["containers and the rest"] = run.took * (os.cpu_count() or 1) - sum(every.values()) - run.lost
            each = ", ".join(f"{who} {used / count * 1000:.1f}" for who, used in every.items())
            print(f"{kind}: processor time per pod, in ms: {each}; taken by other machines {run.lost:.2f} s")
            meanwhile.append(run.took / run.spent["driver"])
            print(f"{kind}: over the processor time that the driver took meanwhile: {meanwhile[-1]:.2f}")
        met = sum(ratio <= _GOAL for ratio in ratios)
        print(f"{kind}: ratio of {rounds} runs: {spread(ratios)}; {met} of them at most {_GOAL}")
        print(f"{kind}: over the processor time that the driver took meanwhile: {spread(meanwhile)}")
        whose = {IMAGE: "Moorage's plugin", OTHER: "official host-path driver"}
        if kind in whose and not options.kubeconfig:
            goal = max(ratios) <= _GOAL
            record(f"200 pods at once over the driver's own total: {whose[kind]}", spread(ratios), goal)
        print(f"{kind}: as many volumes, the driver asked for all at once: {at_once:.2f} s; as many pods, used volumes "
              f"and statuses without an agent: {least:.2f} s")  # fmt: skip


class Run(NamedTuple):
    """How long pods took to run, and what that took."""

    took: float
    created: float  # when the API server had all of them
    spent: dict[str, float]
    idle: float
    lost: float


def spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.2f}, from {min(values):.2f} to {max(values):.2f}"


async def start(bench: Lab, names: list[str]) -> Run:
    before, idle, lost, started = bench.cpu_s(), machine_s(IDLE), machine_s(STOLEN), time.monotonic()
    await bench.pods(names)
    created = time.monotonic() - started
    await bench.all_running(names)
    took = time.monotonic() - started
    spent = {who: used - before[who] for who, used in bench.cpu_s().items()}
    return Run(took, created, spent, machine_s(IDLE) - idle, machine_s(STOLEN) - lost)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", choices=[PLAIN, IMAGE, OTHER, "both"], default="both")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds that plain takes per stage and publish")
    parser.add_argument("--pods", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1, help="how often they are started; with a median in the end")
    parser.add_argument("--kubeconfig", default="", help="of another API server than ours; it is not cleaned up")
    parser.add_argument("--pid", type=int, action="append", default=[], help="of that API server and what is beside it")
    parser.add_argument("command", nargs="*", help="the program of `other` and its arguments, after --")
    options = parser.parse_args()
    for driver in [PLAIN, IMAGE] if options.driver == "both" else [options.driver]:
        uvloop.run(main(driver, options))
