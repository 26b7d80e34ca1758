"""Why an object is where it is: the first cause that holds, followed to what it waits for.

Owns: turning a reference such as `pvc/data` into a story: one sentence, the chain behind it, evidence, one next step.
May not touch: writes, terminals.
Start reading at: `explain`.
"""

from dataclasses import dataclass, field

from moorage.errors import MoorageError, UsageError
from moorage.insight.causes import REGISTRY, Advice, Cause, Finding
from moorage.insight.causes.advice import trash_note
from moorage.insight.causes.pods_running import fs_group_note
from moorage.insight.cluster_view import ClusterView
from moorage.insight.reader import read_all
from moorage.insight.surroundings import read_around
from moorage.insight.workloads import WORKLOADS, Workload
from moorage.kube.api.client import Client
from moorage.kube.objects import (
    KubeObject,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
    VolumeSnapshot,
)
from moorage.suggest import Command, command, in_namespace, in_words, kubectl

_LONGEST_CHAIN = 8

KINDS: dict[str, type[KubeObject]] = {
    "pvc": PersistentVolumeClaim,
    "persistentvolumeclaim": PersistentVolumeClaim,
    "claim": PersistentVolumeClaim,
    "pv": PersistentVolume,
    "persistentvolume": PersistentVolume,
    "volume": PersistentVolume,
    "pod": Pod,
    "po": Pod,
    "va": VolumeAttachment,
    "volumeattachment": VolumeAttachment,
    "snapshot": VolumeSnapshot,
    "volumesnapshot": VolumeSnapshot,
    "vs": VolumeSnapshot,
    "node": Node,
    "no": Node,
}
_WORDS: dict[type[KubeObject], str] = {
    PersistentVolumeClaim: "pvc",
    PersistentVolume: "pv",
    Pod: "pod",
    VolumeAttachment: "va",
    VolumeSnapshot: "snapshot",
    Node: "node",
}
_FIELDS: dict[type[KubeObject], str] = {
    PersistentVolumeClaim: "claims",
    PersistentVolume: "volumes",
    Pod: "pods",
    VolumeAttachment: "attachments",
    VolumeSnapshot: "snapshots",
    Node: "nodes",
}


_HARMLESS = (
    "node-cordoned",
    "node-without-drivers",
    "node-attach-limit",
    "node-driver-waits",  # the pod's story tells it
)  # worth a word when asked, no trouble by itself


def is_harmless(story: "Story") -> bool:
    """Whether a story is worth telling when asked for, but no trouble by itself."""
    return story.cause in _HARMLESS


class ObjectNotFound(MoorageError):
    """The object asked about is not in the cluster.

    `trashed_as` is what the trash of a pool calls its volume. It is empty if the object has none.
    """

    code = "NOT_FOUND"

    def __init__(self, message: str, trashed_as: str = "") -> None:
        self.message, self.trashed_as = message, trashed_as
        where = "; a deleted volume of Moorage stays in the trash of its pool for a day: "
        undelete = command("moorage", "volume", "undelete", names=(trashed_as,))
        super().__init__(f"{message}{where}`{undelete}`" if trashed_as else message)


@dataclass(frozen=True)
class Link:
    """One object of the chain: where it stands and what it waits for."""

    object: str
    state: str
    sentence: str
    cause: str = ""


@dataclass(frozen=True)
class Story:
    """The whole explanation of one object."""

    object: str
    sentence: str
    cause: str
    stuck: bool
    chain: list[Link] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    next_step: str = ""
    purpose: str = ""
    then: list[Advice] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)


async def explain(client: Client, reference: str, namespace: str) -> Story:
    """The story of one object, given as `pvc/NAME` and the like."""
    word, _, name = reference.partition("/")
    workload = WORKLOADS.get(word.lower().removesuffix("s")) or WORKLOADS.get(word.lower())
    if workload is not None and name:
        return _story_of_workload(await client.find(workload, name, namespace), f"{word.lower()}/{name}", namespace)
    kind, name = parse(reference)
    view = await read_around(client, kind, name, namespace)
    return story_of(view, found(view, kind, name, namespace))


def _story_of_workload(found: Workload | None, shown: str, namespace: str) -> Story:
    """Say whether a controller makes the pods of an object; why a pod is stuck is shown for the pod."""
    if found is None:
        raise ObjectNotFound(f"there is no {shown} in namespace {namespace}")
    plural = found.resource.plural
    if not found.is_untouched:
        step = kubectl("get", "pods", namespace=namespace)
        return Story(shown, f"{shown}: its controller has seen it; ask about its pods", "", False, next_step=step)
    return Story(
        shown,
        f"{shown}: no controller has acted on it. Moorage runs none for {plural}, so it makes no pods here",
        "workload-without-controller",
        True,
        next_step=in_words("create a pod like the template of {}, with the same claims", found.name),
    )


async def explain_all(client: Client) -> list[Story]:
    """Return the stories of everything that is stuck, each told once, from where it begins.

    Reads each kind once, and takes time in proportion to the number of objects.
    """
    return stuck_stories(await read_all(client))


def parse(reference: str) -> tuple[type[KubeObject], str]:
    """`pvc/data` as a kind and a name; UsageError says what would be understood."""
    word, slash, name = reference.partition("/")
    kind = KINDS.get(word.lower().rstrip("s") if word.lower() not in KINDS else word.lower())
    if not slash or not name or kind is None:
        raise UsageError(f"{reference!r}: want KIND/NAME with pvc, pod, pv, va, snapshot, node or deployment")
    return kind, name


def found(view: ClusterView, kind: type[KubeObject], name: str, namespace: str) -> KubeObject:
    objects: dict[str, KubeObject] = getattr(view, _FIELDS[kind])
    key = f"{namespace}/{name}" if kind.resource.namespaced else name
    if key not in objects:
        where = f" in namespace {namespace}" if kind.resource.namespaced else ""
        why = view.unreadable.get(kind.resource.kind)
        message = f"there is no {_WORDS[kind]}/{name}{where}" + (f": {why}" if why else "")
        has_volume = kind in (PersistentVolumeClaim, PersistentVolume) and not why
        raise ObjectNotFound(message, key if has_volume else "")
    return objects[key]


def story_of(view: ClusterView, obj: KubeObject) -> Story:
    """Follow causes from an object to the one that explains it; the last one gives the next step."""
    chain: list[Link] = []
    evidence: list[str] = []
    seen: set[str] = set()
    advised, last_id, current = Finding(""), "", obj
    while True:
        seen.add(current.uid or current.key)
        cause, finding = first_cause(view, current)
        sentence = finding.sentence if finding else "it is well"
        chain.append(Link(ref(current), state_of(current), sentence, cause.id if cause else ""))
        if finding is None:
            break
        evidence += [line for line in finding.evidence if line not in evidence]
        if finding.next_step and not advised.purpose:  # a step with a purpose comes before what the chain says later
            advised = finding
        last_id = cause.id if cause else last_id
        following = finding.waits_for
        if following is None or (following.uid or following.key) in seen or len(chain) >= _LONGEST_CHAIN:
            break
        current = following
    if not last_id:
        return _without_cause(view, obj, chain)
    sentence = f"{ref(obj)}: " + " — ".join(link.sentence for link in chain if link.cause)
    step = advised.next_step or _waiting(obj)
    return Story(
        ref(obj), sentence, last_id, True, chain, evidence, step, advised.purpose, list(advised.then), view.unreadable
    )


def _without_cause(view: ClusterView, obj: KubeObject, chain: list[Link]) -> Story:
    """The story of an object that no cause is about; one that is being deleted is still not well."""
    if not obj.is_deleting:
        return Story(ref(obj), f"{ref(obj)}: {well(view, obj)}", "", False, chain, unreadable=view.unreadable)
    holders = f"finalizer {', '.join(obj.finalizers)} holds it" if obj.finalizers else "no finalizer holds it any more"
    sentence = f"it is being deleted, and {holders}"
    link = Link(ref(obj), state_of(obj), sentence)
    return Story(
        ref(obj), f"{ref(obj)}: {sentence}", "", True, [link], next_step=_waiting(obj), unreadable=view.unreadable
    )


def _waiting(obj: KubeObject) -> Command:
    """The next step if a component is at work and the user can only wait for it."""
    return command("moorage", "explain", f"{_WORDS[type(obj)]}/{obj.name}", *in_namespace(obj.namespace), "--watch")


def stuck_stories(view: ClusterView) -> list[Story]:
    """Stories of objects with a cause, leaving out those that are only a step in another's chain."""
    stories = []
    for kind in (PersistentVolumeClaim, Pod, VolumeSnapshot, PersistentVolume, VolumeAttachment, Node):
        objects: dict[str, KubeObject] = getattr(view, _FIELDS[kind])
        stories += [story_of(view, obj) for obj in objects.values()]
    stuck = [story for story in stories if story.stuck and not is_harmless(story)]
    told = {link.object for story in stuck for link in story.chain[1:]}
    return [story for story in stuck if story.object not in told]


def first_cause(view: ClusterView, obj: KubeObject) -> tuple[Cause | None, Finding | None]:
    for cause in REGISTRY:
        if cause.about is type(obj):
            finding = cause.test(view, obj)
            if finding is not None:
                return cause, finding
    return None, None


def ref(obj: KubeObject) -> str:
    word = _WORDS.get(type(obj), obj.resource.kind.lower())
    return f"{word}/{obj.name}" + (f" ({obj.namespace})" if obj.namespace not in ("", "default") else "")


def state_of(obj: KubeObject) -> str:
    """The state in one word, as kubectl shows it."""
    if obj.is_deleting:
        return "Terminating"
    match obj:
        case PersistentVolumeClaim() | PersistentVolume() | Pod():
            return obj.status.phase or "Pending"
        case VolumeAttachment():
            return "attached" if obj.status.attached else "not attached"
        case VolumeSnapshot():
            return "ready" if obj.status is not None and obj.status.ready_to_use else "not ready"
        case Node():
            return "Ready" if obj.is_ready else "NotReady"
    return ""


def well(view: ClusterView, obj: KubeObject) -> str:
    """One sentence about an object with which nothing is wrong."""
    match obj:
        case PersistentVolumeClaim():
            users = view.pods_of(obj)
            used = (
                f", used by pod {users[0].name} on {users[0].spec.node_name or 'no node yet'}"
                if users
                else ", used by no pod"
            )
            return f"it is bound to {obj.spec.volume_name}{used}; nothing is wrong"
        case PersistentVolume() if obj.spec.claim_ref is not None:
            holder = f"{obj.spec.claim_ref.namespace}/{obj.spec.claim_ref.name}"
            return f"it is {obj.status.phase} for claim {holder}; nothing is wrong{trash_note(obj)}"
        case PersistentVolume():
            return "it is free and waits for a claim; nothing is wrong"
        case Pod():
            note = "".join(f"; {each}" for each in fs_group_note(view, obj))
            return f"it is {obj.status.phase or 'Pending'} on {obj.spec.node_name or 'no node'}; nothing is wrong{note}"
        case VolumeAttachment():
            return f"it is attached to {obj.spec.node_name}; nothing is wrong"
    return f"it is {state_of(obj)}; nothing is wrong"
