"""Events that tell a user what happened to an object; repeated ones are counted, floods are held back.

Owns: making, aggregating and sending Event objects. Recording never blocks and never fails its caller.
Start reading at: `Recorder.event`.
"""

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from moorage.kube.client import Client
from moorage.kube.errors import ApiError, Forbidden, NotFound
from moorage.kube.objects.core import Event
from moorage.kube.objects.meta import KubeObject, ObjectReference, as_document, reference_to, timestamp_text
from moorage.log import get_logger

log = get_logger(__name__)

_REMEMBERED = 4096
_QUEUED = 2000
_SIMILAR = 10  # this many different messages of one kind within the window, then they are counted as one
_WINDOW_S = 600.0
_BURST = 25
_REFILL_S = 300.0


@dataclass(frozen=True, slots=True)
class _Note:
    about: ObjectReference
    type: str
    reason: str
    message: str


@dataclass(slots=True)
class _Sent:
    name: str
    namespace: str
    count: int


@dataclass(slots=True)
class _Source:
    """How many events one object has left, and how many alike it has had."""

    tokens: float
    at: float


class Recorder:
    """Sends events in the background, in order. Use as `async with Recorder(client, "persistentvolume-controller")`."""

    def __init__(self, client: Client, component: str, host: str = "", clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._component = component
        self._host = host
        self._clock = clock
        self._queue: asyncio.Queue[_Note] = asyncio.Queue(_QUEUED)
        self._sent: OrderedDict[tuple[str, ...], _Sent] = OrderedDict()
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._similar: OrderedDict[tuple[str, ...], tuple[float, set[str]]] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._send_forever(), name=f"events-{self._component}")
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            async with asyncio.timeout(2):
                await self.flush()
        except TimeoutError:
            log.warning("events were not all sent", component=self._component, left=self._queue.qsize())
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def event(self, about: KubeObject | ObjectReference, type: str, reason: str, message: str) -> None:
        """Record one event; `type` is Normal or Warning."""
        reference = reference_to(about) if isinstance(about, KubeObject) else about
        try:
            self._queue.put_nowait(_Note(reference, type, reason, message[:1024]))
        except asyncio.QueueFull:
            log.warning("event dropped: too many are waiting", reason=reason, object=reference.name)

    def normal(self, about: KubeObject | ObjectReference, reason: str, message: str) -> None:
        self.event(about, "Normal", reason, message)

    def warning(self, about: KubeObject | ObjectReference, reason: str, message: str) -> None:
        self.event(about, "Warning", reason, message)

    @property
    def is_idle(self) -> bool:
        return self._queue._unfinished_tasks == 0  # type: ignore[attr-defined,no-any-return]

    async def flush(self) -> None:
        """Return when everything recorded so far has been sent (or given up on)."""
        await self._queue.join()

    async def _send_forever(self) -> None:
        while True:
            note = await self._queue.get()
            try:
                await self._send(note)
            except ApiError as error:
                log.warning("event was not taken", reason=note.reason, object=note.about.name, error=str(error))
            finally:
                self._queue.task_done()

    async def _send(self, note: _Note) -> None:
        note, key = self._aggregated(note)
        known = self._sent.get(key)
        if known is None and not self._may_send(note.about.uid or note.about.name):
            return
        if known is not None:
            try:
                patch = {"count": known.count + 1, "lastTimestamp": self._now(), "message": note.message}
                await self._client.patch(Event, known.name, patch, known.namespace)
                known.count += 1
                return
            except NotFound:
                del self._sent[key]
        await self._create(note, key)

    async def _create(self, note: _Note, key: tuple[str, ...]) -> None:
        namespace = note.about.namespace or "default"
        name = f"{note.about.name}.{int(self._clock() * 1e9):x}{random.randrange(16**4):04x}"
        body = {
            "metadata": {"name": name[-253:].lstrip(".-"), "namespace": namespace},
            "involvedObject": as_document(note.about),
            "reason": note.reason,
            "message": note.message,
            "type": note.type,
            "count": 1,
            "firstTimestamp": self._now(),
            "lastTimestamp": self._now(),
            "source": {"component": self._component, **({"host": self._host} if self._host else {})},
            "reportingComponent": self._component,
            "reportingInstance": self._host,
        }
        try:
            made = await self._client.create(Event, body, namespace)
        except (NotFound, Forbidden) as error:  # the namespace is gone or going: nobody will read it
            log.debug("event has no home", namespace=namespace, reason=str(error))
            return
        self._sent[key] = _Sent(made.name, namespace, 1)
        while len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)

    def _aggregated(self, note: _Note) -> tuple[_Note, tuple[str, ...]]:
        about = note.about
        kind = (about.kind, about.namespace, about.name, about.uid, note.type, note.reason)
        since, messages = self._similar.get(kind, (self._clock(), set()))
        if self._clock() - since > _WINDOW_S:
            since, messages = self._clock(), set()
        messages.add(note.message)
        self._similar[kind] = (since, messages)
        while len(self._similar) > _REMEMBERED:
            self._similar.popitem(last=False)
        if len(messages) > _SIMILAR:
            return _Note(about, note.type, note.reason, f"(combined from similar events): {note.message}"[:1024]), kind
        return note, (*kind, note.message)

    def _may_send(self, source: str) -> bool:
        now = self._clock()
        state = self._sources.pop(source, None) or _Source(float(_BURST), now)
        state.tokens = min(float(_BURST), state.tokens + (now - state.at) / _REFILL_S)
        state.at = now
        self._sources[source] = state
        while len(self._sources) > _REMEMBERED:
            self._sources.popitem(last=False)
        if state.tokens < 1:
            return False
        state.tokens -= 1
        return True

    def _now(self) -> str:
        return timestamp_text(self._clock())
