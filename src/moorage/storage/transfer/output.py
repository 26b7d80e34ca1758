"""Where an export writes its frames: a pipe, or a file that is kept in step with the disk.

Start reading at: `StreamOutput`.
"""

import os
from collections.abc import Sequence

from moorage.host import writeback
from moorage.storage.transfer.stream import (
    CHUNK_BYTES,
    MAGIC,
    Frame,
    Position,
)

_WRITEBACK_BYTES = 16 * CHUNK_BYTES


class StreamOutput:
    """The writing end; bytes before `skip` are counted and not sent."""

    def __init__(self, fd: int, position: Position, skip: int = 0) -> None:
        self._fd = fd
        self._skip = skip
        self.position = position

    def begin(self, frame: Frame, payload: bytes) -> None:
        self._write([memoryview(MAGIC)])
        self.position.at = len(MAGIC)
        self.put(frame, memoryview(payload))

    def put(self, frame: Frame, payload: memoryview) -> None:
        placed = frame.padded_at(self.position.at)
        head = placed.encoded()
        self._write([memoryview(head + bytes(placed.padding)), payload] if len(payload) else [memoryview(head)])
        self.position.advance(placed, head)

    def _write(self, parts: Sequence[memoryview]) -> None:
        waiting = []
        for part in parts:
            left = min(self._skip, len(part))
            self._skip -= left
            if left < len(part):
                waiting.append(part[left:])
        while waiting:
            sent = os.writev(self._fd, waiting)
            while waiting and sent >= len(waiting[0]):
                sent -= len(waiting.pop(0))
            if sent:
                waiting[0] = waiting[0][sent:]


class FileOutput(StreamOutput):
    """A file that has to be on disk at the end goes there while it grows; the fsync then has little left to do."""

    def __init__(self, fd: int, position: Position, sync: bool) -> None:
        super().__init__(fd, position)
        self._sync = sync
        self._flushed = position.at

    def put(self, frame: Frame, payload: memoryview) -> None:
        super().put(frame, payload)
        at = self.position.at
        if self._sync and at - self._flushed >= _WRITEBACK_BYTES:
            self._sync = writeback.begin(self._fd, self._flushed, at - self._flushed)
            self._flushed = at
