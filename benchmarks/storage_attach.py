"""What an attach and its detach cost beside two fsynced renames; wanted: at most 3 times as much."""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figures import record

from moorage.storage import CreateVolume, Pool, PoolConfig, PoolScope


def medians(first: Callable[[], object], second: Callable[[], object], rounds: int) -> list[float]:
    """The medians of two calls that take turns, so that a busy machine slows both."""
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, times in zip((first, second), took, strict=True):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in took]


def fsynced_rename(directory: Path) -> None:
    """Write a small file, fsync it, rename it into place, fsync the directory."""
    fd = os.open(directory / "new", os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, b"x" * 100)
    os.fsync(fd)
    os.close(fd)
    os.rename(directory / "new", directory / "state")
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="moorage-attach-", dir=arguments.directory))
    try:
        with Pool.open(PoolConfig("b", base / "pool", scope=PoolScope.SHARED, background=False)) as pool:
            volume = pool.create_volume(CreateVolume("v", 1 << 20, filesystem="")).id
            pool.attachments.register_node("n1", limit=10)

            def pair() -> None:
                pool.attachments.attach(volume, "n1", "SINGLE_NODE_WRITER")
                pool.attachments.detach(volume, "n1")

            def bare() -> None:
                fsynced_rename(base)
                fsynced_rename(base)

            ours, plain = medians(pair, bare, arguments.rounds)
        print(f"attach+detach {ours * 1000:.2f} ms, two fsynced renames {plain * 1000:.2f} ms")
        record("attach and detach in the pool over two fsynced renames", f"{ours / plain:.2f}", ours / plain <= 3)
        print(f"ratio: {ours / plain:.2f} (wanted: at most 3)")
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
