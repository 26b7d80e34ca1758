"""Leader election on a Lease, compatible with client-go: the two never both lead.

Owns: acquiring, renewing and releasing the lease.
May not touch: what the leader does; it is run as a task that ends when the lease is lost.
Start reading at: `Elector.lead`.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from moorage.errors import MoorageError
from moorage.kube.client import Client
from moorage.kube.errors import AlreadyExists, ApiError, Conflict
from moorage.kube.objects.core import Lease, LeaseSpec
from moorage.kube.objects.meta import micro_timestamp_text
from moorage.log import get_logger

log = get_logger(__name__)

Clock = Callable[[], float]


class LeadershipLost(MoorageError):
    """Somebody else leads now, or the lease could not be renewed in time."""

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


def sanitised(name: str) -> str:
    """A lease name as the official sidecars make it."""
    name = re.sub(r"[^A-Za-z0-9-]", "-", name)
    return name + "X" if name.endswith("-") else name


class Elector:
    """One candidate for one lease."""

    def __init__(self, client: Client, config: ElectionConfig, clock: Clock = time.monotonic) -> None:
        self._client = client
        self._config = config
        self._clock = clock
        self._seen: Lease | None = None
        self._seen_at = 0.0
        self._renewed_at = 0.0
        self.is_leader = False

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait to become leader, run `work`, keep the lease meanwhile; LeadershipLost when it slips away."""
        await self._acquire()
        log.info("leading", lease=self._config.name, identity=self._config.identity)
        working = asyncio.ensure_future(work())
        renewing = asyncio.create_task(self._renew_forever(), name=f"renew-{self._config.name}")
        try:
            done, _ = await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.is_leader = False
            for task in (working, renewing):
                task.cancel()
            await asyncio.gather(working, renewing, return_exceptions=True)
            if self._config.release_on_exit:
                await asyncio.shield(self._release())

    def is_healthy(self, tolerance_s: float = 20.0) -> bool:
        """False when we lead and have not renewed for longer than the lease and some tolerance."""
        return not self.is_leader or self._clock() - self._renewed_at <= self._config.lease_s + tolerance_s

    async def _acquire(self) -> None:
        while not await self._try():
            await asyncio.sleep(self._config.retry_s)
        self.is_leader = True

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.retry_s)
            try:
                async with asyncio.timeout(self._config.renew_s):
                    while not await self._try():
                        if self._held_by_another():
                            raise LeadershipLost(f"lease {self._config.name} is now held by {self._holder()}")
                        await asyncio.sleep(self._config.retry_s)
            except TimeoutError as error:
                raise LeadershipLost(
                    f"lease {self._config.name} could not be renewed in {self._config.renew_s} s"
                ) from error

    async def _try(self) -> bool:
        """One attempt to take or renew; False when another holds it or the API did not let us."""
        try:
            return await self._take_or_renew()
        except (Conflict, AlreadyExists):
            return False
        except ApiError as error:
            log.warning("lease attempt failed", lease=self._config.name, reason=str(error))
            return False

    async def _take_or_renew(self) -> bool:
        config, now = self._config, micro_timestamp_text(time.time())
        lease = await self._client.find(Lease, config.name, config.namespace)
        if lease is None:
            meta = {"name": config.name, "namespace": config.namespace, "labels": config.labels or {}}
            spec = self._spec(now, now, 0)
            self._observe(await self._client.create(Lease, {"metadata": meta, "spec": spec}, config.namespace))
            return True
        if self._seen is None or self._seen.spec != lease.spec:
            self._observe(lease)
        if self._held_by_another() and not self._expired():
            return False
        mine = lease.spec.holder_identity == config.identity
        acquired = lease.spec.acquire_time if mine and lease.spec.acquire_time else now
        transitions = (lease.spec.lease_transitions or 0) + (0 if mine else 1)
        patch = {"spec": self._spec(acquired, now, transitions)}
        version = lease.metadata.resource_version
        self._observe(await self._client.patch(Lease, config.name, patch, config.namespace, version=version))
        return True

    async def _release(self) -> None:
        try:
            lease = await self._client.find(Lease, self._config.name, self._config.namespace)
            if lease is None or lease.spec.holder_identity != self._config.identity:
                return
            now = micro_timestamp_text(time.time())
            spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "acquireTime": now, "renewTime": now}
            version = lease.metadata.resource_version
            await self._client.patch(Lease, lease.name, {"spec": spec}, lease.namespace, version=version)
        except ApiError as error:
            log.warning("lease was not released", lease=self._config.name, reason=str(error))

    def _spec(self, acquired: str, renewed: str, transitions: int) -> dict[str, object]:
        return {
            "holderIdentity": self._config.identity,
            "leaseDurationSeconds": int(self._config.lease_s),
            "acquireTime": acquired,
            "renewTime": renewed,
            "leaseTransitions": transitions,
        }

    def _observe(self, lease: Lease) -> None:
        self._seen, self._seen_at = lease, self._clock()
        if lease.spec.holder_identity == self._config.identity:
            self._renewed_at = self._seen_at

    def _holder(self) -> str:
        return (self._seen.spec.holder_identity if self._seen else "") or ""

    def _held_by_another(self) -> bool:
        return bool(self._holder()) and self._holder() != self._config.identity

    def _expired(self) -> bool:
        """By our own clock: the holder has not been seen to renew for the length of its lease."""
        spec = self._seen.spec if self._seen else LeaseSpec()
        return self._clock() - self._seen_at > float(spec.lease_duration_seconds or self._config.lease_s)
