"""Bytes written and read through a path that the driver published, and what the kernel says of that path.

Owns: the access to data in both modes, file in a filesystem or raw device. All of it may hang; call it in a thread.
Start reading at: `write`, `digest`, `size_of`.
"""

import hashlib
import os
import stat
from pathlib import Path

from moorage.host import libc, loop, mountinfo

DATA_NAME = "check-data"
_CHUNK = 1 << 20


def _opened(path: str, is_block: bool, flags: int) -> int:
    """Open the published device, or the file in the published filesystem. No link of the driver is followed."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    if is_block:
        return os.open(path, flags)
    directory = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        extra = os.O_CREAT if flags & (os.O_WRONLY | os.O_RDWR) else 0
        return os.open(DATA_NAME, flags | extra, 0o600, dir_fd=directory)
    finally:
        os.close(directory)


def write(path: str, is_block: bool, content: bytes, offset: int = 0) -> None:
    """Write bytes and wait until they are stored."""
    descriptor = _opened(path, is_block, os.O_WRONLY)
    try:
        view, at = memoryview(content), offset
        while view:
            written = os.pwrite(descriptor, view, at)
            view, at = view[written:], at + written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: str, is_block: bool, size: int, offset: int = 0) -> bytes:
    """Read bytes as they are stored, not as the page cache of an earlier mount has them."""
    descriptor = _opened(path, is_block, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        found = bytearray()
        while len(found) < size and (part := os.pread(descriptor, size - len(found), offset + len(found))):
            found += part
        return bytes(found)
    finally:
        os.close(descriptor)


def digest(path: str, is_block: bool, size: int) -> str:
    """Return the checksum of the first bytes."""
    total, at = hashlib.sha256(), 0
    while at < size and (part := read(path, is_block, min(_CHUNK, size - at), at)):
        total.update(part)
        at += len(part)
    return total.hexdigest()


def settle(path: str) -> None:
    """Write everything of a filesystem to its device, so that its figures are current."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        libc.syncfs(descriptor)
    finally:
        os.close(descriptor)


def size_of(path: str) -> int:
    """Return the size of a device, or of the filesystem at a directory."""
    if stat.S_ISBLK(os.stat(path).st_mode):
        with open(path, "rb") as device:
            return device.seek(0, os.SEEK_END)
    figures = os.statvfs(path)
    return figures.f_blocks * figures.f_frsize


def kind_of(path: str) -> str:
    """Return what is at a path, in words."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return "nothing"
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISBLK, "a block device"), (stat.S_ISREG, "a plain file"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a special file or link")


def mount_at(path: str) -> mountinfo.Mount | None:
    """Return the mount at a path, as the kernel has it."""
    return mountinfo.mount_at(os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path))


def mounts_at(path: str) -> list[mountinfo.Mount]:
    return mountinfo.mounts_at(os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path))


def loop_device_of(path: str) -> tuple[int, str] | None:
    """Return number and backing file of the loop device behind a published path, None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    device = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    if os.major(device) != 7 or not Path(f"/sys/block/loop{os.minor(device)}/loop").exists():
        return None
    return os.minor(device), loop.at(os.minor(device)).backing_file


def is_same_loop(number: int, backing: str) -> bool:
    """Return whether a loop device still has this backing file."""
    file = Path(f"/sys/block/loop{number}/loop/backing_file")
    try:
        return file.read_text().rstrip("\n").removesuffix(" (deleted)") == backing.removesuffix(" (deleted)")
    except OSError:
        return False
