"""The blocks of snapshots: which hold data, and which differ between two snapshots of a volume.

Owns: opening the snapshots and checking the request. `changes.py` compares.
Start reading at: `SnapshotBlocks.changed`.
"""

import contextlib
import os
from collections.abc import Iterator

from moorage.host.extents import Range
from moorage.log import get_logger
from moorage.storage.changes import Comparison, allocated_ranges
from moorage.storage.errors import ImageMissing, InvalidValue, SizeOutOfRange
from moorage.storage.model import BlockDiff, Snapshot, VolumeKind
from moorage.storage.snapshots import Snapshots

log = get_logger(__name__)


class SnapshotBlocks:
    """The blocks of the snapshots of one pool."""

    def __init__(self, snapshots: Snapshots, copies_by_reflink: bool) -> None:
        self._snapshots = snapshots
        self._by_extents = copies_by_reflink

    def allocated(self, snapshot_id: str, start: int = 0) -> BlockDiff:
        """The ranges of a snapshot that hold data."""
        snapshot = self._image_snapshot(snapshot_id, start)

        def ranges() -> Iterator[Range]:
            with _reading(snapshot) as fd:
                yield from allocated_ranges(fd, snapshot.size_bytes, start)

        return BlockDiff(snapshot.size_bytes, "extents", ranges())

    def changed(self, base_id: str, target_id: str, start: int = 0) -> BlockDiff:
        """The ranges of a snapshot that differ from an older one of the same volume."""
        base, target = self._image_snapshot(base_id), self._image_snapshot(target_id, start)
        if base.volume_id != target.volume_id:
            raise InvalidValue(
                "base_snapshot_id", f"{base_id} is of volume {base.volume_id}, {target_id} of {target.volume_id}"
            )
        by_extents = self._by_extents

        def ranges() -> Iterator[Range]:
            with _reading(base) as old, _reading(target) as new:
                comparison = Comparison(old, new, by_extents, start)
                yield from comparison.ranges(target.size_bytes)
                if comparison.compared_bytes:
                    log.info("compared by content", base=base_id, target=target_id, bytes=comparison.compared_bytes)

        return BlockDiff(target.size_bytes, "extents" if by_extents else "content", ranges())

    def _image_snapshot(self, ident: str, start: int = 0) -> Snapshot:
        snapshot = self._snapshots.get(ident)
        if snapshot.kind is not VolumeKind.IMAGE:
            raise InvalidValue("snapshot_id", f"{ident} is of a directory, which has no blocks")
        if not 0 <= start <= snapshot.size_bytes:
            raise SizeOutOfRange(f"starting_offset {start} lies outside of snapshot {ident}")
        return snapshot


@contextlib.contextmanager
def _reading(snapshot: Snapshot) -> Iterator[int]:
    try:
        fd = os.open(snapshot.data, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as failed:
        raise ImageMissing(f"the data of snapshot {snapshot.id}: {failed.strerror}") from failed
    try:
        yield fd
    finally:
        os.close(fd)
