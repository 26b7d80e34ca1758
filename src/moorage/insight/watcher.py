"""Following a story: being told when one of its objects changes, instead of asking over and over.

Owns: one watch for each object of a story's chain and one for the events about it, as long as the block lasts.
May not touch: judging. A change only says that another look is worthwhile.
Start reading at: `Follower`.

A story can also change through objects that are not in its chain (a class that is created, a lease that ends), so a
look is taken every few seconds in any case; and every second where a watch is not allowed or has broken.
"""

import asyncio
import contextlib
from contextlib import aclosing
from typing import Self

from moorage.insight.explain import KINDS, Story, parse
from moorage.kube.api.client import Client
from moorage.kube.errors import ApiError
from moorage.kube.objects import Event, KubeObject

_AT_MOST_S = 5.0
_WITHOUT_WATCH_S = 1.0
_TOGETHER_S = 0.1  # changes come in groups: a claim, its events, its volume

Watched = tuple[type[KubeObject], str, str]
"""A kind, a namespace and a field selector."""


class Follower:
    """Watches what a story tells of; a watch begins with the present state, so nothing is missed between two looks."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._changed = asyncio.Event()
        self._tasks: dict[Watched, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def next(self, story: Story) -> None:
        """Return when an object of the story has changed, or when the next look is due."""
        wanted = watched(story, self._namespace)
        for key in [key for key in self._tasks if key not in wanted]:
            self._tasks.pop(key).cancel()
        broken = [key for key, task in self._tasks.items() if task.done()]
        for key in wanted:
            if key not in self._tasks or key in broken:
                self._tasks[key] = asyncio.create_task(self._watch(*key), name=f"watch-{key[0].resource.kind}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _WITHOUT_WATCH_S if broken else _AT_MOST_S)
            await asyncio.sleep(_TOGETHER_S)
        self._changed.clear()

    async def _watch(self, kind: type[KubeObject], namespace: str, fields: str) -> None:
        # A watch that is refused or breaks ends here and is opened again with the next look, which then comes sooner.
        with contextlib.suppress(ApiError):
            async with aclosing(self._client.watch(kind, namespace, fields=fields)) as changes:
                async for _ in changes:
                    self._changed.set()


def watched(story: Story, namespace: str) -> set[Watched]:
    """The objects of the chain by their names, and the events about each."""
    found: set[Watched] = set()
    for link in story.chain:
        reference, _, place = link.object.partition(" ")
        if reference.partition("/")[0] not in KINDS:
            continue
        kind, name = parse(reference)
        where = place.strip("()") or namespace if kind.resource.namespaced else ""
        found.add((kind, where, f"metadata.name={name}"))
        about = f"involvedObject.name={name},involvedObject.kind={kind.resource.kind}"
        found.add((Event, where or "default", about))
    return found
