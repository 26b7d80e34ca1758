"""Leader election on a Lease, compatible with client-go: the two never both lead.

Owns: acquiring, renewing and releasing the lease.
May not touch: what the leader does; it is run as a task that ends when the lease is lost.
Start reading at: `Elector.lead`.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from moorage.errors import MoorageError, UsageError
from moorage.kube.api import metrics
from moorage.kube.api.client import Client
from moorage.kube.errors import AlreadyExists, ApiError, Conflict, NotFound, Unavailable
from moorage.kube.objects.core import Lease, LeaseSpec
from moorage.kube.objects.meta import micro_timestamp_text
from moorage.log import get_logger
from moorage.process import first_of

log = get_logger(__name__)

_AFTER_CONFLICT_S = 0.2
_SOONEST_S = 0.05

Clock = Callable[[], float]


class LeadershipLost(MoorageError):
    """Another process leads now, or the lease could not be renewed in time."""

    code = "UNAVAILABLE"


@dataclass(frozen=True)
class ElectionConfig:
    """Which lease, who we are, and client-go's three times."""

    name: str
    namespace: str
    identity: str
    lease_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 5.0
    labels: dict[str, str] | None = None
    release_on_exit: bool = True

    def __post_init__(self) -> None:
        if not self.lease_s > self.renew_s > 0 or self.retry_s <= 0 or not self.identity:
            raise UsageError(
                f"leader election of {self.name!r}: want lease > renew deadline > 0, retry > 0 and an "
                f"identity, not {self.lease_s}, {self.renew_s}, {self.retry_s} and {self.identity!r}"
            )


class Elector:
    """One candidate for one lease.

    Time is only ever measured on our own monotonic clock, from the moment a change of the lease was seen, as client-go
    does: clocks of different machines are never compared. The lease is read and replaced, not patched: the official
    roles grant `update` on leases and no `patch`.
    """

    def __init__(self, client: Client, config: ElectionConfig, clock: Clock = time.monotonic) -> None:
        self._client = client
        self._config = config
        self._clock = clock
        self._document: dict[str, Any] | None = None  # the lease as last read or written, whole
        self._seen = LeaseSpec()
        self._seen_at = 0.0
        self._renewed_at = 0.0  # when the last successful renewal was sent: others count from then at the earliest
        self.is_leader = False

    async def lead(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait to become leader, run `work`, keep the lease meanwhile; LeadershipLost when it slips away."""
        metrics.set_master(self._config.name, False)
        await self._acquire()
        log.info("leading", lease=self._config.name, identity=self._config.identity)
        working = asyncio.create_task(work(), name=f"lead-{self._config.name}")
        renewing = asyncio.create_task(self._renew_forever(), name=f"renew-{self._config.name}")
        try:
            await first_of([working, renewing])
        finally:
            self._set_leader(False)
            if self._config.release_on_exit:
                await asyncio.shield(self._release())

    @property
    def has_looked(self) -> bool:
        """The lease was read or written at least once: the API server answers us, and we may."""
        return self._document is not None

    def is_healthy(self, tolerance_s: float = 20.0) -> bool:
        """False when we lead and have not renewed for longer than the lease and some tolerance."""
        return not self.is_leader or self._clock() - self._renewed_at <= self._config.lease_s + tolerance_s

    async def _acquire(self) -> None:
        while not await self._try():
            await asyncio.sleep(self._wait_s())
        self._set_leader(True)

    def _wait_s(self) -> float:
        """Until the next attempt: the retry period, or the moment the holder's lease runs out if that is sooner."""
        wait_s = self._config.retry_s * random.uniform(1.0, 1.2)
        if self._held_by_another():
            left_s = self._seen_at + self._duration_s() - self._clock()
            wait_s = min(wait_s, max(left_s, 0.0) + _SOONEST_S)
        return wait_s

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.retry_s)
            # Never past the end of our own lease, counted from when we sent the last renewal: others may lead then.
            left_s = self._renewed_at + self._config.lease_s - self._clock()
            try:
                async with asyncio.timeout(min(self._config.renew_s, left_s)):
                    while not await self._try():
                        if self._held_by_another():
                            raise LeadershipLost(f"lease {self._config.name} is now held by {self._holder()}")
                        await asyncio.sleep(min(self._config.retry_s, 1.0))
            except TimeoutError as error:
                raise LeadershipLost(f"lease {self._config.name} could not be renewed in time") from error

    async def _try(self) -> bool:
        """One attempt to take or renew; False when another holds it or the API did not let us."""
        try:
            if self.is_leader and self._document is not None and not self._held_by_another():
                try:
                    await self._write(self._document)  # the lease is most likely still as we left it
                    return True
                except (Conflict, NotFound):
                    log.debug("lease changed under us", lease=self._config.name)
            return await self._take_or_renew()
        except (Conflict, AlreadyExists):
            await asyncio.sleep(_AFTER_CONFLICT_S * random.uniform(0.5, 1.0))  # another process was quicker
        except ApiError as error:
            log.warning("lease attempt failed", lease=self._config.name, reason=str(error))
        return False

    async def _take_or_renew(self) -> bool:
        config = self._config
        try:
            document = await self._read()
        except NotFound:
            meta = {"name": config.name, "namespace": config.namespace, "labels": config.labels or {}}
            document = {"apiVersion": Lease.resource.api_version, "kind": "Lease", "metadata": meta}
            await self._write(document, is_new=True)
            return True
        self._document = document
        spec = msgspec.convert(document.get("spec") or {}, LeaseSpec)
        if self._seen != spec:
            self._seen, self._seen_at = spec, self._clock()
        if self._held_by_another() and self._clock() - self._seen_at < self._duration_s():
            return False
        await self._write(document)
        return True

    async def _read(self) -> dict[str, Any]:
        return _document(await self._client.request("GET", self._path(self._config.name)))

    async def _write(self, document: dict[str, Any], is_new: bool = False) -> None:
        """Put our claim into the lease; fails when it is no longer the one in `document`."""
        sent_at, now = self._clock(), micro_timestamp_text(time.time())
        old: dict[str, Any] = document.get("spec") or {}
        is_ours = old.get("holderIdentity") == self._config.identity
        spec = {
            **old,
            "holderIdentity": self._config.identity,
            "leaseDurationSeconds": max(1, math.ceil(self._config.lease_s)),
            "acquireTime": old.get("acquireTime") or now if is_ours else now,
            "renewTime": now,
            "leaseTransitions": 0 if is_new else int(old.get("leaseTransitions") or 0) + (not is_ours),
        }
        method, path = ("POST", self._path()) if is_new else ("PUT", self._path(self._config.name))
        answer = await self._client.request(method, path, {**document, "spec": spec})
        self._document = _document(answer)
        self._seen = msgspec.convert(self._document.get("spec") or {}, LeaseSpec)
        self._seen_at = self._clock()
        self._renewed_at = sent_at

    async def _release(self) -> None:
        """Leave the lease without a holder, as client-go does, so that the next one need not wait."""
        try:
            document = await self._read()
            old: dict[str, Any] = document.get("spec") or {}
            if old.get("holderIdentity") != self._config.identity:
                return
            now = micro_timestamp_text(time.time())
            spec = {**old, "holderIdentity": "", "leaseDurationSeconds": 1, "acquireTime": now, "renewTime": now}
            await self._client.request("PUT", self._path(self._config.name), {**document, "spec": spec})
        except ApiError as error:
            log.warning("lease was not released", lease=self._config.name, reason=str(error))

    def _path(self, name: str = "") -> str:
        return Lease.resource.path(self._config.namespace, name)

    def _set_leader(self, is_leader: bool) -> None:
        self.is_leader = is_leader
        metrics.set_master(self._config.name, is_leader)

    def _holder(self) -> str:
        return self._seen.holder_identity or ""

    def _held_by_another(self) -> bool:
        return bool(self._holder()) and self._holder() != self._config.identity

    def _duration_s(self) -> float:
        """How long the present holder said that its lease lasts."""
        return float(self._seen.lease_duration_seconds or self._config.lease_s)


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body, type=dict[str, Any])
        msgspec.convert(document.get("spec") or {}, LeaseSpec)
        return document
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(502, "BadAnswer", f"cannot read a Lease of the API server: {error}") from error
