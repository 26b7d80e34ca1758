"""Claims as the API server has them, for pods that start: one by one, or all of a namespace at once.

Owns: the reads, and how old one may be.
Start reading at: `LiveClaims.read`.

What was heard of a claim may be older than the pod that names it, so each is read after the pod was seen. Where many
pods start together, and claims may be listed, one list is newer than all of them and takes less than a read for each.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from moorage.kube.byname import ByNameInformer
from moorage.kube.client import Client
from moorage.kube.errors import Forbidden
from moorage.kube.objects.core import PersistentVolumeClaim
from moorage.log import get_logger

log = get_logger(__name__)

Claim = PersistentVolumeClaim

_AT_ONCE = 8  # of hundreds of pods that start together: more would open a connection each, which costs the most
_MANY = 8  # volumes under way; for fewer, single reads are sooner there
_WORTH = 16  # claims in one list that take about as long as one read
_FRESH_S = 5.0  # whoever tries again later reads again


@dataclass(frozen=True, slots=True)
class _Listed:
    began: float
    claims: dict[str, Claim]


class LiveClaims:
    """Reads of claims for one node."""

    def __init__(
        self,
        client: Client,
        heard: ByNameInformer[Claim] | None = None,
        under_way: Callable[[], int] = lambda: 0,
    ) -> None:
        self._client = client
        self._heard = heard
        self._under_way = under_way
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._listed: dict[str, _Listed] = {}
        self._listing: dict[str, asyncio.Task[_Listed]] = {}

    async def read(self, namespace: str, name: str, since: float) -> Claim | None:
        """The claim as it was at some moment after `since` (of the monotonic clock) and not long ago."""
        now = time.monotonic()
        since = min(max(since, now - _FRESH_S), now)
        if self._heard is not None and self._heard.read_at(f"{namespace}/{name}") > since:
            return self._heard.get(f"{namespace}/{name}")
        if self._is_worth_a_list():
            try:
                return (await self._list_since(namespace, since)).claims.get(name)
            except Forbidden as error:
                log.debug("claims are read one by one", namespace=namespace, reason=str(error))
        async with self._slots:
            return await self._client.find(Claim, name, namespace)

    def remember(self, claim: Claim) -> None:
        """What was read is news to who listens."""
        if self._heard is not None:
            self._heard.remember(claim)

    def _is_worth_a_list(self) -> bool:
        under_way = self._under_way()
        if self._heard is None or self._heard.is_by_name or under_way <= _MANY:
            self._listed.clear()
            return False
        return len(self._heard) <= under_way * _WORTH

    async def _list_since(self, namespace: str, since: float) -> _Listed:
        """One list at a time: who comes while it is under way shares the next."""
        while True:
            known = self._listed.get(namespace)
            if known is not None and known.began > since:
                return known
            task = self._listing.get(namespace)
            if task is None:
                task = asyncio.create_task(self._list(namespace), name=f"claims-of-{namespace}")
                self._listing[namespace] = task
            await asyncio.shield(task)

    async def _list(self, namespace: str) -> _Listed:
        began = time.monotonic()
        try:
            found = await self._client.list(Claim, namespace)
            listed = self._listed[namespace] = _Listed(began, {claim.name: claim for claim in found.items})
            return listed
        finally:
            del self._listing[namespace]
