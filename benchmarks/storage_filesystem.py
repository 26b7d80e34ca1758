"""A reflinking filesystem in a sparse file, for the benchmarks that need one; gone afterwards."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moorage.host import filesystems, loop, mounts

GIB = 1 << 30


@contextlib.contextmanager
def scratch(fstype: str = "xfs", size: int = 256 * GIB) -> Iterator[Path]:
    """A mounted filesystem of this type; needs root."""
    if os.geteuid() != 0:
        sys.exit("this benchmark needs root, for a loop device and a mount")
    base = Path(tempfile.mkdtemp(prefix="moorage-bench-"))
    image, target = base / "image", base / "mnt"
    target.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(size)
        filesystems.mkfs(image, fstype)
        device = loop.attach(image)
        try:
            mounts.mount(device.path, target, fstype)
            try:
                yield target
            finally:
                mounts.unmount(target)
        finally:
            loop.detach(device)
            loop.wait_detached(device)
    finally:
        shutil.rmtree(base)
