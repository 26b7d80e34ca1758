"""Reading container logs as `kubectl logs` wants them.

Owns: the log format, tail, since, limits, and following a file that grows and is put aside for a new one.
Start reading at: `stream`.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from asyncinotify import Inotify, Mask

from moorage.errors import InvalidRequest
from moorage.kube.objects.meta import seconds_of

_CHUNK = 1 << 16
_LOOK_AGAIN_S = 1.0
_STREAMS = ("All", "Stdout", "Stderr")


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The options of `kubectl logs`."""

    follow: bool = False
    timestamps: bool = False
    tail: int | None = None
    since: float | None = None  # seconds since the epoch
    limit_bytes: int | None = None
    stream: str = "All"


def log_options_from(query: Mapping[str, str], now: float) -> LogOptions:
    """The options of a request; InvalidRequest in the words that an API server uses."""
    tail, limit = _number(query, "tailLines", 0), _number(query, "limitBytes", 1)
    seconds, since = _number(query, "sinceSeconds", 1), seconds_of(query.get("sinceTime"))
    stream = query.get("stream") or "All"
    if query.get("sinceTime") and since is None:
        raise _invalid("sinceTime", query["sinceTime"], "must be a time such as 2026-01-31T12:00:00Z")
    if seconds is not None and since is not None:
        raise InvalidRequest("at most one of `sinceTime` or `sinceSeconds` may be specified")
    if stream not in _STREAMS:
        raise _invalid("stream", stream, f"must be one of {', '.join(_STREAMS)}")
    if tail is not None and stream != "All":
        raise InvalidRequest("`tailLines` and specific `stream` are mutually exclusive for now")
    return LogOptions(
        follow=is_yes(query.get("follow", "")),
        timestamps=is_yes(query.get("timestamps", "")),
        tail=tail,
        since=since if seconds is None else now - seconds,
        limit_bytes=limit,
        stream=stream,
    )


def is_yes(text: str) -> bool:
    return text.lower() in ("1", "true")


def _number(query: Mapping[str, str], name: str, least: int) -> int | None:
    text = query.get(name)
    if not text:
        return None
    try:
        number = int(text)
    except ValueError:
        raise _invalid(name, text, "must be a number") from None
    if number < least:
        raise _invalid(name, text, f"must be {'greater than or equal to 0' if least == 0 else 'greater than 0'}")
    return number


def _invalid(name: str, value: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: Invalid value: {value[:80]}: {why}")


class Printer:
    """Stored lines as they are printed. A long line is stored in pieces; only its first one gets a time."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options
        self._begins_line = True

    def shown(self, line: bytes) -> bytes:
        """One stored line; empty when it is not to be printed."""
        options = self._options
        stamp, _, rest = line.partition(b" ")
        stream, _, rest = rest.partition(b" ")
        flag, _, text = rest.partition(b" ")
        if flag not in (b"F", b"P"):
            return b""
        begins_line, self._begins_line = self._begins_line, flag == b"F"
        if options.stream not in ("All", "") and stream.decode() != options.stream.lower():
            return b""
        if options.since is not None:
            written = seconds_of(stamp.decode(errors="replace")[:26].rstrip("Z") + "Z")
            if written is not None and written < options.since:
                return b""
        prefix = stamp + b" " if options.timestamps and begins_line else b""
        return prefix + text + (b"\n" if flag == b"F" else b"")


async def stream(path: Path, options: LogOptions, is_running: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """The log's text in pieces; with `follow`, until the container has ended and all was read."""
    left = options.limit_bytes
    async with aclosing(_pieces(path, options, is_running)) as pieces:
        async for piece in pieces:
            if left is not None:
                piece = piece[:left]
                left -= len(piece)
            if piece:
                yield piece
            if left is not None and left <= 0:
                return


async def _pieces(path: Path, options: LogOptions, is_running: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    printer, log = Printer(options), _Log(path)
    reading = asyncio.ensure_future(asyncio.to_thread(log.stored, printer, options.tail))
    try:
        pieces = await asyncio.shield(reading)
        for start in range(0, len(pieces), 256):
            yield b"".join(pieces[start : start + 256])
        if options.follow:
            async with aclosing(_follow(log, path.parent, is_running)) as following:
                async for lines in following:
                    yield b"".join(printer.shown(line) for line in lines)
    finally:
        await asyncio.wait({reading})  # a file must not be closed while a thread reads it
        log.close()


async def _follow(log: "_Log", directory: Path, is_running: Callable[[], bool]) -> AsyncGenerator[list[bytes], None]:
    """What is written from now on, until the container has ended and all was read."""
    with Inotify() as inotify:
        if directory.is_dir():
            inotify.add_watch(directory, Mask.MODIFY | Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM)
        while True:
            running = is_running()
            if lines := log.more():
                yield lines
                continue
            if not running:
                return
            try:
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await inotify.get()
            except TimeoutError:
                continue


class _Log:
    """The file that is being written and the one that was put aside before it, read one after the other.

    A file is held open while it is read, so that nothing is lost when it is put aside.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._aside = Path(f"{path}.1")
        self._file: BinaryIO | None = None
        self._rest = b""

    def stored(self, printer: Printer, tail: int | None) -> list[bytes]:
        """Everything so far as it is printed, or its last lines."""
        lines: list[bytes] = []
        while (left := self._go_on()) is not None:
            lines += left + self._lines(-1)
        if tail is not None:
            lines = lines[-tail:] if tail > 0 else []
        return [text for line in lines if (text := printer.shown(line))]

    def more(self) -> list[bytes]:
        """The next stored lines; none when there are no more now."""
        while True:
            if lines := self._lines(_CHUNK):
                return lines
            left = self._go_on()
            if left is None or left:
                return left or []

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lines(self, size: int) -> list[bytes]:
        """Whole lines of the open file; the beginning of one that is still being written is kept for later."""
        while self._file is not None and (data := self._file.read(size)):
            *lines, self._rest = (self._rest + data).split(b"\n")
            if lines:
                return lines
        return []

    def _go_on(self) -> list[bytes] | None:
        """Take up the next file: what was added to the last one meanwhile, or None when that is still the newest."""
        successor = self._successor()
        if successor is None:
            return None
        left = self._lines(-1)
        self.close()
        self._file, self._rest = successor, b""
        return left

    def _successor(self) -> BinaryIO | None:
        held = None if self._file is None else _identity(os.fstat(self._file.fileno()))
        try:
            if _identity(self._path.stat()) == held:
                return None
        except FileNotFoundError:
            pass  # put aside this moment, or nothing was ever written
        for path in (self._aside, self._path):  # if two files were begun meanwhile, the older one comes first
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue
            if _identity(os.fstat(file.fileno())) != held:
                return file
            file.close()
        return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
