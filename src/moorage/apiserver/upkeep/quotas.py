"""Keeps `status.used` of quotas current after claims were deleted and quotas changed.

Owns: when a namespace is counted. The counting itself is `writing.quota.recount`.
Start reading at: `QuotaCounter.run`.
"""

import asyncio
from functools import partial

from moorage.apiserver.errors import StatusError
from moorage.apiserver.store.store import PendingChange, Store
from moorage.apiserver.writing.quota import CLAIMS, QUOTAS, recount
from moorage.log import get_logger

log = get_logger(__name__)

GATHER_S = 0.1  # deletions often come together


class QuotaCounter:
    """Recounts the namespaces whose quotas may be wrong."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._due: set[str] = {key[0] for key in store.table(QUOTAS).order}
        self._wake = asyncio.Event()
        if self._due:
            self._wake.set()
        store.on_commit.append(self._on_commit)

    def _on_commit(self, changes: list[PendingChange]) -> None:
        for change in changes:
            is_quota = change.resource == QUOTAS and change.kind != "DELETED"
            is_freed = change.resource == CLAIMS and change.kind == "DELETED" and self._has_quota(change.key[0])
            if is_quota or is_freed:
                self._due.add(change.key[0])
                self._wake.set()

    def _has_quota(self, namespace: str) -> bool:
        return any(key[0] == namespace for key in self._store.table(QUOTAS).order)

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            while self._due:
                await self._count(self._due.pop())

    async def _count(self, namespace: str) -> None:
        try:
            await self._store.write(partial(recount, namespace=namespace))
        except StatusError as error:
            log.warning("quotas could not be counted", namespace=namespace, error=str(error))
