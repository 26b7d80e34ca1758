"""What a pool can refuse, each with the gRPC code that says so on the wire.

Owns: every error that `storage` raises on purpose.
May not touch: gRPC; a code is a name.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from moorage.errors import InvalidRequest, MoorageError


class StorageError(MoorageError):
    """The base of the errors below."""


class InvalidValue(InvalidRequest):
    """A field of a request that no retry makes right; the message names the field."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


class NoSuchObject(StorageError):
    """There is no such object in this pool; ids that cannot exist give the same answer."""

    code = "NOT_FOUND"
    retryable = False
    what: ClassVar[str] = "object"

    def __init__(self, ident: str, pool: str = "") -> None:
        shown = ident if len(ident) <= 128 else ident[:125] + "..."
        where = f" in pool {pool}" if pool else ""
        super().__init__(f"{self.what} {shown!r} does not exist{where}")
        self.ident = ident


class VolumeNotFound(NoSuchObject):
    what = "volume"


class SnapshotNotFound(NoSuchObject):
    what = "snapshot"


class GroupNotFound(NoSuchObject):
    what = "group snapshot"


class NodeNotFound(NoSuchObject):
    what = "node"


class NotInTrash(NoSuchObject):
    what = "deleted object"


class PoolNotFound(InvalidRequest):
    """A request named a pool that this plugin does not serve."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"pool: there is no pool {name!r}; known are {', '.join(sorted(known))}")


class NameTaken(StorageError):
    """The name exists with other properties; the message says which differ."""

    code = "ALREADY_EXISTS"
    retryable = False

    def __init__(self, what: str, name: str, differs: str) -> None:
        super().__init__(f"{what} {name!r} exists already, but {differs}")


class OutOfSpace(StorageError):
    """It would fit into the pool, but not now."""

    code = "RESOURCE_EXHAUSTED"


class LimitReached(StorageError):
    """A node has all the volumes that it may have."""

    code = "RESOURCE_EXHAUSTED"


class SizeOutOfRange(StorageError):
    """No amount of waiting makes this size possible."""

    code = "OUT_OF_RANGE"
    retryable = False


class VolumeInUse(StorageError):
    """The volume is in use. The message names the holder."""

    code = "FAILED_PRECONDITION"


class InUseCopyRefused(VolumeInUse):
    """A copy of a volume in use would hold its writers for the length of a full copy."""


class Fenced(StorageError):
    """A node without a valid attachment asked for the volume."""

    code = "FAILED_PRECONDITION"


class AttachedElsewhere(StorageError):
    """A single-node volume is attached to another node."""

    code = "FAILED_PRECONDITION"


class AttachedDifferently(StorageError):
    """The volume is attached to this node, but in another way."""

    code = "ALREADY_EXISTS"


class AttachmentsUnreadable(StorageError):
    """The pool's filesystem does not show which node has a volume, so it is attached to none."""

    code = "UNAVAILABLE"

    def __init__(self, what: str, failed: OSError) -> None:
        where = os.fsdecode(failed.filename2 or failed.filename or "the volume's attachments")
        super().__init__(
            f"{what}: the pool's filesystem refuses {where} ({os.strerror(failed.errno or 0)}), so no node is given "
            "the volume; on a replicated filesystem the replicas disagree: bring all of them back and heal it "
            "(docs/explanation/storage.md, Replicas that disagree)"
        )


class GroupMember(InvalidRequest):
    """A member of a group snapshot cannot be deleted alone."""


class Busy(StorageError):
    """Another operation on the same object is running."""

    code = "ABORTED"


class PoolLocked(StorageError):
    """Another process owns the pool."""

    code = "FAILED_PRECONDITION"


class PoolUnusable(StorageError):
    """The directory is no pool that this version can serve."""

    code = "FAILED_PRECONDITION"
    retryable = False


class PoolVanished(StorageError):
    """The pool's directory or filesystem is gone; it may come back."""

    code = "UNAVAILABLE"


class PoolReadOnly(StorageError):
    """The pool's filesystem refuses writes."""


class DamagedRecord(StorageError):
    """A record on disk does not decode or contradicts itself; nothing is guessed."""

    retryable = False

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(f"the record {path} is damaged: {why}")
        self.path = str(path)


class ImageMissing(StorageError):
    """A volume's data is not where its record says."""

    retryable = False
