"""Export: a snapshot or a volume at rest as a stream (see `stream`), to a file or a pipe.

Owns: what is exported (everything, or what changed since a snapshot), identities of contents, and going on with a
file that was left unfinished.
May not touch: volumes' records; it only reads the pool.
Start reading at: `subject_of`, `export_to_file`, `export_to_pipe`.
"""

import contextlib
import fcntl
import hashlib
import os
import queue
import stat
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moorage.errors import UsageError
from moorage.host.errors import host_error
from moorage.host.extents import CopyProgress, Range, data_ranges
from moorage.storage.errors import ImageMissing, InvalidValue, StorageError, VolumeInUse
from moorage.storage.layout import fsync_path, read_file
from moorage.storage.model import Snapshot, Volume, VolumeKind
from moorage.storage.pool import Pool
from moorage.storage.records import PoolRecord, decoded
from moorage.storage.transfer.archive import archived, tree_state
from moorage.storage.transfer.output import FileOutput, StreamOutput
from moorage.storage.transfer.stream import (
    CHUNK_BYTES,
    DATA,
    DIRECTORY_FORMAT,
    FORMAT,
    HEAD,
    TAIL,
    ZERO,
    Frame,
    Header,
    Position,
    checksum_of,
    scan,
)
from moorage.storage.trees import tree_bytes
from moorage.storage.usage import observe

PARTIAL = ".partial"
_ZEROS = bytes(CHUNK_BYTES)
_BUFFERS = 4
Piece = tuple[Frame, memoryview]


class ChangedMeanwhile(StorageError):
    """A volume was written to while it was exported, or since; its stream is of no use."""

    code = "ABORTED"


@dataclass(frozen=True, slots=True)
class ExportSource:
    """What goes into a stream: the header, the file, and the ranges of it from an offset on."""

    header: Header
    data: Path
    ranges: Callable[[int], Iterator[Range]]
    check: Callable[[], None] = lambda: None

    @property
    def is_delta(self) -> bool:
        return bool(self.header.base)


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export did; `resumed_at` is where it went on, in bytes of the stream."""

    data_bytes: int
    stream_bytes: int
    frames: int
    resumed_at: int = 0


def subject_of(pool: Pool, source: Snapshot | Volume, since: Snapshot | None = None) -> ExportSource:
    """A snapshot, whole or what changed since an older one; or a volume that is not in use."""
    is_directory = source.kind is VolumeKind.DIRECTORY
    if is_directory and since is not None:
        raise InvalidValue("since", f"{source.id} is a directory, which has no blocks to compare; export it whole")
    if isinstance(source, Volume):
        if since is not None:
            raise InvalidValue("since", "only a snapshot can be compared with a snapshot; cut one first")
        return _directory_at_rest(pool, source) if is_directory else _volume_at_rest(pool, source)
    volume = pool.volumes.find(source.volume_id)
    header = Header(
        source=identity_of(pool, source),
        volume_id=source.volume_id,
        volume_name=volume.name if volume is not None else source.volume_id,
        filesystem=source.filesystem,
        size_bytes=source.size_bytes,
        snapshot_id=source.id,
        base=identity_of(pool, since) if since is not None else "",
        base_snapshot_id=since.id if since is not None else "",
        data_bytes=source.data_bytes,
        created_ns=source.created_ns,
        format=DIRECTORY_FORMAT if is_directory else FORMAT,
        kind=source.kind.value,
    )
    if is_directory:
        return ExportSource(header, source.data, _no_ranges)
    if since is None:
        return ExportSource(header, source.data, lambda start: pool.blocks.allocated(source.id, start).ranges)
    base = since.id
    pool.blocks.changed(base, source.id)  # says now what is wrong with the pair
    return ExportSource(header, source.data, lambda start: pool.blocks.changed(base, source.id, start).ranges)


def identity_of(pool: Pool, snapshot: Snapshot) -> str:
    """The same for the same content wherever it is known, and for no other: pool, snapshot and its time."""
    return _digest(pool_id(pool), "snapshot", snapshot.id, str(snapshot.created_ns))


def pool_id(pool: Pool) -> str:
    path = os.path.join(pool.directory, "pool.json")
    return decoded(read_file(path), PoolRecord, path).id


def _volume_at_rest(pool: Pool, volume: Volume) -> ExportSource:
    found = _stat(volume)

    def check() -> None:
        use = observe(volume.data, volume.kind)
        if use:
            raise VolumeInUse(
                f"volume {volume.id} is in use ({use.holders}) and pool {pool.name} has no reflinks; "
                "cut a snapshot and export that"
            )
        now = _stat(volume)
        if (now.st_ino, now.st_mtime_ns, now.st_size) != (found.st_ino, found.st_mtime_ns, found.st_size):
            raise ChangedMeanwhile(f"volume {volume.id} was changed while it was exported")

    def ranges(start: int) -> Iterator[Range]:
        with _reading(volume.data) as fd:
            yield from data_ranges(fd, start)

    check()
    header = Header(
        source=_digest(pool_id(pool), "volume", volume.id, str(found.st_ino), str(found.st_mtime_ns)),
        volume_id=volume.id,
        volume_name=volume.name,
        filesystem=volume.filesystem,
        size_bytes=found.st_size,
        data_bytes=min(found.st_size, found.st_blocks * 512),
        created_ns=found.st_mtime_ns,
    )
    return ExportSource(header, volume.data, ranges, check)


def _no_ranges(start: int) -> Iterator[Range]:
    return iter(())


def _directory_at_rest(pool: Pool, volume: Volume) -> ExportSource:
    """A directory that is not mounted here; any change of any file during the export is noticed at its end."""
    path = os.fspath(volume.data)

    def state() -> tuple[int, int]:
        try:
            return tree_state(path)
        except FileNotFoundError as failed:
            if not os.path.isdir(path):
                raise ImageMissing(f"the data of volume {volume.id} is missing") from failed
            raise ChangedMeanwhile(f"volume {volume.id} is being changed") from failed

    def check() -> None:
        use = observe(volume.data, volume.kind)
        if use:
            raise VolumeInUse(
                f"volume {volume.id} is in use ({use.holders}) and pool {pool.name} cannot copy a directory in one "
                "moment; stop its pods first, or export a snapshot of it"
            )
        if state() != found:
            raise ChangedMeanwhile(f"volume {volume.id} was changed while it was exported")

    found = state()
    check()
    header = Header(
        source=_digest(pool_id(pool), "volume", volume.id, *map(str, found)),
        volume_id=volume.id,
        volume_name=volume.name,
        filesystem="",
        size_bytes=volume.size_bytes,
        data_bytes=tree_bytes(path),
        created_ns=found[1],
        format=DIRECTORY_FORMAT,
        kind="directory",
    )
    return ExportSource(header, volume.data, _no_ranges, check)


def export_to_file(
    subject: ExportSource, path: Path, progress: CopyProgress | None = None, *, resume: bool = False, sync: bool = True
) -> Exported:
    """Write the stream to `path`, which appears when it is whole; until then it is `path`.partial."""
    partial = path.with_name(path.name + PARTIAL)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if resume else os.O_TRUNC)
    try:
        fd = os.open(partial, flags, 0o600)
    except OSError as failed:
        raise host_error("write", partial, failed) from failed
    try:
        start = _resumable(fd, subject, partial) if resume else Position()
        os.ftruncate(fd, start.at)
        os.lseek(fd, start.at, os.SEEK_SET)
        with _reading(subject.data) as source:
            done = _send(subject, source, FileOutput(fd, start.copied(), sync), progress)
        if sync:
            os.fsync(fd)
        os.rename(partial, path)
        if sync:
            fsync_path(os.fspath(path.absolute().parent))
    except OSError as failed:
        raise host_error("write", partial, failed) from failed
    finally:
        os.close(fd)
    return done


def export_to_pipe(subject: ExportSource, fd: int, progress: CopyProgress | None = None, *, skip: int = 0) -> Exported:
    """Write the stream to a pipe, without its first `skip` bytes, which the other side has already."""
    with contextlib.suppress(OSError):  # not a pipe, or no right to a larger one
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
    try:
        with _reading(subject.data) as source:
            return _send(subject, source, StreamOutput(fd, Position(), skip), progress)
    except BrokenPipeError as failed:
        raise StorageError("the reader of the stream has gone away") from failed
    except OSError as failed:
        raise host_error("write the stream to", f"descriptor {fd}", failed) from failed


def _resumable(fd: int, subject: ExportSource, partial: Path) -> Position:
    found = scan(fd)
    if found is None:
        return Position()
    if found.header != subject.header:
        other = found.header.snapshot_id or found.header.volume_id
        raise UsageError(f"{partial} holds the beginning of another export (of {other}); remove it to start over")
    return found.position


def _send(subject: ExportSource, source: int, out: "StreamOutput", progress: CopyProgress | None) -> Exported:
    start = out.position.copied()
    if start.at == 0:
        payload = msgspec.json.encode(subject.header)
        out.begin(Frame(HEAD, 0, len(payload), checksum_of(payload)), payload)
    total = subject.header.data_bytes
    with contextlib.closing(_read_ahead(subject, source, start.offset)) as pieces:
        for frame, content in pieces:
            out.put(frame, content)
            if progress is not None:
                done = out.position.data_bytes
                progress(done, max(total, done))
    subject.check()
    trailer = out.position.trailer()
    frame = Frame(TAIL, 0, len(trailer), checksum_of(trailer))
    out.put(frame, memoryview(trailer))
    at = out.position
    return Exported(at.data_bytes, at.at, at.frames, start.at)


def _read_ahead(subject: ExportSource, fd: int, start: int) -> Generator[Piece, None, None]:
    """Frames with their bytes, which are good until the next frame.

    A second thread reads and computes checksums while this one writes: one after the other takes longer than cp, which
    computes nothing. Mapping the file was tried and takes more, as both threads then share changing page tables. A few
    buffers go around: fresh memory for each frame would cost as much as the reading.
    """
    free: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
    ready: queue.SimpleQueue[tuple[Frame, memoryview, bytearray] | BaseException | None] = queue.SimpleQueue()
    for _ in range(_BUFFERS):
        free.put(bytearray(CHUNK_BYTES))

    def read() -> None:
        try:
            pieces = _archive_pieces if subject.header.is_directory else _pieces
            for found in pieces(subject, fd, start, free.get):
                ready.put(found)
            ready.put(None)
        except BaseException as failed:  # raised again by the writer
            ready.put(failed)

    reader = threading.Thread(target=read, name="export-reader")
    reader.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            frame, payload, buffer = found
            yield frame, payload
            free.put(buffer)
    finally:
        free.put(None)  # where the writer failed, the reader ends when it wants the next buffer
        reader.join()


def _pieces(
    subject: ExportSource, fd: int, start: int, take: Callable[[], bytearray | None]
) -> Iterator[tuple[Frame, memoryview, bytearray]]:
    """Frames from an offset on, each in its own buffer; zeros are left out of a full stream, and told in a delta."""
    buffer = take()
    for piece in subject.ranges(start):
        offset, end = max(piece.offset, start), min(piece.end, subject.header.size_bytes)
        while offset < end:
            if buffer is None:
                return
            length = min(end, (offset // CHUNK_BYTES + 1) * CHUNK_BYTES) - offset
            payload = memoryview(buffer)[:length]
            count = os.preadv(fd, [payload], offset)
            if count != length:
                raise ImageMissing(f"{subject.data} ends at {offset + count}, inside of its data")
            if not buffer.startswith(_ZEROS if length == CHUNK_BYTES else bytes(length)):
                yield Frame(DATA, offset, length, checksum_of(payload)), payload, buffer
                buffer = take()
            elif subject.is_delta:
                yield Frame(ZERO, offset, length), memoryview(b""), buffer
                buffer = take()
            offset += length


def _archive_pieces(
    subject: ExportSource, fd: int, start: int, take: Callable[[], bytearray | None]
) -> Iterator[tuple[Frame, memoryview, bytearray]]:
    """The archive of a directory in frames of one chunk; what lies before `start` is made again and not given."""
    buffer, filled, offset = take(), 0, 0

    def piece(whole: bytearray) -> tuple[Frame, memoryview, bytearray]:
        payload = memoryview(whole)[:filled]
        return Frame(DATA, offset, filled, checksum_of(payload)), payload, whole

    for part in archived(os.fspath(subject.data)):
        view = memoryview(part)
        while view:
            if buffer is None:
                return
            count = min(len(view), CHUNK_BYTES - filled)
            buffer[filled : filled + count] = view[:count]
            view, filled = view[count:], filled + count
            if filled == CHUNK_BYTES:
                if offset >= start:
                    yield piece(buffer)
                    buffer = take()
                offset, filled = offset + CHUNK_BYTES, 0
    if buffer is not None and filled and offset >= start:
        yield piece(buffer)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _stat(volume: Volume) -> os.stat_result:
    try:
        found = os.lstat(volume.data)
    except OSError as failed:
        raise ImageMissing(f"the data of volume {volume.id}: {failed.strerror}") from failed
    if not stat.S_ISREG(found.st_mode):
        raise ImageMissing(f"the data of volume {volume.id} is not a regular file")
    return found


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as failed:
        raise ImageMissing(f"{path}: {failed.strerror}") from failed
    try:
        yield fd
    finally:
        os.close(fd)
