"""What the parts of one open pool share.

Owns: the bundle of configuration, directories, ledger and locks; no behaviour of its own.
May not touch: volumes and snapshots; the modules that do, take a `Context`.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moorage.storage.layout import PoolLayout
from moorage.storage.ledger import Ledger
from moorage.storage.model import PoolConfig, VolumeKind
from moorage.storage.tree_sizes import TreeSizes


class KeyedLocks:
    """A lock for each key that a thread holds or waits for; nothing for all the others."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def held(self, key: str) -> Iterator[None]:
        with self._guard:
            lock, users = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._locks[key]
                if users == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = (lock, users - 1)


@dataclass(slots=True)
class PoolContext:
    """One open pool.

    `make_room` frees trash until so many bytes are free, oldest first; `attached_nodes` says which
    nodes of a shared pool have a volume; `changed_by_guest` tells the owner of a guest's change.
    """

    config: PoolConfig
    layout: PoolLayout
    ledger: Ledger
    fstype: str
    copies_by_reflink: bool
    names: KeyedLocks = field(default_factory=KeyedLocks)
    tree_sizes: TreeSizes = field(default_factory=TreeSizes)
    now_ns: Callable[[], int] = time.time_ns
    make_room: Callable[[int], None] = lambda _: None
    attached_nodes: Callable[[str], list[str]] = lambda _: []
    changed_by_guest: Callable[[], None] = lambda: None

    @property
    def is_btrfs(self) -> bool:
        return self.fstype == "btrfs"

    def data_bytes(self, data: str | Path, kind: VolumeKind) -> int:
        """What a volume's or snapshot's data takes on disk now; nothing where it is missing."""
        if kind is VolumeKind.DIRECTORY:
            return self.tree_sizes.bytes_of(os.fspath(data))
        try:
            found = os.lstat(data)
        except FileNotFoundError:
            return 0
        return min(found.st_size, found.st_blocks * 512)
