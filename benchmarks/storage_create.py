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

from figures import record

from moorage.storage import CreateVolume, Pool, PoolConfig

MIB = 1 << 20
BATCH = 250


def pair_costs(pools: list[Pool], rounds: int) -> list[float]:
    """The median time of one create and one delete in each pool; they take turns, so that a busy
    machine slows them all alike."""
    costs: list[list[float]] = [[] for _ in pools]
    for n in range(rounds):
        for pool, times in zip(pools, costs, strict=True):
            started = time.perf_counter()
            volume = pool.create_volume(CreateVolume(f"pair-{n}", MIB, filesystem=""))
            pool.delete_volume(volume.id)
            times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in costs]


def fill(pool: Pool, upto: int, made: int) -> float:
    """Create volumes with 8 threads until there are `upto`; returns creates a second."""
    started = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(lambda n: pool.create_volume(CreateVolume(f"fill-{n}", MIB, filesystem="")), range(made, upto))
        )
    return (upto - made) / (time.perf_counter() - started)


def bare(directory: Path, start: int, count: int) -> float:
    """The same number of directories, as durable, with nothing around them; returns how many a second."""
    for part in ("tmp", "final"):
        (directory / part).mkdir(parents=True, exist_ok=True)

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
        list(threads.map(one, range(start, start + count)))
    return count / (time.perf_counter() - started)


def speeds(pool: Pool, directory: Path, few: int, many: int) -> tuple[float, float]:
    """Creates a second, ours and bare, in batches that take turns."""
    ours, plain = [], []
    for start in range(few, many, BATCH):
        ours.append(fill(pool, min(start + BATCH, many), start))
        plain.append(bare(directory, start, BATCH))
    return statistics.median(ours), statistics.median(plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--few", type=int, default=100)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="moorage-create-", dir=arguments.directory))
    try:
        small = PoolConfig("few", base / "few", overcommit=1000.0, background=False)
        large = PoolConfig("many", base / "many", overcommit=1000.0, background=False)
        with Pool.open(small) as few, Pool.open(large) as many:
            fill(few, arguments.few, 0)
            fill(many, arguments.few, 0)
            speed, plain = speeds(many, base / "bare", arguments.few, arguments.many)
            costs = pair_costs([few, many], arguments.rounds)
        started = time.perf_counter()
        Pool.open(large).close()
        opened = time.perf_counter() - started
        print(f"create+delete at {arguments.few}: {costs[0] * 1000:.2f} ms, ", end="")
        print(f"at {arguments.many}: {costs[1] * 1000:.2f} ms")
        growth = costs[1] / costs[0]
        record("create and delete with 10,000 volumes over 100", f"{growth:.2f}", growth <= 1.2)
        record("creates with 8 callers", f"{speed:.0f}/s", speed >= 300 or plain / speed <= 2)
        print(f"growth: {costs[1] / costs[0]:.2f} (wanted: at most 1.2)")
        print(f"creates/s with 8 callers: {speed:.0f}; bare: {plain:.0f}/s; ratio {plain / speed:.2f}")
        print(f"opening a pool with {arguments.many} volumes: {opened:.2f} s")
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
