"""Mounts on this machine: the calls that change them.

Owns: mount(2) and umount2(2), mount options as flags, corrupted mount points, stat of a filesystem.
May not touch: loop devices, pools.
Start reading at: `mount`, `bind`, `unmount`.
"""

import errno
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moorage.host import libc
from moorage.host.errors import HostError, host_error
from moorage.host.mountinfo import is_mounted

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_SYNCHRONOUS, MS_REMOUNT = 1, 2, 4, 8, 16, 32
MS_MANDLOCK, MS_DIRSYNC, MS_NOSYMFOLLOW, MS_NOATIME, MS_NODIRATIME = 64, 128, 256, 1024, 2048
MS_BIND, MS_REC, MS_RELATIME, MS_STRICTATIME, MS_LAZYTIME = 4096, 16384, 1 << 21, 1 << 24, 1 << 25
MNT_FORCE, MNT_DETACH, UMOUNT_NOFOLLOW = 1, 2, 8

_SET = {
    "ro": MS_RDONLY,
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "sync": MS_SYNCHRONOUS,
    "dirsync": MS_DIRSYNC,
    "noatime": MS_NOATIME,
    "nodiratime": MS_NODIRATIME,
    "relatime": MS_RELATIME,
    "strictatime": MS_STRICTATIME,
    "lazytime": MS_LAZYTIME,
    "nosymfollow": MS_NOSYMFOLLOW,
    "mand": MS_MANDLOCK,
}
_CLEAR = {
    "rw": MS_RDONLY,
    "suid": MS_NOSUID,
    "dev": MS_NODEV,
    "exec": MS_NOEXEC,
    "async": MS_SYNCHRONOUS,
    "atime": MS_NOATIME,
    "diratime": MS_NODIRATIME,
    "norelatime": MS_RELATIME,
    "nolazytime": MS_LAZYTIME,
    "nomand": MS_MANDLOCK,
}
_PER_MOUNT = (
    MS_RDONLY
    | MS_NOSUID
    | MS_NODEV
    | MS_NOEXEC
    | MS_NOATIME
    | MS_NODIRATIME
    | MS_RELATIME
    | MS_STRICTATIME
    | MS_NOSYMFOLLOW
)
# The same as mount_setattr(2) has them. What a bind does not name is taken away, but for the kind of access times.
_ATTRIBUTES = {MS_RDONLY: 1, MS_NOSUID: 2, MS_NODEV: 4, MS_NOEXEC: 8, MS_NOSYMFOLLOW: 0x200000}
_TIMES = {MS_RELATIME: 0, MS_NOATIME: 0x10, MS_STRICTATIME: 0x20, MS_NODIRATIME: 0x80}
_ALL_TIMES = 0xF0
# A process between its fork and its exec holds every file that is open here; such a moment passes.
_BUSY_PAUSES_S = (0.01, 0.03, 0.1, 0.3)
# What the kubelet takes for a dead mount, and the two that XFS answers with after an error.
_CORRUPT = {
    errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.EACCES, errno.EHOSTDOWN, errno.EWOULDBLOCK, errno.ENODEV,
    errno.EUCLEAN, errno.ESHUTDOWN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Space:
    """A filesystem's size and use, in bytes and inodes; `available` is what an ordinary user gets."""

    total_bytes: int
    free_bytes: int
    available_bytes: int
    total_inodes: int
    free_inodes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes

    @property
    def used_inodes(self) -> int:
        return self.total_inodes - self.free_inodes


def flags_from(options: Iterable[str]) -> tuple[int, str]:
    """Mount options as mount(2) wants them: the flag bits, and the filesystem's own as text."""
    flags, rest = 0, []
    for option in (word.strip() for text in options for word in text.split(",")):
        if option in _SET:
            flags |= _SET[option]
        elif option in _CLEAR:
            flags &= ~_CLEAR[option]
        elif option and option != "defaults":
            rest.append(option)
    return flags, ",".join(rest)


def mount(source: str | Path, target: str | Path, fstype: str, options: Iterable[str] = ()) -> None:
    """Mount a filesystem; the options are the words that `mount -o` takes."""
    flags, data = flags_from(options)
    try:
        libc.mount(os.fspath(source), os.fspath(target), fstype, flags, data)
    except OSError as failed:
        raise host_error(f"mount {fstype} {source} at", target, failed) from failed


def bind(
    source: str | Path, target: str | Path, options: Iterable[str] = (), recursive: bool = False, shown: str = ""
) -> None:
    """Show `source` at `target`, with options such as `ro`. A crash leaves the complete mount or none.
    `shown` is the path of the new mount where `target` is only a handle on what lies below it."""
    flags, data = flags_from(options)
    if data:
        raise HostError(f"bind {target}: a bind mount cannot take the options {data!r}", errno.EINVAL)
    flags &= _PER_MOUNT
    try:
        if flags:
            _bind_with(os.fspath(source), os.fspath(target), flags, recursive)
        else:
            libc.mount(os.fspath(source), os.fspath(target), "", MS_BIND | (MS_REC if recursive else 0), "")
    except OSError as failed:
        if failed.errno != errno.ENOSYS:
            raise host_error(f"bind {source} at", target, failed) from failed
        _bind_in_two_steps(os.fspath(source), os.fspath(target), flags, recursive, shown or os.fspath(target))


def _bind_with(source: str, target: str, flags: int, recursive: bool) -> None:
    """The mount has its options before it can be seen."""
    wanted = sum(bit for flag, bit in _ATTRIBUTES.items() if flags & flag)
    clear = sum(_ATTRIBUTES.values()) & ~wanted
    if any(flags & flag for flag in _TIMES):
        wanted |= sum(bit for flag, bit in _TIMES.items() if flags & flag)
        clear |= _ALL_TIMES
    tree = libc.open_tree(source, recursive=recursive)
    try:
        libc.mount_setattr("", wanted, clear=clear, at=tree)
        libc.move_mount(tree, target, follow_links=True)  # as mount(2) does
    finally:
        os.close(tree)


def _bind_in_two_steps(source: str, target: str, flags: int, recursive: bool, shown: str) -> None:
    """For kernels before 5.12, which can set the options of what is mounted only."""
    try:
        libc.mount(source, target, "", MS_BIND | (MS_REC if recursive else 0), "")
    except OSError as failed:
        raise host_error(f"bind {source} at", target, failed) from failed
    try:
        libc.mount("none", shown, "", MS_BIND | MS_REMOUNT | flags, "")
    except OSError as failed:
        libc.umount2(shown, MNT_DETACH)
        raise host_error("set options of bind mount", shown, failed) from failed


def remount(target: str | Path, fstype: str, options: Iterable[str]) -> None:
    """Change the options of a mounted filesystem."""
    flags, data = flags_from(options)
    try:
        libc.mount("none", os.fspath(target), fstype, MS_REMOUNT | flags, data)
    except OSError as failed:
        raise host_error("remount", target, failed) from failed


def unmount(target: str | Path, *, lazy: bool = False, force: bool = False) -> bool:
    """Take away the top mount at `target`; False says that nothing was mounted there."""
    flags = UMOUNT_NOFOLLOW | (MNT_DETACH if lazy else 0) | (MNT_FORCE if force else 0)
    for pause_s in (*_BUSY_PAUSES_S, None):
        try:
            libc.umount2(os.fspath(target), flags)
            return True
        except OSError as failed:
            if failed.errno in (errno.EINVAL, errno.ENOENT) and not is_mounted(target):
                return False
            if failed.errno != errno.EBUSY or pause_s is None:
                raise host_error("unmount", target, failed) from failed
        time.sleep(pause_s)
    return True


def unmount_all(target: str | Path) -> int:
    """Take away every mount stacked at `target`; corrupted ones lazily. Returns how many."""
    count = 0
    while is_mounted(target):
        unmount(target, lazy=is_corrupted(target))
        count += 1
    return count


def is_corrupted(path: str | Path) -> bool:
    """Whether a path answers with the errors of a dead mount (its server or device is gone)."""
    telling = _CORRUPT
    try:
        status = os.stat(path)
        telling = _CORRUPT - {errno.EACCES}  # one that lives may keep root from listing a directory, as NFS does
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as entries:
                next(entries, None)
    except OSError as failed:
        return failed.errno in telling
    return False


def space_of(path: str | Path) -> Space:
    """statfs in bytes."""
    try:
        found = os.statvfs(path)
    except OSError as failed:
        raise host_error("statfs", path, failed) from failed
    unit = found.f_frsize
    return Space(
        total_bytes=found.f_blocks * unit,
        free_bytes=found.f_bfree * unit,
        available_bytes=found.f_bavail * unit,
        total_inodes=found.f_files,
        free_inodes=found.f_ffree,
    )
