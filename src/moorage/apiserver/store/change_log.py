"""What changed, in order: the log that watches read and old snapshots are rebuilt from.

Owns: records, changes, one log per resource, waking watchers, and forgetting.
May not touch: SQLite and HTTP.
Start reading at: `Log`.

A watcher is a position in a log. It costs nothing while it waits, and a slow one does not delay the others: it falls
behind, and is dropped when what it needs has been forgotten.
"""

import asyncio
import itertools
import time
from bisect import bisect_right
from collections.abc import Callable, Hashable

import msgspec

KEEP_S = 300.0  # as long as etcd keeps history under Kubernetes
KEEP_AT_LEAST_S = 75.0  # what the watch cache promises
SOFT_LIMIT_BYTES = 48 << 20
HARD_LIMIT_BYTES = 192 << 20
COALESCE_S = 0.005  # changes within this time reach a watcher in one write,
COALESCE_EACH_S = 0.0001  # and longer when many watch, because each of them costs a write


class _Meta(msgspec.Struct):
    labels: dict[str, str] | None = None


class _Labelled(msgspec.Struct):
    metadata: _Meta


_labels = msgspec.json.Decoder(_Labelled).decode


class ObjectVersion:
    """One version of one object: its bytes as they go to clients."""

    __slots__ = ("_labels_found", "body", "revision")

    def __init__(self, revision: int, body: bytes) -> None:
        self.revision = revision
        self.body = body
        self._labels_found: dict[str, str] | None = None

    @property
    def labels(self) -> dict[str, str]:
        """The labels, read from the bytes when they are first asked for."""
        if self._labels_found is None:
            self._labels_found = _labels(self.body).metadata.labels or _NONE
        return self._labels_found


_NONE: dict[str, str] = {}


class Change:
    """One step of one object, with its state before and after."""

    __slots__ = ("at", "key", "kind", "previous", "record")

    def __init__(self, kind: str, key: tuple[str, str], record: ObjectVersion, previous: ObjectVersion | None) -> None:
        self.kind = kind
        self.key = key
        self.record = record
        self.previous = previous
        self.at = time.monotonic()


def frame_of(kind: str, body: bytes) -> bytes:
    return b'{"type":"%b","object":%b}\n' % (kind.encode(), body)


class Log:
    """The changes of one resource since `floor`, addressed by a position that never shifts."""

    __slots__ = ("_changes", "_first", "_last_wake", "_scheduled", "_shared", "_waiting", "floor", "size_bytes")

    def __init__(self) -> None:
        self.floor = 0  # a watch may start at this revision or later
        self.size_bytes = 0
        self._changes: list[Change] = []
        self._first = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._shared: tuple[int, int, dict[Hashable, bytes]] = (0, 0, {})
        self._scheduled = False
        self._last_wake = 0.0

    @property
    def end(self) -> int:
        """The position after the last change."""
        return self._first + len(self._changes)

    def append(self, change: Change) -> None:
        self._changes.append(change)
        self.size_bytes += len(change.record.body)
        if self._waiting and not self._scheduled:
            self._scheduled = True
            loop = asyncio.get_running_loop()
            wait = self._last_wake + COALESCE_S + COALESCE_EACH_S * len(self._waiting) - loop.time()
            if wait <= 0:
                loop.call_soon(self._wake)
            else:
                loop.call_later(wait, self._wake)

    def position_after(self, revision: int) -> int | None:
        """Where to start reading what came after `revision`; None when part of it is forgotten."""
        if revision < self.floor:
            return None
        return self._first + bisect_right(self._changes, revision, key=_revision_of)

    def since(self, position: int, most: int | None = None, size_bytes: int | None = None) -> list[Change] | None:
        """The changes from a position on, or the first of them up to a size; None when some of them are forgotten."""
        if position < self._first:
            return None
        start = position - self._first
        found = self._changes[start : None if most is None else start + most]
        if size_bytes is None:
            return found
        sizes = itertools.accumulate(len(change.record.body) for change in found)
        return found[: 1 + sum(1 for size in sizes if size <= size_bytes)]

    async def grown(self, position: int, until: float) -> bool:
        """Wait until there is something at `position`; False when the loop's clock says `until` first."""
        loop = asyncio.get_running_loop()
        while self.end <= position:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.add(turn)
            # Each change wakes each watcher: a timer of the loop costs a fraction of asyncio.timeout.
            timer = loop.call_at(until, _end_turn, turn)
            try:
                await turn
            finally:
                timer.cancel()
                self._waiting.discard(turn)
            if loop.time() >= until:
                return self.end > position
        return True

    def shared(self, selection: Hashable, position: int, changes: list[Change], made: Callable[[], bytes]) -> bytes:
        """Lines for the changes from a position on; watchers of one selection that stand together share them."""
        end = position + len(changes)
        if self._shared[:2] != (position, end):
            self._shared = (position, end, {})
        lines = self._shared[2]
        if selection not in lines:
            lines[selection] = made()
        return lines[selection]

    def trim(self, now: float, held_bytes: int) -> None:
        """Forget by age, and sooner when the logs together hold much."""
        keep_s = KEEP_S if held_bytes < SOFT_LIMIT_BYTES else KEEP_AT_LEAST_S
        if held_bytes > HARD_LIMIT_BYTES:
            keep_s = 5.0
        drop = 0
        while drop < len(self._changes) and self._changes[drop].at < now - keep_s:
            drop += 1
        if drop:
            self.floor = self._changes[drop - 1].record.revision
            self.size_bytes -= sum(len(change.record.body) for change in self._changes[:drop])
            del self._changes[:drop]
            self._first += drop

    def compact(self) -> None:
        """Forget everything, as after a restart."""
        self.trim(float("inf"), 0)

    def _wake(self) -> None:
        self._scheduled = False
        self._last_wake = asyncio.get_running_loop().time()
        for turn in self._waiting:
            _end_turn(turn)


def _end_turn(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)


def _revision_of(change: Change) -> int:
    return change.record.revision
