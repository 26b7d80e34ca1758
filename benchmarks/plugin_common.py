"""A pool in a loop file, and a plugin on it, for the plugin's benchmarks. Needs root."""

import contextlib
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moorage.host import loop, mountinfo, mounts

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python benchmarks/x.py` finds what the tests share
from tests.support.plugin_caller import Caller, block, mounted
from tests.support.plugin_process import PluginProcess

__all__ = ["Caller", "PluginProcess", "block", "mounted"]

MIB = 1024 * 1024
GIB = 1024 * MIB
LOW = 32


@contextlib.contextmanager
def loop_devices_released():
    """The kernel keeps every loop device that was needed once; those that this block added go with it."""
    before = loop.numbers()
    try:
        yield
    finally:
        # Each removal waits for the kernel, so many go at once. What is attached stays; so do the low
        # numbers, which another process may just have been told to use.
        added = [number for number in loop.numbers() - before if number >= LOW]
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(loop.remove, added))


@contextlib.contextmanager
def pool_in_file(fstype="xfs", size=64 * GIB):
    """A mounted filesystem in a sparse file below the temporary directory."""
    with loop_devices_released(), tempfile.TemporaryDirectory(prefix="moorage-bench-") as text:
        base = Path(text)
        image, target = base / "pool.img", base / "pool"
        target.mkdir()
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run([f"mkfs.{fstype}", "-q", str(image)], check=True, capture_output=True)
        device = loop.attach(image)
        try:
            mounts.mount(device.path, target, fstype)
            try:
                yield base, target
            finally:
                mounts.unmount_all(target)
        finally:
            loop.detach(device)
            loop.wait_detached(device)


@contextlib.contextmanager
def pool_on_disk(directory=None):
    """A pool on the filesystem of a directory as it is, by default that of temporary files."""
    with loop_devices_released(), tempfile.TemporaryDirectory(prefix="moorage-bench-", dir=directory) as text:
        target = Path(text) / "pool"
        target.mkdir()
        try:
            yield Path(text), target
        finally:  # an interrupted run may not have taken its volumes down, and the directory goes next
            for left in reversed(mountinfo.mounts_below(text)):
                mounts.unmount(left.target)
            for device in loop.attached(below=text):
                loop.detach(device)


@contextlib.asynccontextmanager
async def plugin_on(pool, base, flags=()):
    """A running plugin and a caller; what the caller put up is taken down at the end."""
    run = base / "run"
    run.mkdir(exist_ok=True)
    async with PluginProcess({"default": pool}, directory=run, flags=["--overcommit=1000", *flags]) as process:
        caller = Caller(process.client, base)
        try:
            yield process, caller
        finally:
            await caller.leave()


def rss_mib(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
