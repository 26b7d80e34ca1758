"""Import: a stream becomes a new volume, or a delta brings a volume from one state to the next.

Owns: `imported.json` beside a volume's data, which says what state of which stream the data is.
May not touch: a volume that is in use. A volume has its old data until the new is complete and on disk.
Start reading at: `import_stream`.

An unfinished import goes on where it was when the same stream comes again (`unfinished`).
"""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moorage.errors import MoorageError
from moorage.host import holes
from moorage.host.extents import CopyProgress, clone_file, copy_sparse
from moorage.host.safe_remove import remove_tree
from moorage.log import get_logger
from moorage.storage import attachments, directories
from moorage.storage.errors import DamagedRecord, InvalidValue, NameTaken, OutOfSpace, StorageError, VolumeInUse
from moorage.storage.failpoints import reached
from moorage.storage.ids import id_from
from moorage.storage.layout import fsync_path, read_file, replace_file, write_file
from moorage.storage.model import Volume, VolumeKind
from moorage.storage.pool import Pool
from moorage.storage.records import VolumeRecord, encoded
from moorage.storage.sizes import MAXIMUM_BYTES, minimum_for, rounded_up
from moorage.storage.transfer.export import identity_of
from moorage.storage.transfer.stream import DATA, Frame, FramedBytes, Header, Position, StreamReader
from moorage.storage.transfer.unfinished import (
    IMPORTS,
    building,
    clear,
    discard_unfinished,
    forget_progress,
    keep,
    kept_position,
)
from moorage.storage.transfer.unpack import unpack
from moorage.storage.usage import observe
from moorage.storage.volumes import DATA as DATA_FILE
from moorage.storage.volumes import RECORD

log = get_logger(__name__)

_LINEAGE = "imported.json"
CHECKPOINT_BYTES = 256 << 20
_ZEROS = bytes(1 << 20)
_IDENTITY = re.compile(r"[0-9a-f]{32}")


class WrongBase(StorageError):
    """A delta was offered to something that is not in the state that it begins at."""

    code = "FAILED_PRECONDITION"
    retryable = False


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """Where a stream goes: a new volume called `name` (default: as it was), or the volume with the id `onto`."""

    name: str = ""
    onto: str = ""
    restart: bool = False
    checkpoint_bytes: int = CHECKPOINT_BYTES


@dataclass(frozen=True, slots=True)
class Imported:
    volume: Volume
    data_bytes: int
    resumed_at: int
    was_complete: bool = False


class _State(msgspec.Struct, frozen=True):
    """One content: the identity of its source, and the file that holds it unchanged."""

    identity: str
    inode: int
    mtime_ns: int


class _Lineage(msgspec.Struct, frozen=True):
    states: list[_State]


def import_stream(pool: Pool, fd: int, request: ImportRequest, progress: CopyProgress | None = None) -> Imported:
    """Read a stream to its end and leave the volume with its content, or nothing new at all."""
    reader = StreamReader(fd)
    header = reader.header
    _check_header(header)
    ident = request.onto or id_from(request.name or header.volume_name)
    with pool.context.layout.translated(f"import volume {ident}"):
        done = _already(pool, ident, header, request)
        if done is not None:
            return Imported(done, 0, 0, was_complete=True)
        base = _base_of(pool, header, request)
        _check_room(pool, header, ident)
        with building(pool, ident) as place:
            if request.restart:
                clear(place)
            if header.is_directory:
                start = reader.position.copied()
                fill_directory(pool, place, reader, progress)
            else:
                start = _prepare(place, header, base, reader.position)
                _fill(place, reader, start, request.checkpoint_bytes, progress)
            reached("import.filled")
            if request.onto:
                volume = _replace_data(pool, place, header, request.onto)
            else:
                volume = _publish(pool, place, header, request.name or header.volume_name, ident)
    pool.context.changed_by_guest()
    log.info("volume imported", volume=ident, pool=pool.name, base=header.base_snapshot_id)
    return Imported(volume, reader.position.data_bytes, start.at if start.frames else 0)


def state_of(volume: Volume) -> str:
    """The identity of the content that was imported into a volume and not changed since; or nothing."""
    path = os.path.join(volume.data.parent, _LINEAGE)
    try:
        lineage = msgspec.json.decode(read_file(path), type=_Lineage)
        now = os.stat(volume.data)
    except FileNotFoundError:
        return ""
    except (msgspec.DecodeError, UnicodeDecodeError) as failed:
        raise DamagedRecord(path, str(failed)) from failed
    for state in lineage.states:
        if (state.inode, state.mtime_ns) == (now.st_ino, now.st_mtime_ns):
            return state.identity
    return ""


# --- what there is already -----------------------------------------------------------------


def _already(pool: Pool, ident: str, header: Header, request: ImportRequest) -> Volume | None:
    """The volume if it has this very content; an error if the name is taken by another."""
    existing = pool.volumes.get(ident) if request.onto else pool.volumes.find(ident)
    if existing is None:
        return None
    if state_of(existing) == header.source:
        discard_unfinished(pool, ident)
        if rounded_up(header.size_bytes) > existing.size_bytes:  # the one step after the data is there
            return pool.expand_volume(ident, header.size_bytes)
        return existing
    if not request.onto:
        raise NameTaken("volume", existing.name, "it is not the same import; give another --name")
    return None


def _base_of(pool: Pool, header: Header, request: ImportRequest) -> Path | None:
    """The file that the stream's ranges are changes of; None for a full stream."""
    if not header.base:
        if request.onto:
            raise WrongBase(
                f"the stream is a full export; it makes a new volume and is not applied onto {request.onto}"
            )
        return None
    wanted = header.base_snapshot_id
    if request.onto:
        volume = pool.volumes.get(request.onto)
        found = state_of(volume)
        if found != header.base:
            why = "has another state" if found else "was not imported, or was changed since"
            raise WrongBase(
                f"the stream holds what changed since snapshot {wanted}; volume {volume.id} {why}, "
                "so the result would be damaged"
            )
        return volume.data
    snapshot = pool.snapshots.find(wanted)
    if snapshot is None or identity_of(pool, snapshot) != header.base:
        raise WrongBase(
            f"the stream holds only what changed since snapshot {wanted}, which is not in pool {pool.name}; "
            "import that first and apply this with --onto"
        )
    return snapshot.data


def _check_header(header: Header) -> None:
    """Refuse what no volume of ours can be. The checksums of a stream prove nothing about who made it."""
    kind = VolumeKind.DIRECTORY if header.is_directory else VolumeKind.IMAGE
    minimum_for(kind, header.filesystem)  # raises for an unknown filesystem
    if not 0 < header.size_bytes <= MAXIMUM_BYTES:
        raise InvalidValue("size_bytes", f"a volume cannot have {header.size_bytes} bytes")
    if not _IDENTITY.fullmatch(header.source) or not _IDENTITY.fullmatch(header.base or header.source):
        raise InvalidValue("source", "the stream does not say what its content is")
    if header.is_directory and (header.base or header.filesystem):
        raise InvalidValue("kind", "a directory has neither a base nor a filesystem")


def _check_room(pool: Pool, header: Header, ident: str) -> None:
    existing = pool.volumes.find(ident)
    more = _most_bytes(header) - (existing.size_bytes if existing is not None else 0)
    available = pool.capacity().available_bytes
    if more > available:
        raise OutOfSpace(f"import volume {ident}: {more} bytes do not fit, pool {pool.name} has {available} left")


def _most_bytes(header: Header) -> int:
    """How many bytes the volume may hold. A directory whose size was not enforced may hold more than its size."""
    return max(header.size_bytes, header.data_bytes) if header.is_directory else header.size_bytes


# --- building ------------------------------------------------------------------------------


def _prepare(place: str, header: Header, base: Path | None, begin: Position) -> Position:
    """Where to go on: after what is on disk of the same stream, or at the beginning with the base's data."""
    stream = f"{header.source} {header.base}"
    kept = kept_position(place, stream)
    if kept is not None and os.path.exists(os.path.join(place, DATA_FILE)):
        return kept
    fd = os.open(os.path.join(place, DATA_FILE), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if base is not None:
            with open(base, "rb") as source:
                if not clone_file(source.fileno(), fd):
                    copy_sparse(source.fileno(), fd)
        os.ftruncate(fd, max(rounded_up(header.size_bytes), os.fstat(fd).st_size))
        os.fsync(fd)
    finally:
        os.close(fd)
    keep(place, stream, begin)
    return begin.copied()


def _fill(
    place: str, reader: StreamReader, start: Position, checkpoint_bytes: int, progress: CopyProgress | None
) -> None:
    """Write every frame from `start` on; every so many bytes, make sure of them."""
    header = reader.header
    stream = f"{header.source} {header.base}"
    reader.skip_to(start)  # a pipe is read from its beginning instead, and the known part is not written again
    fd = os.open(os.path.join(place, DATA_FILE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    position, unsaved = start.copied(), 0
    try:
        try:
            for frame, payload, after in reader.frames():
                if after.at <= start.at:
                    continue
                _write(fd, frame, payload)
                position, unsaved = after, unsaved + frame.payload_bytes
                if unsaved >= checkpoint_bytes:
                    os.fdatasync(fd)
                    keep(place, stream, position)
                    unsaved = 0
                    reached("import.checkpoint")
                if progress is not None:
                    progress(position.data_bytes, max(header.data_bytes, position.data_bytes))
        except (MoorageError, KeyboardInterrupt):
            os.fdatasync(fd)
            keep(place, stream, position)
            raise
        os.fsync(fd)
        past = time.time_ns() - 1_000_000_000  # whatever is written later has another time, to the tick
        os.utime(fd, ns=(past, past))
        os.fsync(fd)
    finally:
        os.close(fd)


def fill_directory(pool: Pool, place: str, reader: StreamReader, progress: CopyProgress | None) -> None:
    """Unpack a directory's archive, from its beginning whatever is there, and leave it on disk."""
    clear(place)
    data = os.path.join(place, DATA_FILE)
    directories.make(data, pool.context.is_btrfs)
    total = reader.header.data_bytes

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, max(total, done))

    archive = FramedBytes(reader)
    unpack(archive, data, tell, _most_bytes(reader.header))
    archive.drain()  # nothing is published before the trailer was seen
    directories.sync(data)


def _write(fd: int, frame: Frame, payload: memoryview) -> None:
    if frame.kind == DATA:
        offset = frame.offset
        while payload:
            count = os.pwrite(fd, payload, offset)
            payload, offset = payload[count:], offset + count
        return
    if not holes.punch(fd, frame.offset, frame.length):
        for offset in range(frame.offset, frame.offset + frame.length, len(_ZEROS)):
            os.pwrite(fd, _ZEROS[: frame.offset + frame.length - offset], offset)


# --- finishing -----------------------------------------------------------------------------


def _state(path: str, identity: str) -> _State:
    found = os.stat(path)
    return _State(identity, found.st_ino, found.st_mtime_ns)


def _publish(pool: Pool, place: str, header: Header, name: str, ident: str) -> Volume:
    """The directory of the import becomes the volume's, in one rename."""
    context = pool.context
    size = rounded_up(header.size_bytes)
    data = os.path.join(place, DATA_FILE)
    is_directory = header.is_directory
    record = VolumeRecord(
        id=ident,
        name=name,
        kind=VolumeKind.DIRECTORY if is_directory else VolumeKind.IMAGE,
        size_bytes=size,
        created_ns=context.now_ns(),
        filesystem=header.filesystem,
        size_enforced=not is_directory or directories.limit(data, ident, size, context.is_btrfs),
    )
    with context.names.held(f"volume {ident}"), context.ledger.reserved(size, f"import volume {ident}"):
        if not is_directory:  # the inode and time of a directory say nothing about the files below it
            lineage = _Lineage([_state(data, header.source)])
            write_file(os.path.join(place, _LINEAGE), msgspec.json.encode(lineage))
        attachments.prepare(context, place)
        write_file(os.path.join(place, RECORD), encoded(record))
        reached("import.recorded")
        # The progress goes last: until the rename, a repeated import finds it and has nothing left to write.
        if os.path.exists(os.path.join(context.layout.volumes, ident)):
            raise NameTaken("volume", name, "it was made meanwhile")
        if not context.layout.publish(place, context.layout.volumes, ident):
            raise NameTaken("volume", name, "it was made meanwhile")
    if not is_directory:
        forget_progress(os.path.join(context.layout.volumes, ident))
    fsync_path(os.path.join(pool.directory, IMPORTS))
    return pool.volumes.get(ident)


def _replace_data(pool: Pool, place: str, header: Header, ident: str) -> Volume:
    """Give a volume its new data in one rename; its lineage knows both states before."""
    new = os.path.join(place, DATA_FILE)
    with pool.volumes.locked(ident) as volume:
        use = observe(volume.data, volume.kind)
        if use:
            raise VolumeInUse(f"volume {ident} is still in use on this node: {use.holders}")
        attached = pool.context.attached_nodes(ident)
        if attached:
            raise VolumeInUse(f"volume {ident} is attached to {', '.join(attached)}")
        if state_of(volume) != header.base:
            raise WrongBase(f"volume {ident} was changed while the stream was read")
        states = [_state(os.fspath(volume.data), header.base), _state(new, header.source)]
        replace_file(os.path.join(volume.data.parent, _LINEAGE), msgspec.json.encode(_Lineage(states)))
        reached("import.lineage")
        os.rename(new, volume.data)
        fsync_path(os.fspath(volume.data.parent))
        reached("import.replaced")
    if rounded_up(header.size_bytes) > volume.size_bytes:
        pool.expand_volume(ident, header.size_bytes)
    remove_tree(place)
    return pool.volumes.get(ident)
