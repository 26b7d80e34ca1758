"""What to do next about the volumes that changed. Pure: the same world at the same time gives the same actions.

Owns: every rule of attaching and detaching: who may share, when a node counts as done with a volume, force, back-off.
May not touch: the API, the clock. It changes nothing; `execute.py` carries the actions out.
Start reading at: `plan`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moorage.controllers.attachdetach.state import AttachPhase, AttachState, TrackedVolume, VolumeOnNode
from moorage.kube.volumes import NodeName, VolumeName


@dataclass(frozen=True, slots=True)
class AttachLimits:
    """How long nodes and attachments are waited for, and whether a silent node is overruled after that."""

    force_after_s: float = 360.0
    may_force: bool = True
    verify_s: float = 60.0  # how long a VolumeAttachment may contradict what is known to be attached


@dataclass(frozen=True, slots=True)
class Attach:
    volume: VolumeName
    node: NodeName


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take a volume off the list in the node's status, so that nothing new mounts it; detaching comes after that."""

    volume: VolumeName
    node: NodeName


@dataclass(frozen=True, slots=True)
class Detach:
    """Take a volume off a node; `verify` asks the node's live status once more whether it is in use."""

    volume: VolumeName
    node: NodeName
    verify: bool = True


@dataclass(frozen=True, slots=True)
class AwaitUnmount:
    """No pod needs the volume on the node any more. The time until a forced detach counts from now."""

    volume: VolumeName
    node: NodeName


@dataclass(frozen=True, slots=True)
class Keep:
    """It is wanted again: the time until force no longer counts."""

    volume: VolumeName
    node: NodeName


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No answer came to an attach or detach in time."""

    volume: VolumeName
    node: NodeName


@dataclass(frozen=True, slots=True)
class Verify:
    """Look at the VolumeAttachment of something attached that has contradicted it for a while, and believe it."""

    volume: VolumeName
    node: NodeName


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the pods on a node that another node has the volume; `holders` are the nodes."""

    volume: VolumeName
    node: NodeName
    holders: tuple[NodeName, ...]


AttachAction = Attach | Withdraw | Detach | AwaitUnmount | Keep | GiveUp | Verify | Warn


def plan(world: AttachState, names: Iterable[VolumeName], limits: AttachLimits, now: float) -> list[AttachAction]:
    """The actions that the named volumes call for, detaching before attaching."""
    actions: list[AttachAction] = []
    for name in sorted(names):
        volume = world.volumes.get(name)
        if volume is not None:
            detaching = list(_plan_present(world, volume, limits, now))
            actions += detaching
            actions += _plan_wanted(volume, detaching, now)
    return actions


def _plan_present(
    world: AttachState, volume: TrackedVolume, limits: AttachLimits, now: float
) -> Iterator[AttachAction]:
    for node, attachment in volume.attachments.items():
        if attachment.is_executing:
            continue
        if attachment.is_pending:
            if now >= attachment.deadline:
                yield GiveUp(volume.name, node)
        elif node in volume.wanted:
            if attachment.detach_wanted_at is not None:
                yield Keep(volume.name, node)
            if attachment.doubted_at is not None and now - attachment.doubted_at >= limits.verify_s:
                yield Verify(volume.name, node)
        else:
            yield from _plan_unwanted(world, volume, node, attachment, limits, now)


def _plan_unwanted(
    world: AttachState,
    volume: TrackedVolume,
    node: NodeName,
    attachment: VolumeOnNode,
    limits: AttachLimits,
    now: float,
) -> Iterator[AttachAction]:
    if attachment.detach_wanted_at is None:
        yield AwaitUnmount(volume.name, node)
    if attachment.backoff.holds("detach", now):
        return
    known = world.nodes[node]
    since = attachment.detach_wanted_at if attachment.detach_wanted_at is not None else now
    is_overdue = limits.may_force and now - since > limits.force_after_s
    is_forced = known.is_out_of_service or (is_overdue and not known.is_ready)
    if (volume.name in known.in_use or _may_be_mounted(volume, node, attachment)) and not is_forced:
        return
    if known.exists and volume.name in known.listed:
        if attachment.state is not AttachPhase.LEAVING:
            yield Withdraw(volume.name, node)
        return
    yield Detach(volume.name, node, verify=not is_overdue and not known.is_out_of_service)


def _may_be_mounted(volume: TrackedVolume, node: NodeName, attachment: VolumeOnNode) -> bool:
    """Whether to wait for the node's next report.

    What the node's status never listed cannot be mounted. Kubernetes waits all the same, and so do we, unless that
    would keep the volume from a pod on another node.
    """
    is_waited_for = not volume.is_shareable and any(other != node for other in volume.wanted)
    return attachment.assumed_in_use and (attachment.was_listed or not is_waited_for)


def _plan_wanted(volume: TrackedVolume, detaching: list[AttachAction], now: float) -> Iterator[AttachAction]:
    leaving = {action.node for action in detaching if isinstance(action, Withdraw | Detach)}
    for node, wish in volume.wanted.items():
        attachment = volume.attachments.get(node)
        if attachment is not None and not _may_attach(attachment, now):
            continue
        # A volume that one node has to itself waits for every trace of it elsewhere to go, certain or not: Kubernetes
        # lets uncertain ones pass here, and may then attach a volume twice.
        holders = () if volume.is_shareable else tuple(other for other in volume.attachments if other != node)
        if not holders:
            yield Attach(volume.name, node)
            if not volume.is_shareable:
                return
        elif not wish.was_warned and not any(
            other in leaving or _is_busy(volume.attachments[other]) for other in holders
        ):
            yield Warn(volume.name, node, holders)


def _is_busy(attachment: VolumeOnNode) -> bool:
    return attachment.is_pending or attachment.state is AttachPhase.LEAVING


def _may_attach(attachment: VolumeOnNode, now: float) -> bool:
    if attachment.is_executing or attachment.state not in (AttachPhase.UNCERTAIN, AttachPhase.LEAVING):
        return False
    return not attachment.backoff.holds("attach", now)
