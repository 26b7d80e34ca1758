"""What should be attached and what is attached, as plain data.

Owns: desired state (which pods want which volume on which node), actual state (what is, or may be, attached where),
what nodes report, and the sets of volumes and nodes that changed since they were last looked at.
May not touch: the API, clocks, tasks. `populate.py` fills it, `plan.py` reads it, `execute.py` tells it outcomes.
Start reading at: `AttachState`, `TrackedVolume`.

An attachment is in one of five states. There is no entry where nothing is attached.

    ATTACHING   the VolumeAttachment was asked for; the answer is awaited
    ATTACHED    confirmed by the attacher; listed in the node's status
    UNCERTAIN   an attach or detach failed, or a restart found it: it may be attached; it is not listed
    LEAVING     to be detached; the node's status must stop listing it first
    DETACHING   the VolumeAttachment is deleted, and awaited to be gone
"""

import heapq
from dataclasses import dataclass, field
from enum import Enum

from moorage.kube.objects.meta import ObjectReference
from moorage.kube.volumes import NodeName, VolumeName, attachment_name, driver_and_handle

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 122.0
OPERATION_TIMEOUT_S = 120.0


def attachment_of(volume: VolumeName, node: NodeName) -> str:
    """Return the name of the VolumeAttachment of a volume on a node."""
    driver, handle = driver_and_handle(volume) or ("", volume)
    return attachment_name(driver, handle, node)


class AttachPhase(Enum):
    ATTACHING = "attaching"
    ATTACHED = "attached"
    UNCERTAIN = "uncertain"
    LEAVING = "leaving"
    DETACHING = "detaching"


@dataclass(slots=True)
class AttachBackoff:
    """How long an operation that failed is left alone; another kind of operation starts afresh."""

    operation: str = ""
    delay_s: float = 0.0
    until: float = 0.0

    def failed(self, operation: str, now: float) -> None:
        again = operation == self.operation and self.delay_s > 0
        self.delay_s = min(self.delay_s * 2, MAX_BACKOFF_S) if again else FIRST_BACKOFF_S
        self.operation = operation
        self.until = now + self.delay_s

    def holds(self, operation: str, now: float) -> bool:
        return operation == self.operation and now < self.until


@dataclass(slots=True)
class VolumeOnNode:
    """What is known of one volume on one node."""

    state: AttachPhase
    deadline: float = 0.0  # when an operation in flight is given up; 0 while none is
    is_executing: bool = False  # our own requests for it have not all been answered
    was_deleted: bool = False  # the API server took our deletion: what is left is to see it gone
    assumed_in_use: bool = False  # mounted, for all we know, until the node's next report
    was_listed: bool = False  # the node's status has listed it, so that it may really be mounted
    is_new: bool = True  # no attach of it has ended yet
    detach_wanted_at: float | None = None
    doubted_at: float | None = None  # since then its VolumeAttachment has not said that it is attached
    told: list[ObjectReference] = field(default_factory=list)  # the pods that it is being attached for
    backoff: AttachBackoff = field(default_factory=AttachBackoff)

    @property
    def is_pending(self) -> bool:
        return self.state in (AttachPhase.ATTACHING, AttachPhase.DETACHING)


@dataclass(slots=True)
class DesiredAttachment:
    """Who wants a volume on a node."""

    pods: dict[str, ObjectReference] = field(default_factory=dict)  # by uid
    was_warned: bool = False  # its pods were told that the volume is held elsewhere


@dataclass(slots=True)
class TrackedVolume:
    """One volume, wherever it is wanted or attached."""

    name: VolumeName
    pv_name: str = ""  # unknown after a restart until a pod names it
    driver: str = ""
    is_shareable: bool = True  # may be attached to several nodes; unknown counts as yes, as in Kubernetes
    wanted: dict[NodeName, DesiredAttachment] = field(default_factory=dict)
    attachments: dict[NodeName, VolumeOnNode] = field(default_factory=dict)


@dataclass(slots=True)
class AttachNode:
    """What matters of a node. One that was deleted is kept while anything is wanted or attached there."""

    name: NodeName
    exists: bool = False
    is_managed: bool = False
    is_ready: bool = False
    is_out_of_service: bool = False
    in_use: frozenset[str] = frozenset()
    foreign: tuple[tuple[str, str], ...] = ()  # attached volumes of other plugins, which stay listed
    listed: frozenset[str] = frozenset()  # ours that its status lists
    volumes: set[VolumeName] = field(default_factory=set)  # with an attachment here
    wishes: set[VolumeName] = field(default_factory=set)


@dataclass(slots=True)
class PodUse:
    """What one pod contributes to the desired state."""

    key: str
    node: NodeName
    volumes: set[VolumeName] = field(default_factory=set)


class AttachState:
    """Both states, and what changed. Every change goes through a method that marks what must be looked at."""

    def __init__(self) -> None:
        self.volumes: dict[VolumeName, TrackedVolume] = {}
        self.nodes: dict[NodeName, AttachNode] = {}
        self.pods: dict[str, PodUse] = {}  # by uid
        self.names: dict[str, tuple[VolumeName, NodeName]] = {}  # VolumeAttachment name to what it attaches
        self.in_doubt: dict[str, tuple[VolumeName, NodeName]] = {}  # creations whose outcome was never heard
        self.dirty: set[VolumeName] = set()
        self.dirty_nodes: set[NodeName] = set()
        self.dirty_drivers: set[str] = set()
        self.late_nodes: set[NodeName] = set()  # became managed after they had pods
        self._timers: list[tuple[float, str, str]] = []

    def node(self, name: NodeName) -> AttachNode:
        found = self.nodes.get(name)
        if found is None:
            found = self.nodes[name] = AttachNode(name)
        return found

    def volume(self, name: VolumeName) -> TrackedVolume:
        found = self.volumes.get(name)
        if found is None:
            found = self.volumes[name] = TrackedVolume(name)
        return found

    def attachment(self, name: VolumeName, node: NodeName) -> VolumeOnNode | None:
        volume = self.volumes.get(name)
        return volume.attachments.get(node) if volume is not None else None

    # Desired state

    def want(self, uid: str, pod: ObjectReference, node: NodeName, name: VolumeName) -> None:
        """A pod on a node wants a volume."""
        use = self.pods.setdefault(uid, PodUse(f"{pod.namespace}/{pod.name}", node))
        volume = self.volume(name)
        wish = volume.wanted.get(node)
        if wish is None:
            wish = volume.wanted[node] = DesiredAttachment()
            self.node(node).wishes.add(name)
        if uid not in wish.pods:
            wish.pods[uid] = pod
            use.volumes.add(name)
            self.dirty.add(name)

    def unwant(self, uid: str, only: VolumeName | None = None) -> None:
        """A pod no longer wants its volumes (or one of them)."""
        use = self.pods.get(uid)
        if use is None:
            return
        for name in [only] if only is not None else list(use.volumes):
            use.volumes.discard(name)
            self._drop_wish(uid, name, use.node)
        if not use.volumes:
            del self.pods[uid]

    def _drop_wish(self, uid: str, name: VolumeName, node: NodeName) -> None:
        volume = self.volumes.get(name)
        wish = volume.wanted.get(node) if volume is not None else None
        if volume is None or wish is None:
            return
        wish.pods.pop(uid, None)
        self.dirty.add(name)
        if not wish.pods:
            del volume.wanted[node]
            self.node(node).wishes.discard(name)
            self._forget_if_unused(volume, node)

    # Actual state

    def found_attached(self, name: VolumeName, node: NodeName) -> None:
        """A restart found the volume in the node's status."""
        self._place(name, node, VolumeOnNode(AttachPhase.ATTACHED, was_listed=True, is_new=False))

    def found_attachment(self, name: VolumeName, node: NodeName) -> None:
        """A VolumeAttachment was found of which we do not know how far it came."""
        if self.attachment(name, node) is None:
            self._place(name, node, VolumeOnNode(AttachPhase.UNCERTAIN, assumed_in_use=True, is_new=False))

    def attach_begins(self, name: VolumeName, node: NodeName, now: float) -> None:
        attachment = self.attachment(name, node)
        if attachment is None:
            attachment = VolumeOnNode(AttachPhase.ATTACHING)
            self._place(name, node, attachment)
        attachment.state = AttachPhase.ATTACHING
        attachment.was_deleted = False
        attachment.detach_wanted_at = None
        wish = self.volumes[name].wanted.get(node)
        attachment.told = list(wish.pods.values()) if wish is not None else []
        attachment.deadline = now + OPERATION_TIMEOUT_S
        attachment.is_executing = True
        self.wake_at(attachment.deadline, name)

    def attached(self, name: VolumeName, node: NodeName) -> None:
        """The attacher confirmed it; the node's status has to list it now."""
        attachment = self.volumes[name].attachments[node]
        attachment.state = AttachPhase.ATTACHED
        attachment.deadline = 0.0
        attachment.backoff = AttachBackoff()
        attachment.assumed_in_use = attachment.was_listed = True
        attachment.is_new = False
        attachment.doubted_at = None
        self._touch(name, node)

    def failed(self, name: VolumeName, node: NodeName, operation: str, now: float) -> None:
        """An operation failed: the attachment is uncertain, and left alone for a while."""
        attachment = self.attachment(name, node)
        if attachment is None:
            return
        attachment.state = AttachPhase.UNCERTAIN
        attachment.deadline = 0.0
        attachment.assumed_in_use |= attachment.is_new
        attachment.is_new = False
        attachment.backoff.failed(operation, now)
        self.wake_at(attachment.backoff.until, name)
        self._touch(name, node)

    def leave(self, name: VolumeName, node: NodeName) -> None:
        """It is to be detached: its node must not list it any more."""
        self.volumes[name].attachments[node].state = AttachPhase.LEAVING
        self._touch(name, node)

    def detach_begins(self, name: VolumeName, node: NodeName, now: float) -> None:
        attachment = self.volumes[name].attachments[node]
        attachment.state = AttachPhase.DETACHING
        attachment.was_deleted = False
        attachment.deadline = now + OPERATION_TIMEOUT_S
        attachment.is_executing = True
        self.wake_at(attachment.deadline, name)

    def detached(self, name: VolumeName, node: NodeName) -> None:
        """The VolumeAttachment is gone: nothing is attached there any more."""
        volume = self.volumes.get(name)
        if volume is None or node not in volume.attachments:
            return
        del volume.attachments[node]
        self.names.pop(attachment_of(name, node), None)
        self.node(node).volumes.discard(name)
        self._touch(name, node)
        self._forget_if_unused(volume, node)

    def doubted(self, name: VolumeName, node: NodeName) -> None:
        """The attacher withdrew its confirmation, or something changed behind our back."""
        attachment = self.volumes[name].attachments[node]
        attachment.state = AttachPhase.UNCERTAIN
        attachment.deadline = 0.0
        attachment.doubted_at = None
        self._touch(name, node)

    def listing(self, node: NodeName) -> list[VolumeName]:
        """What the node's status should list: confirmed, and not about to be detached."""
        known = self.nodes.get(node)
        if known is None:
            return []
        return sorted(
            name for name in known.volumes if self.volumes[name].attachments[node].state is AttachPhase.ATTACHED
        )

    # Time

    def wake_at(self, due: float, name: VolumeName) -> None:
        """Look at a volume again at a time."""
        heapq.heappush(self._timers, (due, "volume", name))

    def wake_node_at(self, due: float, name: NodeName) -> None:
        heapq.heappush(self._timers, (due, "node", name))

    def wake_driver_at(self, due: float, name: str) -> None:
        heapq.heappush(self._timers, (due, "driver", name))

    def wake_pods_at(self, due: float, name: NodeName) -> None:
        heapq.heappush(self._timers, (due, "pods", name))

    def ring(self, now: float) -> None:
        """Mark what has become due."""
        while self._timers and self._timers[0][0] <= now:
            _, kind, name = heapq.heappop(self._timers)
            if kind == "volume":
                self.dirty.add(VolumeName(name))
            elif kind == "node":
                self.dirty_nodes.add(NodeName(name))
            elif kind == "pods":
                self.late_nodes.add(NodeName(name))
            else:
                self.dirty_drivers.add(name)

    @property
    def next_due(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def _place(self, name: VolumeName, node: NodeName, attachment: VolumeOnNode) -> None:
        self.volume(name).attachments[node] = attachment
        self.names[attachment_of(name, node)] = (name, node)
        self.node(node).volumes.add(name)
        self._touch(name, node)

    def _touch(self, name: VolumeName, node: NodeName) -> None:
        self.dirty.add(name)
        self.dirty_nodes.add(node)

    def _forget_if_unused(self, volume: TrackedVolume, node: NodeName) -> None:
        if not volume.wanted and not volume.attachments:
            self.volumes.pop(volume.name, None)
        known = self.nodes[node]
        if not known.exists and not known.volumes and not known.wishes:
            del self.nodes[node]
