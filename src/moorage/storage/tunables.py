"""What can be changed on a living volume, and what each value may be.

Owns: the keys of ModifyVolume and the check of their values. All of it is pure.
May not touch: the devices; the node applies what is stored here.
Start reading at: `validated`, `Settings.of`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moorage.storage.errors import InvalidValue

DIRECT_IO = "directIO"
READ_AHEAD = "readAheadKiB"
TRASH_RETENTION = "trashRetention"
IO_LIMITS = ("readIOPS", "writeIOPS", "readBytesPerSecond", "writeBytesPerSecond")
KEYS = (DIRECT_IO, READ_AHEAD, TRASH_RETENTION, *IO_LIMITS)

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?\Z")
_MAX_READ_AHEAD_KIB = 1024 * 1024
_MAX_LIMIT = 1 << 53


@dataclass(frozen=True, slots=True)
class Tunables:
    """The mutable parameters as values; None means the plugin's default, 0 means no limit."""

    direct_io: bool | None
    read_ahead_kib: int | None
    trash_retention_s: float | None
    read_iops: int
    write_iops: int
    read_bytes_per_second: int
    write_bytes_per_second: int

    @staticmethod
    def of(mutable: Mapping[str, str]) -> "Tunables":
        checked = validated(mutable)
        direct, ahead, kept = checked.get(DIRECT_IO), checked.get(READ_AHEAD), checked.get(TRASH_RETENTION)
        limits = [int(checked.get(key, "0")) for key in IO_LIMITS]
        return Tunables(
            direct_io=None if direct is None else direct == "true",
            read_ahead_kib=None if ahead is None else int(ahead),
            trash_retention_s=None if kept is None else seconds_from(kept),
            read_iops=limits[0],
            write_iops=limits[1],
            read_bytes_per_second=limits[2],
            write_bytes_per_second=limits[3],
        )

    @property
    def has_io_limits(self) -> bool:
        return any((self.read_iops, self.write_iops, self.read_bytes_per_second, self.write_bytes_per_second))


def validated(mutable: Mapping[str, str]) -> dict[str, str]:
    """The same parameters if every one is known and allowed; nothing is taken from a bad set."""
    for key, value in mutable.items():
        if key not in KEYS:
            raise InvalidValue(f"mutable parameter {key[:64]!r}", f"unknown; known are {', '.join(KEYS)}")
        _check(key, value)
    return dict(mutable)


def seconds_from(text: str) -> float:
    """`90s`, `15m`, `24h`, `7d`, `1d12h`, or plain seconds."""
    if text.isascii() and text.isdigit() and len(text) < 16:
        return float(text)
    match = _DURATION.match(text)
    if match is None or not text or len(text) > 32:
        raise InvalidValue(TRASH_RETENTION, f"{text[:64]!r} is not a duration such as 90s, 15m, 24h or 7d")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _check(key: str, value: str) -> None:
    if key == DIRECT_IO:
        if value not in ("true", "false"):
            raise InvalidValue(key, f"{value[:64]!r} is neither true nor false")
    elif key == TRASH_RETENTION:
        seconds_from(value)
    else:
        top = _MAX_READ_AHEAD_KIB if key == READ_AHEAD else _MAX_LIMIT
        if not (value.isascii() and value.isdigit() and len(value) < 20 and int(value) <= top):
            raise InvalidValue(key, f"{value[:64]!r} is not a whole number from 0 to {top}")
