"""A durable note of every volume that is being created, so that a crash leaks none.

If a process dies between CreateVolume and saving the PersistentVolume, only the claim leads to the volume; if the claim
is deleted meanwhile, nothing does. So each attempt is first written into the annotations of one Lease, because every
provisioner's account may write leases. The instance that starts next carries it out, or another instance that notices
that the writer has ended. Many attempts share one write: those that arrive during a write go with the next one, and
each write renews all notes of its instance.

Owns: that Lease.
Start reading at: `Journal.note`, `Journal.run`.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable

from moorage.kube.api.client import Client
from moorage.kube.errors import AlreadyExists, ApiError, Conflict, Forbidden, Invalid, NotFound
from moorage.kube.objects import Lease
from moorage.log import get_logger
from moorage.sidecars.provisioner.abandoned_intents import Clock, Intent, OtherIntents
from moorage.sidecars.provisioner.attempt import ProvisionAttempt, from_text, to_text

log = get_logger(__name__)

_PREFIX = "intent.moorage.dev/"
_LARGEST_BYTES = 200_000  # all annotations of an object together may have 256 KiB
_STAMP_BYTES = 15
_FORGET_AFTER_S = 2.0
_RETRY_S = 1.0
_LEAVE_S = 2.0
_PAUSE_S = 0.02  # after a write, so that the attempts of a burst share the next one
_ANY = ""  # in place of a note's text: our own note goes whatever it says


class Journal:
    """The intents of one provisioner. `run` must be running for `note` to return.

    Each instance has its own notes and renews them while their attempts are open. Those of others are adopted at the
    start, but removed only when they were left behind (`OtherIntents`) and their attempt was carried out after that:
    until then, their writer may be about to create the volume.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        namespace: str,
        *,
        patience_s: float = 300.0,
        clock: Clock = time.time,
        timer: Clock = time.monotonic,
    ) -> None:
        self._client = client
        self._name = name
        self._namespace = namespace
        self._patience_s = patience_s  # 0 if the writers of the other notes have stopped, because we hold the lease
        self._clock = clock
        self._timer = timer
        self._instance = f"{random.randrange(16**8):08x}"
        self._mine: dict[str, str] = {}  # by key, which is UID and instance
        self._written: frozenset[str] = frozenset()  # our keys that the last write held
        self._written_at = float("-inf")
        self._others = OtherIntents(patience_s, clock=clock, timer=timer)
        self._forgotten: dict[str, str] = {}  # by key: the text that may be removed
        self._lease: Lease | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self.is_enabled = True
        self.writes = 0

    async def load(self) -> dict[str, ProvisionAttempt]:
        """Return every attempt that was noted and not forgotten, by claim UID."""
        self._mine.clear()
        self._written, self._written_at = frozenset(), float("-inf")
        self._forgotten.clear()
        if not self.is_enabled:
            return {}
        try:
            self._see(await self._client.find(Lease, self._name, self._namespace))
        except Forbidden as error:
            self._disable(error)
            return {}
        notes = [Intent(key, text) for key, text in self._notes().items()]
        for note in notes:
            if self._is_mine(note.key):
                self._mine[note.key] = note.text.partition(":")[2]
        self._written = frozenset(self._mine)
        return self.read(notes)

    def read(self, notes: Iterable[Intent]) -> dict[str, ProvisionAttempt]:
        """Return the attempts in the notes, by UID. Drop an unreadable note once no other instance can need it."""
        found: dict[str, ProvisionAttempt] = {}
        for note in notes:
            try:
                found[note.uid] = from_text(note.text.partition(":")[2])
            except ValueError as error:
                log.warning("intent cannot be read", uid=note.uid, reason=str(error))
                if self._is_mine(note.key) or note in self._others.abandoned():
                    self._forgotten[note.key] = note.text
        return found

    def has(self, uid: str) -> bool:
        """Whether this instance has noted the attempt, recently enough for a call that begins now.

        Until that call is over, no other instance takes the note for one whose writer has ended. A note of another
        instance does not count, because others may remove it.
        """
        if not self.is_enabled:
            return True
        is_fresh = not self._patience_s or self._timer() - self._written_at < self._patience_s / 2
        key = f"{uid}.{self._instance}"
        return is_fresh and key in self._mine and key in self._written

    async def note(self, uid: str, attempt: ProvisionAttempt) -> None:
        """Return when the attempt is written, or when it is known that it cannot be written."""
        if not self.is_enabled:
            return
        key, text = f"{uid}.{self._instance}", to_text(attempt)
        if key not in self._mine and self._size() + len(text) > _LARGEST_BYTES:
            log.warning("too many volumes are being made to note one more", claim=attempt.claim.name)
            return
        self._mine[key] = text
        self._forgotten.pop(key, None)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        await waiter

    def _size(self) -> int:
        """Bytes of all notes, other instances' included: they share the object's limit."""
        known = self._lease.annotations if self._lease is not None else {}
        others = (text for key, text in known.items() if not self._is_mine(key))
        return sum(len(text) + _STAMP_BYTES for text in self._mine.values()) + sum(map(len, others))

    def abandoned(self, uid: str = "") -> list[Intent]:
        """Return the notes, of one attempt or of all, that other instances left behind and that are to be removed."""
        found = (note for note in self._others.abandoned() if self._forgotten.get(note.key) != note.text)
        return [note for note in found if uid in ("", note.uid)]

    def forget(self, uid: str, covered: Iterable[Intent] = ()) -> None:
        """Remove our note of an attempt that is over, with the next write or soon.

        The notes in `covered` are removed too, unless they are renewed until then. They were left behind before the
        attempt last began, so nothing that their writers created can have been missed.
        """
        gone = {note.key: note.text for note in covered}
        key = f"{uid}.{self._instance}"
        if self._mine.pop(key, None) is not None:
            gone[key] = _ANY
        self._forgotten.update(gone)
        if gone and not self._wake.is_set():
            asyncio.get_running_loop().call_later(_FORGET_AFTER_S, self._wake.set)

    async def run(self, take_over: Callable[[list[Intent]], None] = lambda found: None) -> None:
        """Write until cancelled. A last write then removes the notes of attempts that are over, if time allows.

        `take_over` is called periodically with the notes that other instances left behind, until they are forgotten.
        """
        try:
            while True:
                await self._woken()
                if self.is_enabled:
                    await self.look()
                    take_over(self.abandoned())
                    await asyncio.sleep(_PAUSE_S)
        finally:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.cancel()
            await self._leave()

    async def look(self) -> None:
        """Write what is to be written, and our notes again when they age. Otherwise read what others have written."""
        is_aging = bool(self._mine) and self._timer() - self._written_at >= self._look_s
        if self._waiters or self._forgotten or (self._patience_s and is_aging):
            await self._flush()
        elif self._patience_s:
            try:
                self._see(await self._client.find(Lease, self._name, self._namespace))
            except ApiError as error:
                log.info("others' intents could not be read", lease=self._name, reason=str(error))

    @property
    def _look_s(self) -> float:
        """Often enough that a note is renewed before `has` finds it too old."""
        return self._patience_s / 4

    async def _woken(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._look_s or None):
                await self._wake.wait()
        self._wake.clear()

    def _is_mine(self, key: str) -> bool:
        return key.endswith(f".{self._instance}")

    def _notes(self) -> dict[str, str]:
        """All notes in the Lease as it was last seen, by key."""
        known = self._lease.annotations if self._lease is not None else {}
        return {key.removeprefix(_PREFIX): text for key, text in known.items() if key.startswith(_PREFIX)}

    def _see(self, lease: Lease | None) -> None:
        self._lease = lease
        self._others.see({key: text for key, text in self._notes().items() if not self._is_mine(key)})

    async def _leave(self) -> None:
        """Remove the notes of attempts that are over. They would be repeated at the next start, and fill the Lease."""
        if not self.is_enabled or not self._forgotten or self._lease is None:
            return
        try:
            async with asyncio.timeout(_LEAVE_S):
                while not await self._put_over_others():
                    await asyncio.sleep(_PAUSE_S)
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
        """Write once. Returns False if it should be tried again after a pause."""
        try:
            return await self._put_over_others()
        except (Forbidden, Invalid) as error:
            self._disable(error)
            return True
        except ApiError as error:
            log.warning("intents could not be written; volumes wait", lease=self._name, reason=str(error))
            return False

    async def _put_over_others(self) -> bool:
        """Write on top of what others have written meanwhile. Returns False after five conflicts in a row."""
        for _ in range(5):
            try:
                await self._put()
                return True
            except (Conflict, AlreadyExists, NotFound):
                self._see(await self._client.find(Lease, self._name, self._namespace))
        return False

    async def _put(self) -> None:
        """Write once. Raises Conflict if the Lease has changed since it was read: no renewal is overwritten."""
        gone, mine = dict(self._forgotten), dict(self._mine)
        metadata: dict[str, object] = {"name": self._name, "namespace": self._namespace}
        annotations: dict[str, str] = {}
        if self._lease is not None:
            known = self._lease.annotations
            removed = {_PREFIX + key for key, text in self._notes().items() if gone.get(key) in (_ANY, text)}
            annotations = {key: text for key, text in known.items() if key not in removed}
            metadata["resourceVersion"] = self._lease.metadata.resource_version
            metadata["labels"] = self._lease.labels
        annotations |= {f"{_PREFIX}{key}": f"{self._clock():.3f}:{text}" for key, text in mine.items()}
        body = {"metadata": metadata | {"annotations": annotations}, "spec": {}}
        self.writes += 1
        written_at = self._timer()
        if self._lease is None:
            self._see(await self._client.create(Lease, body, self._namespace))
        else:
            self._see(await self._client.update(Lease, self._name, body, self._namespace))
        self._written, self._written_at = frozenset(mine), written_at
        self._forgotten = {key: text for key, text in self._forgotten.items() if gone.get(key) != text}

    def _disable(self, error: ApiError) -> None:
        self.is_enabled = False
        log.warning(
            "intents cannot be written: a volume may be leaked if this process is killed while making it",
            lease=self._name,
            reason=str(error),
        )
