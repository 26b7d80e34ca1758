"""A client of an API that has a bad day, for tests of controllers that must get through it."""

import random
from collections.abc import AsyncGenerator
from typing import Any

from moorage.kube.api.client import Client, WatchEvent
from moorage.kube.errors import Conflict, Gone, Unavailable


class Flaky(Client):
    """The first write fails, then every fourth, half of them after they took effect; watches end early."""

    def __init__(self, config: Any, seed: int) -> None:
        super().__init__(config)
        self._chance = random.Random(seed)
        self.faults = 0

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> bytes:
        if method == "GET" or (self.faults and self._chance.random() > 0.25):
            return await super().request(method, path, body, **options)
        self.faults += 1
        way = self._chance.choice(["conflict", "before", "after", "after"])
        if way == "conflict":
            raise Conflict(409, "Conflict", "somebody else was quicker")
        if way == "after":
            await super().request(method, path, body, **options)
        raise Unavailable(503, "Unreachable", "the connection was lost")

    async def watch(self, kind: Any, namespace: str = "", **options: Any) -> AsyncGenerator[WatchEvent[Any], None]:
        left = self._chance.randint(4, 20)
        async for event in super().watch(kind, namespace, **options):
            yield event
            left -= 1
            if left == 0:
                self.faults += 1
                if self._chance.random() < 0.3:
                    raise Gone(410, "Expired", "too old resource version")
                return
