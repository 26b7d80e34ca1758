"""Claims as the API server has them, for pods that start: one by one, or all of a namespace at once.

Owns: the reads, and how old one may be.
Start reading at: `LiveClaims.read`.

What was heard of a claim may be older than the pod that names it, so each is read after the pod was seen. Where many
pods start together, and claims may be listed, one list is newer than all of them and takes less than a read for each.
"""

import asyncio
from collections.abc import Callable

from moorage.kube.api.client import Client
from moorage.kube.cache.by_name import ByNameInformer
from moorage.kube.errors import Forbidden
from moorage.kube.objects.volumes import PersistentVolumeClaim
from moorage.log import get_logger
from moorage.node.volumes.shared_reads import Reads, not_long_ago

log = get_logger(__name__)

Claim = PersistentVolumeClaim

_AT_ONCE = 8  # of hundreds of pods that start together: more would open a connection each, which costs the most
_MANY = 8  # volumes under way; for fewer, single reads are sooner there
_WORTH = 16  # claims in one list that take about as long as one read
_FRESH_S = 5.0  # a later retry reads again


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
        self._lists = Reads(self._list)

    async def read(self, namespace: str, name: str, since: float) -> Claim | None:
        """The claim as it was at some moment after `since` (of the monotonic clock) and not long ago."""
        since = not_long_ago(since, _FRESH_S)
        if self._heard is not None and self._heard.read_at(f"{namespace}/{name}") > since:
            return self._heard.get(f"{namespace}/{name}")
        if self._is_worth_a_list():
            try:
                return (await self._lists.since(namespace, since)).get(name)
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
            self._lists.forget()
            return False
        return len(self._heard) <= under_way * _WORTH

    async def _list(self, namespace: str) -> dict[str, Claim]:
        found = await self._client.list(Claim, namespace)
        return {claim.name: claim for claim in found.items}
