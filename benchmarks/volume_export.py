"""How fast an export is beside `cp --sparse=always` of the same image, wanted at most 10 % slower.

Both are whole commands, take turns in shuffled order and write to the same filesystem. Twice: to the page cache, where
only processor time counts (`--no-sync`, as cp does), and to the disk (export as it is, cp followed by `sync FILE`).
cp runs with `--reflink=never`: within one reflinking filesystem it would copy nothing at all. Imports are shown too.
Data is random, a part of a larger sparse image, in many pieces.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from storage_filesystem import scratch

from moorage import log
from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig, Snapshot

MIB, GIB = 1 << 20, 1 << 30


def made(pool: Pool, data_bytes: int, pieces: int) -> Snapshot:
    size = 8 * data_bytes
    volume = pool.create_volume(CreateVolume("v", size, filesystem=""))
    block = os.urandom(4 * MIB)
    with open(volume.data, "r+b") as file:
        for piece in range(pieces):
            file.seek(piece * (size // pieces))
            for _ in range(data_bytes // pieces // len(block)):
                file.write(block)
    return pool.create_snapshot(CreateSnapshot("s", volume.id))


def timed(*commands: Sequence[str]) -> tuple[float, float]:
    """How long commands took, and how much processor time; the second says more on a busy machine."""
    started, before = time.perf_counter(), os.times()
    for argv in commands:
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - started, used


def compare(title: str, sides: dict[str, Callable[[], tuple[float, float]]], rounds: int, data_bytes: int) -> None:
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in random.sample(sorted(sides), len(sides)):
            took[name].append(sides[name]())
    first = next(iter(sides))
    base = [statistics.median(each) for each in zip(*took[first], strict=True)]
    for name, runs in took.items():
        seconds, used = (statistics.median(each) for each in zip(*runs, strict=True))
        best = min(runs)[0] / min(took[first])[0]
        print(
            f"{title}: {name}: median {seconds:.3f} s, {data_bytes / seconds / MIB:.0f} MiB/s; over {first}:", end=" "
        )
        print(f"{seconds / base[0]:.2f}, best runs {best:.2f}, processor time {used / base[1]:.2f} ({used:.2f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="data in MiB")
    parser.add_argument("--pieces", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    log.configure("warning")
    data_bytes = options.mib * MIB
    print(f"load at the start: {os.getloadavg()[0]:.1f}")
    with scratch(size=256 * GIB) as base:
        directory, copy, stream = base / "pool", base / "copy", base / "stream"
        with Pool.open(PoolConfig("bench", directory, background=False)) as pool:
            snapshot = made(pool, data_bytes, options.pieces)
        moorage = [sys.executable, "-m", "moorage.cli.main", "volume", "--pool", str(directory)]

        def gone() -> None:
            for path in (copy, stream):
                path.unlink(missing_ok=True)

        def run_cp(sync: bool) -> tuple[float, float]:
            gone()
            argv = ["cp", "--sparse=always", "--reflink=never", str(snapshot.data), str(copy)]
            return timed(argv, ["sync", str(copy)]) if sync else timed(argv)

        def run_export(sync: bool) -> tuple[float, float]:
            gone()
            return timed([*moorage, "export", snapshot.id, str(stream), "--sync" if sync else "--no-sync"])

        for title, sync in (("to the page cache", False), ("to the disk", True)):
            sides = {"cp": lambda sync=sync: run_cp(sync), "export": lambda sync=sync: run_export(sync)}
            compare(title, sides, options.rounds, data_bytes)
        run_export(True)
        numbers = iter(range(1000))

        def run_import() -> tuple[float, float]:
            return timed([*moorage, "import", str(stream), "--name", f"copy-{next(numbers)}"])

        compare("import", {"import": run_import}, 3, data_bytes)


if __name__ == "__main__":
    main()
