"""Filesystems on devices: make, check, grow.

Owns: the command lines of mkfs, fsck and the growing tools, and the smallest size of each type.
Nothing here destroys data: `format_blank` refuses a device that holds anything, repairs are
limited to what `e2fsck -p` does unattended, and XFS is never repaired.
May not touch: loop devices, pools.
Start reading at: `format_blank`, `check`, `grow`.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moorage.host.commands import run
from moorage.host.errors import (
    CannotGrow,
    CommandFailed,
    FilesystemDamaged,
    NotEmpty,
    UnknownFilesystem,
    host_error,
)
from moorage.host.probe import Content, probe, probe_known

MIB = 1024 * 1024
MINIMUM_BYTES: Mapping[str, int] = {"ext4": 2 * MIB, "xfs": 300 * MIB, "btrfs": 128 * MIB, "": MIB}
FILESYSTEMS = ("ext4", "xfs", "btrfs")
_MKFS_TIMEOUT_S = 600.0
_CHECK_TIMEOUT_S = 3600.0
_BTRFS_IOC_RESIZE = 0x50009403
_VOL_ARGS = struct.Struct("=q4088s")


@dataclass(frozen=True, slots=True)
class FsckResult:
    """What a check before a mount found: `repaired` says that preen fixed something small."""

    repaired: bool
    said: str = ""


def format_blank(device: str | Path, fstype: str, *, label: str = "") -> None:
    """Make a filesystem on a device that is proven empty; anything found there is an error."""
    found = probe(device)
    if found is not None:
        raise NotEmpty(f"{device} already holds {found.fstype}; it is never formatted over")
    mkfs(device, fstype, label=label)


def mkfs(device: str | Path, fstype: str, *, label: str = "") -> None:
    """Make a filesystem, whatever was there. Callers prove first that nothing was.

    No tool discards: a preallocated image must stay preallocated, and a new sparse one has
    nothing to give back. All work in units of 4096 bytes: once an image shares blocks with a copy,
    XFS gives it direct I/O in such units only.
    """
    if fstype == "ext4":
        lazy = "nodiscard,lazy_itable_init=1,lazy_journal_init=1"
        options = ["-q", "-F", "-b", "4096", "-m", "0", "-E", lazy]
    elif fstype == "xfs":
        options = ["-q", "-f", "-K", "-s", "size=4096"]
        if _device_size(device) < MINIMUM_BYTES["xfs"]:
            options.append("--unsupported")  # mkfs refuses small ones for their speed; they work and grow
    elif fstype == "btrfs":
        options = ["-q", "-f", "-K"]
    else:
        raise UnknownFilesystem(f"cannot make a {fstype[:64]!r}; known are {', '.join(FILESYSTEMS)}")
    named = ["-L", label] if label else []
    run([f"mkfs.{fstype}", *options, *named, device], timeout_s=_MKFS_TIMEOUT_S)


def check(device: str | Path, fstype: str) -> FsckResult:
    """Make an ext4 fit to mount, as an unattended boot would; XFS and btrfs look after themselves.

    Damage that preen does not fix raises FilesystemDamaged; the data is left as it is.
    """
    if fstype not in ("ext4", "ext3", "ext2"):
        content = probe_known(device)
        if content is not None and content.has_errors:
            raise FilesystemDamaged(
                f"the {fstype} on {device} is marked as needing repair; "
                f"run {'xfs_repair' if fstype == 'xfs' else 'btrfs check'} on it by hand"
            )
        return FsckResult(False)
    if _is_clean_ext4(device):
        return FsckResult(False)
    done = run(["e2fsck", "-p", device], timeout_s=_CHECK_TIMEOUT_S, accept=range(256))
    if done.returncode & ~3:
        said = (done.stdout + done.stderr).strip()
        raise FilesystemDamaged(
            f"the {fstype} on {device} is damaged and was not repaired: {said or done.returncode}; "
            "run e2fsck on it by hand"
        )
    return FsckResult(done.returncode != 0, done.stdout.strip())


def grow(device: str | Path, fstype: str, mountpoint: str | Path | None) -> bool:
    """Grow a filesystem to its device's size; False says that it had that size already.

    ext4 grows mounted or not; xfs and btrfs must be mounted read-write.
    """
    if is_full_size(device, fstype):
        return False
    if fstype in ("ext4", "ext3", "ext2"):
        _grow_ext4(device)
    elif fstype == "xfs":
        run(["xfs_growfs", "-d", _mounted(device, fstype, mountpoint)])
    elif fstype == "btrfs":
        _grow_btrfs(_mounted(device, fstype, mountpoint))
    else:
        raise CannotGrow(f"the filesystem {fstype!r} on {device} cannot be grown")
    return True


def is_full_size(device: str | Path, fstype: str) -> bool:
    """Whether a filesystem covers its device, up to less than the tool's own rounding."""
    content = probe_known(device)
    if content is None:
        return False
    # An XFS cannot use a last allocation group of under 16 MiB; growing it again changes nothing.
    slack = {"xfs": 16 * MIB, "btrfs": MIB}.get(fstype, 128 * 1024)
    return _device_size(device) - content.size_bytes < slack


def mount_options(fstype: str) -> tuple[str, ...]:
    """Options that every mount of an image needs: a restored XFS has its source's identity."""
    return ("nouuid",) if fstype == "xfs" else ()


def content_of(device: str | Path) -> Content | None:
    """What is on the device; see `probe`."""
    return probe(device)


def ext4_errors(device: str | Path) -> int:
    """How many errors the kernel has seen on a mounted ext4; 0 where it has no count."""
    name = os.path.basename(os.path.realpath(device))
    with contextlib.suppress(OSError, ValueError), open(f"/sys/fs/ext4/{name}/errors_count") as count:
        return int(count.read())
    return 0


def _is_clean_ext4(device: str | Path) -> bool:
    """Unmounted cleanly, without errors and without a journal to replay: nothing to check."""
    with open(device, "rb") as file:
        file.seek(1024)
        block = file.read(1024).ljust(1024, b"\0")
    state = struct.unpack_from("<H", block, 58)[0]
    needs_recovery = struct.unpack_from("<I", block, 96)[0] & 0x4
    return bool(state & 1) and not state & 2 and not needs_recovery


def grow_or_postpone(device: str | Path, fstype: str, mountpoint: str | Path | None) -> bool:
    """Grow as `grow` does. Raises CannotGrow if this process may not grow a mounted filesystem."""
    try:
        return grow(device, fstype, mountpoint)
    except CommandFailed as failed:
        if mountpoint is None or "Permission denied" not in failed.stderr:
            raise
        # Growing a mounted ext4 is the one thing here that needs more than CAP_SYS_ADMIN.
        raise CannotGrow(
            f"the {fstype} on {device} cannot be grown while mounted: this process lacks CAP_SYS_RESOURCE; "
            "it is grown when the volume is staged next"
        ) from failed


def _grow_ext4(device: str | Path) -> None:
    try:
        run(["resize2fs", device], timeout_s=_CHECK_TIMEOUT_S)
    except CommandFailed as failed:
        if "e2fsck -f" not in failed.stderr:
            raise
        run(["e2fsck", "-f", "-p", device], timeout_s=_CHECK_TIMEOUT_S, accept=(0, 1, 2))
        run(["resize2fs", device], timeout_s=_CHECK_TIMEOUT_S)


def _grow_btrfs(mountpoint: str | Path) -> None:
    fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _BTRFS_IOC_RESIZE, bytearray(_VOL_ARGS.pack(0, b"max")))  # bytes end at 1 KiB
    except OSError as failed:
        raise host_error("grow the btrfs at", mountpoint, failed) from failed
    finally:
        os.close(fd)


def _mounted(device: str | Path, fstype: str, mountpoint: str | Path | None) -> str | Path:
    if mountpoint is None:
        raise CannotGrow(f"the {fstype} on {device} can only be grown while it is mounted")
    return mountpoint


def _device_size(device: str | Path) -> int:
    with open(device, "rb") as file:
        return file.seek(0, os.SEEK_END)
