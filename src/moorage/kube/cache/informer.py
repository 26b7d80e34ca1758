"""Cache the objects of one kind and notify handlers of changes.

Owns: list and watch, resuming, relisting after 410, indexes, and calling handlers in order.
Start reading at: `Informer.run`, `Informer.subscription`, `Informer.remember`.

A handler is called with (old, new) and should only enqueue a key. A cache never goes back in time: it drops an object
that is older than the cached one, so a slow watch cannot undo what `remember` put in after an own write.
"""

import asyncio
import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Generic, TypeVar

from moorage.kube.api.client import Client, WatchEvent
from moorage.kube.cache.interning import shared
from moorage.kube.errors import ApiError, Gone, Unavailable
from moorage.kube.objects.meta import KubeObject, version_number
from moorage.kube.selectors import LabelMatch
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T", bound=KubeObject)
ChangeHandler = Callable[[T | None, T | None], None]
IndexKeys = Callable[[T], Iterable[str]]

_BACKOFF_START_S = 0.2
_BACKOFF_MAX_S = 15.0
_SHORT_WATCH_S = 1.0  # a watch that ends sooner and told nothing counts as a failure, lest we spin
_SILENCE_S = 30.0  # a server that ignores sendInitialEvents never announces the end of the list
_STREAMED_TRIES = 2
_RESUMABLE = frozenset({429, 500, 502, 503})  # the server's trouble, not our version's: no reason to list again
_REFUSED = frozenset({401, 403, 404, 429})  # as true of a list as of a streamed one


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
        self._indexers: dict[Hashable, IndexKeys[T]] = {}
        self._indexes: dict[Hashable, dict[str, dict[str, T]]] = {}
        self._handlers: list[ChangeHandler[T]] = []
        self._synced = asyncio.Event()
        self._seen_version = 0  # the stream has told us everything up to here
        self._must_list = True
        self._streams_lists = True  # until the server refuses sendInitialEvents
        self._streamed_failures = 0
        self._match = LabelMatch.parse(labels)
        self._changed_at = time.monotonic()
        self._heard = 0  # events of the stream, bookmarks included
        self.relists = 0
        self.changes = 0

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

    @property
    def quiet_s(self) -> float:
        """Return the seconds since the handlers were last called."""
        return time.monotonic() - self._changed_at

    async def wait_synced(self) -> None:
        await self._synced.wait()

    def index(self, name: Hashable, keys: IndexKeys[T]) -> None:
        """Keep an index: `at(name, value)` then finds the objects for which `keys` gave that value."""
        if name in self._indexers:
            return
        self._indexers[name] = keys
        self._indexes[name] = {}
        for obj in self._objects.values():
            self._index_add(name, obj)

    def at(self, name: Hashable, value: str) -> list[T]:
        """Return the objects that an index holds under a value."""
        return list(self._indexes[name].get(value, {}).values())

    def by(self, keys: IndexKeys[T], value: str) -> list[T]:
        """Return the objects for which `keys` gives this value.

        The function names the index, which is built at the first call. Pass a module-level function: a new lambda in
        each call would build a new index each time.
        """
        self.index(keys, keys)
        return self.at(keys, value)

    def subscribe(self, handler: ChangeHandler[T]) -> None:
        """Call `handler` with (None, object) for each cached object, then with (old, new) for every change."""
        self._add_handler(handler, replay=True)

    @contextmanager
    def subscription(self, handler: ChangeHandler[T], *, replay: bool = True) -> Iterator[None]:
        """Call `handler` with (old, new) for every change inside the block.

        With `replay` it is called first with (None, object) for each cached object.
        """
        self._add_handler(handler, replay=replay)
        try:
            yield
        finally:
            handlers = list(self._handlers)  # a copy: a notification may be iterating over the old list
            handlers.remove(handler)
            self._handlers = handlers

    def _add_handler(self, handler: ChangeHandler[T], *, replay: bool) -> None:
        self._handlers = [*self._handlers, handler]
        for obj in list(self._objects.values()) if replay else ():
            self._call(handler, None, obj)

    def remember(self, obj: T) -> None:
        """Cache what an own write returned, unless the watch is already past it or it is outside this scope."""
        if obj.version > self._seen_version and self._is_ours(obj):
            self._put(obj)

    def resync(self) -> None:
        """Tell every handler of every object once more."""
        for obj in list(self._objects.values()):
            for handler in self._handlers:
                self._call(handler, obj, obj)

    async def run(self) -> None:
        """List and watch for ever; every failure is waited out."""
        async with asyncio.TaskGroup() as tasks:
            if self._resync_s > 0:
                tasks.create_task(self._resync_forever(), name=f"resync-{self.kind.resource.plural}")
            await self._follow_forever()

    async def _follow_forever(self) -> None:
        backoff_s = _BACKOFF_START_S
        while True:
            heard, started = self._heard, asyncio.get_running_loop().time()
            try:
                await self._list_and_watch()
            except Gone:
                self._must_list = True
                log.debug("history is gone, listing again", kind=self.kind.resource.plural)
            except ApiError as error:
                self._log_failure(error)
            except Exception:  # a fault of ours in one object must not blind the whole process
                self._must_list = True
                log.exception("cannot follow", kind=self.kind.resource.plural)
            if self._heard != heard or asyncio.get_running_loop().time() - started > _SHORT_WATCH_S:
                backoff_s = _BACKOFF_START_S
                if not self._must_list:
                    await asyncio.sleep(0)
                    continue
            await asyncio.sleep(backoff_s * random.uniform(0.7, 1.3))
            backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)

    async def _list_and_watch(self) -> None:
        if self._must_list and self._streams_lists and self._streamed_failures < _STREAMED_TRIES:
            await self._watch_from_list()
            if not self._must_list:
                return
        if self._must_list:
            found = await self._client.list(self.kind, **self._scope)
            self._replace({obj.key: shared(obj) for obj in found.items}, version_number(found.resource_version))
        await self._watch()

    async def _watch_from_list(self) -> None:
        """Take the list and what follows it from one stream; after a refusal the list is still to be made."""
        fresh: dict[str, T] = {}
        stream = self._client.watch(self.kind, initial=True, timeout_s=random.randint(300, 600), **self._scope)
        try:
            async with aclosing(stream) as events, asyncio.timeout(_SILENCE_S) as silence:
                async for event in events:
                    if not self._must_list:
                        self._take(event)
                    elif event.ends_initial_list:
                        silence.reschedule(None)
                        self._replace(fresh, event.object.version)
                    else:
                        silence.reschedule(asyncio.get_running_loop().time() + _SILENCE_S)
                        _collect(fresh, event)
        except TimeoutError:
            self._streams_lists = False
            return
        except ApiError as error:
            if not self._must_list:
                raise
            self._streamed_failures += 1
            if error.status in _REFUSED or error.reason == "Unreachable":
                raise
            if error.status <= 500:  # 4xx: it does not know this; 500: its etcd is too old for it
                self._streams_lists = False
            return
        if self._must_list:
            self._streamed_failures += 1
            raise Unavailable(503, "Unreachable", "the initial list ended before its end was announced")

    async def _watch(self) -> None:
        stream = self._client.watch(
            self.kind, version=str(self._seen_version), timeout_s=random.randint(300, 600), **self._scope
        )
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    self._take(event)
        except ApiError as error:
            if error.status not in _RESUMABLE:
                self._must_list = True  # such as 504 for a version that a restored server has not reached yet
            raise

    def _take(self, event: WatchEvent[T]) -> None:
        obj = event.object
        self._heard += 1
        if event.type == "DELETED":
            known = self._objects.get(obj.key)
            if known is not None and known.version <= obj.version:
                self._drop(known, obj)
        elif event.type in ("ADDED", "MODIFIED"):
            self._put(obj)
        elif 0 < obj.version < self._seen_version:
            raise Gone(410, "Expired", "the server's history is behind ours: it was restored from an older copy")
        self._seen_version = max(self._seen_version, obj.version)

    def _replace(self, fresh: dict[str, T], version: int) -> None:
        self.relists += 1
        went_back = version < self._seen_version  # the server was restored from an older copy: nothing here is newer
        for key, known in list(self._objects.items()):
            newer = fresh.get(key)
            is_obsolete = went_back or known.version <= version
            if is_obsolete and (newer is None or newer.version < known.version):
                self._drop(known, known)
        for obj in fresh.values():
            self._put(obj)
        self._seen_version = version
        self._must_list = False
        self._streamed_failures = 0
        self._synced.set()

    def _is_ours(self, obj: T) -> bool:
        """Whether an own write is in this informer's scope; by fields it is only known for what is here already."""
        namespace, fields = self._scope["namespace"], self._scope["fields"]
        if namespace and obj.namespace != namespace:
            return False
        return self._match.matches(obj.labels) and (not fields or obj.key in self._objects)

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
        self.changes += 1
        self._changed_at = time.monotonic()
        for handler in self._handlers:
            self._call(handler, old, new)

    def _call(self, handler: ChangeHandler[T], old: T | None, new: T | None) -> None:
        try:
            handler(old, new)
        except Exception:  # one part's mistake must not keep the others from hearing
            log.exception("handler failed", kind=self.kind.resource.kind, object=getattr(new or old, "key", ""))

    def _index_add(self, name: Hashable, obj: T) -> None:
        for value in self._indexers[name](obj):
            self._indexes[name].setdefault(value, {})[obj.key] = obj

    def _index_remove(self, name: Hashable, obj: T) -> None:
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


def _collect(fresh: dict[str, T], event: WatchEvent[T]) -> None:
    if event.type in ("ADDED", "MODIFIED"):
        fresh[event.object.key] = shared(event.object)
    elif event.type == "DELETED":
        fresh.pop(event.object.key, None)
