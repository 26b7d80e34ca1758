"""Objects on disk and in memory: SQLite for durability, encoded bytes for speed, one revision for all.

Owns: the database file, the in-memory tables, group commit, and handing committed changes to the logs.
May not touch: the meaning of objects. It sees a resource's name, a namespace, a name and bytes.
Start reading at: `Store.write`, `Transaction`.

A write is a function that reads the current state and stages changes. The functions that wait while a commit is on its
way to the disk run together in the next one, in the thread of the database: however much one of them computes, the
event loop goes on. The committed state does not change meanwhile, because only the end of the commit changes it, on
the event loop. Nothing is visible to readers, and no writer is answered, before its commit has returned; a function
that raises leaves nothing behind.
"""

import asyncio
import sqlite3
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from moorage.apiserver.errors import too_large_object, unavailable
from moorage.apiserver.store.change_log import Change, Log, ObjectVersion
from moorage.apiserver.store.owner_index import Owners
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")
Key = tuple[str, str]  # namespace, name
encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode
LIMIT_OBJECT_BYTES = 3 << 19  # as etcd under Kubernetes
BATCH_S = 0.1  # after this much work a commit begins, and the writes that are left wait for the next one

_SCHEMA = (
    """
    CREATE TABLE objects (
        resource TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,
        revision INTEGER NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (resource, namespace, name)
    );
    CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
    CREATE TABLE changed (resource TEXT PRIMARY KEY, revision INTEGER NOT NULL);
    INSERT INTO counters VALUES ('revision', 1);
    """,
)


@dataclass(slots=True)
class ObjectTable:
    """All objects of one resource, in key order, and the log of their changes."""

    records: dict[Key, ObjectVersion] = field(default_factory=dict)
    order: list[Key] = field(default_factory=list)
    log: Log = field(default_factory=Log)

    def put(self, key: Key, record: ObjectVersion) -> None:
        if key not in self.records:
            insort(self.order, key)
        self.records[key] = record

    def drop(self, key: Key) -> None:
        if self.records.pop(key, None) is not None:
            del self.order[bisect_left(self.order, key)]


@dataclass(slots=True)
class PendingChange:
    """One change on its way to the disk."""

    resource: str
    key: Key
    kind: str
    record: ObjectVersion
    previous: ObjectVersion | None


class Transaction:
    """What one write sees and stages; reads fall through to the batch and then to the committed state."""

    __slots__ = ("_batch", "_store", "latest", "revision", "staged")

    def __init__(self, store: "Store", batch: "dict[tuple[str, Key], ObjectVersion | None]", revision: int) -> None:
        self._store = store
        self._batch = batch
        self.revision = revision
        self.staged: list[PendingChange] = []
        self.latest: dict[tuple[str, Key], ObjectVersion | None] = {}

    def get(self, resource: str, namespace: str, name: str) -> ObjectVersion | None:
        where = (resource, (namespace, name))
        for layer in (self.latest, self._batch):
            if where in layer:
                return layer[where]
        return self._store.get(resource, namespace, name)

    def records(self, resource: str, namespace: str) -> Iterator[ObjectVersion]:
        """Yield every object of a resource in a namespace, as this write sees it."""
        pending = {
            key: record for layer in (self._batch, self.latest) for (of, key), record in layer.items() if of == resource
        }
        table = self._store.table(resource)
        committed = table.order[
            bisect_left(table.order, (namespace, "")) : bisect_left(table.order, (namespace + "\0", ""))
        ]
        for key in dict.fromkeys((*committed, *(key for key in pending if key[0] == namespace))):
            record = pending[key] if key in pending else table.records[key]
            if record is not None:
                yield record

    def put(self, resource: str, namespace: str, name: str, body: dict[str, Any]) -> ObjectVersion:
        """Stage an object; its resourceVersion becomes the revision of this change."""
        key = (namespace, name)
        previous = self.get(resource, namespace, name)
        self.revision += 1
        body["metadata"]["resourceVersion"] = str(self.revision)
        record = ObjectVersion(self.revision, encode(body))
        if len(record.body) > LIMIT_OBJECT_BYTES:
            raise too_large_object(len(record.body), LIMIT_OBJECT_BYTES)
        self.latest[resource, key] = record
        kind = "MODIFIED" if previous else "ADDED"
        self.staged.append(PendingChange(resource, key, kind, record, previous))
        return record

    def delete(self, resource: str, namespace: str, name: str, body: dict[str, Any]) -> ObjectVersion:
        """Stage a removal; the last state goes to watchers under the revision of the removal."""
        key = (namespace, name)
        previous = self.get(resource, namespace, name)
        self.revision += 1
        body["metadata"]["resourceVersion"] = str(self.revision)
        record = ObjectVersion(self.revision, encode(body))
        self.latest[resource, key] = None
        self.staged.append(PendingChange(resource, key, "DELETED", record, previous))
        return record


@dataclass(slots=True)
class _Waiting:
    work: Callable[[Transaction], Any]
    result: asyncio.Future[Any]
    answer: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class _Batch:
    """The writes of one commit, and what came of them."""

    writes: list[_Waiting]
    revision: int
    staged: list[PendingChange] = field(default_factory=list)
    left: list[_Waiting] = field(default_factory=list)  # there was no time for these


class Store:
    """The state of the server. All methods belong to the event loop's thread, but writes run in the database's."""

    def __init__(self, path: Path | None) -> None:
        self._db = _opened(path)
        self._tables: dict[str, ObjectTable] = {}
        self._waiting: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sqlite")
        self.before_commit: list[Callable[[list[PendingChange]], None]] = []  # in the thread of the database
        self.on_commit: list[Callable[[list[PendingChange]], None]] = []
        self.commits = 0
        self.owners = Owners()
        self.revision = self._load()

    def start(self) -> None:
        """Begin to accept writes; needs a running loop."""
        self._writer = asyncio.create_task(self._write_forever(), name="apiserver-store")

    async def close(self) -> None:
        """Finish the commit under way, refuse what waits, and close the file."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        for waiting in self._waiting:
            if not waiting.result.done():
                waiting.result.set_exception(unavailable("the server is shutting down"))
        self._waiting.clear()
        self._disk.shutdown(wait=True)
        self._db.close()

    def table(self, resource: str) -> ObjectTable:
        found = self._tables.get(resource)
        return found if found is not None else self._tables.setdefault(resource, ObjectTable())

    def tables(self) -> dict[str, ObjectTable]:
        return self._tables

    def get(self, resource: str, namespace: str, name: str) -> ObjectVersion | None:
        found = self._tables.get(resource)
        return found.records.get((namespace, name)) if found else None

    def objects(self, resource: str, namespace: str = "") -> Iterator[dict[str, Any]]:
        """Every committed object of a resource, decoded."""
        table = self.table(resource)
        for key in list(table.order):
            if (not namespace or key[0] == namespace) and key in table.records:
                yield decode(table.records[key].body)

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in the next commit; return its result once it is on disk, or raise what it raised."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(work, result))
        self._wake.set()
        return await result

    def trim(self, now: float) -> None:
        """Forget history that no watcher may ask for any more."""
        held = sum(table.log.size_bytes for table in self._tables.values())
        for table in self._tables.values():
            table.log.trim(now, held)

    async def _write_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(0)  # let the other requests of this turn join
            batch, self._waiting = _Batch(self._waiting, self.revision), []
            commit = loop.run_in_executor(self._disk, self._store_batch, batch)
            try:
                await asyncio.shield(commit)
            except asyncio.CancelledError:
                await asyncio.wait([commit])
                self._finish(commit, batch)
                raise
            except Exception:
                log.debug("commit raised")  # _finish reads the same failure from the future
            self._finish(commit, batch)

    def _store_batch(self, batch: _Batch) -> None:
        """Run the writes of a batch, and commit what they staged."""
        self._run(batch)
        if batch.staged:
            for tell in self.before_commit:
                tell(batch.staged)
            self._commit(batch.staged, batch.revision)

    def _run(self, batch: _Batch) -> None:
        overlay: dict[tuple[str, Key], ObjectVersion | None] = {}
        end = time.monotonic() + BATCH_S
        for at, waiting in enumerate(batch.writes):
            if waiting.result.done():
                continue  # the client went away before its turn came
            if time.monotonic() > end:
                batch.writes, batch.left = batch.writes[:at], batch.writes[at:]
                return
            transaction = Transaction(self, overlay, batch.revision)
            try:
                waiting.answer = waiting.work(transaction)
            except Exception as error:
                waiting.error = error
                continue
            overlay.update(transaction.latest)
            batch.revision = transaction.revision
            batch.staged.extend(transaction.staged)

    def _finish(self, commit: asyncio.Future[None], batch: _Batch) -> None:
        if batch.left:
            self._waiting[:0] = batch.left
            self._wake.set()
        error = commit.exception()
        if error is not None:
            log.error("commit failed", error=str(error), writes=len(batch.staged))
            for waiting in batch.writes:
                waiting.error = waiting.error or unavailable(f"the write could not be stored: {error}")
        elif batch.staged:
            self._apply(batch.staged, batch.revision)
        for waiting in batch.writes:
            if waiting.result.done():
                continue
            if waiting.error is not None:
                waiting.result.set_exception(waiting.error)
            else:
                waiting.result.set_result(waiting.answer)

    def _commit(self, staged: list[PendingChange], revision: int) -> None:
        last: dict[tuple[str, Key], PendingChange] = {(s.resource, s.key): s for s in staged}
        puts = [(s.resource, *s.key, s.record.revision, s.record.body) for s in last.values() if s.kind != "DELETED"]
        drops = [(s.resource, *s.key) for s in last.values() if s.kind == "DELETED"]
        changed = {s.resource: s.record.revision for s in staged}
        with transaction(self._db) as db:
            db.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?)", puts)
            db.executemany("DELETE FROM objects WHERE resource = ? AND namespace = ? AND name = ?", drops)
            db.executemany("INSERT OR REPLACE INTO changed VALUES (?, ?)", changed.items())
            db.execute("UPDATE counters SET value = ? WHERE name = 'revision'", (revision,))

    def _apply(self, staged: list[PendingChange], revision: int) -> None:
        for change in staged:
            table = self.table(change.resource)
            before = change.previous.body if change.previous else None
            after = None if change.kind == "DELETED" else change.record.body
            self.owners.note(change.resource, change.key, before, after)
            if after is None:
                table.drop(change.key)
            else:
                table.put(change.key, change.record)
            table.log.append(Change(change.kind, change.key, change.record, change.previous))
        self.revision = revision
        self.commits += 1
        for tell in self.on_commit:
            try:
                tell(staged)
            except Exception:  # what is committed stays so, and the next writers must not wait for ever
                log.exception("a follower of commits failed", follower=getattr(tell, "__qualname__", str(tell)))

    def _load(self) -> int:
        revision = int(self._db.execute("SELECT value FROM counters WHERE name = 'revision'").fetchone()[0])
        namespaces: dict[str, str] = {}
        rows: Iterable[tuple[str, str, str, int, bytes]] = self._db.execute(
            "SELECT resource, namespace, name, revision, body FROM objects ORDER BY resource, namespace, name"
        )
        for resource, namespace, name, changed, body in rows:
            table = self.table(resource)
            key = (namespaces.setdefault(namespace, namespace), name)
            table.records[key] = ObjectVersion(changed, body)
            self.owners.note(resource, key, None, body)
            table.order.append(key)
        for resource, changed in self._db.execute("SELECT resource, revision FROM changed"):
            self.table(resource).log.floor = changed
        return revision


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All of the block, or nothing of it."""
    db.execute("BEGIN IMMEDIATE")  # take the write lock now, not at the first write
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:  # cancellation included
        db.rollback()
        raise


def _opened(path: Path | None) -> sqlite3.Connection:
    """The database with full durability; without a path it lives in memory, for tests that need no disk."""
    if path is not None:
        path.touch(mode=0o600)  # Secrets are in it; SQLite gives its other files the same mode
        path.chmod(0o600)
    db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA cache_size = -4096")
    db.execute("PRAGMA wal_autocheckpoint = 4000")  # rarer, as one that falls into a commit delays its writers
    if path is not None:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")  # a second server on one file must fail, not interleave
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    for number, step in enumerate(_SCHEMA[version:], version + 1):
        db.executescript(f"BEGIN IMMEDIATE; {step}; PRAGMA user_version = {number}; COMMIT;")
    return db
