"""One operation at a time for one object. The second caller gets ABORTED at once.

Owns: the table of running operations of one process.
Start reading at: `InFlight.claim`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from moorage.csi.errors import OperationPending


class InFlight:
    """Which objects an operation is running for. Used from one event loop only."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}

    @contextmanager
    def claim(self, operation: str, *keys: str) -> Iterator[None]:
        """Hold every key for the length of the block, or raise OperationPending and hold none."""
        wanted = list(dict.fromkeys(keys))
        for key in wanted:
            if key in self._holders:
                raise OperationPending(key, self._holders[key])
        for key in wanted:
            self._holders[key] = operation
        try:
            yield
        finally:
            for key in wanted:
                del self._holders[key]

    def is_busy(self, key: str) -> bool:
        return key in self._holders

    def __len__(self) -> int:
        return len(self._holders)


def volume_key(volume_id: str) -> str:
    """Return the key of a volume."""
    return f"volume {volume_id}"


def snapshot_key(snapshot_id: str) -> str:
    """Return the key of a snapshot."""
    return f"snapshot {snapshot_id}"


def group_key(group_id: str) -> str:
    """Return the key of a group snapshot."""
    return f"group snapshot {group_id}"
