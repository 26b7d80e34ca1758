"""What can be wrong with a node call that is well formed.

Owns: the errors of staging and publishing, each with the code that CSI asks for.
"""

from collections.abc import Sequence
from pathlib import Path

from moorage.errors import MoorageError


class NotStaged(MoorageError):
    """A publish before its stage."""

    code = "FAILED_PRECONDITION"

    def __init__(self, volume_id: str, path: str) -> None:
        super().__init__(f"volume {volume_id} is not staged at {path}; call NodeStageVolume first")


class MountedDifferently(MoorageError):
    """Something is mounted at the path, and it is not what was asked for."""

    code = "ALREADY_EXISTS"
    retryable = False

    def __init__(self, volume_id: str, path: str, why: str) -> None:
        super().__init__(f"volume {volume_id} at {path}: {why}")


class StillPublished(MoorageError):
    """An unstage before the last unpublish, or a second target for a single writer."""

    code = "FAILED_PRECONDITION"

    def __init__(self, volume_id: str, targets: Sequence[str]) -> None:
        super().__init__(f"volume {volume_id} is still published at {', '.join(targets)}")


class ForeignMount(MoorageError):
    """A mount that is not of our pools. We never touch it."""

    code = "FAILED_PRECONDITION"

    def __init__(self, volume_id: str, path: str, source: str) -> None:
        super().__init__(f"{path} shows {source}, which is not volume {volume_id}; it is left alone")


class WrongContent(MoorageError):
    """An image holds another filesystem than the volume's own; nothing is formatted over."""

    code = "FAILED_PRECONDITION"
    retryable = False


class NotAtPath(MoorageError):
    """The volume is not at the path that a caller asked about."""

    code = "NOT_FOUND"

    def __init__(self, volume_id: str, path: str) -> None:
        super().__init__(f"volume {volume_id} is not staged or published at {path!r}")


class DeviceStillOpen(MoorageError):
    """A device of the volume was released, but a process has it open and may still write through it."""

    code = "ABORTED"

    def __init__(self, volume_id: str, device: Path) -> None:
        super().__init__(
            f"volume {volume_id}: {device} was released, but a process still has it open; `fuser -v {device}` names it"
        )


class MountUnverified(MoorageError):
    """The kernel took a mount and then did not show it; the next try starts from what is there."""
