"""A local, current copy of the objects of one kind, and word of every change to it.

Owns: list and watch, resuming, relisting after 410, indexes, and delivery to handlers in order.
May not touch: decisions; a handler is told (old, new) and should only put a key into a queue.
Start reading at: `Informer.run`, `Informer.remember`, `Informers`.

A copy never goes back in time: an object older than the one at hand is dropped, so a component that `remember`s what
its own write returned cannot be misled by a slower watch.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Self, TypeVar, cast

from moorage.kube.client import Client, WatchEvent
from moorage.kube.errors import ApiError, Gone, Unavailable
from moorage.kube.objects.meta import KubeObject, version_number
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T", bound=KubeObject)
Handler = Callable[[T | None, T | None], None]
IndexKeys = Callable[[T], Iterable[str]]

_BACKOFF_START_S = 0.2
_BACKOFF_MAX_S = 15.0


class Informer(Generic[T]):
    """The objects of one kind (in one namespace, or matching one selector), kept current."""

    def __init__(
        self,
        client: Client,
        kind: type[T],
        *,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        resync_s: float = 0.0,
    ) -> None:
        self.kind = kind
        self._client = client
        self._scope: dict[str, Any] = {"namespace": namespace, "labels": labels, "fields": fields}
        self._resync_s = resync_s
        self._objects: dict[str, T] = {}
        self._indexers: dict[str, IndexKeys[T]] = {}
        self._indexes: dict[str, dict[str, dict[str, T]]] = {}
        self._handlers: list[Handler[T]] = []
        self._synced = asyncio.Event()
        self._seen_version = 0  # the stream has told us everything up to here
        self._streams_lists = True  # until the server refuses sendInitialEvents
        self.relists = 0

    def get(self, key: str) -> T | None:
        """The object with this key (`namespace/name` or `name`), as last heard."""
        return self._objects.get(key)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._objects.values()))

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def is_synced(self) -> bool:
        """True once the first list has been taken in and every handler has been told of it."""
        return self._synced.is_set()

    @property
    def seen_version(self) -> int:
        """The newest revision up to which everything of this kind is known here."""
        return self._seen_version

    async def wait_synced(self) -> None:
        await self._synced.wait()

    def index(self, name: str, keys: IndexKeys[T]) -> None:
        """Keep an index: `at(name, value)` then finds the objects for which `keys` gave that value."""
        if name in self._indexers:
            return
        self._indexers[name] = keys
        self._indexes[name] = {}
        for obj in self._objects.values():
            self._index_add(name, obj)

    def at(self, name: str, value: str) -> list[T]:
        """The objects that an index holds under a value."""
        return list(self._indexes[name].get(value, {}).values())

    def subscribe(self, handler: Handler[T]) -> None:
        """Be told (old, new) of every change from now on, and first (None, object) of all that is there."""
        self._handlers.append(handler)
        for obj in list(self._objects.values()):
            handler(None, obj)

    def remember(self, obj: T) -> None:
        """Take in what an own write returned, unless the stream is already past it."""
        if obj.version > self._seen_version:
            self._put(obj)

    def resync(self) -> None:
        """Tell every handler of every object once more."""
        for obj in list(self._objects.values()):
            self._tell(obj, obj)

    async def run(self) -> None:
        """List and watch for ever; every failure is waited out."""
        backoff_s = _BACKOFF_START_S
        resyncing = asyncio.create_task(self._resync_forever(), name=f"resync-{self.kind.resource.plural}")
        try:
            while True:
                try:
                    if not self.is_synced or not self._seen_version:
                        await self._list()
                    await self._watch()
                    backoff_s = _BACKOFF_START_S
                    continue
                except Gone:
                    self._seen_version = 0
                    continue
                except ApiError as error:
                    self._log_failure(error)
                await asyncio.sleep(backoff_s * random.uniform(0.7, 1.3))
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
        finally:
            resyncing.cancel()

    async def _list(self) -> None:
        if self._streams_lists:
            try:
                await self._list_by_watch()
                return
            except Unavailable:
                raise
            except ApiError as error:
                if error.status in (401, 403, 404, 429):
                    raise
                self._streams_lists = False
        found = await self._client.list(self.kind, **self._scope)
        self._replace({obj.key: obj for obj in found.items}, version_number(found.resource_version))

    async def _list_by_watch(self) -> None:
        fresh: dict[str, T] = {}
        stream = self._client.watch(self.kind, initial=True, timeout_s=300, **self._scope)
        try:
            async for event in cast(Any, stream):
                if event.ends_initial_list:
                    self._replace(fresh, event.object.version)
                    return
                if event.type in ("ADDED", "MODIFIED"):
                    fresh[event.object.key] = event.object
                elif event.type == "DELETED":
                    fresh.pop(event.object.key, None)
        finally:
            await cast(Any, stream).aclose()
        raise Unavailable(503, "Unreachable", "the initial list ended before its end was announced")

    async def _watch(self) -> None:
        stream = self._client.watch(
            self.kind, version=str(self._seen_version), timeout_s=random.randint(300, 600), **self._scope
        )
        try:
            async for event in cast(Any, stream):
                self._take(event)
        finally:
            await cast(Any, stream).aclose()

    def _take(self, event: WatchEvent[T]) -> None:
        obj = event.object
        if event.type == "DELETED":
            known = self._objects.get(obj.key)
            if known is not None and known.version <= obj.version:
                self._drop(known, obj)
        elif event.type in ("ADDED", "MODIFIED"):
            self._put(obj)
        self._seen_version = max(self._seen_version, obj.version)

    def _replace(self, fresh: dict[str, T], version: int) -> None:
        self.relists += 1
        for key, known in list(self._objects.items()):
            if key not in fresh and known.version <= version:
                self._drop(known, known)
        for obj in fresh.values():
            self._put(obj)
        self._seen_version = version
        self._synced.set()

    def _put(self, obj: T) -> None:
        old = self._objects.get(obj.key)
        if old is not None:
            if old.version > obj.version or (old.version == obj.version and old.uid == obj.uid):
                return
            if old.uid != obj.uid:
                self._drop(old, old)
                old = None
        self._objects[obj.key] = obj
        for name in self._indexers:
            if old is not None:
                self._index_remove(name, old)
            self._index_add(name, obj)
        self._tell(old, obj)

    def _drop(self, known: T, last: T) -> None:
        del self._objects[known.key]
        for name in self._indexers:
            self._index_remove(name, known)
        self._tell(last if last.uid == known.uid else known, None)

    def _tell(self, old: T | None, new: T | None) -> None:
        for handler in self._handlers:
            handler(old, new)

    def _index_add(self, name: str, obj: T) -> None:
        for value in self._indexers[name](obj):
            self._indexes[name].setdefault(value, {})[obj.key] = obj

    def _index_remove(self, name: str, obj: T) -> None:
        for value in self._indexers[name](obj):
            bucket = self._indexes[name].get(value)
            if bucket is not None:
                bucket.pop(obj.key, None)
                if not bucket:
                    del self._indexes[name][value]

    async def _resync_forever(self) -> None:
        while self._resync_s > 0:
            await asyncio.sleep(self._resync_s)
            self.resync()

    def _log_failure(self, error: ApiError) -> None:
        log.warning("cannot follow", kind=self.kind.resource.plural, reason=str(error), status=error.status)


class Informers:
    """One informer per kind and scope, shared by all parts of a process.

    Use as `async with Informers(client) as informers`; an informer asked for with `of` starts at once when the
    block is entered, or when it is asked for inside.
    """

    def __init__(self, client: Client, *, resync_s: float = 0.0) -> None:
        self.client = client
        self._resync_s = resync_s
        self._informers: dict[tuple[type[Any], str, str, str], Informer[Any]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._running = False

    def of(self, kind: type[T], *, namespace: str = "", labels: str = "", fields: str = "") -> Informer[T]:
        """The shared informer of a kind in a scope."""
        key = (kind, namespace, labels, fields)
        informer = self._informers.get(key)
        if informer is None:
            informer = Informer(
                self.client, kind, namespace=namespace, labels=labels, fields=fields, resync_s=self._resync_s
            )
            self._informers[key] = informer
            if self._running:
                self._start(informer)
        return cast(Informer[T], informer)

    async def wait_synced(self) -> None:
        """Return when every informer asked for so far has taken in its first list."""
        for informer in list(self._informers.values()):
            await informer.wait_synced()

    async def __aenter__(self) -> Self:
        self._running = True
        for informer in self._informers.values():
            self._start(informer)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running = False
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    def _start(self, informer: Informer[Any]) -> None:
        task = asyncio.create_task(informer.run(), name=f"informer-{informer.kind.resource.plural}")
        task.add_done_callback(_report_end)
        self._tasks[id(informer)] = task


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("informer ended", task=task.get_name(), reason=repr(task.exception()))
