"""What the pictures of one volume are made of: the chain of its life, its timeline, its family. Pure functions.

Owns: which boxes, bars and branches there are, and where. Templates draw them.
Start reading at: `chain_of`, `gantt_of`, `family_of`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moorage.insight.cluster_view import ClusterView
from moorage.insight.explain import state_of
from moorage.insight.trace import Trace, TraceStep
from moorage.kube.objects import KubeObject, PersistentVolumeClaim, VolumeSnapshot
from moorage.ui.stages import ClaimPlace

_MOST_STEPS = 80
_DEEPEST = 6
_MOST_CHILDREN = 50
_MOST_BRANCHES = 300  # of one tree
_NARROWEST = 0.4  # percent of the width, so that a short step can be seen


@dataclass(frozen=True)
class Box:
    """One link of the chain. `tone` is done, now, wrong or later."""

    title: str
    name: str
    state: str
    owner: str
    tone: str
    since: str | None = None
    error: str = ""
    at: int = 0  # its place in the row


def chain_of(claim: PersistentVolumeClaim, place: ClaimPlace, wrong: dict[str, str]) -> list[Box]:
    """Return claim → volume → attachment → staged → mounted. `wrong` maps a box's title to its error."""
    volume, is_bound = place.volume, claim.status.phase == "Bound"
    pods = ", ".join(pod.name for pod in place.pods) or "no pod"
    attached = [each for each in place.attachments if each.status.attached]
    running = [pod for pod in place.pods if pod.status.phase == "Running"]
    used_on = sorted({*place.staged_on, *(pod.spec.node_name for pod in running)})
    nodes = ", ".join(sorted({each.spec.node_name for each in place.attachments})) or "no node"
    is_done = {
        "Claim": is_bound,
        "Volume": volume is not None and is_bound,
        "Attachment": bool(attached) or (not place.needs_attach and bool(used_on)),
        "Staged": bool(used_on),
        "Mounted": bool(running) and len(running) == len(place.pods),
    }
    facts = (
        ("Claim", claim.name, claim.status.phase or "Pending", "binder", claim),
        (
            "Volume",
            volume.name if volume else "",
            state_of(volume) if volume else "not there yet",
            "provisioner",
            volume,
        ),
        _attachment(place, nodes, attached),
        ("Staged", ", ".join(used_on), "in use" if used_on else "not staged", "node agent", None),
        (
            "Mounted",
            pods,
            f"{len(running)} of {len(place.pods)} running",
            "node agent",
            place.pods[0] if place.pods else None,
        ),
    )
    boxes, is_reached = [], True
    for at, (title, name, state, owner, obj) in enumerate(facts):
        error = wrong.get(title, "")
        tone = "wrong" if error else "done" if is_done[title] else "now" if is_reached and place.pods else "later"
        tone = "now" if tone == "later" and is_reached and title in ("Claim", "Volume") else tone
        is_reached = is_reached and is_done[title]
        boxes.append(Box(title, name, state, owner, tone, _since(obj), error, at))
    return boxes


def _attachment(
    place: ClaimPlace, nodes: str, attached: Sequence[KubeObject]
) -> tuple[str, str, str, str, KubeObject | None]:
    if place.volume is not None and not place.needs_attach:
        return "Attachment", "", "not needed", "driver", None
    first = place.attachments[0] if place.attachments else None
    state = f"{len(attached)} of {len(place.attachments)} attached" if place.attachments else "not asked for"
    return "Attachment", nodes, state, "attach/detach, attacher", first


def _since(obj: KubeObject | None) -> str | None:
    return obj.metadata.creation_timestamp if obj is not None else None


@dataclass(frozen=True)
class Bar:
    """One step of a timeline; `left` and `width` are percent of the whole."""

    step: TraceStep
    left: float
    width: float
    row: int


@dataclass(frozen=True)
class Gantt:
    """A timeline: its bars, the seconds that it spans, and the people in it, for their colours."""

    bars: list[Bar] = field(default_factory=list)
    seconds: float = 0.0
    who: list[str] = field(default_factory=list)
    left_out: int = 0


def gantt_of(trace: Trace, now: float) -> Gantt:
    """Return the timeline of a trace; one that is not done goes on until now."""
    steps = trace.steps[-_MOST_STEPS:]
    if not steps:
        return Gantt()
    begin = min(step.begin for step in steps)
    end = max(max(step.at for step in steps), begin + 0.001)
    if not trace.is_done:
        end = max(end, now)
    scale = 100.0 / (end - begin)
    bars = []
    for row, step in enumerate(steps):
        width = max((step.at - step.begin) * scale, _NARROWEST)
        bars.append(Bar(step, round(min((step.begin - begin) * scale, 100.0 - width), 3), round(width, 3), row))
    who = sorted({step.who for step in steps})
    return Gantt(bars, end - begin, who, len(trace.steps) - len(steps))


@dataclass(frozen=True)
class Branch:
    """One member of a family: a claim or a snapshot, and what was made from it."""

    word: str
    obj: KubeObject
    state: str
    is_asked: bool
    children: list["Branch"] = field(default_factory=list)


def family_of(view: ClusterView, claim: PersistentVolumeClaim) -> Branch | None:
    """Return the family tree that a claim belongs to, from its oldest ancestor; None if it has no relatives."""
    top: KubeObject = claim
    for _ in range(_DEEPEST):
        parent = _parent(view, top)
        if parent is None or parent is claim:
            break
        top = parent
    tree = _grown(top, claim, _children(view))
    return tree if tree.children else None


def _parent(view: ClusterView, obj: KubeObject) -> KubeObject | None:
    match obj:
        case PersistentVolumeClaim():
            source = obj.spec.data_source_ref or obj.spec.data_source
            if source is None:
                return None
            key = f"{getattr(source, 'namespace', None) or obj.namespace}/{source.name}"
            return view.snapshots.get(key) if source.kind == "VolumeSnapshot" else view.claims.get(key)
        case VolumeSnapshot():
            return view.claims.get(f"{obj.namespace}/{obj.spec.source.persistent_volume_claim_name}")
    return None


def _grown(top: KubeObject, asked: KubeObject, children: Mapping[int, Sequence[KubeObject]]) -> Branch:
    """Return the tree below an object, level by level until it is too large or too deep."""
    tree = _branch(top, asked)
    level, count = [tree], 1
    for _ in range(_DEEPEST * 2):
        for branch in level:
            found = children.get(id(branch.obj), ())[: min(_MOST_CHILDREN, _MOST_BRANCHES - count)]
            branch.children.extend(_branch(child, asked) for child in found)
            count += len(found)
        level = [child for branch in level for child in branch.children]
    return tree


def _branch(obj: KubeObject, asked: KubeObject) -> Branch:
    return Branch("snapshot" if isinstance(obj, VolumeSnapshot) else "pvc", obj, state_of(obj), obj is asked)


def _children(view: ClusterView) -> dict[int, list[KubeObject]]:
    """Return what was made from each object, by its id; objects are not hashable."""
    found: dict[int, list[KubeObject]] = {}
    for each in sorted((*view.snapshots.values(), *view.claims.values()), key=lambda each: each.name):
        parent = _parent(view, each)
        if parent is not None and parent is not each:
            found.setdefault(id(parent), []).append(each)
    return found
