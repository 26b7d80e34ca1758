"""Which bytes a snapshot holds, and which differ between two.

Owns: the comparison of two files' extents. Nothing is read where extents can tell; where they cannot
(copies without reflink, compressed or inline extents) the bytes themselves are compared, and
`method` says so.
May not touch: snapshots' records; it is given open files.
Start reading at: `changed_ranges` (pure but for the extents it is given), `Comparison`.
"""

import os
from collections.abc import Iterator

from moorage.host.extents import OPAQUE, UNWRITTEN, Extent, Range, data_ranges, extents_of

BLOCK = 4096
_READ = 1024 * 1024
_END = 1 << 63


def allocated_ranges(fd: int, size: int, start: int = 0) -> Iterator[Range]:
    """The parts of a file with data, cut to its size, from the range that holds `start` on."""
    yield from _cut(merged(data_ranges(fd, start)), start, size)


def changed_ranges(base: Iterator[Extent], target: Iterator[Extent], start: int = 0) -> Iterator[tuple[Range, bool]]:
    """Where two extent lists differ, in order; True marks ranges that only the bytes can decide.

    Equal physical addresses at equal offsets mean equal bytes as long as both files live: neither
    can be written in place while it shares a block. A hole and an unwritten extent both read as
    zeros.
    """
    old, new = _Cursor(base), _Cursor(target)
    offset = start
    while True:
        left, right = old.at(offset), new.at(offset)
        if left is None and right is None:
            upcoming = min(old.next_start(offset), new.next_start(offset))
            if upcoming == _END:
                return
            offset = upcoming
            continue
        end = min(old.boundary(offset), new.boundary(offset))
        piece = Range(offset, end - offset)
        if left is None or right is None:
            yield piece, False
        elif (left[3] | right[3]) & OPAQUE:
            yield piece, True
        elif left[1] - left[0] != right[1] - right[0]:
            yield piece, False
        offset = end


def merged(ranges: Iterator[Range]) -> Iterator[Range]:
    """Neighbours joined."""
    held: Range | None = None
    for piece in ranges:
        if held is not None and piece.offset <= held.end:
            held = Range(held.offset, max(held.end, piece.end) - held.offset)
        else:
            if held is not None:
                yield held
            held = piece
    if held is not None:
        yield held


class Comparison:
    """The difference between two files: `ranges` once, then `compared_bytes` says how many were read."""

    def __init__(self, base_fd: int, target_fd: int, share_blocks: bool, start: int = 0) -> None:
        self._base, self._target = base_fd, target_fd
        self._share_blocks = share_blocks
        self._start = start
        self.compared_bytes = 0

    def ranges(self, size: int) -> Iterator[Range]:
        """Ranges of the target that differ from the base, cut to the target's size."""
        first = self._start // BLOCK * BLOCK
        found = self._by_extents(first) if self._share_blocks else self._by_content(first, size)
        yield from _cut(merged(found), self._start, size)

    def _by_extents(self, first: int) -> Iterator[Range]:
        base, target = extents_of(self._base, first), extents_of(self._target, first)
        for piece, is_doubtful in changed_ranges(base, target, first):
            if is_doubtful:
                yield from self._compared(piece)
            else:
                yield piece

    def _by_content(self, first: int, size: int) -> Iterator[Range]:
        """Compare bytes wherever either file has data."""
        both = _union(data_ranges(self._base, first), data_ranges(self._target, first))
        for piece in both:
            yield from self._compared(_aligned(piece, size))

    def _compared(self, piece: Range) -> Iterator[Range]:
        offset = piece.offset
        while offset < piece.end:
            length = min(_READ, piece.end - offset)
            old, new = os.pread(self._base, length, offset), os.pread(self._target, length, offset)
            self.compared_bytes += length
            if old.ljust(length, b"\0") != new.ljust(length, b"\0"):
                yield from _blocks_that_differ(old, new, offset, length)
            offset += length


def _blocks_that_differ(old: bytes, new: bytes, offset: int, length: int) -> Iterator[Range]:
    for at in range(0, length, BLOCK):
        size = min(BLOCK, length - at)
        if old[at : at + size].ljust(size, b"\0") != new[at : at + size].ljust(size, b"\0"):
            yield Range(offset + at, size)


class _Cursor:
    """One extent list, read as far as needed; unwritten extents count as holes."""

    def __init__(self, extents: Iterator[Extent]) -> None:
        self._extents = extents
        self._current: Extent | None = None
        self._is_over = False

    def _advance(self, offset: int) -> None:
        while not self._is_over and (
            self._current is None or self._current[0] + self._current[2] <= offset or self._current[3] & UNWRITTEN
        ):
            self._current = next(self._extents, None)
            self._is_over = self._current is None

    def at(self, offset: int) -> Extent | None:
        """The extent with data that covers `offset`."""
        self._advance(offset)
        if self._current is not None and self._current[0] <= offset:
            return self._current
        return None

    def next_start(self, offset: int) -> int:
        """Where data begins at or after `offset`."""
        self._advance(offset)
        return _END if self._current is None else max(offset, self._current[0])

    def boundary(self, offset: int) -> int:
        """Up to where nothing changes: the end of the extent here, or the start of the next."""
        found = self.at(offset)
        return self.next_start(offset) if found is None else found[0] + found[2]


def _union(first: Iterator[Range], second: Iterator[Range]) -> Iterator[Range]:
    """Two ordered lists of ranges as one."""

    def interleaved() -> Iterator[Range]:
        left, right = next(first, None), next(second, None)
        while left is not None or right is not None:
            if right is None or (left is not None and left.offset <= right.offset):
                if left is not None:
                    yield left
                left = next(first, None)
            else:
                yield right
                right = next(second, None)

    return merged(interleaved())


def _aligned(piece: Range, size: int) -> Range:
    start = piece.offset // BLOCK * BLOCK
    end = min(-(-piece.end // BLOCK) * BLOCK, max(size, piece.end))
    return Range(start, end - start)


def _cut(ranges: Iterator[Range], start: int, size: int) -> Iterator[Range]:
    """Only what ends after `start`, and nothing beyond `size`."""
    for piece in ranges:
        if piece.offset >= size:
            return
        end = min(piece.end, size)
        if end > start:
            yield Range(piece.offset, end - piece.offset)
