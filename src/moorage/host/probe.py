"""What a device or image holds, read from its first blocks.

Owns: filesystem signatures and the sizes, labels and error marks that superblocks carry.
May not touch: the device; everything here only reads.
Start reading at: `probe`.

A tenant may have written these blocks. Each number is checked before it is used, and a superblock with impossible
numbers counts as a damaged filesystem: never as an empty device, and never as a size.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moorage.host.commands import run
from moorage.host.errors import host_error

_ERROR_FS = 0x0002  # ext4: the kernel noticed errors
_XFS_NEEDSREPAIR = 1 << 4
_START_BYTES = 4096
_BTRFS_AT = 0x10000
_UNITS = frozenset(512 << power for power in range(8))  # up to 64 KiB: what the kernel mounts
_LARGEST_BYTES = 1 << 63


@dataclass(frozen=True, slots=True)
class Content:
    """A filesystem on a device: its type, its own size, and whether it marked itself damaged.

    `unit_bytes` is the smallest piece that it reads or writes; a device with larger sectors cannot
    carry it.
    """

    fstype: str
    size_bytes: int = 0
    has_errors: bool = False
    uuid: str = ""
    unit_bytes: int = 512


def probe(device: str | Path) -> Content | None:
    """The filesystem on a device, or None where no signature of one is found.

    ext4, xfs and btrfs are read here, without a fork; anything else is looked for with
    `blkid -p`, so "None" is as good a proof of emptiness as the system can give.
    """
    known = probe_known(device)
    return known if known is not None else _blkid(device)


def probe_known(device: str | Path) -> Content | None:
    """Like `probe`, for the filesystems that Moorage makes, in three reads."""
    try:
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as failed:
        raise host_error("open", device, failed) from failed
    try:
        return content_in(_block(fd, 0), lambda: _block(fd, _BTRFS_AT))
    except OSError as failed:
        raise host_error("read", device, failed) from failed
    finally:
        os.close(fd)


def content_in(start: bytes, btrfs: Callable[[], bytes]) -> Content | None:
    """The filesystem whose superblock is in the first 4096 bytes, or in those at 64 KiB."""
    return _ext4(start) or _xfs(start) or _btrfs(btrfs())


def _block(fd: int, offset: int) -> bytes:
    return os.pread(fd, _START_BYTES, offset).ljust(_START_BYTES, b"\0")


def _ext4(start: bytes) -> Content | None:
    block = start[1024:2048]
    if block[56:58] != b"\x53\xef":
        return None
    low, log_size = struct.unpack_from("<I", block, 4)[0], struct.unpack_from("<I", block, 24)[0]
    state = struct.unpack_from("<H", block, 58)[0]
    compat, incompat = struct.unpack_from("<II", block, 92)
    high = struct.unpack_from("<I", block, 336)[0] if incompat & 0x80 else 0
    has_extents, has_journal = bool(incompat & 0x40), bool(compat & 0x4)
    fstype = "ext4" if has_extents else "ext3" if has_journal else "ext2"
    unit = 1024 << min(log_size, 16)
    return _content(fstype, (high << 32) | low, unit, unit, block[104:120], bool(state & _ERROR_FS))


def _xfs(start: bytes) -> Content | None:
    if start[:4] != b"XFSB":
        return None
    block_size, blocks = struct.unpack_from(">IQ", start, 4)
    version = struct.unpack_from(">H", start, 100)[0] & 0xF
    incompat = struct.unpack_from(">I", start, 216)[0] if version == 5 else 0
    sector = struct.unpack_from(">H", start, 102)[0]
    return _content("xfs", blocks, block_size, sector, start[32:48], bool(incompat & _XFS_NEEDSREPAIR))


def _btrfs(block: bytes) -> Content | None:
    if block[0x40:0x48] != b"_BHRfS_M":
        return None
    size = struct.unpack_from("<Q", block, 0x70)[0]
    sector = struct.unpack_from("<I", block, 0x90)[0]
    return _content("btrfs", size // 512, 512, sector, block[0x20:0x30], False)


def _content(fstype: str, blocks: int, block_bytes: int, unit_bytes: int, uuid: bytes, has_errors: bool) -> Content:
    if block_bytes not in _UNITS or unit_bytes not in _UNITS or not 0 < blocks <= _LARGEST_BYTES // block_bytes:
        return Content(fstype, has_errors=True, uuid=_uuid(uuid))
    return Content(fstype, blocks * block_bytes, has_errors, _uuid(uuid), unit_bytes)


def _blkid(device: str | Path) -> Content | None:
    done = run(["blkid", "-p", "-o", "export", "-s", "TYPE", "-s", "PTTYPE", device], accept=(0, 2, 8))
    if done.returncode == 8:  # several signatures at once: something is there
        return Content("ambiguous")
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        if key in ("TYPE", "PTTYPE"):
            return Content(value)
    return None


def _uuid(raw: bytes) -> str:
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
