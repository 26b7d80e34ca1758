"""What happened to an object: who did what, when, and where the time went.

Owns: steps, gathered from objects, events and the components' records, and the shares of the time between them.
May not touch: writes, terminals. Judging why something is stuck is `explain.py`'s.
Start reading at: `trace`, `shares`.

Times: Kubernetes writes whole seconds. An event's name ends in the nanoseconds of its first telling, and log lines have
milliseconds; such a step is exact. Only exact steps share the time out.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from moorage.insight.cluster_view import ClusterView
from moorage.insight.explain import ObjectNotFound, found, parse, ref
from moorage.insight.log_records import LogRecord, read_records
from moorage.insight.reader import Reader
from moorage.insight.surroundings import read_around
from moorage.kube.api.client import Client
from moorage.kube.objects import (
    Event,
    KubeObject,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
    VolumeSnapshot,
    VolumeSnapshotContent,
    seconds_of,
)
from moorage.kube.volumes import claims_of, reference_key

_NAMED_AT = re.compile(r"\.([0-9a-f]{16})[0-9a-f]{0,4}$")
_DONE = {
    "pod": ("Started",),
    "pvc": ("Started", "ProvisioningSucceeded"),
    "pv": ("Started", "ProvisioningSucceeded"),
    "snapshot": ("SnapshotReady",),
}
_CALLERS = {
    "CreateVolume": "provisioner",
    "DeleteVolume": "provisioner",
    "ControllerPublish": "attacher",
    "ControllerUnpublish": "attacher",
    "ControllerExpand": "resizer",
    "ControllerModify": "resizer",
    "CreateSnapshot": "snapshotter",
    "DeleteSnapshot": "snapshotter",
    "Node": "node agent",
}
_WRITES = {
    "f:volume.kubernetes.io/selected-node": "chose the node for the volume",
    "f:pv.kubernetes.io/bind-completed": "completed the binding",
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


@dataclass(frozen=True)
class Share:
    """How much of the time somebody took."""

    who: str
    seconds: float
    longest: str


@dataclass(frozen=True)
class Trace:
    """All that is known to have happened, in order, and the shares of the time until the object was of use."""

    object: str
    subjects: list[str]
    steps: list[TraceStep]
    seconds: float
    is_done: bool
    start: float = 0.0
    shares: list[Share] = field(default_factory=list)


async def trace(client: Client, reference: str, namespace: str, logs: Path | None = None) -> Trace:
    """The story of one object and of what belongs to it, given as `pvc/NAME` and the like."""
    kind, name = parse(reference)
    word = reference.partition("/")[0].lower()
    view = await read_around(client, kind, name, namespace)
    asked = found(view, kind, name, namespace)
    await _add_users(client, view)
    subjects = _subjects(view, asked)
    async with Reader(client) as reader:
        for one in subjects:
            await reader.events(type(one), one.key)
        events = [event for one in subjects for event in reader.view.events.get(one.uid, [])]
    steps = [step for event in events for step in _from_event(event, subjects)]
    for one in subjects:
        steps += await _from_object(client, one)
    if logs is not None:
        steps += [_from_record(record, subjects) for record in read_records(logs, _needles(subjects))]
    return assemble(
        ref(subjects[0]), [ref(one) for one in subjects], steps, _DONE.get(_short(kind, word), ()), view.now
    )


async def _add_users(client: Client, view: ClusterView) -> None:
    """An explanation of a volume needs no pods; its story does: they are read around the claim that holds it."""
    for volume in list(view.volumes.values()):
        holder = volume.spec.claim_ref
        if holder is None or view.pods:
            continue
        more = await read_around(client, PersistentVolumeClaim, holder.name, holder.namespace)
        view.claims.update(more.claims)
        view.pods.update(more.pods)
        view.attachments.update(more.attachments)


def assemble(name: str, subjects: list[str], steps: list[TraceStep], done: tuple[str, ...], now: float) -> Trace:
    """Steps in order, and the shares of the time from the first to the one after which the object was of use."""
    ordered = sorted(_without_doubles(steps), key=_order)
    end = _end(ordered, done)
    counted = ordered if end is None else ordered[: ordered.index(end) + 1]
    told, seconds = shares(counted, None if end is not None else now)
    return Trace(name, subjects, ordered, seconds, end is not None, _start(ordered), told)


def shares(steps: list[TraceStep], until: float | None) -> tuple[list[Share], float]:
    """Who took how much: a call counts for who answered it, the time before a step for who took the step."""
    exact = sorted(_outside_calls([step for step in steps if step.is_exact]), key=lambda step: (step.begin, step.at))
    if not exact:
        return [], 0.0
    at = min(_start(steps), exact[0].begin)
    start, found_shares = at, dict[str, list[tuple[float, str]]]()
    for step in exact:
        if step.begin > at:
            found_shares.setdefault(_caller(step), []).append((step.begin - at, f"before {_brief(step)}"))
        own = step.at - max(at, step.begin)
        if step.took and own > 0:
            found_shares.setdefault(step.who, []).append((own, _brief(step)))
        at = max(at, step.at)
    if until is not None and until > at:
        found_shares.setdefault("(nobody yet)", []).append((until - at, "since the last step"))
        at = until
    told = [Share(who, sum(s for s, _ in parts), max(parts)[1]) for who, parts in found_shares.items()]
    return sorted(told, key=lambda share: -share.seconds), at - start


def _start(steps: list[TraceStep]) -> float:
    """When it began. A creation is known to the second: what is exact within that second is the better measure."""
    first = steps[0].begin if steps else 0.0
    exact = min((step.begin for step in steps if step.is_exact), default=first)
    return exact if exact - first < 1.0 else first


def _outside_calls(exact: list[TraceStep]) -> list[TraceStep]:
    """Without what a component noted during a call that it answered: the call's own time holds it."""
    calls = [step for step in exact if step.took]
    return [
        step
        for step in exact
        if step.took or not any(call.who == step.who and call.begin <= step.at <= call.at for call in calls)
    ]


def _caller(step: TraceStep) -> str:
    """Who made a call happen: the time before it is theirs, not the driver's."""
    if step.reason != "call":
        return step.who
    return next((who for start, who in _CALLERS.items() if step.what.startswith(start)), step.who)


def _brief(step: TraceStep) -> str:
    return step.what.partition(":")[0] if step.source == "event" else step.what


def _end(steps: list[TraceStep], done: tuple[str, ...]) -> TraceStep | None:
    """The first step after which the object was of use; the best of what is known."""
    for reason in done:
        for step in steps:
            if step.reason == reason:
                return step
    return None


def _order(step: TraceStep) -> tuple[float, float]:
    """Within a second: what a person created, what is exact, what a component created, what else is known."""
    second = float(int(step.at))
    if step.is_exact:
        return second, step.at - second
    if step.reason != "Created":
        return second, 2.0
    return second, 1.0 if step.object.startswith(("pv/", "va/", "volumesnapshotcontent/")) else -1.0


def _without_doubles(steps: list[TraceStep]) -> list[TraceStep]:
    """Conditions that an event tells better are left out."""
    told = {(step.object, step.reason) for step in steps if step.source == "event"}
    better = {"PodScheduled": "Scheduled", "container": "Started"}
    return [step for step in steps if (step.object, better.get(step.reason, "")) not in told]


def _subjects(view: ClusterView, obj: KubeObject) -> list[KubeObject]:
    """The object asked about and what belongs to it: claims, volumes, attachments, pods, contents."""
    pods, claims, volumes, others = list[Pod](), list[PersistentVolumeClaim](), list[PersistentVolume](), [obj]
    match obj:
        case Pod():
            pods.append(obj)
        case PersistentVolumeClaim():
            claims.append(obj)
        case PersistentVolume():
            volumes.append(obj)
        case VolumeAttachment():
            volumes += [v for v in view.volumes.values() if v.name == obj.spec.source.persistent_volume_name]
        case VolumeSnapshot():
            name = obj.status.bound_volume_snapshot_content_name if obj.status is not None else None
            others += [content for content in view.contents.values() if content.name == name]
            return others
    claims += [c for pod in pods for c in view.claims.values() if c.key in claims_of(pod)]
    keys = [reference_key(v.spec.claim_ref) for v in volumes if v.spec.claim_ref is not None]
    claims += [claim for claim in view.claims.values() if claim.key in keys]
    volumes += [v for claim in claims for v in view.volumes.values() if v.name == claim.spec.volume_name]
    pods += [pod for claim in claims for pod in view.pods.values() if claim.key in claims_of(pod)]
    attached = [a for volume in volumes for a in view.attachments_of(volume)]
    return list({one.uid: one for one in (*others, *claims, *volumes, *attached, *pods)}.values())


async def _from_object(client: Client, obj: KubeObject) -> list[TraceStep]:
    """What an object's own timestamps tell."""
    raw: dict[str, Any] = msgspec.json.decode(
        await client.request("GET", obj.resource.path(obj.namespace, obj.name)), type=dict
    )
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


def _from_event(event: Event, subjects: list[KubeObject]) -> list[TraceStep]:
    """An event's first telling and, where it was repeated, its last."""
    about = next((ref(one) for one in subjects if one.uid == event.involved_object.uid), event.involved_object.name)
    who = _who(event.source.component or event.reporting_component)
    what, failed = f"{event.reason}: {event.message}", event.type == "Warning"
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


def _from_record(record: LogRecord, subjects: list[KubeObject]) -> TraceStep:
    fields = record.fields
    text = " ".join(fields.values())
    about = next((ref(one) for one in subjects for needle in _needles([one]) if needle in text), ref(subjects[0]))
    who, failed = _logger(record.logger), record.level in ("warning", "error")
    if record.event == "call":
        code = fields.get("code", "")
        words = f"{fields.get('method')} {code}" + (f": {fields['error']}" if fields.get("error") else "")
        return TraceStep(record.at, who, about, words, "log", record.seconds, True, code != "OK", "call")
    rest = " ".join(f"{key}={value}" for key, value in fields.items() if key not in ("request", "seconds"))
    return TraceStep(
        record.at, who, about, f"{record.event} {rest}".strip()[:300], "log", record.seconds, True, failed, "log"
    )


def _needles(subjects: list[KubeObject]) -> list[str]:
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


def _short(kind: type[KubeObject], word: str) -> str:
    known = {Pod: "pod", PersistentVolumeClaim: "pvc", PersistentVolume: "pv", VolumeSnapshot: "snapshot"}
    return known.get(kind, word)


__all__ = ["ObjectNotFound", "Share", "Trace", "TraceStep", "assemble", "shares", "trace"]
