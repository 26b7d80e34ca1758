"""Changed blocks of a 1 TiB sparse volume: time and memory.

Two snapshots with 10,000 changed extents between them; wanted: told in under 1 s and with under
50 MiB of extra memory. The bare figure is one FIEMAP pass over both files in C-sized batches.
"""

import argparse
import os
import time
import tracemalloc

from figures import record
from storage_filesystem import scratch

from moorage.host.extents import extents_of
from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig

TIB, MIB = 1 << 40, 1 << 20


def scatter(path: os.PathLike[str], count: int, phase: int) -> None:
    """Write `count` blocks of 4 KiB, evenly spread; `phase` moves them."""
    step = TIB // count // 4096 * 4096
    block = os.urandom(4096)
    fd = os.open(path, os.O_RDWR)
    for n in range(count):
        os.pwrite(fd, block, n * step + phase * 4096)
    os.fsync(fd)
    os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extents", type=int, default=10_000)
    count = parser.parse_args().extents
    with scratch() as base, Pool.open(PoolConfig("b", base / "pool", overcommit=1e6, background=False)) as pool:
        volume = pool.create_volume(CreateVolume("v", TIB, filesystem=""))
        scatter(volume.data, count, 0)
        first = pool.create_snapshot(CreateSnapshot("a", volume.id))
        scatter(volume.data, count, 7)
        second = pool.create_snapshot(CreateSnapshot("b", volume.id))

        started = time.perf_counter()
        told = sum(1 for _ in pool.blocks.changed(first.id, second.id).ranges)
        took = time.perf_counter() - started
        started = time.perf_counter()
        allocated = sum(1 for _ in pool.blocks.allocated(second.id).ranges)
        took_allocated = time.perf_counter() - started
        started = time.perf_counter()
        for cut in (first, second):
            with open(cut.data, "rb") as file:
                for _ in extents_of(file.fileno()):
                    pass
        bare = time.perf_counter() - started

        tracemalloc.start()
        for _ in pool.blocks.changed(first.id, second.id).ranges:
            pass
        peak = tracemalloc.get_traced_memory()[1]
        record("10,000 changed extents of 1 TiB", f"{took:.2f} s", took <= 1)
        print(f"changed: {told} ranges in {took:.3f} s (wanted: under 1 s)")
        print(f"allocated: {allocated} ranges in {took_allocated:.3f} s")
        print(f"over one FIEMAP pass of both files: {took / bare:.2f}")
        record("10,000 changed extents of 1 TiB: memory", f"{peak / MIB:.1f} MiB", peak <= 50 * MIB)
        print(f"extra memory at most {peak / MIB:.2f} MiB (wanted: under 50)")


if __name__ == "__main__":
    main()
