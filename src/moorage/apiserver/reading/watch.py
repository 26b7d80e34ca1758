"""Watches: the state now, then every change after it, in order, none missed and none repeated.

Owns: where a watch starts, what a selection makes of a change, bookmarks, and when a watch ends.
May not touch: HTTP; it yields lines of bytes.
Start reading at: `WatchStream.lines`.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable

from moorage.apiserver.errors import StatusError, expired, too_large_version
from moorage.apiserver.kinds.registry import Kind
from moorage.apiserver.request.options import Call
from moorage.apiserver.store.change_log import Change, ObjectVersion, frame_of
from moorage.apiserver.store.selection import matcher, selection_of
from moorage.apiserver.store.store import Store, encode

BOOKMARK_S = 60.0
_CHANGES_AT_A_TIME = 100
_BYTES_AT_A_TIME = 256 << 10
_TURN_S = 0.01
Render = Callable[[bytes], bytes]  # an object's bytes as this watcher wants them (another version, a Table)


class WatchStream:
    """One client's view of one resource."""

    def __init__(self, store: Store, call: Call, render: Render | None) -> None:
        self._store = store
        self._call = call
        self._render = render
        self._matches = matcher(call.kind, call.namespace, call.name, call.options)
        self._log = store.table(call.kind.stored_as).log
        self._selection = selection_of(call)
        options = call.options
        asked = int(options.version or 0)
        if asked > store.revision:
            raise too_large_version(asked, store.revision)
        self._wants_initial = options.sends_initial or (options.sends_initial is None and asked == 0)
        self._position = self._log.end
        if not self._wants_initial and asked:
            self._position = self._start(asked)

    def _start(self, asked: int) -> int:
        position = self._log.position_after(asked)
        if position is None:
            raise expired(f"too old resource version: {asked} ({self._log.floor})")
        return position

    async def lines(self) -> AsyncIterator[bytes]:
        """Chunks of whole lines until the watch's time is over."""
        loop = asyncio.get_running_loop()
        timeout = self._call.options.timeout_s or random.uniform(1800, 3600)
        end = loop.time() + timeout
        if self._wants_initial:
            async for chunk in self._initial_lines():
                yield chunk
        bookmark_at = loop.time() + BOOKMARK_S
        last_call = end - 2 if timeout > 4 else end
        while (now := loop.time()) < end:
            until = min(bookmark_at, last_call if now < last_call else end, end)
            if not await self._log.grown(self._position, until):
                bookmark_at = loop.time() + BOOKMARK_S
                if self._call.options.wants_bookmarks:
                    yield self._bookmark()
                continue
            changes = self._log.since(self._position, _CHANGES_AT_A_TIME, _BYTES_AT_A_TIME)
            if changes is None:
                yield self.error_line(expired("too old resource version: the watch fell behind"))
                return
            chunk = self._frames(changes)
            self._position += len(changes)
            if chunk:
                yield chunk
            if self._position < self._log.end:
                await asyncio.sleep(0)  # others have their turn

    async def _initial_lines(self) -> AsyncIterator[bytes]:
        table = self._store.table(self._call.kind.stored_as)
        found = [(key, table.records[key]) for key in table.order]
        revision = self._store.revision
        self._position = self._log.end
        chunk: list[bytes] = []
        began = time.monotonic()
        for key, record in found:
            if time.monotonic() - began > _TURN_S:
                await asyncio.sleep(0)
                began = time.monotonic()
            if self._matches is None or self._matches(key, record):
                chunk.append(self._frame("ADDED", record.body))
            if len(chunk) >= 200:
                yield b"".join(chunk)
                chunk = []
        if self._call.options.sends_initial:
            chunk.append(self._bookmark(revision, {"k8s.io/initial-events-end": "true"}))
        if chunk:
            yield b"".join(chunk)

    def _frames(self, changes: list[Change]) -> bytes:
        if self._render is not None:
            return self._lines_of(changes)
        return self._log.shared(self._selection, self._position, changes, lambda: self._lines_of(changes))

    def _lines_of(self, changes: list[Change]) -> bytes:
        return b"".join([line for change in changes if (line := self._selected(change))])

    def _selected(self, change: Change) -> bytes | None:
        """The change as this selection sees it: entering it is ADDED, leaving it is DELETED."""
        matches = self._matches
        if matches is None:
            return self._frame(change.kind, change.record.body)
        before = change.previous is not None and matches(change.key, change.previous)
        after = change.kind != "DELETED" and matches(change.key, change.record)
        if after:
            return self._frame("MODIFIED" if before else "ADDED", change.record.body)
        if not before or change.previous is None:
            return None
        if change.kind == "DELETED":
            return self._frame(change.kind, change.record.body)
        return self._frame("DELETED", _as_of(change.previous, change.record.revision))

    def _frame(self, kind: str, body: bytes) -> bytes:
        return frame_of(kind, self._render(body) if self._render else body)

    def _bookmark(self, revision: int | None = None, annotations: dict[str, str] | None = None) -> bytes:
        meta: dict[str, object] = {"resourceVersion": str(revision or self._store.revision)}
        if annotations:
            meta["annotations"] = annotations
        kind: Kind = self._call.kind
        body = encode({"kind": kind.name, "apiVersion": kind.api_version, "metadata": meta})
        return frame_of("BOOKMARK", body)

    @staticmethod
    def error_line(error: StatusError) -> bytes:
        return frame_of("ERROR", encode(error.status()))


def _as_of(record: ObjectVersion, revision: int) -> bytes:
    """The object's former content under a newer version."""
    old = f'"resourceVersion":"{record.revision}"'.encode()
    return record.body.replace(old, f'"resourceVersion":"{revision}"'.encode(), 1)
