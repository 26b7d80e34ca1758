"""An informer for those who may not list: each object is then asked for by its name.

Owns: the switch between both ways, and when an object is asked for again.
Start reading at: `ByNameInformer`.

A node's own credentials let it read the claims and volumes of its pods, one by one, and nothing more. Where listing is
allowed this is an informer like any other and hears of changes at once; where it is refused, it looks at what is wanted
every minute, and more often at what is not as it should be yet.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informer
from moorage.kube.errors import ApiError, Forbidden
from moorage.kube.objects.meta import KubeObject
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T", bound=KubeObject)

_SETTLED_S = 60.0
_UNSETTLED_S = 1.0
_UNSETTLED_MAX_S = 15.0
_LIST_AGAIN_S = 600.0
_AT_ONCE = 16
_ANSWER_S = 10.0


class ByNameInformer(Informer[T]):
    """Objects that are asked for with `get`, followed for as long as `wanted` names them."""

    def __init__(
        self,
        client: Client,
        kind: type[T],
        *,
        wanted: Callable[[], Collection[str]],
        is_settled: Callable[[T], bool] = lambda _obj: True,
        settled_s: float = _SETTLED_S,
        unsettled_s: float = _UNSETTLED_S,
        list_again_s: float = _LIST_AGAIN_S,
        **scope: Any,
    ) -> None:
        super().__init__(client, kind, **scope)
        self._wanted = wanted
        self._is_settled = is_settled
        self._settled_s = settled_s
        self._unsettled_s = unsettled_s
        self._list_again_s = list_again_s
        self._due: dict[str, float] = {}  # when each name is asked for (again)
        self._tries: dict[str, int] = {}  # how often in a row it was not as it should be
        self._read_at: dict[str, float] = {}  # when the newest answer was asked for
        self._asked = asyncio.Event()
        self.is_by_name = False

    def get(self, key: str) -> T | None:
        """The object as last heard; one that was never asked for is asked for now, and handlers are told of it."""
        if self.is_by_name and key not in self._due:
            self._due[key] = 0.0
            self._asked.set()
        return super().get(key)

    def read_at(self, key: str) -> float:
        """When, of the monotonic clock, the object was asked for by name: what is known of it is not older."""
        return self._read_at.get(key, 0.0) if self.is_by_name else 0.0

    async def _list_and_watch(self) -> None:
        try:
            await super()._list_and_watch()
        except Forbidden as error:
            if not self._synced.is_set():
                log.info("listing is not allowed; objects are asked for by name",
                         kind=self.kind.resource.plural, reason=str(error))  # fmt: skip
            await self._ask_by_name()

    async def _ask_by_name(self) -> None:
        """For some time: rights may be given while we run."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._list_again_s
        self._must_list = True
        self._due = dict.fromkeys((*(obj.key for obj in self), *self._wanted()), 0.0)
        self.is_by_name = True
        self._synced.set()
        self._seen_version = 0
        gate = asyncio.Semaphore(_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as looks:
                under_way: set[asyncio.Task[None]] = set()
                while (now := clock()) < until:
                    self._asked.clear()
                    due = [key for key, at in self._due.items() if at <= now]
                    wanted = self._wanted() if due else ()
                    for key in due:
                        if key not in wanted:
                            self._leave(key)
                            continue
                        self._due[key] = math.inf  # until there is an answer, which the others do not wait for
                        look = looks.create_task(self._look(key, gate), name=f"look-at-{key}")
                        under_way.add(look)
                        look.add_done_callback(under_way.discard)
                    await self._rest(min([until, *self._due.values()]) - clock())
                for look in under_way:
                    look.cancel()
        finally:
            self.is_by_name = False

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._asked.wait()
        except TimeoutError:
            return

    async def _look(self, key: str, gate: asyncio.Semaphore) -> None:
        namespace, name = self.kind.resource.split(key)
        is_right = False
        try:
            async with gate, asyncio.timeout(_ANSWER_S):
                began = time.monotonic()
                found = await self._client.find(self.kind, name, namespace)
            self._read_at[key] = began
            known = super().get(key)
            if found is not None:
                self._put(found)
                is_right = self._is_settled(found)
            elif known is not None:
                self._drop(known, known)
        except (ApiError, TimeoutError) as error:
            reason = str(error) or f"no answer in {_ANSWER_S:g} s"
            log.warning("cannot be read", kind=self.kind.resource.plural, name=key, reason=reason)
        tries = 0 if is_right else self._tries.get(key, 0) + 1
        self._tries[key] = tries
        wait_s = self._settled_s if is_right else min(self._unsettled_s * 2.0 ** min(tries - 1, 10), _UNSETTLED_MAX_S)
        self._due[key] = asyncio.get_running_loop().time() + wait_s * random.uniform(0.9, 1.1)
        self._asked.set()  # the loop sleeps until what was due before

    def _leave(self, key: str) -> None:
        self._due.pop(key, None)
        self._tries.pop(key, None)
        self._read_at.pop(key, None)
        known = super().get(key)
        if known is not None:
            self._drop(known, known)
