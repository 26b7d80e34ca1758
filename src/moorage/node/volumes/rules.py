"""Small decisions about CSI volumes: access modes, who applies fsGroup, SELinux labels, what an error means.

Owns: those tables, as pure functions.
Start reading at: `access_mode`, `agent_applies_fs_group`, `failure_from`.
"""

from collections.abc import Collection, Sequence

from msgspec import convert

from moorage.csi import access_modes
from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError, InvalidAccessModes
from moorage.errors import MoorageError
from moorage.kube.objects.pods import Pod, SELinuxOptions
from moorage.kube.objects.storage import CsiDriverSpec
from moorage.node.volumes.state import CsiSource, StepFailure, VolumeUse

_UNCERTAIN = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED"})
STAGE, STATS, EXPAND = "STAGE_UNSTAGE_VOLUME", "GET_VOLUME_STATS", "EXPAND_VOLUME"
MULTI_WRITER, MOUNT_GROUP = "SINGLE_NODE_MULTI_WRITER", "VOLUME_MOUNT_GROUP"


class StepFailed(MoorageError):
    """A step of mounting or unmounting failed: where, and what may be concluded."""

    def __init__(self, failure: StepFailure, step: str, message: str) -> None:
        super().__init__(message)
        self.failure = failure
        self.step = step


def failure_from(error: CsiError) -> StepFailure:
    """Whether the driver may have done (or may still do) what it was asked."""
    return StepFailure.UNCERTAIN if error.code in _UNCERTAIN else StepFailure.FINAL


def access_mode(modes: Sequence[str], capabilities: Collection[str]) -> "pb.VolumeCapability.AccessMode.Mode.ValueType":
    """Return the CSI mode of a volume. Only the first of its access modes counts."""
    try:
        return access_modes.mode_of(modes[:1] or [access_modes.RWO], MULTI_WRITER in capabilities)
    except InvalidAccessModes as error:
        raise StepFailed(StepFailure.FINAL, "device", str(error)) from error


def agent_applies_fs_group(use: VolumeUse, driver: CsiDriverSpec | None, capabilities: Collection[str]) -> bool:
    """Whether files are to be given to the pod's group by us; otherwise the driver may do it."""
    assert isinstance(use.source, CsiSource)
    if MOUNT_GROUP in capabilities or use.fs_group is None or use.read_only:
        return False
    policy = (driver.fs_group_policy if driver else None) or "ReadWriteOnceWithFSType"
    if policy == "None":
        return False
    if policy == "File":
        return True
    if not use.source.fs_type:
        return False
    return use.source.is_ephemeral or bool({"ReadWriteOnce", "ReadWriteOncePod"} & set(use.source.access_modes))


def lifecycle_obstacle(source: CsiSource, driver: CsiDriverSpec | None) -> str:
    """Why the driver cannot serve this kind of volume; empty when it can."""
    wanted = "Ephemeral" if source.is_ephemeral else "Persistent"
    offered = (driver.volume_lifecycle_modes if driver else None) or ["Persistent"]
    if wanted in offered:
        return ""
    if driver is None:
        return f"there is no CSIDriver object {source.driver}, which an inline volume needs"
    return f"driver {source.driver} only supports CSI volume lifecycle modes {', '.join(offered)}, not {wanted}"


def mount_label(pod: Pod, names: Collection[str], driver: CsiDriverSpec | None) -> str:
    """The SELinux label to mount a pod's volume with, on a host that has SELinux; empty when files are labelled one by
    one instead: the driver or the pod does not want it, or the containers that have the volume do not agree."""
    security = pod.spec.security_context
    if driver is None or not driver.se_linux_mount:
        return ""
    if security is not None and security.se_linux_change_policy == "Recursive":
        return ""
    of_pod = security.se_linux_options if security is not None else None
    labels = set()
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        if any(mount.name in names for mount in container.volume_mounts):
            own = (container.security_context or {}).get("seLinuxOptions")
            options = convert(own, SELinuxOptions) if own is not None else of_pod
            labels |= {_file_label(options)} if options is not None else set()
    return labels.pop() if len(labels) == 1 else ""


def _file_label(options: SELinuxOptions) -> str:
    """A container's files bear its user and level; role and type are those of files, whatever its processes have."""
    if not options.level:
        return ""  # the runtime chooses one for each container
    return f"{options.user or 'system_u'}:object_r:container_file_t:{options.level}"
