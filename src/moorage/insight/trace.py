"""What happened to an object: who did what, when, and where the time went.

Owns: steps, gathered from objects, events and the components' records, and the shares of the time between them.
May not touch: writes, terminals. Judging why something is stuck is `explain.py`'s.
Start reading at: `trace`, `shares`.

Times: Kubernetes writes whole seconds. An event's name ends in the nanoseconds of its first telling, and log lines have
milliseconds; such a step is exact. Only exact steps share the time out.
"""

from dataclasses import dataclass, field
from pathlib import Path

from moorage.insight.cluster_view import ClusterView
from moorage.insight.explain import ObjectNotFound, found, parse, ref
from moorage.insight.log_records import read_records
from moorage.insight.reader import Reader
from moorage.insight.surroundings import read_around
from moorage.insight.trace_sources import TraceStep, from_call, from_event, from_object, from_record, needles
from moorage.insight.waiting import call_in_flight
from moorage.kube.api.client import Client
from moorage.kube.objects import (
    KubeObject,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
    VolumeSnapshot,
)
from moorage.kube.volumes import claims_of, reference_key

_CLOCKS_S = 1.5  # events have whole seconds
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


@dataclass(frozen=True)
class Share:
    """How much of the time one component took."""

    who: str
    seconds: float
    longest: str


@dataclass(frozen=True)
class Trace:
    """All that is known to have happened, in order, and the shares of the time until the object could be used."""

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
        calls = [(one, call) for one in subjects if (call := call_in_flight(reader.view, one)) is not None]
    steps = [step for event in events for step in from_event(event, subjects)]
    steps += [from_call(one, call, view.now) for one, call in calls]
    for one in subjects:
        steps += await from_object(client, one)
    if logs is not None:
        steps += [from_record(record, subjects) for record in read_records(logs, needles(subjects))]
    done = _DONE.get(_short(kind, word), ())
    return assemble(ref(subjects[0]), [ref(one) for one in subjects], steps, done, view.now)


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
    """Put steps in order, and share out the time from the first to the one after which the object could be used.

    A pod's time begins with the pod, not with a claim that is older, and only its own start ends it.
    """
    ordered = sorted(_without_doubles(steps), key=_order)
    own = [step for step in ordered if step.object == name] if name.startswith("pod/") else ordered
    counted = [step for step in ordered if step.at >= int(own[0].at)] if own else ordered
    end = _end(own, done)
    if end is not None:
        counted = counted[: counted.index(end) + 1]
    told, seconds = shares(counted, None if end is not None else now)
    return Trace(name, subjects, ordered, seconds, end is not None, _start(counted), told)


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
        found_shares.setdefault("(unknown)", []).append((until - at, "since the last step"))
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
    """Return the first step after which the object could be used; the best of what is known."""
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
    """Leave out conditions that an event tells better, and calls that the driver's own record tells better."""
    told = {(step.object, step.reason) for step in steps if step.source == "event"}
    better = {"PodScheduled": "Scheduled", "container": "Started"}
    left = [step for step in steps if (step.object, better.get(step.reason, "")) not in told]
    calls = [step for step in left if step.reason == "call"]
    outer = {id(one) for one in calls if any(_encloses(one, other) for other in calls)}
    return [step for step in left if id(step) not in outer]


def _encloses(caller: TraceStep, driver: TraceStep) -> bool:
    """Whether a caller's record of a call is about the call that the driver has recorded itself, in less time."""
    is_same = caller is not driver and _method(caller) == _method(driver) and (caller.took or 0) > (driver.took or 0)
    return is_same and caller.begin - _CLOCKS_S <= driver.begin and driver.at <= caller.at + _CLOCKS_S


def _method(step: TraceStep) -> str:
    return step.what.partition(" ")[0]


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


def _short(kind: type[KubeObject], word: str) -> str:
    known = {Pod: "pod", PersistentVolumeClaim: "pvc", PersistentVolume: "pv", VolumeSnapshot: "snapshot"}
    return known.get(kind, word)


__all__ = ["ObjectNotFound", "Share", "Trace", "TraceStep", "assemble", "shares", "trace"]
