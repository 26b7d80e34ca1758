"""Writing pod.status: the newest one wins, and no caller waits for it.

Owns: one patch at a time per pod, repeated until the server has taken the newest status, and again when another client
has changed it.
Start reading at: `StatusWriter.put`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from moorage.kube.api.client import Client, PatchType
from moorage.kube.api.wire import without_nulls
from moorage.kube.control.queue import WorkQueue
from moorage.kube.errors import Conflict, Invalid, NotFound
from moorage.kube.objects.meta import Condition
from moorage.kube.objects.pods import Pod, PodStatus
from moorage.log import get_logger

log = get_logger(__name__)

_OWN = frozenset({"PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"})
# Most pods run before anybody could read that they are being made. The more are being made at once, the longer each
# takes, and the more such writes would take from them.
_CREATING_S, _CREATING_EACH_S, _CREATING_MAX_S = 1.0, 0.05, 10.0
# An API server takes much less processor time for writes that come together: see benchmarks/node_status.py. So they are
# gathered, and then many are under way at once.
_TOGETHER, _TOGETHER_S, _AT_ONCE = 64, 1.0, 32


@dataclass(slots=True)
class _Entry:
    namespace: str
    name: str
    wanted: dict[str, Any]
    written: dict[str, Any] | None = None
    answer: tuple[int, Any] = (0, None)  # what the server made of it: its version, and what it says in short
    settled: asyncio.Event | None = None


class StatusWriter:
    """Statuses on their way to the API server. While more are `to_come`, they are gathered for a moment; the fewer are
    to come, the fewer are gathered, so that the last pods do not wait for many others."""

    def __init__(self, client: Client, to_come: Callable[[], int] = lambda: 0) -> None:
        self._client = client
        self._to_come = to_come
        self._gathered: list[str] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._entries: dict[str, _Entry] = {}
        self._queue: WorkQueue[str] = WorkQueue("pod-status", start_s=0.1, max_s=30.0)

    def put(self, pod: Pod, status: dict[str, Any]) -> None:
        """Write this status soon."""
        entry = self._entries.get(pod.uid)
        if entry is None:
            entry = self._entries[pod.uid] = _Entry(pod.namespace, pod.name, status)
            if _is_there(status, pod):
                entry.written, entry.answer = status, (pod.version, _gist(pod))
        entry.wanted = status
        if entry.written == status:
            if not _is_overwritten(entry, pod):
                return
            entry.written = None
        if entry.written is None and _only_creating(status):
            wait_s = _CREATING_S + _CREATING_EACH_S * self._queue.delayed
            self._queue.add_after(pod.uid, min(wait_s, _CREATING_MAX_S))
            return
        self._gathered.append(pod.uid)
        if len(self._gathered) >= min(self._to_come(), _TOGETHER):
            self._send_gathered()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(_TOGETHER_S, self._send_gathered)

    def _send_gathered(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        for uid in self._gathered:
            self._queue.add(uid)
        self._gathered.clear()

    def last(self, uid: str) -> dict[str, Any] | None:
        entry = self._entries.get(uid)
        return entry.wanted if entry else None

    def is_echo(self, pod: Pod) -> bool:
        """Whether this is what the server made of the newest status, and nothing else has changed since."""
        entry = self._entries.get(pod.uid)
        return entry is not None and entry.written == entry.wanted and entry.answer[0] == pod.version

    async def flush(self, uid: str) -> None:
        """Return when the newest status of a pod is at the server, or the pod is gone."""
        entry = self._entries.get(uid)
        if entry is None or entry.written == entry.wanted:
            return
        entry.settled = entry.settled or asyncio.Event()
        self._queue.add(uid)
        await entry.settled.wait()

    def forget(self, uid: str) -> None:
        entry = self._entries.pop(uid, None)
        if entry is not None and entry.settled is not None:
            entry.settled.set()

    async def run(self) -> None:
        await self._queue.run(self._write, workers=_AT_ONCE)

    async def _write(self, uid: str) -> None:
        entry = self._entries.get(uid)
        if entry is None:
            return
        status = entry.wanted
        if entry.written != status:
            patch = {"metadata": {"uid": uid}, "status": status}
            try:
                answer = await self._client.patch(
                    Pod, entry.name, patch, entry.namespace, how=PatchType.STRATEGIC, subresource="status"
                )
                entry.answer = (answer.version, _gist(answer))
            except (NotFound, Conflict) as gone:
                log.debug("pod is gone or was recreated", pod=entry.name, reason=str(gone))
            except Invalid as error:
                # A kube-apiserver rejects the old uid of a recreated pod as a wrong value.
                is_another = any(cause.get("field") == "metadata.uid" for cause in error.causes)
                say = log.debug if is_another else log.error
                say("pod status was refused", pod=entry.name, reason=str(error))
            entry.written = status
        if entry.wanted == entry.written and entry.settled is not None:
            entry.settled.set()
            entry.settled = None
        elif entry.wanted != entry.written:
            self._queue.add(uid)


def _only_creating(status: dict[str, Any]) -> bool:
    """Nothing but the news that the pod has been seen; a status that says more replaces it soon."""
    every = (*status.get("initContainerStatuses", ()), *status["containerStatuses"])
    reasons = {(one["state"].get("waiting") or {}).get("reason") for one in every}
    return bool(status["phase"] == "Pending") and reasons <= {"ContainerCreating", "PodInitializing"}


def _is_there(status: dict[str, Any], pod: Pod) -> bool:
    """Whether the server has it already: an agent that is started again says of most pods what the last one said."""
    found = pod.status
    if not found.container_statuses:
        return False
    wanted = msgspec.convert(without_nulls(status), PodStatus)
    own = [one for one in found.conditions if one.type in _OWN]
    return _by_type(own) == _by_type(wanted.conditions) and wanted == msgspec.structs.replace(
        found, conditions=wanted.conditions, nominated_node_name="", ephemeral_container_statuses=[]
    )


def _by_type(conditions: list[Condition]) -> dict[str, Condition]:
    return {one.type: one for one in conditions}


def _is_overwritten(entry: _Entry, found: Pod) -> bool:
    """Whether another client has changed what was written since: a node that was out of reach for a while has its pods
    marked as not ready, and only this agent undoes that."""
    version, said = entry.answer
    return 0 < version < found.version and said != _gist(found)


def _gist(pod: Pod) -> tuple[Any, ...]:
    status = pod.status
    every = (*status.init_container_statuses, *status.container_statuses)
    return (
        status.phase,
        {one.type: one.status for one in status.conditions if one.type in _OWN},
        [(one.name, one.ready, one.restart_count, list(one.state)) for one in every],
    )
