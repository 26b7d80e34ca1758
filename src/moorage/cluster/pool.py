"""The directory that `moorage up` gives its plugin as a pool.

Owns: finding out whether a filesystem can reflink, and an XFS filesystem in a file where it cannot.
May not touch: any filesystem that it did not make; the file is formatted only while it is empty.
Start reading at: `ensure_pool`.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moorage.cluster.layout import DataLayout
from moorage.errors import MoorageError
from moorage.host import extents, filesystems, loop, mountinfo, mounts
from moorage.log import get_logger

log = get_logger(__name__)

_SMALLEST_XFS = 300 << 20


class PoolNotCreated(MoorageError):
    """The pool could not be made; the message says which step failed."""

    code = "FAILED_PRECONDITION"


@dataclass(frozen=True)
class PoolReport:
    """Where the pool is, and what a person should know about it."""

    path: Path
    can_reflink: bool
    advice: str = ""


def ensure_pool(layout: DataLayout, given: Path | None, size_bytes: int) -> PoolReport:
    """The pool to use: the given directory, an XFS filesystem in a file (`size_bytes`), or a plain directory."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _reported(given)
    layout.pool.mkdir(parents=True, exist_ok=True, mode=0o700)
    if layout.pool_image.exists() or (size_bytes and not can_reflink(layout.pool)):
        _mount_image(layout, size_bytes)
    return _reported(layout.pool)


def release_pool(layout: DataLayout) -> None:
    """Unmount the filesystem in a file, if that is what the pool is; its loop device goes with the mount."""
    if layout.pool_image.exists() and mountinfo.mount_at(layout.pool) is not None:
        mounts.unmount_all(layout.pool)


def can_reflink(directory: Path) -> bool:
    """Try it: only a clone that worked proves that clones work."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".reflink-") as scratch:
        source, target = os.path.join(scratch, "a"), os.path.join(scratch, "b")
        with open(source, "w+b") as one, open(target, "w+b") as other:
            one.write(b"\0" * 4096)
            one.flush()
            return extents.clone_file(one.fileno(), other.fileno())


def _mount_image(layout: DataLayout, size_bytes: int) -> None:
    if mountinfo.mount_at(layout.pool) is not None:
        return
    if not layout.pool_image.exists():
        if size_bytes < _SMALLEST_XFS:
            raise PoolNotCreated(f"--pool-size: an XFS pool needs at least {_SMALLEST_XFS >> 20} MiB")
        descriptor = os.open(layout.pool_image, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            os.truncate(file.fileno(), size_bytes)
    layout.pool_image.chmod(0o600)  # earlier versions let every user of the machine read it
    attached = loop.find(layout.pool_image)
    device = attached[0] if attached else loop.attach(layout.pool_image)
    try:
        with loop.held(device):
            if filesystems.content_of(device.path) is None:
                log.info("making an XFS pool in a file", file=layout.pool_image, size_bytes=size_bytes)
                filesystems.format_blank(device.path, "xfs", label="moorage-pool")
            mounts.mount(device.path, layout.pool, "xfs", ("noatime",))
    finally:
        loop.detach(device)  # the kernel keeps it for as long as it is mounted


def _reported(path: Path) -> PoolReport:
    reflinks = can_reflink(path)
    advice = (
        ""
        if reflinks
        else (
            "snapshots and clones are full copies here: the pool's filesystem cannot reflink; "
            "--pool-size 20Gi makes an XFS pool in a file where they are instant"
        )
    )
    return PoolReport(path, reflinks, advice)
