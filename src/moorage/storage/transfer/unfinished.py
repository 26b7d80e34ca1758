"""Unfinished imports: where one is built until it is whole, and how far it has come.

Owns: `imports/<id>/` in the pool, and `progress.json` in it.
May not touch: volumes.
Start reading at: `building`, `unfinished`.

The directory is locked while its import lives, so a collector can tell the dead ones.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator

import msgspec

from moorage.host.safe_remove import remove_tree
from moorage.storage.errors import Busy, DamagedRecord, StorageError
from moorage.storage.layout import read_file, replace_file
from moorage.storage.pool import Pool
from moorage.storage.transfer.stream import Position
from moorage.storage.volumes import DATA as DATA_FILE

IMPORTS = "imports"
_PROGRESS = "progress.json"


class OtherImport(StorageError):
    """An import of another stream under this name is unfinished."""

    code = "FAILED_PRECONDITION"
    retryable = False


class _Progress(msgspec.Struct, frozen=True):
    """How far an import is on disk; `stream` tells source and base."""

    stream: str
    at: int
    frames: int
    data_bytes: int
    offset: int
    chain: str

    def position(self) -> Position:
        return Position(self.at, self.frames, self.data_bytes, self.offset, bytes.fromhex(self.chain))


@contextlib.contextmanager
def building(pool: Pool, ident: str) -> Iterator[str]:
    """The import's own directory, locked; what is not published stays for the next try."""
    place = os.path.join(pool.directory, IMPORTS, ident)
    os.makedirs(place, 0o700, exist_ok=True)
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as failed:
            raise Busy(f"another import of volume {ident} is running") from failed
        yield place
    except Exception:
        if not os.path.exists(os.path.join(place, _PROGRESS)):
            remove_tree(place)  # nothing worth keeping
        raise
    finally:
        os.close(fd)


def clear(place: str) -> None:
    """Remove what the import wrote so far."""
    for name in os.listdir(place):
        remove_tree(os.path.join(place, name))


def kept_position(place: str, stream: str) -> Position | None:
    """How far an import of this stream came before; an error if it was another stream."""
    path = os.path.join(place, _PROGRESS)
    try:
        kept = msgspec.json.decode(read_file(path), type=_Progress)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as failed:
        raise DamagedRecord(path, str(failed)) from failed
    if kept.stream != stream:
        raise OtherImport(
            f"an import of another stream into volume {os.path.basename(place)} is unfinished; "
            "finish it, or start over with --restart"
        )
    return kept.position()


def keep(place: str, stream: str, position: Position) -> None:
    """Write down that everything up to here is on disk."""
    record = _Progress(stream, position.at, position.frames, position.data_bytes, position.offset, position.chain.hex())
    replace_file(os.path.join(place, _PROGRESS), msgspec.json.encode(record))


def unfinished(pool: Pool) -> list[tuple[str, float, bool]]:
    """Imports that are not complete: the id, when they last moved, and whether their process lives."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(os.path.join(pool.directory, IMPORTS)) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                data = os.path.join(entry.path, DATA_FILE)
                moved = os.stat(data if os.path.exists(data) else entry.path).st_mtime
                found.append((entry.name, moved, not _is_free(entry.path)))
    return sorted(found)


def discard_unfinished(pool: Pool, ident: str) -> bool:
    """Remove an unfinished import whose process is dead."""
    place = os.path.join(pool.directory, IMPORTS, ident)
    if not os.path.isdir(place) or not _is_free(place):
        return False
    remove_tree(place)
    return True


def forget_progress(place: str) -> None:
    """Remove the record from what became a volume."""
    os.unlink(os.path.join(place, _PROGRESS))


def _is_free(place: str) -> bool:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
