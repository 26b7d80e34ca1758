"""Names in, ids out.

Owns: the derivation of ids from callers' names, and the check that an id is safe as a file name.
May not touch: the disk. Everything here is pure.
Start reading at: `id_from`, `is_id`.

An id is a readable part of the name and 80 bits of its SHA-256: `pvc-3f2a...-9c1e5b7a2d4f6a8b0c1d`.
It holds only a-z, 0-9 and `-`. A dot appears only where it means something: `<group>.<n>` is a
member of a group snapshot, `ephemeral.<...>` a volume that lives with its pod.
"""

import hashlib
import re
from typing import NewType

from moorage.storage.errors import InvalidValue

VolumeId = NewType("VolumeId", str)
SnapshotId = NewType("SnapshotId", str)
GroupId = NewType("GroupId", str)

MAX_NAME_BYTES = 4096
EPHEMERAL = "ephemeral."
_READABLE = 48
_HASH = 20
_UNSAFE = re.compile(r"[^a-z0-9]+")
_PLAIN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,98}[a-z0-9])?\Z")
_INDEX = re.compile(r"(?:0|[1-9][0-9]{0,8})\Z")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def id_from(name: str, *, field: str = "name") -> str:
    """The id for a caller's name: always the same one, and safe as a file name."""
    if not name:
        raise InvalidValue(field, "it must not be empty")
    try:
        raw = name.encode()
    except UnicodeEncodeError as failed:
        raise InvalidValue(field, "it is not valid Unicode") from failed
    if len(raw) > MAX_NAME_BYTES:
        raise InvalidValue(field, f"it has {len(raw)} bytes, the limit is {MAX_NAME_BYTES}")
    if _CONTROL.search(name):
        raise InvalidValue(field, f"it holds a control character: {name[:64]!r}")
    readable = _UNSAFE.sub("-", name.lower())[:_READABLE].strip("-")
    digest = hashlib.sha256(raw).hexdigest()[:_HASH]
    return f"{readable}-{digest}" if readable else digest


def ephemeral_id_from(name: str) -> VolumeId:
    """The id of a volume that lives with its pod; never equal to a persistent one."""
    return VolumeId(EPHEMERAL + id_from(name))


def is_ephemeral(ident: str) -> bool:
    return ident.startswith(EPHEMERAL)


def is_id(ident: str) -> bool:
    """Whether this could be a plain id. What could not is simply not found."""
    return _PLAIN.match(ident) is not None


def is_volume_id(ident: str) -> bool:
    return is_id(ident.removeprefix(EPHEMERAL))


def member_id(group: GroupId, index: int) -> SnapshotId:
    """The id of the n-th member of a group snapshot; the group can be read from it."""
    return SnapshotId(f"{group}.{index}")


def group_of(snapshot: str) -> tuple[GroupId, int] | None:
    """The group and index that a member's id names; None for any other id."""
    group, dot, index = snapshot.partition(".")
    if dot and is_id(group) and _INDEX.match(index):
        return GroupId(group), int(index)
    return None
