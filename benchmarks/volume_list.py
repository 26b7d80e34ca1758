"""How long `moorage volume list` takes with many volumes: the whole command, wanted at most 500 ms.

Also without starting a process: reading the records alone. Half of the volumes of a second pool have a snapshot, so
that their extents have to be looked at.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from figures import record
from storage_filesystem import scratch

from moorage import log
from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig
from moorage.storage.guests import open_pool
from moorage.storage.listing import overview

MIB = 1 << 20
BYTECODE = tempfile.TemporaryDirectory(prefix="moorage-bench-bytecode-")
ENVIRONMENT = {**os.environ, "PYTHONPYCACHEPREFIX": BYTECODE.name, "PYTHONDONTWRITEBYTECODE": ""}
"""An installed command has its bytecode; a work tree may not."""


def filled(directory: Path, volumes: int, snapshots: int) -> None:
    """A pool with so many volumes, some of them with data and a snapshot."""

    def make(number: int) -> None:
        volume = pool.create_volume(CreateVolume(f"pvc-{number:06d}", 16 * MIB))
        if number < snapshots:
            with open(volume.data, "r+b") as file:
                file.write(b"x" * 65536)
            pool.create_snapshot(CreateSnapshot(f"s-{number:06d}", volume.id))

    config = PoolConfig("bench", directory, background=False, overcommit=100.0)
    with Pool.open(config) as pool, ThreadPoolExecutor(8) as threads:
        list(threads.map(make, range(volumes)))


def command_ms(directory: Path, *arguments: str) -> tuple[float, float]:
    """How long a command took, and how much processor time; the second says more on a busy machine."""
    argv = [sys.executable, "-m", "moorage.cli.main", "volume", "--pool", str(directory), *arguments]
    started, before = time.perf_counter(), os.times()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return (time.perf_counter() - started) * 1000, used * 1000


def records_ms(directory: Path) -> float:
    with open_pool(directory) as pool:
        started = time.perf_counter()
        overview(pool)
        return (time.perf_counter() - started) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--volumes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    log.configure("warning")
    print(f"load at the start: {os.getloadavg()[0]:.1f}")
    with scratch() as base:
        for title, snapshots in (("no snapshots", 0), ("half with a snapshot", options.volumes // 2)):
            directory = base / title.replace(" ", "-")
            filled(directory, options.volumes, snapshots)
            start = min(command_ms(base / "empty", "create", "a", "--new-pool") for _ in range(5))
            for name, arguments in (("text", ("list",)), ("json", ("list", "-o", "json"))):
                took, used = zip(*(command_ms(directory, *arguments) for _ in range(options.rounds)), strict=True)
                if not snapshots and name == "text":
                    median = statistics.median(took)
                    record("`moorage volume list` with 10,000 volumes", f"{median:.0f} ms", median <= 500)
                print(
                    f"{options.volumes} volumes, {title}, {name}: median {statistics.median(took):.0f} ms, "
                    f"best {min(took):.0f} ms, processor time {statistics.median(used):.0f} ms; "
                    f"over the 500 ms wanted: median {statistics.median(took) / 500:.2f}, best {min(took) / 500:.2f}"
                )
            alone_ms = [records_ms(directory) for _ in range(options.rounds)]
            alone = statistics.median(alone_ms)
            print(f"    the records alone: {alone:.0f} ms; a command that does little: {start[0]:.0f} ms at best")


if __name__ == "__main__":
    main()
