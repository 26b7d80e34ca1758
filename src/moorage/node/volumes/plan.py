"""What to do next for each volume: a pure function of the two states.

Owns: every rule about order: unmount before mount, device last, one step per volume at a time.
May not touch: anything but its arguments.
Start reading at: `plan_volume`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from moorage.kube.volumes import VolumeName
from moorage.node.layout import PodUid
from moorage.node.volumes.state import (
    STAGE,
    ActualVolume,
    CsiSource,
    Expand,
    MountState,
    MountVolume,
    UnmountDevice,
    UnmountVolume,
    VolumeAction,
    VolumeState,
    VolumeUse,
)

_EXCLUSIVE = "volume uses the ReadWriteOncePod access mode and is already in use by another pod"
_NOT_REPORTED = "waiting for the node's status to list the volume as in use"
_NOT_ATTACHED = "waiting for the volume to be attached to this node"
_LEAVING = "waiting for the end of a deleted pod that still uses the volume"
PASSING = frozenset({_NOT_REPORTED, _NOT_ATTACHED, _LEAVING})  # something is being done; all else is for users to solve


@dataclass(frozen=True, slots=True)
class VolumeStep:
    """The next action for a volume, if any; when to plan again; why pods wait."""

    action: VolumeAction | None = None
    look_again_at: float | None = None
    waiting: Mapping[PodUid, str] = field(default_factory=dict)
    forget: bool = False


def plan(world: VolumeState, names: Iterable[VolumeName], now: float) -> dict[VolumeName, VolumeStep]:
    """One step for each of the volumes."""
    return {name: plan_volume(world, name, now) for name in names}


def plan_volume(world: VolumeState, name: VolumeName, now: float) -> VolumeStep:
    """At most one action: a volume leaves old pods first, then goes to new ones, and its device goes last."""
    uses = world.desired.get(name, {})
    volume = world.actual.get(name)
    if volume is not None and volume.pending is not None:
        return VolumeStep()
    again: list[float] = []
    waiting: dict[PodUid, str] = {}
    if volume is not None and world.is_ready:
        for uid, pod in volume.pods.items():
            if pod.state is MountState.ABSENT or uid in uses or (uid in world.held and pod.may_be_used):
                continue
            action = _when_due(volume, UnmountVolume(name, uid), now, again)
            if action is not None:
                return VolumeStep(action)
    if volume is not None and world.is_ready and _has_wrong_label(volume, uses.values()):
        return VolumeStep(_when_due(volume, UnmountDevice(name), now, again), min(again, default=None))
    for use in _fewest_failures_first(volume, uses.values()):
        action = _next_for(world, volume, use, now, again, waiting)
        if action is not None:
            return VolumeStep(action, min(again, default=None), waiting)
    if volume is not None and world.is_ready and not uses and not volume.pods:
        if volume.device is MountState.ABSENT:
            return VolumeStep(forget=True)
        action = _when_due(volume, UnmountDevice(name), now, again)
        if action is not None:
            return VolumeStep(action)
    return VolumeStep(None, min(again, default=None), waiting)


def _fewest_failures_first(volume: ActualVolume | None, uses: Collection[VolumeUse]) -> Collection[VolumeUse]:
    """A stage that fails is tried for one pod at a time: where it fails for one of them only, another has its turn."""
    if volume is None or STAGE not in volume.backoffs:
        return uses
    return sorted(uses, key=lambda use: volume.failures_of(MountVolume(use)))


def _next_for(
    world: VolumeState,
    volume: ActualVolume | None,
    use: VolumeUse,
    now: float,
    again: list[float],
    waiting: dict[PodUid, str],
) -> VolumeAction | None:
    uid = use.pod.uid
    state = volume.state_of(uid) if volume else MountState.ABSENT
    if state is not MountState.MOUNTED:
        reason = _obstacle(world, volume, use, now, again)
        if reason:
            waiting[uid] = reason
            return None
        return _when_due(volume, MountVolume(use), now, again)
    assert volume is not None
    if use.republish_s > 0:
        due = volume.pods[uid].published_at + use.republish_s
        if due <= now:
            action = _when_due(volume, MountVolume(use), now, again)
            if action is not None:
                return action
        else:
            again.append(due)
    if wants_growth(volume, use):
        return _when_due(volume, Expand(use), now, again)
    return None


def wants_growth(volume: ActualVolume, use: VolumeUse) -> bool:
    """The PV has become larger than what this node last grew the volume to."""
    known = volume.size_bytes or use.claim_size_bytes
    return (
        isinstance(use.source, CsiSource)
        and not use.source.is_ephemeral
        and not use.read_only
        and not volume.growth_refused
        and use.claim_expands
        and 0 < known < use.size_bytes
    )


def _has_wrong_label(volume: ActualVolume, uses: Collection[VolumeUse]) -> bool:
    """Staged with an SELinux label that no pod wants any more: a mount's label cannot be changed."""
    is_free = volume.device is not MountState.ABSENT and not volume.pods
    return is_free and bool(uses) and all(use.se_linux_label != volume.se_linux_label for use in uses)


def _obstacle(world: VolumeState, volume: ActualVolume | None, use: VolumeUse, now: float, again: list[float]) -> str:
    if use.is_attachable:
        if use.volume not in world.in_use_reported:
            return _NOT_REPORTED
        if use.volume not in world.attached:
            return _NOT_ATTACHED
    held = volume.pods if volume is not None else {}
    others = [uid for uid, pod in held.items() if uid != use.pod.uid and pod.state is not MountState.ABSENT]
    ends = [world.leaving[uid] for uid in others if world.leaving.get(uid, now) > now and not use.is_shared]
    if ends:
        again.append(min(ends))
        return _LEAVING
    if use.is_exclusive and others:
        return _EXCLUSIVE
    if volume is not None and others and volume.se_linux_label != use.se_linux_label:
        has, needs = volume.se_linux_label or "none", use.se_linux_label or "none"
        return f"volume is mounted for another pod with SELinux label {has}, and this pod needs {needs}"
    return ""


def _when_due(volume: ActualVolume | None, action: VolumeAction, now: float, again: list[float]) -> VolumeAction | None:
    due = volume.due_at(action) if volume is not None else now
    if now < due:
        again.append(due)
        return None
    return action
