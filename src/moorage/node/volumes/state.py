"""What pods need and what is there, as plain data.

Owns: both states of the volume manager and how the outcome of a step changes the actual one.
May not touch: the disk, the API, a driver, a clock.
Start reading at: `VolumeState`, `VolumeUse`, `ActualVolume`, `settle`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from moorage.kube.objects.meta import SecretReference
from moorage.kube.volumes import VolumeName
from moorage.node.layout import PodUid

BACKOFF_START_S = 0.5
BACKOFF_MAX_S = 122.0
_MANY = frozenset({"ReadWriteMany", "ReadOnlyMany"})


class MountState(Enum):
    """Whether something is mounted; UNCERTAIN counts as mounted for teardown and as missing for a pod's start."""

    ABSENT = "absent"
    UNCERTAIN = "uncertain"
    MOUNTED = "mounted"


class StepFailure(Enum):
    """What may be concluded from an error."""

    UNCERTAIN = "uncertain"  # the driver may have done it, or may still be doing it
    TRANSIENT = "transient"  # nothing was asked of the driver
    FINAL = "final"  # the driver refused; nothing is there


@dataclass(frozen=True, slots=True)
class PodRef:
    """The pod as a volume sees it."""

    uid: PodUid
    namespace: str
    name: str
    service_account: str = "default"


@dataclass(frozen=True, slots=True)
class CsiSource:
    """A CSI volume as the API describes it; after a restart only the first six fields are known."""

    driver: str
    handle: str
    spec_name: str
    is_ephemeral: bool = False
    is_block: bool = False
    claim: str = ""  # namespace/name
    claim_uid: str = ""
    access_modes: tuple[str, ...] = ()
    fs_type: str = ""
    mount_options: tuple[str, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    stage_secret: SecretReference | None = None
    publish_secret: SecretReference | None = None
    expand_secret: SecretReference | None = None


@dataclass(frozen=True, slots=True)
class PlainSource:
    """A volume that the agent makes itself: emptyDir, secret, configMap, hostPath, projected, downwardAPI."""

    plugin: str
    spec_name: str
    body: Any


@dataclass(frozen=True, slots=True)
class VolumeUse:
    """One pod's need of one volume."""

    volume: VolumeName
    pod: PodRef
    source: CsiSource | PlainSource
    outer_names: tuple[str, ...]
    is_attachable: bool = False
    read_only: bool = False
    fs_group: int | None = None
    fs_group_on_root_mismatch: bool = False
    se_linux_label: str = ""  # to mount with; empty where volumes are not mounted with one
    size_bytes: int = 0  # the PV's capacity; 0 for volumes without one
    claim_size_bytes: int = 0  # what the claim's status says
    claim_expands: bool = True
    republish_s: float = 0.0  # publish again this often; 0 is never

    @property
    def is_exclusive(self) -> bool:
        """ReadWriteOncePod and nothing else."""
        return isinstance(self.source, CsiSource) and self.source.access_modes == ("ReadWriteOncePod",)

    @property
    def is_shared(self) -> bool:
        """Meant for many at once."""
        return isinstance(self.source, CsiSource) and not _MANY.isdisjoint(self.source.access_modes)


@dataclass(slots=True)
class VolumeBackoff:
    failures: int = 0
    until: float = 0.0
    message: str = ""


@dataclass(slots=True)
class ActualPod:
    """What is known of one pod's mount of a volume."""

    state: MountState = MountState.ABSENT
    is_reconstructed: bool = False
    published_at: float = 0.0
    source: CsiSource | PlainSource | None = None  # two PersistentVolumes may name one volume of a driver

    @property
    def may_be_used(self) -> bool:
        """Processes of the pod may have been started with it: it was certain once, if perhaps to an earlier agent."""
        return self.state is MountState.MOUNTED or self.published_at > 0 or self.is_reconstructed


@dataclass(slots=True)
class ActualVolume:
    """What is known of one volume on this node."""

    name: VolumeName
    source: CsiSource | PlainSource
    device: MountState = MountState.ABSENT
    device_is_reconstructed: bool = False
    is_attachable: bool | None = None  # unknown after a restart
    se_linux_label: str = ""  # what it is mounted with, if anything is
    size_bytes: int = 0  # what has been grown to; 0 is unknown
    growth_refused: bool = False  # the driver cannot grow it while in use
    pods: dict[PodUid, ActualPod] = field(default_factory=dict)
    pending: "VolumeAction | None" = None
    backoffs: dict[tuple[str, str], VolumeBackoff] = field(default_factory=dict)

    def state_of(self, uid: PodUid) -> MountState:
        pod = self.pods.get(uid)
        return pod.state if pod else MountState.ABSENT

    def due_at(self, action: "VolumeAction") -> float:
        """When the back-offs that hold up an action are over."""
        keys = (backoff_key(action), STAGE) if isinstance(action, MountVolume) else (backoff_key(action),)
        return max(self.backoffs[key].until if key in self.backoffs else 0.0 for key in keys)

    def failures_of(self, action: "VolumeAction") -> int:
        backoff = self.backoffs.get(backoff_key(action))
        return backoff.failures if backoff is not None else 0

    def reason_against(self, uid: PodUid) -> str:
        """Why the last mount for a pod failed, or the last stage for any; empty when neither did."""
        backoff = self.backoffs.get(("mount", uid)) or self.backoffs.get(STAGE)
        return backoff.message if backoff is not None else ""

    def source_of(self, uid: PodUid) -> CsiSource | PlainSource:
        """The volume as this pod has it: its directory bears the name of the pod's own PersistentVolume."""
        pod = self.pods.get(uid)
        return (pod.source if pod else None) or self.source


@dataclass(frozen=True, slots=True)
class MountVolume:
    """Stage if needed, publish, grow if needed."""

    use: VolumeUse
    kind = "mount"


@dataclass(frozen=True, slots=True)
class UnmountVolume:
    volume: VolumeName
    uid: PodUid
    kind = "unmount"


@dataclass(frozen=True, slots=True)
class UnmountDevice:
    volume: VolumeName
    kind = "unmount device"


@dataclass(frozen=True, slots=True)
class Expand:
    use: VolumeUse
    kind = "expand"


VolumeAction = MountVolume | UnmountVolume | UnmountDevice | Expand


def volume_of(action: VolumeAction) -> VolumeName:
    match action:
        case MountVolume(use) | Expand(use):
            return use.volume
        case UnmountVolume(volume, _) | UnmountDevice(volume):
            return volume


STAGE = ("stage", "")  # the back-off of a mount's first step, which is the same for every pod of a volume
EXPAND = (Expand.kind, "")


def backoff_key(action: VolumeAction) -> tuple[str, str]:
    match action:
        case MountVolume(use):
            return (action.kind, use.pod.uid)
        case UnmountVolume(_, uid):
            return (action.kind, uid)
        case _:
            return (action.kind, "")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How a step ended. `device` and `pod` say what is certain; `failure` and `step` what went wrong and where."""

    failure: StepFailure | None = None
    step: str = ""  # device, pod, expand
    message: str = ""
    staged: bool = False  # the device step succeeded (or was not needed)
    published: bool = False
    size_bytes: int = 0
    growth_refused: bool = False


@dataclass(slots=True)
class VolumeState:
    """Everything that the plan looks at."""

    desired: dict[VolumeName, dict[PodUid, VolumeUse]] = field(default_factory=dict)
    actual: dict[VolumeName, ActualVolume] = field(default_factory=dict)
    held: set[PodUid] = field(default_factory=set)  # their processes still run: nothing of theirs is unmounted
    leaving: dict[PodUid, float] = field(default_factory=dict)  # no longer pods; until when others wait for their end
    in_use_reported: frozenset[str] = frozenset()  # in node.status.volumesInUse, as the server has it
    attached: frozenset[str] = frozenset()  # in node.status.volumesAttached
    is_ready: bool = False  # the desired state is complete: unmounting may begin

    def in_use(self) -> frozenset[VolumeName]:
        """What node.status.volumesInUse must list: attachable, and desired or possibly here."""
        names = {name for name, uses in self.desired.items() if any(use.is_attachable for use in uses.values())}
        for name, volume in self.actual.items():
            is_persistent = isinstance(volume.source, CsiSource) and not volume.source.is_ephemeral
            if is_persistent and name not in self.desired and volume.is_attachable is not False:
                names.add(name)
        return frozenset(names)


def settle(world: VolumeState, action: VolumeAction, outcome: StepOutcome, now: float) -> None:
    """Take the outcome of a step into the actual state."""
    volume = world.actual.get(volume_of(action))
    if volume is None:
        return
    volume.pending = None
    _settle_backoffs(world, volume, action, outcome, now)
    match action:
        case MountVolume(use):
            _settle_mount(volume, use, outcome, now)
        case UnmountVolume(_, uid):
            if outcome.failure is None:
                volume.pods.pop(uid, None)
            elif uid in volume.pods:
                volume.pods[uid].state = MountState.UNCERTAIN
        case UnmountDevice():
            volume.device = MountState.ABSENT if outcome.failure is None else MountState.UNCERTAIN
            volume.device_is_reconstructed &= outcome.failure is not None
        case Expand():
            volume.size_bytes = max(volume.size_bytes, outcome.size_bytes)
            volume.growth_refused |= outcome.growth_refused


def _settle_backoffs(
    world: VolumeState, volume: ActualVolume, action: VolumeAction, outcome: StepOutcome, now: float
) -> None:
    key = backoff_key(action)
    failed = [key] if outcome.failure is not None else []
    if isinstance(action, MountVolume):
        if outcome.failure is not None and outcome.step == "device":  # else each of its pods would have it staged again
            failed.append(STAGE)
        if outcome.staged:
            volume.backoffs.pop(STAGE, None)
        if action.use.pod.uid not in world.desired.get(volume.name, {}):
            failed = [one for one in failed if one != key]  # that pod does not come back
    if key not in failed:
        volume.backoffs.pop(key, None)
    for one in failed:
        backoff = volume.backoffs.setdefault(one, VolumeBackoff())
        backoff.failures += 1
        delay_s: float = min(BACKOFF_START_S * 2.0 ** min(backoff.failures - 1, 20), BACKOFF_MAX_S)
        backoff.until = now + delay_s
        backoff.message = outcome.message


def _settle_mount(volume: ActualVolume, use: VolumeUse, outcome: StepOutcome, now: float) -> None:
    volume.is_attachable, volume.se_linux_label = use.is_attachable, use.se_linux_label
    pod = volume.pods.setdefault(use.pod.uid, ActualPod())
    if pod.state is MountState.ABSENT or outcome.published:
        pod.source = use.source
    if outcome.staged:
        volume.device, volume.device_is_reconstructed = MountState.MOUNTED, False
        volume.source = use.source
    volume.growth_refused |= outcome.growth_refused
    if outcome.published:
        pod.state, pod.is_reconstructed, pod.published_at = MountState.MOUNTED, False, now
        volume.size_bytes = max(volume.size_bytes, outcome.size_bytes)
    elif outcome.failure is StepFailure.UNCERTAIN:
        if outcome.step == "device":
            volume.device = MountState.UNCERTAIN if volume.device is MountState.ABSENT else volume.device
        elif pod.state is MountState.ABSENT:
            pod.state = MountState.UNCERTAIN
    elif outcome.failure is StepFailure.FINAL:
        if outcome.step == "device" and volume.device is MountState.UNCERTAIN and not volume.device_is_reconstructed:
            volume.device = MountState.ABSENT
        elif outcome.step == "pod" and pod.state is MountState.UNCERTAIN and not pod.may_be_used:
            pod.state = MountState.ABSENT
    if pod.state is MountState.MOUNTED and outcome.failure is not None:
        pod.published_at = now  # a failed republish waits its turn and leaves the mount alone
    if pod.state is MountState.ABSENT:
        del volume.pods[use.pod.uid]
