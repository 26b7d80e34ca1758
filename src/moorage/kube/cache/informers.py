"""The informers of one process, each kind and selection once.

Start reading at: `Informers.of`.
"""

import asyncio
from collections.abc import Iterator
from typing import Any, Self, cast

from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informer, T
from moorage.kube.objects.meta import KubeObject
from moorage.log import get_logger

log = get_logger(__name__)


class Informers:
    """One informer per kind and scope, shared by all parts of a process.

    Use as `async with Informers(client) as informers`; an informer asked for with `of` starts at once when the
    block is entered, or when it is asked for inside.
    """

    def __init__(self, client: Client, *, resync_s: float = 0.0) -> None:
        self.client = client
        self._resync_s = resync_s
        self._informers: dict[tuple[type[Any], str, str, str], Informer[Any]] = {}
        self._by_kind: dict[type[Any], list[Informer[Any]]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._running = False

    def of(self, kind: type[T], *, namespace: str = "", labels: str = "", fields: str = "") -> Informer[T]:
        """The shared informer of a kind in a scope."""
        key = (kind, namespace, labels, fields)
        informer = self._informers.get(key)
        if informer is None:
            informer = self._add(
                key,
                Informer(self.client, kind, namespace=namespace, labels=labels, fields=fields, resync_s=self._resync_s),
            )
        return cast(Informer[T], informer)

    def share(self, informer: Informer[T]) -> None:
        """Run an informer that the caller made, and give it to all who ask for its kind."""
        self._add((informer.kind, "", "", ""), informer)

    def remember(self, obj: KubeObject) -> None:
        """Cache what an own write returned in every informer of its kind. Creates no informer."""
        for informer in self._by_kind.get(type(obj), ()):
            informer.remember(obj)

    def _add(self, key: tuple[type[Any], str, str, str], informer: Informer[Any]) -> Informer[Any]:
        self._informers[key] = informer
        self._by_kind.setdefault(informer.kind, []).append(informer)
        if self._running:
            self._start(informer)
        return informer

    async def wait_synced(self) -> None:
        """Return when every informer asked for so far has taken in its first list."""
        for informer in list(self._informers.values()):
            await informer.wait_synced()

    @property
    def is_synced(self) -> bool:
        return all(informer.is_synced for informer in self._informers.values())

    @property
    def changes(self) -> int:
        """How many changes have been told so far, over all informers."""
        return sum(informer.changes for informer in self._informers.values())

    def is_quiet(self, for_s: float = 0.1) -> bool:
        """Everything asked for is synced, and nothing has changed for some time: with idle queues, the world rests."""
        return all(one.is_synced and one.quiet_s >= for_s for one in self._informers.values())

    def __iter__(self) -> Iterator[Informer[Any]]:
        return iter(list(self._informers.values()))

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
