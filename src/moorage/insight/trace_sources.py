"""What one source tells of what happened: an object's own fields, an event, a log line, a call without answer.

Owns: `TraceStep`, and how each source becomes steps.
Start reading at: `from_object`, `from_event`, `from_record`.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from moorage.csi.pending import ANSWERED
from moorage.insight.cluster_view import last_seen
from moorage.insight.explain import ref
from moorage.insight.log_records import LogRecord
from moorage.insight.waiting import WaitingCall
from moorage.kube.api.client import Client
from moorage.kube.api.wire import of_any_depth
from moorage.kube.names import BIND_COMPLETED, SELECTED_NODE
from moorage.kube.objects import (
    Event,
    KubeObject,
    PersistentVolume,
    Pod,
    VolumeSnapshotContent,
    seconds_of,
)

_NAMED_AT = re.compile(r"\.([0-9a-f]{16})[0-9a-f]{0,4}$")
_ANSWERED_AFTER = re.compile(r"^driver \S+ answered (\w+) after (\d+) s$")
_WRITES = {
    f"f:{SELECTED_NODE}": "chose the node for the volume",
    f"f:{BIND_COMPLETED}": "completed the binding",
    "f:attached": "reported the attachment",
}
_WHO = (
    (re.compile(r"^persistentvolume-controller$"), "binder"),
    (re.compile(r"^default-scheduler$"), "scheduler"),
    (re.compile(r"^attachdetach-controller$"), "attach/detach"),
    (re.compile(r"^(?P<driver>[\w.-]+)_.+_[0-9a-f-]{36}$"), "provisioner"),
    (re.compile(r"^external-resizer "), "resizer"),
    (re.compile(r"^csi-snapshotter "), "snapshotter"),
    (re.compile(r"^snapshot-controller$"), "snapshot controller"),
    (re.compile(r"^kubelet$"), "node agent"),
)


@dataclass(frozen=True)
class TraceStep:
    """One thing that happened. `at` is when it was done; it began `took` seconds before, where that is known."""

    at: float
    who: str
    object: str
    what: str
    source: str  # object, event or log
    took: float | None = None
    is_exact: bool = False
    is_failure: bool = False
    reason: str = ""

    @property
    def begin(self) -> float:
        return self.at - (self.took or 0.0)


async def from_object(client: Client, obj: KubeObject) -> list[TraceStep]:
    """What an object's own timestamps tell."""
    body = await client.request("GET", obj.resource.path(obj.namespace, obj.name))
    raw: dict[str, Any] = of_any_depth(partial(msgspec.json.decode, type=dict), body)
    meta, status, name = raw.get("metadata") or {}, raw.get("status") or {}, ref(obj)
    written = meta.get("managedFields") or []
    makers = [entry for entry in written if not entry.get("subresource")]
    first: dict[str, Any] = min(makers, key=lambda entry: str(entry.get("time") or ""), default={})
    steps = [_plain(name, meta.get("creationTimestamp"), str(first.get("manager") or "?"), "created", "Created")]
    steps.append(_plain(name, meta.get("deletionTimestamp"), "?", "deletion asked for", "Deleted"))
    for entry in written:
        fields = msgspec.json.encode(entry.get("fieldsV1") or {}).decode()
        for needle, what in _WRITES.items():
            if f'"{needle}"' in fields:
                steps.append(_plain(name, entry.get("time"), str(entry.get("manager") or "?"), what, "Wrote"))
    whose = "node agent" if isinstance(obj, Pod) else ""
    for condition in status.get("conditions") or []:
        if condition.get("status") == "True":
            kind, why = str(condition.get("type")), str(condition.get("message") or "")
            what = f"condition {kind}" + (f": {why}" if why else "")
            steps.append(_plain(name, condition.get("lastTransitionTime"), whose, what, kind))
    if isinstance(obj, PersistentVolume):
        phase = f"phase {obj.status.phase}"
        steps.append(_plain(name, status.get("lastPhaseTransitionTime"), "binder", phase, "Phase"))
    for error in ("attachError", "detachError", "error"):
        told = status.get(error) or {}
        steps.append(_plain(name, told.get("time"), "", f"{error}: {told.get('message')}", error, is_failure=True))
    for container in status.get("containerStatuses") or []:
        began = ((container.get("state") or {}).get("running") or {}).get("startedAt")
        steps.append(_plain(name, began, "node agent", f"container {container.get('name')} runs", "container"))
    return [step for step in steps if step.at > 0]


def _plain(name: str, text: Any, who: str, what: str, reason: str, is_failure: bool = False) -> TraceStep:
    return TraceStep(
        seconds_of(str(text or "")) or 0.0, who, name, what, "object", is_failure=is_failure, reason=reason
    )


def from_event(event: Event, subjects: list[KubeObject]) -> list[TraceStep]:
    """An event's first telling and, where it was repeated, its last."""
    about = next((ref(one) for one in subjects if one.uid == event.involved_object.uid), event.involved_object.name)
    who = _who(event.source.component or event.reporting_component)
    what, failed = f"{event.reason}: {event.message}", event.type == "Warning"
    answered = _ANSWERED_AFTER.match(event.message) if event.reason == ANSWERED else None
    if answered is not None:
        at, took = last_seen(event), float(answered[2])
        return [TraceStep(at, "driver", about, f"{answered[1]} OK", "event", took, True, False, "call")]
    named = _NAMED_AT.search(event.name)
    first = (
        seconds_of(event.first_timestamp)
        or seconds_of(event.event_time)
        or seconds_of(event.metadata.creation_timestamp)
    )
    last = seconds_of(event.last_timestamp)
    at, is_exact = first or 0.0, False
    if named is not None and abs(int(named[1], 16) / 1e9 - at) < 2.0:
        at, is_exact = int(named[1], 16) / 1e9, True
    steps = [TraceStep(at, who, about, what, "event", None, is_exact, failed, event.reason)]
    if event.count > 1 and last is not None and last > at:
        again = f"{event.reason}, for the {event.count}th time"
        steps.append(TraceStep(last, who, about, again, "event", None, False, failed, f"{event.reason} again"))
    return steps


def from_call(about: KubeObject, call: WaitingCall, now: float) -> TraceStep:
    """A call that the driver has not answered: it lasts until now."""
    what = f"{call.method} has no answer from driver {call.driver} yet"
    return TraceStep(now, "driver", ref(about), what, "event", call.seconds, True, False, "call")


def from_record(record: LogRecord, subjects: list[KubeObject]) -> TraceStep:
    fields = record.fields
    text = " ".join(fields.values())
    about = next((ref(one) for one in subjects for needle in needles([one]) if needle in text), ref(subjects[0]))
    who, failed = _logger(record.logger), record.level in ("warning", "error")
    if record.event == "call":
        code = fields.get("code", "")
        words = f"{fields.get('method')} {code}" + (f": {fields['error']}" if fields.get("error") else "")
        return TraceStep(record.at, who, about, words, "log", record.seconds, True, code != "OK", "call")
    rest = " ".join(f"{key}={value}" for key, value in fields.items() if key not in ("request", "seconds"))
    return TraceStep(
        record.at, who, about, f"{record.event} {rest}".strip()[:300], "log", record.seconds, True, failed, "log"
    )


def needles(subjects: list[KubeObject]) -> list[str]:
    """What a log line about these objects holds: names that are unique, uids, handles, `namespace/name`."""
    needles = []
    for one in subjects:
        needles += [one.uid, one.key if one.namespace or len(one.name) > 12 else ""]
        if isinstance(one, PersistentVolume) and one.spec.csi is not None:
            needles.append(one.spec.csi.volume_handle)
        if isinstance(one, VolumeSnapshotContent) and one.status is not None:
            needles.append(one.status.snapshot_handle or "")
    return [needle for needle in needles if needle]


def _who(component: str) -> str:
    for pattern, name in _WHO:
        match = pattern.match(component)
        if match is not None:
            return name
    return component or "?"


def _logger(name: str) -> str:
    top, _, rest = name.partition(".")
    if top in ("csi", "plugin", "storage", "host"):
        return "driver"
    if top == "node":
        return "node agent"
    return rest.partition(".")[0] if top in ("sidecars", "controllers") and rest else name
