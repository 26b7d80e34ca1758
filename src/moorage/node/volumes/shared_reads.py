"""Reads of the API that many wait for at once: one answer counts for all who came before its read began.

Owns: what was read last, and which reads are under way.
Start reading at: `Reads.since`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_MOST_KEPT = 512


def not_long_ago(since: float, fresh_s: float) -> float:
    """The moment, of the monotonic clock, from which on an answer is new enough for who came at `since`: nothing that
    is older than `fresh_s` is, and for who has just come, or is not remembered, everything from now on."""
    now = time.monotonic()
    return min(max(since, now - fresh_s), now)


class Reads(Generic[K, V]):
    """The last answer for each key."""

    def __init__(self, read: Callable[[K], Awaitable[V]]) -> None:
        self._read = read
        self._known: dict[K, tuple[float, V]] = {}
        self._under_way: dict[K, asyncio.Task[tuple[float, V]]] = {}

    async def since(self, key: K, since: float) -> V:
        """What the key names, as it was at some moment after `since`. One read at a time: who comes while it is under
        way shares the next. One that fails, fails for all who wait for it."""
        known = self._known.get(key)
        while known is None or known[0] < since:
            known = await asyncio.shield(self._under_way.get(key) or self._begun(key))
        return known[1]

    def forget(self) -> None:
        self._known.clear()

    def _begun(self, key: K) -> asyncio.Task[tuple[float, V]]:
        task = self._under_way[key] = asyncio.create_task(self._take(key), name=f"read {key}")
        task.add_done_callback(_is_heard)
        return task

    async def _take(self, key: K) -> tuple[float, V]:
        began = time.monotonic()
        try:
            found = await self._read(key)
        finally:
            del self._under_way[key]
        if len(self._known) >= _MOST_KEPT:
            self._known.clear()
        self._known[key] = began, found
        return began, found


def _is_heard(task: asyncio.Task[Any]) -> None:
    """Its error is no surprise, also if all who waited for it have given up."""
    if not task.cancelled():
        task.exception()
