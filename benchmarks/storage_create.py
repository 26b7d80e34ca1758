"""What CreateVolume+DeleteVolume cost: growth with the number of volumes, and speed beside bare files.

Prints two figures. `growth` is the cost of one create+delete with many volumes in the pool over the
cost with few (wanted: at most 1.2). `creates/s` is measured with 8 threads, beside the same threads
doing nothing but mkdir, write, fsync, rename and fsync of the parent (wanted: 300/s, or a ratio of at
most 2).
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moorage.storage import CreateVolume, Pool, PoolConfig

MIB = 1 << 20


def pair_cost(pool: Pool, tag: str, rounds: int) -> float:
    """The median time of one create and one delete."""
    costs = []
    for n in range(rounds):
        started = time.perf_counter()
        volume = pool.create_volume(CreateVolume(f"{tag}-{n}", MIB, filesystem=""))
        pool.delete_volume(volume.id)
        costs.append(time.perf_counter() - started)
    return statistics.median(costs)


def fill(pool: Pool, upto: int, made: int) -> float:
    """Create volumes with 8 threads until there are `upto`; returns creates a second."""
    started = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(lambda n: pool.create_volume(CreateVolume(f"fill-{n}", MIB, filesystem="")), range(made, upto))
        )
    return (upto - made) / (time.perf_counter() - started)


def bare(directory: Path, count: int) -> float:
    """The same number of directories, as durable, with nothing around them."""
    (directory / "tmp").mkdir(parents=True)
    (directory / "final").mkdir()

    def one(n: int) -> None:
        built = directory / "tmp" / str(n)
        built.mkdir()
        fd = os.open(built / "volume.json", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, b"x" * 300)
        os.fsync(fd)
        os.close(fd)
        os.rename(built, directory / "final" / str(n))
        fd = os.open(directory / "final", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    started = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, range(count)))
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--few", type=int, default=100)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="moorage-create-", dir=arguments.directory))
    try:
        config = PoolConfig("bench", base / "pool", overcommit=1000.0, background=False)
        with Pool.open(config) as pool:
            fill(pool, arguments.few, 0)
            few = pair_cost(pool, "few", arguments.rounds)
            speed = fill(pool, arguments.many, arguments.few)
            many = pair_cost(pool, "many", arguments.rounds)
        started = time.perf_counter()
        Pool.open(config).close()
        opened = time.perf_counter() - started
        plain = bare(base / "bare", 2000)
        print(f"create+delete at {arguments.few}: {few * 1000:.2f} ms, at {arguments.many}: {many * 1000:.2f} ms")
        print(f"growth: {many / few:.2f} (wanted: at most 1.2)")
        print(f"creates/s with 8 callers: {speed:.0f}; bare: {plain:.0f}/s; ratio {plain / speed:.2f}")
        print(f"opening a pool with {arguments.many} volumes: {opened:.2f} s")
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
