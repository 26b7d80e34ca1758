"""Reading container logs as `kubectl logs` wants them.

Owns: the log format, tail, since, limits, and following a file that grows.
Start reading at: `stream`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncinotify import Inotify, Mask

from moorage.kube.objects.meta import seconds_of

_CHUNK = 1 << 16
_LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The options of `kubectl logs`."""

    follow: bool = False
    timestamps: bool = False
    tail: int | None = None
    since: float | None = None  # seconds since the epoch
    limit_bytes: int | None = None
    stream: str = "All"


def shown(line: bytes, options: LogOptions) -> bytes:
    """One stored line as it is printed; empty when it is not to be printed."""
    stamp, _, rest = line.partition(b" ")
    stream, _, rest = rest.partition(b" ")
    flag, _, text = rest.partition(b" ")
    if flag not in (b"F", b"P"):
        return b""
    if options.stream not in ("All", "") and stream.decode() != options.stream.lower():
        return b""
    if options.since is not None:
        written = seconds_of(stamp.decode(errors="replace")[:26].rstrip("Z") + "Z")
        if written is not None and written < options.since:
            return b""
    prefix = stamp + b" " if options.timestamps else b""
    return prefix + text + (b"\n" if flag == b"F" else b"")


async def stream(path: Path, options: LogOptions, is_running: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The log's text in pieces; with `follow`, until the container has ended and all was read."""
    left = options.limit_bytes
    async for piece in _pieces(path, options, is_running):
        if left is not None:
            piece = piece[:left]
            left -= len(piece)
        if piece:
            yield piece
        if left is not None and left <= 0:
            return


async def _pieces(path: Path, options: LogOptions, is_running: Callable[[], bool]) -> AsyncIterator[bytes]:
    lines = await asyncio.to_thread(_stored, path, options)
    position, pieces = lines
    for start in range(0, len(pieces), 256):
        yield b"".join(pieces[start : start + 256])
    if not options.follow:
        return
    with Inotify() as inotify:
        if path.parent.is_dir():
            inotify.add_watch(path.parent, Mask.MODIFY | Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM)
        rest = b""
        while True:
            running = is_running()
            data, position = await asyncio.to_thread(_more, path, position)
            *whole, rest = (rest + data).split(b"\n")
            yield b"".join(shown(line, options) for line in whole)
            if data:
                continue
            if not running:
                return
            try:
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await inotify.get()
            except TimeoutError:
                continue


def _stored(path: Path, options: LogOptions) -> tuple[int, list[bytes]]:
    """What is in the files now, and how far the newest was read."""
    kept = [text for line in _old_lines(path) if (text := shown(line, options))]
    data, position = _more(path, 0, whole=True)
    *lines, rest = data.split(b"\n")
    position -= len(rest)
    kept += [text for line in lines if (text := shown(line, options))]
    if options.tail is not None:
        kept = kept[-options.tail :] if options.tail > 0 else []
    return position, kept


def _old_lines(path: Path) -> Iterator[bytes]:
    old = Path(f"{path}.1")
    if old.exists():
        yield from old.read_bytes().split(b"\n")


def _more(path: Path, position: int, whole: bool = False) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < position:
                position = 0  # the file was changed for a new one
            file.seek(position)
            data = file.read() if whole else file.read(_CHUNK)
            return data, position + len(data)
    except FileNotFoundError:
        return b"", position
