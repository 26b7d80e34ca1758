"""Loop devices: files as block devices.

Owns: attaching with one atomic ioctl and direct I/O, finding a device by its file, growing,
detaching, and the device nodes in /dev. State is read from the kernel (sysfs and ioctls) only.
May not touch: mounts, filesystems, pools.
Start reading at: `attach`, `find`, `held`, `detach`.

The kernel gives the number of a device that went to the next file that asks for one. So a number that was read a moment
ago may be another file's by now: who acts on a `LoopDevice` acts on it only while it has the file it was seen with.
"""

import contextlib
import errno
import fcntl
import os
import random
import stat
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moorage.host.block_devices import opened, size_behind
from moorage.host.errors import HostError, LoopGone, host_error
from moorage.host.loop_info import INFO, SYS, backing_of, file_of, is_open_elsewhere, plain_path, read_status
from moorage.host.probe import probe_known

_CONTROL = "/dev/loop-control"
_MAJOR = 7
_SET_FD_DIRECT, _CLR_FD, _SET_CAPACITY, _CONFIGURE = 0x4C08, 0x4C01, 0x4C07, 0x4C0A
_CTL_REMOVE, _CTL_GET_FREE = 0x4C81, 0x4C82
_READ_ONLY, _AUTOCLEAR, _DIRECT_IO = 1, 4, 16
_CONFIG = struct.Struct(f"=II{INFO.size}s64x")
_ATTEMPTS = 256
_ATTACHING = threading.Lock()


@dataclass(frozen=True, slots=True)
class LoopDevice:
    """One attached loop device as the kernel describes it."""

    number: int
    file: tuple[int, int]  # device and inode
    backing_file: str
    is_deleted: bool
    direct_io: bool
    read_only: bool
    autoclear: bool

    @property
    def path(self) -> Path:
        return Path(f"/dev/loop{self.number}")

    @property
    def device(self) -> tuple[int, int]:
        return (_MAJOR, self.number)


def attach(backing: str | Path, *, read_only: bool = False, direct_io: bool = True, block_size: int = 0) -> LoopDevice:
    """Attach a file to a free loop device, completely or not at all.

    Direct I/O is asked for and verified: look at `direct_io` of the result, because the kernel
    silently falls back where the file's filesystem cannot do it.

    Sectors have 4096 bytes unless the file holds a filesystem with smaller units. Left to itself the
    kernel chooses by what the file needs for direct I/O, which changes when its blocks become
    shared: a filesystem made before its first snapshot could not be mounted after it.
    """
    flags = (_READ_ONLY if read_only else 0) | (_DIRECT_IO if direct_io else 0)
    name = os.fsencode(os.path.abspath(backing))[-63:]
    block_size = block_size or _sector_for(backing)
    with opened(backing, os.O_RDONLY if read_only else os.O_RDWR) as file_fd:
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(random.uniform(0, 0.002 * min(attempt, 10)))
            info = INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, name, b"", b"", 0, 0)
            # Threads of one process would all be told the same free number; other processes may be too.
            with _ATTACHING, opened(ensure_node(number := _free_number()), os.O_RDWR) as device_fd:
                try:
                    fcntl.ioctl(device_fd, _CONFIGURE, _CONFIG.pack(file_fd, block_size, info))
                except OSError as failed:
                    if failed.errno == errno.EBUSY:  # another process took this number first
                        continue
                    raise host_error(f"attach loop{number} to", backing, failed) from failed
                return _described(number, device_fd)
    raise HostError(f"attach {backing}: no free loop device after {_ATTEMPTS} attempts", errno.EBUSY)


def files() -> list[tuple[int, bytes]]:
    """The number of every attached device, and what the kernel tells of its file's path."""
    with opened(SYS, os.O_RDONLY | os.O_DIRECTORY) as directory:
        told = ((number, backing_of(number, directory)) for number in numbers())
        return [(number, text) for number, text in told if text is not None]


def find(backing: str | Path, among: Iterable[tuple[int, bytes]] | None = None) -> list[LoopDevice]:
    """The loop devices on this file, by device and inode, so renames and namespaces do not matter."""
    try:
        wanted = os.stat(backing)
    except FileNotFoundError:
        return []
    if not is_open_elsewhere(backing):
        return []
    file, real = (wanted.st_dev, wanted.st_ino), os.fsencode(os.path.realpath(backing))
    found = []
    for number, text in files() if among is None else among:
        # Names narrow the search, as to ask a device is to open it; device and inode decide.
        if _may_be(text.removesuffix(b" (deleted)"), real, file) and _inode_of(number) == file:
            with contextlib.suppress(HostError):
                found.append(at(number))
    return found


def _may_be(text: bytes, real: bytes, file: tuple[int, int]) -> bool:
    """Whether a device's path can lead to the file, perhaps through another mount or in another namespace."""
    theirs, ours = text.rsplit(b"/", 2), real.rsplit(b"/", 2)
    if theirs[-1] != ours[-1]:
        return False
    if theirs[-2] == ours[-2]:
        return True
    try:
        seen = os.stat(text)
    except OSError:
        return True
    return (seen.st_dev, seen.st_ino) == file


def told_at(path: str, among: Iterable[tuple[int, bytes]]) -> list[LoopDevice]:
    """The devices whose file is or was at this path, as the kernel tells it: deleted, or replaced by another."""
    found = []
    for number, text in among:
        if plain_path(text) == path:
            with contextlib.suppress(HostError):  # detached in the meantime
                found.append(at(number))
    return found


def attached(below: str | Path | None = None) -> list[LoopDevice]:
    """Every attached loop device, or those whose file lies below a directory (deleted files too)."""
    found = []
    for number, text in files():
        with contextlib.suppress(HostError):  # detached in the meantime
            if below is None:
                found.append(at(number))
            elif (path := _path_below(number, text, below)) is not None:
                found.append(replace(at(number), backing_file=path))
    return found


def is_below(number: int, directory: str | Path) -> bool:
    """Whether the file of this loop device lies below a directory."""
    text = backing_of(number)
    return text is not None and _path_below(number, text, directory) is not None


def number_behind(found: os.stat_result) -> int | None:
    """The number of the loop device that a node stands for, or that has the filesystem of a file."""
    device = found.st_rdev if stat.S_ISBLK(found.st_mode) else found.st_dev
    return os.minor(device) if os.major(device) == _MAJOR else None


def at(device: int | str | Path) -> LoopDevice:
    """The loop device with this number or path; an error if nothing is attached to it."""
    number = device if isinstance(device, int) else number_of(device)
    with opened(ensure_node(number), os.O_RDONLY) as fd:
        return _described(number, fd)


def number_of(device: str | Path) -> int:
    """The number of the loop device that a node stands for (also a bind-mounted copy of the node)."""
    try:
        found = os.stat(device)
    except OSError as failed:
        raise host_error("stat", device, failed) from failed
    number = number_behind(found) if stat.S_ISBLK(found.st_mode) else None
    if number is None:
        raise HostError(f"{device} is not a loop device", errno.ENOTBLK)
    return number


@contextlib.contextmanager
def held(device: LoopDevice) -> Iterator[int]:
    """Keep a device open, and so attached to its file even if it is released. Raises LoopGone if it is detached."""
    gone = LoopGone(device.path, device.backing_file)
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(opened(ensure_node(device.number), os.O_RDONLY))
        except HostError as failed:
            if failed.errno == errno.ENXIO:
                raise gone from failed
            raise
        status = read_status(device.number, fd)
        if status is None or file_of(status) != device.file:
            raise gone
        yield fd


def is_still(device: LoopDevice) -> bool:
    """Whether the device has the file it was seen with."""
    return _inode_of(device.number) == device.file


def detach(device: LoopDevice) -> bool:
    """Release a loop device. Returns False if it was already detached from its file.

    A device that is still open elsewhere goes when the last opener closes it.
    """
    try:
        with held(device) as fd:
            fcntl.ioctl(fd, _CLR_FD)
    except LoopGone:
        return False
    except OSError as failed:
        raise host_error("detach", device.path, failed) from failed
    return True


def wait_detached(device: LoopDevice, timeout_s: float = 10.0) -> bool:
    """Whether the device was detached in time; the last processes that have it open may close it a little later."""
    deadline = time.monotonic() + timeout_s
    while backing_of(device.number) is not None and is_still(device):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def numbers() -> set[int]:
    """Every loop device that the kernel has, attached or not."""
    with os.scandir(SYS) as entries:
        return {int(entry.name[4:]) for entry in entries if entry.name.startswith("loop")}


def remove(number: int) -> bool:
    """Take an unattached device out of the kernel; False when it is in use or gone.

    The kernel keeps each device that was ever needed, and looking for one costs by how many there are.
    """
    with _control() as fd:
        try:
            fcntl.ioctl(fd, _CTL_REMOVE, number)
        except OSError as failed:
            if failed.errno in (errno.EBUSY, errno.ENODEV):
                return False
            raise host_error("remove", f"/dev/loop{number}", failed) from failed
    return True


def grow(device: LoopDevice, size_bytes: int) -> None:
    """Have the device show its whole file, which has this size by now."""
    with held(device) as fd:
        if size_behind(fd) >= size_bytes:
            return
        try:
            fcntl.ioctl(fd, _SET_CAPACITY)
        except OSError as failed:
            raise host_error("grow", device.path, failed) from failed


def grow_all(backing: str | Path) -> None:
    """Have every device on this file show all of it."""
    for device in find(backing):
        with contextlib.suppress(LoopGone):
            grow(device, os.stat(backing).st_size)


def set_direct_io(device: int | str | Path, wanted: bool) -> bool:
    """Switch direct I/O; returns what the device does now, which may not be what was wanted."""
    number = device if isinstance(device, int) else number_of(device)
    with opened(ensure_node(number), os.O_RDONLY) as fd:
        try:
            os.fsync(fd)
            fcntl.ioctl(fd, _SET_FD_DIRECT, 1 if wanted else 0)
        except OSError as failed:
            if failed.errno != errno.EINVAL:
                raise host_error("set direct I/O of", f"/dev/loop{number}", failed) from failed
        return _described(number, fd).direct_io


def ensure_node(number: int) -> Path:
    """The device node in /dev, made when a container's /dev does not have it."""
    path = f"/dev/loop{number}"
    try:
        os.stat(path)
    except FileNotFoundError:
        try:
            os.mknod(path, 0o660 | stat.S_IFBLK, os.makedev(_MAJOR, number))
        except FileExistsError:
            pass  # another process was faster
        except OSError as failed:  # a process without privileges has no devices to look at
            raise host_error("make", path, failed) from failed
    return Path(path)


def _sector_for(backing: str | Path) -> int:
    content = probe_known(backing)
    return 4096 if content is None or content.unit_bytes >= 4096 else 512


def _free_number() -> int:
    with _control() as fd:
        try:
            return fcntl.ioctl(fd, _CTL_GET_FREE)
        except OSError as failed:
            raise host_error("ask for a free loop device from", _CONTROL, failed) from failed


@contextlib.contextmanager
def _control() -> Iterator[int]:
    if not os.path.exists(_CONTROL):
        with contextlib.suppress(FileExistsError):
            os.mknod(_CONTROL, 0o660 | stat.S_IFCHR, os.makedev(10, 237))
    with opened(_CONTROL, os.O_RDWR) as fd:
        yield fd


def _described(number: int, fd: int) -> LoopDevice:
    status = read_status(number, fd)
    if status is None:
        raise HostError(f"/dev/loop{number} is not attached to a file", errno.ENXIO)
    flags = status[8]
    text = backing_of(number) or b""
    return LoopDevice(
        number=number,
        file=file_of(status),
        backing_file=plain_path(text),
        is_deleted=text.endswith(b" (deleted)"),
        direct_io=bool(flags & _DIRECT_IO),
        read_only=bool(flags & _READ_ONLY),
        autoclear=bool(flags & _AUTOCLEAR),
    )


def _inode_of(number: int) -> tuple[int, int] | None:
    try:
        with opened(ensure_node(number), os.O_RDONLY) as fd:
            status = read_status(number, fd)
    except HostError:
        return None
    return None if status is None else file_of(status)


def _path_below(number: int, text: bytes, directory: str | Path) -> str | None:
    """The device's file as a path below a directory; None when it is elsewhere.

    The kernel tells the path in the mount through which the file was opened. When that was a container's, and the
    container is gone, the path begins at the root of that mount: some end of it leads to the file from here.
    """
    base, plain = os.path.realpath(directory), plain_path(text)
    if plain.startswith(f"{base.rstrip('/')}/"):
        return plain
    parts = plain.strip("/").split("/")
    for at_part in range(len(parts)):
        path = os.path.join(base, *parts[at_part:])
        try:
            seen = os.stat(path)
        except OSError:
            continue
        if (seen.st_dev, seen.st_ino) == _inode_of(number):
            return path
    return None
