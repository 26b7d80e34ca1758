"""A durable note of every volume that is being made, so that a crash leaks none.

A process that dies between CreateVolume and saving the PersistentVolume leaves a volume that only the claim leads to;
if the claim is deleted meanwhile, nothing does. So each attempt is written down first, in the annotations of one Lease
(leases are what every provisioner's account may already write), and driven to its end by whoever starts next.
Many attempts share one write: those that arrive while a write is under way go with the next one.

Owns: that Lease.
May not touch: what an attempt means.
Start reading at: `Journal.note`, `Journal.run`.
"""

import asyncio
import random
import time
from collections.abc import Callable

from moorage.kube.client import Client
from moorage.kube.errors import AlreadyExists, ApiError, Conflict, Forbidden, Invalid, NotFound
from moorage.kube.objects import Lease
from moorage.log import get_logger
from moorage.sidecars.provisioner.attempt import Attempt, from_text, to_text

log = get_logger(__name__)

_PREFIX = "intent.moorage.dev/"
_LARGEST_BYTES = 200_000  # all annotations of an object together may have 256 KiB
_FORGET_AFTER_S = 2.0
_RETRY_S = 1.0
_LEAVE_S = 2.0
_PAUSE_S = 0.02  # after a write, so that the attempts of a burst share the next one

Clock = Callable[[], float]


class Journal:
    """The intents of one provisioner. `run` must be running for `note` to return.

    Each instance has its own notes. Another instance's are adopted at the start, but removed only when that instance
    cannot be at work any more: at once for a leader, otherwise when they are old.
    """

    def __init__(
        self, client: Client, name: str, namespace: str, *, foreign_s: float = 300.0, clock: Clock = time.time
    ) -> None:
        self._client = client
        self._name = name
        self._namespace = namespace
        self._foreign_s = foreign_s  # 0 when whoever wrote the other notes has stopped: we hold the lease
        self._clock = clock
        self._instance = f"{random.randrange(16**8):08x}"
        self._mine: dict[str, str] = {}  # by key, which is UID and instance
        self._adopted: dict[str, list[tuple[str, float]]] = {}  # by UID: other instances' keys and when they noted
        self._forgotten: set[str] = set()
        self._lease: Lease | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self.is_enabled = True
        self.writes = 0

    async def load(self) -> dict[str, Attempt]:
        """Every attempt that was noted and not forgotten, by claim UID."""
        self._mine.clear()
        self._adopted.clear()
        self._forgotten.clear()
        if not self.is_enabled:
            return {}
        try:
            self._lease = await self._client.find(Lease, self._name, self._namespace)
        except Forbidden as error:
            self._disable(error)
            return {}
        found: dict[str, Attempt] = {}
        for annotation, text in (self._lease.annotations if self._lease else {}).items():
            if not annotation.startswith(_PREFIX):
                continue
            key = annotation.removeprefix(_PREFIX)
            uid, _, instance = key.partition(".")
            noted_at, _, written = text.partition(":")
            try:
                found[uid] = from_text(written)
                if instance == self._instance:
                    self._mine[key] = text
                else:
                    self._adopted.setdefault(uid, []).append((key, float(noted_at)))
            except ValueError as error:
                log.warning("intent cannot be read and is dropped", uid=uid, reason=str(error))
                self._forgotten.add(key)
        return found

    def has(self, uid: str) -> bool:
        """Whether this instance has noted the attempt itself; another's note may be removed by others still."""
        return not self.is_enabled or f"{uid}.{self._instance}" in self._mine

    async def note(self, uid: str, attempt: Attempt) -> None:
        """Return when the attempt is safe: written down, or known to be impossible to write down."""
        if not self.is_enabled:
            return
        text = f"{self._clock():.0f}:{to_text(attempt)}"
        if self._size() + len(text) > _LARGEST_BYTES:
            log.warning("too many volumes are being made to note one more", claim=attempt.claim.name)
            return
        key = f"{uid}.{self._instance}"
        self._mine[key] = text
        self._forgotten.discard(key)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        await waiter

    def _size(self) -> int:
        """Bytes of all notes, other instances' included: they share the object's limit."""
        known = self._lease.annotations if self._lease is not None else {}
        own = f".{self._instance}"
        others = (text for key, text in known.items() if not key.endswith(own))
        return sum(map(len, self._mine.values())) + sum(map(len, others))

    def forget(self, uid: str) -> float:
        """The attempt is over; its notes go with the next write, or soon.

        Seconds are returned when another instance, which may still be alive, has noted it as well: its note may only
        go when it is old enough to be that of a dead one and the attempt has been carried out once more.
        """
        gone = [key for key in (f"{uid}.{self._instance}",) if self._mine.pop(key, None) is not None]
        wait_s = 0.0
        for key, noted_at in self._adopted.pop(uid, []):
            left_s = noted_at + self._foreign_s - self._clock() if self._foreign_s else 0.0
            if left_s > 0:
                self._adopted.setdefault(uid, []).append((key, noted_at))
                wait_s = max(wait_s, left_s)
            else:
                gone.append(key)
        self._forgotten.update(gone)
        if gone and not self._wake.is_set():
            asyncio.get_running_loop().call_later(_FORGET_AFTER_S, self._wake.set)
        return wait_s

    async def run(self) -> None:
        """Write until cancelled; what is over by then is forgotten with a last write, if there is time for one."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self.is_enabled and (self._waiters or self._forgotten):
                    await self._flush()
                    await asyncio.sleep(_PAUSE_S)
        finally:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.cancel()
            await self._leave()

    async def _leave(self) -> None:
        """Notes of what is over would make the next start carry it out once more, and fill the object in time."""
        if not self.is_enabled or not self._forgotten or self._lease is None:
            return
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._put()
        except (ApiError, TimeoutError) as error:
            log.info("what is over stays noted until the next start", lease=self._name, reason=str(error))

    async def _flush(self) -> None:
        waiters, self._waiters = self._waiters, []
        try:
            while not await self._write():
                await asyncio.sleep(_RETRY_S)
        except BaseException:
            self._waiters = waiters + self._waiters
            raise
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _write(self) -> bool:
        """One attempt to write; False when it should be tried again after a pause."""
        try:
            for _ in range(5):
                try:
                    await self._put()
                    return True
                except (Conflict, AlreadyExists, NotFound):
                    self._lease = await self._client.find(Lease, self._name, self._namespace)
            return False
        except (Forbidden, Invalid) as error:
            self._disable(error)
            return True
        except ApiError as error:
            log.warning("intents could not be written; volumes wait", lease=self._name, reason=str(error))
            return False

    async def _put(self) -> None:
        gone = set(self._forgotten)
        metadata: dict[str, object] = {"name": self._name, "namespace": self._namespace}
        annotations: dict[str, str] = {}
        if self._lease is not None:
            known = self._lease.annotations
            annotations = {key: text for key, text in known.items() if key.removeprefix(_PREFIX) not in gone}
            metadata["resourceVersion"] = self._lease.metadata.resource_version
            metadata["labels"] = self._lease.labels
        annotations |= {_PREFIX + key: text for key, text in self._mine.items()}
        body = {"metadata": metadata | {"annotations": annotations}, "spec": {}}
        self.writes += 1
        if self._lease is None:
            self._lease = await self._client.create(Lease, body, self._namespace)
        else:
            self._lease = await self._client.update(Lease, self._name, body, self._namespace)
        self._forgotten -= gone

    def _disable(self, error: ApiError) -> None:
        self.is_enabled = False
        log.warning(
            "intents cannot be written: a volume may be leaked if this process is killed while making it",
            lease=self._name,
            reason=str(error),
        )
