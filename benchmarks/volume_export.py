"""How fast an export is beside `cp --sparse=always` of the same image, wanted at most 10 % slower.

Both are whole commands, take turns in shuffled order and write to the same filesystem. Three comparisons for each shape
of data: to the page cache, where only processor time counts (`--no-sync`, as cp does); to the disk (export as it is, cp
followed by `sync FILE`); and to a pipe (beside `cat` of the same data without holes, to the same reader). cp runs with
`--reflink=never`: within one reflinking filesystem it would copy nothing at all. Imports are shown too. A ratio is the
median over rounds of export's time over cp's in the same round, so that what else the machine does falls on both.

Bytecode is kept in a directory of the benchmark's own: an installed command has it, a work tree may not.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from figures import record
from storage_filesystem import scratch

from moorage import log
from moorage.host.extents import data_ranges
from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig, Snapshot

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SHAPES = {
    "dense": (1, 1),
    "sparse": (8, 16),
    "many extents": (4, 4096),
}
"""How many times larger the image is than its data, and in how many pieces the data lies."""

Took = tuple[float, float]


def made(pool: Pool, name: str, data_bytes: int) -> Snapshot:
    times, pieces = SHAPES[name]
    size = times * data_bytes
    volume = pool.create_volume(CreateVolume(name.replace(" ", "-"), size, filesystem=""))
    length = data_bytes // pieces
    block = os.urandom(min(4 * MIB, length))
    with open(volume.data, "r+b") as file:
        for piece in range(pieces):
            file.seek(piece * (size // pieces))
            for _ in range(length // len(block)):
                file.write(block)
    return pool.create_snapshot(CreateSnapshot(f"{volume.name}-s", volume.id))


def timed(*commands: Sequence[str], environment: dict[str, str] | None = None) -> Took:
    """How long commands took, and how much processor time; the second says more on a busy machine."""
    started, before = time.perf_counter(), os.times()
    for argv in commands:
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - started, used


def compare(title: str, sides: dict[str, Callable[[], Took]], rounds: int, data_bytes: int) -> None:
    took: dict[str, list[Took]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in random.sample(sorted(sides), len(sides)):
            took[name].append(sides[name]())
    first = next(iter(sides))
    for name, runs in took.items():
        seconds, used = (statistics.median(each) for each in zip(*runs, strict=True))
        print(f"{title}: {name}: median {seconds:.3f} s, {data_bytes / seconds / MIB:.0f} MiB/s", end="")
        if name != first:
            pairs = list(zip(runs, took[first], strict=True))
            ratio = statistics.median(one[0] / other[0] for one, other in pairs)
            best = min(runs)[0] / min(took[first])[0]
            cpu = statistics.median(one[1] / max(other[1], 0.01) for one, other in pairs)
            if first == "cp" and "cache" in title:
                record(f"export over cp, {title.partition(',')[0]}", f"{ratio:.2f}", ratio <= 1.1)
            print(f"; over {first}: {ratio:.2f}, best runs {best:.2f}, processor time {cpu:.2f} ({used:.2f} s)", end="")
        print(flush=True)


class Bench:
    """The commands of one shape."""

    def __init__(self, base: Path, snapshot: Snapshot) -> None:
        self.copy, self.stream = base / "copy", base / "stream"
        self.snapshot = snapshot
        self.moorage = [sys.executable, "-m", "moorage.cli.main", "volume", "--pool", str(base / "pool")]
        self.environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(base / "bytecode")}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def cp(self, *, sync: bool = False) -> Took:
        self._clear()
        argv = ["cp", "--sparse=always", "--reflink=never", str(self.snapshot.data), str(self.copy)]
        return timed(argv, ["sync", str(self.copy)]) if sync else timed(argv)

    def export(self, *, sync: bool = False) -> Took:
        self._clear()
        argv = [*self.moorage, "export", self.snapshot.id, str(self.stream), "--sync" if sync else "--no-sync"]
        return timed(argv, environment=self.environment)

    def cat(self) -> Took:
        return timed(["sh", "-c", 'cat "$0" | cat >/dev/null', str(self.copy)])

    def export_to_pipe(self) -> Took:
        command = ["sh", "-c", '"$@" | cat >/dev/null', "sh", *self.moorage, "export", self.snapshot.id, "-"]
        return timed(command, environment=self.environment)

    def imported(self, name: str) -> Took:
        return timed([*self.moorage, "import", str(self.stream), "--name", name], environment=self.environment)

    def packed(self) -> None:
        """The data without its holes, for `cat`."""
        self._clear()
        with open(self.copy, "wb") as file:
            fd = os.open(self.snapshot.data, os.O_RDONLY)
            for piece in data_ranges(fd):
                os.lseek(fd, piece.offset, os.SEEK_SET)
                left = piece.length
                while left:
                    block = os.read(fd, min(left, MIB))
                    file.write(block)
                    left -= len(block)
            os.close(fd)

    def _clear(self) -> None:
        for path in (self.copy, self.stream):
            path.unlink(missing_ok=True)


def run(shape: str, bench: Bench, rounds: int, data_bytes: int) -> None:
    bench.export()  # the bytecode, and the pages of the source
    for title, sync in (("to the page cache", False), ("to the disk", True)):
        sides = {"cp": lambda sync=sync: bench.cp(sync=sync), "export": lambda sync=sync: bench.export(sync=sync)}
        compare(f"{shape}, {title}", sides, rounds, data_bytes)
    bench.packed()
    compare(f"{shape}, to a pipe", {"cat": bench.cat, "export": bench.export_to_pipe}, rounds, data_bytes)
    bench.export(sync=True)
    numbers = iter(range(1000))
    name = shape.replace(" ", "-")
    compare(f"{shape}, import", {"import": lambda: bench.imported(f"{name}-{next(numbers)}")}, 3, data_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="data in MiB")
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    log.configure("warning")
    data_bytes = options.mib * MIB
    print(f"load at the start: {os.getloadavg()[0]:.1f}", flush=True)
    with scratch(size=256 * GIB) as base:
        for shape in SHAPES if options.shape == "all" else [options.shape]:
            with Pool.open(PoolConfig("bench", base / "pool", background=False, overcommit=10.0)) as pool:
                snapshot = made(pool, shape, data_bytes)
            run(shape, Bench(base, snapshot), options.rounds, data_bytes)
    print(f"load at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
