"""Sizes: what a request becomes.

Owns: rounding, limits, and the smallest size of each filesystem. All of it is pure.
May not touch: the disk; how much room there is, the ledger knows.
Start reading at: `plan_size`.
"""

from moorage.host.filesystems import FILESYSTEMS, MINIMUM_BYTES
from moorage.storage.errors import InvalidValue, SizeOutOfRange
from moorage.storage.model import MIB, CreateVolume, VolumeKind

DEFAULT_BYTES = 1024 * MIB
MAXIMUM_BYTES = 8 * 1024 * 1024 * 1024 * MIB - MIB


def check_range(required: int, limit: int) -> None:
    """Refuse ranges that no size satisfies."""
    if required < 0:
        raise InvalidValue("capacity_range.required_bytes", f"{required} is negative")
    if limit < 0:
        raise InvalidValue("capacity_range.limit_bytes", f"{limit} is negative")
    if limit and limit < required:
        raise InvalidValue("capacity_range.limit_bytes", f"{limit} is less than required_bytes {required}")


def rounded_up(size: int) -> int:
    return -(-size // MIB) * MIB


def plan_size(request: CreateVolume, source_bytes: int = 0) -> int:
    """The size that a new volume gets, or why there is none in the requested range."""
    check_range(request.required_bytes, request.limit_bytes)
    minimum = request.smallest_bytes or minimum_for(request.kind, request.filesystem)
    if source_bytes:
        minimum = min(minimum, source_bytes)  # its filesystem is there already
    limit = request.limit_bytes
    wanted = (
        request.required_bytes or source_bytes or (min(DEFAULT_BYTES, limit // MIB * MIB) if limit else DEFAULT_BYTES)
    )
    if source_bytes and wanted < source_bytes:
        if request.required_bytes:
            raise SizeOutOfRange(f"required_bytes {wanted} is smaller than the source, which has {source_bytes} bytes")
        wanted = source_bytes
    size = max(rounded_up(wanted), minimum)
    if limit and size > limit:
        if size == minimum:
            raise SizeOutOfRange(
                f"limit_bytes {limit} is below {minimum}, the smallest size of "
                f"{request.filesystem or request.kind} volumes"
            )
        raise SizeOutOfRange(f"limit_bytes {limit} leaves no size in whole MiB from {wanted} bytes on")
    if size > MAXIMUM_BYTES:
        raise SizeOutOfRange(f"{size} bytes is more than the largest volume, {MAXIMUM_BYTES} bytes")
    return size


def minimum_for(kind: VolumeKind, filesystem: str) -> int:
    """The smallest volume of this kind; an unknown filesystem is an error."""
    if kind is VolumeKind.DIRECTORY:
        return MIB
    if filesystem and filesystem not in FILESYSTEMS:
        raise InvalidValue(
            "filesystem", f"{filesystem[:64]!r} is unknown; known are {', '.join(FILESYSTEMS)}, or none for block"
        )
    return MINIMUM_BYTES[filesystem]
