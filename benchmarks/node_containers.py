"""What starting a container costs.

Prints the processor time of one container, from its specification to its program: what this process, the supervisor
and the container's own process take, for containers started eight at a time.
Run: python benchmarks/node_containers.py [--containers 100] [--rounds 5]
"""

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import uvloop
from node_lab import cpu_s

from moorage.node.runtime import RunningContainer
from moorage.node.runtime.process_runtime import ProcessRuntime


async def spent_ms(base: Path, count: int) -> float:
    """Milliseconds per container."""
    all_ended, running = asyncio.Event(), set[str]()

    def ended(container: RunningContainer) -> None:
        running.discard(container.id)
        if not running:
            all_ended.set()

    runtime = ProcessRuntime(ended)
    await runtime.open()
    made = [
        RunningContainer("u", "main", number, base / str(number), base / f"{number}.log") for number in range(count)
    ]
    running |= {one.id for one in made}
    spec = {"argv": ["sleep", "1000"], "env": {}, "hostname": "h", "mounts": []}
    gate = asyncio.Semaphore(8)

    async def start(container: RunningContainer) -> None:
        async with gate:
            await runtime.start(container, spec)

    before = time.process_time()
    await asyncio.gather(*(start(one) for one in made))
    spent = time.process_time() - before + cpu_s(made[0].state["shim"])
    # Too little for the ticks that other processes' times are counted in.
    spent += sum(int(Path(f"/proc/{one.state['pid']}/schedstat").read_text().split()[0]) for one in made) / 1e9
    for one in made:
        runtime.kill(one)
    async with asyncio.timeout(60):
        await all_ended.wait()
    await runtime.close()
    return spent / count * 1000


async def main(count: int, rounds: int) -> None:
    times: list[float] = []
    for _ in range(rounds):
        base = Path(tempfile.mkdtemp(prefix="moorage-bench-"))
        try:
            times.append(await spent_ms(base, count))
        finally:
            shutil.rmtree(base)
    found = statistics.median(times)
    print(f"{found:.1f} ms of processor time per container ({min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--containers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    uvloop.run(main(options.containers, options.rounds))
