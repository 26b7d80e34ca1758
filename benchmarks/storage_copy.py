"""What a snapshot and a clone cost on a reflink pool, by size and beside the bare FICLONE.

Prints the ratio of a 64 GiB image (sparse, 1 GiB written) to a 1 GiB image (1 GiB written), wanted at
most 2, and the time over a bare FICLONE of the same file, wanted at most 5 ms. The bare figure is the
ioctl on a new file with its fsync, and without anything that makes it a snapshot. All sides take
turns, so that a busy machine slows them alike.

FICLONE itself costs by the number of extents, not by size, so where the 1 GiB lies matters: it is
measured in 1, 16 and 256 pieces spread over the 64 GiB. The bare ratio is printed beside ours.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from figures import record
from storage_filesystem import scratch

from moorage.host.extents import clone_file
from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig, Source, Volume

GIB, MIB = 1 << 30, 1 << 20
PIECES = (1, 16, 256)
WHAT = ("bare", "snapshot", "clone")


def written(pool: Pool, name: str, size: int, pieces: int) -> Volume:
    """A raw volume of this size with 1 GiB written, in so many pieces spread evenly over it."""
    volume = pool.create_volume(CreateVolume(name, size, filesystem=""))
    block = os.urandom(4 * MIB)
    with open(volume.data, "r+b") as file:
        for piece in range(pieces):
            file.seek(piece * (size // pieces))
            for _ in range(GIB // pieces // len(block)):
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return volume


def bare(volume: Volume, directory: Path, n: int) -> None:
    target = directory / f"bare-{n}"
    with open(volume.data, "rb") as old, open(target, "wb") as new:
        if not clone_file(old.fileno(), new.fileno()):
            raise SystemExit("this filesystem cannot clone")
        os.fsync(new.fileno())


def measured(pool: Pool, base: Path, volumes: list[Volume], rounds: int) -> list[list[float]]:
    """Median seconds of [bare, snapshot, clone] for each volume, all of them in turns.

    The order is shuffled in each round: what follows a costly copy pays for some of it.
    """
    took: list[list[list[float]]] = [[[], [], []] for _ in volumes]
    chance = random.Random(1)
    for n in range(rounds):
        order = list(zip(volumes, took, strict=True))
        chance.shuffle(order)
        for volume, times in order:
            tag = f"{volume.name}-{n}"
            wish = CreateVolume(f"c-{tag}", volume.size_bytes, filesystem="", source=Source.volume(volume.id))
            calls: list[Callable[[], object]] = [
                partial(bare, volume, base, n),
                partial(pool.create_snapshot, CreateSnapshot(f"s-{tag}", volume.id)),
                partial(pool.create_volume, wish),
            ]
            for call, samples in zip(calls, times, strict=True):
                started = time.perf_counter()
                call()
                samples.append(time.perf_counter() - started)
            (base / f"bare-{n}").unlink()
    return [[statistics.median(samples) for samples in times] for times in took]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    with scratch() as base, Pool.open(PoolConfig("bench", base / "pool", overcommit=1000.0, background=False)) as pool:
        small = written(pool, "small", GIB, 1)
        large = [written(pool, f"large-{pieces}", 64 * GIB, pieces) for pieces in PIECES]
        first, *rest = measured(pool, base, [small, *large], rounds)
        print("1 GiB: " + ", ".join(f"{what} {cost * 1000:.2f} ms" for what, cost in zip(WHAT, first, strict=True)))
        figures: dict[tuple[str, int], tuple[float, float]] = {}
        for pieces, costs in zip(PIECES, rest, strict=True):
            print(f"64 GiB, 1 GiB written in {pieces} pieces:")
            for what, cost, plain in zip(WHAT, costs, first, strict=True):
                over = "" if what == "bare" else f", over bare {(cost - costs[0]) * 1000:.2f} ms (at most 5)"
                wanted = "" if what == "bare" else " (wanted: at most 2)"
                figures[what, pieces] = (cost / plain, (cost - costs[0]) * 1000)
                print(f"  {what}: {cost * 1000:.2f} ms, 64 GiB / 1 GiB = {cost / plain:.2f}{wanted}{over}")
        report(figures)


def report(figures: dict[tuple[str, int], tuple[float, float]]) -> None:
    """Report ratios and milliseconds over a bare clone, by what was copied and its number of pieces."""
    few = [figures[what, pieces] for what in WHAT[1:] for pieces in PIECES[:2]]
    ratio, over_ms = max(each[0] for each in few), max(each[1] for each in few)
    record("copy of a 64 GiB image over a 1 GiB image, 1 to 16 pieces", f"{ratio:.2f}", ratio <= 2)
    record("copy over a bare FICLONE, 1 to 16 pieces", f"{over_ms:.1f} ms", over_ms <= 5)
    for what in WHAT[1:]:
        ratio = figures[what, PIECES[2]][0]
        record(f"{what} of a 64 GiB image over a 1 GiB image, 256 pieces", f"{ratio:.2f}", ratio <= 2)


if __name__ == "__main__":
    main()
