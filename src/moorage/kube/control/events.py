"""Events that tell a user what happened to an object; repeated ones are counted, floods are held back.

Owns: making, aggregating and sending Event objects. Recording never blocks and never fails its caller.
Start reading at: `Recorder.event`.
"""

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from moorage.kube.api.client import Client
from moorage.kube.errors import AlreadyExists, ApiError, Forbidden, NotFound, Unavailable
from moorage.kube.objects.core import Event
from moorage.kube.objects.meta import KubeObject, ObjectReference, as_document, reference_to, timestamp_text
from moorage.log import get_logger

log = get_logger(__name__)

V = TypeVar("V")

# The figures are client-go's, so that a user sees from Moorage what the official components would show.
_REMEMBERED = 4096
_SIMILAR = 10  # of this many different messages about one thing, the last and all further ones are told as one event
_WINDOW_S = 600.0
_BURST = 25
_REFILL_S = 300.0

_QUEUED = 2000
_IN_FLIGHT = 8
_TRIES = 12
_RETRY_S = 10.0
_LEAVE_S = 2.0
_PATIENCE_S, _LOOK_AGAIN_S = 10.0, 0.5  # while the process is busy with other work


@dataclass(frozen=True, slots=True)
class _Note:
    about: ObjectReference
    type: str
    reason: str
    message: str
    at: float


@dataclass(slots=True)
class _Told:
    """An event that stands for one or more notes; it has no name until it has been created."""

    count: int = 0
    name: str = ""
    first_at: float = 0.0


@dataclass(slots=True)
class _Similar:
    """The different messages about one thing, as long as they keep coming."""

    last_at: float
    messages: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Allowance:
    """How many events one object has left."""

    tokens: float
    at: float


class Recorder:
    """Sends events in the background: in order for each object, several objects at a time.

    Use as `async with Recorder(client, "persistentvolume-controller")`. Leaving the block waits up to two seconds for
    what has not been sent. With `per_second` no more Normal events than this are sent in a second, and none for some
    seconds while `is_busy` says so: where hundreds of objects move at once, telling of it must not take from the
    moving. Warnings do not wait.
    """

    def __init__(
        self,
        client: Client,
        component: str,
        host: str = "",
        clock: Callable[[], float] = time.time,
        per_second: float | None = None,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._client = client
        self._component = component
        self._host = host
        self._clock = clock
        self._lanes: dict[str, deque[_Note]] = {}  # by object; a lane exists as long as its task does
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_IN_FLIGHT)
        self._pause_s = 1 / per_second if per_second else 0.0
        self._is_busy = is_busy
        self._next_at = 0.0
        self._held: deque[tuple[float, asyncio.Future[None]]] = deque()  # until when they are, the first at the left
        self._looking: asyncio.TimerHandle | None = None
        self._is_leaving = asyncio.Event()
        self._waiting = 0
        self._at_rest = asyncio.Event()
        self._at_rest.set()
        self._is_open = False
        self._told: OrderedDict[tuple[str, ...], _Told] = OrderedDict()
        self._similar: OrderedDict[tuple[str, ...], _Similar] = OrderedDict()
        self._allowances: OrderedDict[str, _Allowance] = OrderedDict()

    async def __aenter__(self) -> Self:
        self._is_open = True
        self._is_leaving.clear()
        for lane in list(self._lanes):
            self._start(lane)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_leaving.set()
        if self._looking is not None:
            self._looking.cancel()
            self._look()
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self.flush()
        except TimeoutError:
            log.warning("events were not all sent", component=self._component, left=self._waiting)
        finally:
            self._is_open = False
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def event(self, about: KubeObject | ObjectReference, type: str, reason: str, message: str) -> None:
        """Record one event; `type` is Normal or Warning. Never blocks, never fails."""
        reference = reference_to(about) if isinstance(about, KubeObject) else about
        if self._waiting >= _QUEUED:
            log.warning("event dropped: too many are waiting", reason=reason, object=reference.name)
            return
        note = _Note(reference, type, reason, message[:1024], self._clock())
        key = f"{reference.kind}/{reference.namespace}/{reference.name}/{reference.uid}"
        self._waiting += 1
        self._at_rest.clear()
        if key in self._lanes:
            self._lanes[key].append(note)
            return
        self._lanes[key] = deque([note])
        if self._is_open:
            self._start(key)

    def normal(self, about: KubeObject | ObjectReference, reason: str, message: str) -> None:
        self.event(about, "Normal", reason, message)

    def warning(self, about: KubeObject | ObjectReference, reason: str, message: str) -> None:
        self.event(about, "Warning", reason, message)

    @property
    def is_idle(self) -> bool:
        """Everything recorded so far has been sent or given up on."""
        return self._waiting == 0

    async def flush(self) -> None:
        """Return when everything recorded so far has been sent (or given up on)."""
        await self._at_rest.wait()

    def _start(self, key: str) -> None:
        task = asyncio.create_task(self._send_lane(key), name=f"events-{self._component}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_lane(self, key: str) -> None:
        lane = self._lanes[key]
        while lane:
            note = lane.popleft()
            try:
                await self._turn(note)
                async with self._slots:
                    await self._send(key, note)
            except ApiError as error:
                log.warning("event was not taken", reason=note.reason, object=note.about.name, error=str(error))
            except Exception:  # an event is never worth more than the work it tells of
                log.exception("event was not sent", reason=note.reason, object=note.about.name)
            finally:
                self._done()
        del self._lanes[key]

    async def _turn(self, note: _Note) -> None:
        """Return when a note may be sent."""
        if not self._pause_s or note.type != "Normal":
            return
        loop = asyncio.get_running_loop()
        if self._is_busy() and not self._is_leaving.is_set():
            held: asyncio.Future[None] = loop.create_future()
            self._held.append((loop.time() + _PATIENCE_S, held))
            self._looking = self._looking or loop.call_later(_LOOK_AGAIN_S, self._look)
            await held
        at = max(loop.time(), self._next_at)
        self._next_at = at + self._pause_s
        await self._pause(at)

    def _look(self) -> None:
        """Release the events that were held for long enough, and all of them if the process is not busy any more."""
        loop = asyncio.get_running_loop()
        is_busy = self._is_busy() and not self._is_leaving.is_set()
        while self._held and (not is_busy or self._held[0][0] <= loop.time()):
            _, held = self._held.popleft()
            if not held.done():  # else its task was cancelled
                held.set_result(None)
        self._looking = loop.call_later(_LOOK_AGAIN_S, self._look) if self._held else None

    async def _pause(self, until: float) -> None:
        """Sleep until a time, or until the recorder is closed."""
        if until <= asyncio.get_running_loop().time():
            return
        try:
            async with asyncio.timeout_at(until):
                await self._is_leaving.wait()
        except TimeoutError:
            return

    def _done(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._at_rest.set()

    async def _send(self, source: str, note: _Note) -> None:
        """Aggregate, count, filter, then create or patch: the order matters, a filtered event is still counted."""
        key, message = self._aggregated(note)
        told = _remembered(self._told, key, _Told)
        told.count += 1
        told.first_at = told.first_at or note.at
        if not self._may_send(source):
            return
        name = _event_name(note)
        for attempt in range(1, _TRIES + 1):
            try:
                await self._create_or_count(note, name, message, told)
                return
            except Unavailable as error:  # both ways are idempotent: the name is ours, the count is absolute
                if attempt == _TRIES:
                    raise
                log.debug("event is sent again later", reason=note.reason, error=str(error))
                await asyncio.sleep(_RETRY_S * min(1.0, 0.05 * 2**attempt) * random.uniform(0.5, 1.0))

    async def _create_or_count(self, note: _Note, name: str, message: str, told: _Told) -> None:
        namespace = note.about.namespace or "default"
        if told.name:
            patch = {"count": told.count, "lastTimestamp": timestamp_text(note.at), "message": message}
            try:
                await self._client.patch(Event, told.name, patch, namespace)
                return
            except NotFound:  # it has expired: create another
                told.count, told.first_at = 1, note.at
        try:
            await self._client.create(Event, self._body(note, name, message, told), namespace)
        except AlreadyExists:
            log.debug("event had arrived before", name=name)
        except (NotFound, Forbidden) as error:  # the namespace is gone or being deleted
            log.debug("event has no home", namespace=namespace, reason=str(error))
            return
        told.name = name

    def _body(self, note: _Note, name: str, message: str, told: _Told) -> dict[str, Any]:
        return {
            "metadata": {"name": name, "namespace": note.about.namespace or "default"},
            "involvedObject": as_document(note.about),
            "reason": note.reason,
            "message": message,
            "type": note.type,
            "count": told.count,
            "firstTimestamp": timestamp_text(told.first_at),
            "lastTimestamp": timestamp_text(note.at),
            "source": {"component": self._component, **({"host": self._host} if self._host else {})},
            "reportingComponent": self._component,
            "reportingInstance": self._host,
        }

    def _aggregated(self, note: _Note) -> tuple[tuple[str, ...], str]:
        """The key under which a note is counted, and its message."""
        about = note.about
        kind = (about.api_version, about.kind, about.namespace, about.name, about.uid, note.type, note.reason)
        similar = _remembered(self._similar, kind, lambda: _Similar(note.at))
        if note.at - similar.last_at > _WINDOW_S:
            similar.messages.clear()
        similar.last_at = note.at
        similar.messages.add(note.message)
        if len(similar.messages) < _SIMILAR:
            return (*kind, about.field_path, note.message), note.message
        similar.messages.pop()
        return kind, f"(combined from similar events): {note.message}"[:1024]

    def _may_send(self, source: str) -> bool:
        now = self._clock()
        allowance = _remembered(self._allowances, source, lambda: _Allowance(float(_BURST), now))
        allowance.tokens = min(float(_BURST), allowance.tokens + (now - allowance.at) / _REFILL_S)
        allowance.at = now
        if allowance.tokens < 1:
            return False
        allowance.tokens -= 1
        return True


K = TypeVar("K")


def _remembered(cache: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    """The entry of a cache that forgets what has not been asked for longest."""
    if key in cache:
        cache.move_to_end(key)
        return cache[key]
    while len(cache) >= _REMEMBERED:
        cache.popitem(last=False)
    return cache.setdefault(key, make())


def _event_name(note: _Note) -> str:
    suffix = f".{int(note.at * 1e9):x}{random.randrange(16**4):04x}"
    return (note.about.name or "object")[: 253 - len(suffix)].rstrip(".-") + suffix
