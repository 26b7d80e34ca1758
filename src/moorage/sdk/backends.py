"""Helpers for the common kinds of storage: directories, and images behind loop devices.

Owns: thin, stable names over the host layer, which is private. All of them may be called again after a crash.
Start reading at: `building`, `loop_device`, `grow_filesystem`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moorage.host import extents, filesystems, loop
from moorage.host.safe_remove import remove_tree
from moorage.sdk.errors import NotFound


@contextmanager
def building(path: Path) -> Iterator[Path]:
    """Build a file under another name, and give it its own once it is complete and on disk."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield temporary
        os.fsync(descriptor)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def copy_file(source: Path, target: Path) -> bool:
    """Copy a file over another one. Returns True if they share their blocks (reflink), False after a full copy."""
    with open(source, "rb") as old, open(target, "r+b") as new:
        if extents.clone_file(old.fileno(), new.fileno()):
            return True
        extents.copy_sparse(old.fileno(), new.fileno())
        return False


def remove_directory(path: Path) -> None:
    """Remove a directory with all that is in it, never through a link or a mount. If it is gone, that is fine."""
    remove_tree(path)


def loop_device(image: Path, *, read_only: bool = False) -> Path:
    """Return the loop device of an image; attach one if there is none. Raises NotFound if there is no image.

    A read-only device is another one than that for writing.
    """
    if not image.exists():
        raise NotFound(f"there is no image {image.name}")
    found = [device for device in loop.find(image) if device.read_only == read_only]
    return Path((found[0] if found else loop.attach(image, read_only=read_only)).path)


def release_loop_devices(image: Path) -> None:
    """Detach every loop device of an image."""
    for device in loop.find(image):
        loop.detach(device)


def grow_filesystem(device: Path, mounted_at: Path) -> None:
    """Grow the filesystem on a device to the size of the device, while it is mounted."""
    found = filesystems.content_of(device)
    if found is not None:
        filesystems.grow_or_postpone(device, found.fstype, mounted_at)


def grow_loop_devices(image: Path) -> None:
    """Let the loop devices of an image have its size."""
    loop.grow_all(image)
