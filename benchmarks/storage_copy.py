"""What a snapshot and a clone cost on a reflink pool, by size and beside the bare FICLONE.

Prints the ratio of a 64 GiB image (sparse, 1 GiB written) to a 1 GiB image (1 GiB written), wanted at
most 2, and the time over a bare FICLONE of the same file, wanted at most 5 ms. The bare figure is the
ioctl on a new file with its fsync, and without anything that makes it a snapshot. FICLONE itself costs
by the number of extents, so the 1 GiB of the sparse image is written in a few large pieces.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from storage_filesystem import scratch

from moorage.host.extents import clone_file
from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig, Source, Volume

GIB, MIB = 1 << 30, 1 << 20
PIECES = 16


def written(pool: Pool, name: str, size: int, data: int) -> Volume:
    """A raw volume of this size with so many bytes written, spread over it."""
    volume = pool.create_volume(CreateVolume(name, size, filesystem=""))
    block = os.urandom(4 * MIB)
    with open(volume.data, "r+b") as file:
        for piece in range(PIECES):
            file.seek(piece * (size // PIECES))
            for _ in range(data // PIECES // len(block)):
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return volume


def median(call: Callable[[int], object], rounds: int) -> float:
    took = []
    for n in range(rounds):
        started = time.perf_counter()
        call(n)
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def bare(source: Path, directory: Path) -> Callable[[int], object]:
    def once(n: int) -> None:
        with open(source, "rb") as old, open(directory / f"bare-{n}", "wb") as new:
            if not clone_file(old.fileno(), new.fileno()):
                raise SystemExit("this filesystem cannot clone")
            os.fsync(new.fileno())

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with scratch() as base:
        config = PoolConfig("bench", base / "pool", overcommit=1000.0, background=False)
        with Pool.open(config) as pool:
            costs = {}
            for gib in (1, 64):
                volume = written(pool, f"v{gib}", gib * GIB, GIB)
                plain = median(bare(volume.data, base), rounds)
                for path in base.glob("bare-*"):
                    path.unlink()

                def snapshot(n: int, gib: int = gib, source: str = volume.id) -> object:
                    return pool.create_snapshot(CreateSnapshot(f"s{gib}-{n}", source))

                def clone(n: int, gib: int = gib, source: str = volume.id) -> object:
                    wish = CreateVolume(f"c{gib}-{n}", gib * GIB, filesystem="", source=Source.volume(source))
                    return pool.create_volume(wish)

                costs[gib] = (plain, median(snapshot, rounds), median(clone, rounds))
                print(
                    f"{gib:3} GiB: bare FICLONE {costs[gib][0] * 1000:.2f} ms, "
                    f"snapshot {costs[gib][1] * 1000:.2f} ms, clone {costs[gib][2] * 1000:.2f} ms"
                )
        for index, what in ((1, "snapshot"), (2, "clone")):
            ratio = costs[64][index] / costs[1][index]
            over = (costs[64][index] - costs[64][0]) * 1000
            print(f"{what}: 64 GiB / 1 GiB = {ratio:.2f} (wanted: at most 2); over bare: {over:.2f} ms (at most 5)")


if __name__ == "__main__":
    main()
