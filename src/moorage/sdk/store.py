"""A durable table of small documents in a directory, for drivers that have no database.

Owns: one JSON file for each key, written whole or not at all, and the lock that gives the directory one owner.
Start reading at: `Store`.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from moorage.errors import MoorageError
from moorage.sdk.errors import FailedPrecondition, InvalidArgument

_SUFFIX = ".json"
_LONGEST_NAME = 250
_HIDDEN = "."


class DamagedDocument(MoorageError):
    """A file of the store is not a document."""


class Store:
    """A mapping from text to documents. A write that returned survives a crash; one that did not leaves the old value.

    Opening a directory that another process has open raises FailedPrecondition.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise FailedPrecondition(f"{self.directory} is in use by another process") from error
        for left in self.directory.glob(f"{_HIDDEN}*"):
            left.unlink()  # a write that a crash interrupted

    def close(self) -> None:
        """Release the directory."""
        os.close(self._lock)

    def get(self, key: str) -> Any | None:
        """Return a document, None if there is none."""
        path = self._path(key)
        try:
            return msgspec.json.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedDocument(f"{path} is damaged: {error}") from error

    def put(self, key: str, document: Any) -> None:
        """Write a document; when this returns, it is on disk."""
        path = self._path(key)
        building = path.with_name(_HIDDEN + path.name)
        with open(building, "wb", opener=_private) as file:
            file.write(msgspec.json.encode(document))
            file.flush()
            os.fsync(file.fileno())
        os.rename(building, path)
        os.fsync(self._lock)

    def delete(self, key: str) -> None:
        """Remove a document; if there is none, that is fine."""
        self._path(key).unlink(missing_ok=True)
        os.fsync(self._lock)

    def keys(self) -> Iterator[str]:
        """Yield every key, in order."""
        names = (name for name in os.listdir(self.directory) if name.endswith(_SUFFIX) and name[0] != _HIDDEN)
        return iter(sorted(unquote(name.removesuffix(_SUFFIX)) for name in names))

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield every key with its document, in order."""
        for key in self.keys():
            document = self.get(key)
            if document is not None:
                yield key, document

    def _path(self, key: str) -> Path:
        name = quote(key, safe="")
        if name.startswith("."):
            name = "%2E" + name[1:]
        if not key or len(name) > _LONGEST_NAME:
            raise InvalidArgument(f"the key {key[:64]!r} cannot be a file name of a store")
        return self.directory / (name + _SUFFIX)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
