"""Why a pod on its node does not run, or does not end: mounting, containers, termination."""

import re

from moorage.insight.causes.model import Finding, cause, said
from moorage.insight.causes.pods import is_starting
from moorage.insight.cluster_view import ClusterView
from moorage.insight.waiting import exits_on
from moorage.kube.objects import ContainerStatus, Event, Pod
from moorage.suggest import Command, kubectl


def _mount_words(view: ClusterView, pod: Pod) -> Event | None:
    """Return the newest words about mounting. That it took too long counts only if no other words say why."""
    if not is_starting(pod) or not pod.spec.node_name:
        return None
    told = [e for e in view.events_of(pod) if e.type == "Warning" and e.reason in ("FailedMount", "FailedMapVolume")]
    return next((e for e in told if not e.message.startswith("Unable to attach or mount")), told[0] if told else None)


def _step(pod: Pod) -> Command:
    return kubectl("describe", "pod", pod.name, namespace=pod.namespace)


@cause(
    "pod-secret-missing",
    Pod,
    "A secret that the pod or its volume needs does not exist",
    "Create the secret in the namespace that is named.",
)
def secret_missing(view: ClusterView, pod: Pod) -> Finding | None:
    """Mounting stops because a secret (of the pod, or for the driver) cannot be read."""
    event = _mount_words(view, pod)
    if event is None or "secret" not in event.message.lower() or not _is_absent(event.message):
        return None
    return Finding(
        f"a secret that it needs does not exist: {event.message}", kubectl("get", "secrets", flags=("-A",)), said(event)
    )


@cause(
    "pod-configmap-missing",
    Pod,
    "A config map that the pod needs does not exist",
    "Create the config map.",
)
def configmap_missing(view: ClusterView, pod: Pod) -> Finding | None:
    """Mounting stops because a config map cannot be read."""
    event = _mount_words(view, pod)
    if event is None or "configmap" not in event.message.lower() or not _is_absent(event.message):
        return None
    return Finding(
        f"a config map that it needs does not exist: {event.message}",
        kubectl("get", "configmaps", namespace=pod.namespace),
        said(event),
    )


@cause(
    "pod-filesystem-damaged",
    Pod,
    "The volume's filesystem is damaged",
    "Take a copy of the volume, then repair it (e2fsck -f, xfs_repair) while it is not mounted; it is never reformatted.",
)
def filesystem_damaged(view: ClusterView, pod: Pod) -> Finding | None:
    """The check before the mount, or the mount itself, found errors that need a person."""
    event = _mount_words(view, pod)
    signs = ("fsck", "corrupt", "structure needs cleaning", "damaged", "needs repair", "bad magic")
    if event is None or not any(sign in event.message.lower() for sign in signs):
        return None
    return Finding(f"its volume's filesystem needs repair: {event.message}", _step(pod), said(event))


@cause(
    "pod-format-failed",
    Pod,
    "The volume could not be formatted",
    "Read the words of mkfs: the volume may be too small for the filesystem, or hold data that must not be lost.",
)
def format_failed(view: ClusterView, pod: Pod) -> Finding | None:
    """mkfs failed at the first use of the volume, or refused because the device is not empty."""
    event = _mount_words(view, pod)
    signs = ("mkfs", "failed to format", "cannot be formatted", "never formatted", "no known filesystem")
    if event is None or not any(sign in event.message.lower() for sign in signs):
        return None
    return Finding(f"its volume could not be formatted: {event.message}", _step(pod), said(event))


@cause(
    "pod-driver-silent",
    Pod,
    "The driver does not answer on the node",
    "Look at the driver's process on that node; restarting it disturbs no running pod.",
)
def driver_silent(view: ClusterView, pod: Pod) -> Finding | None:
    """NodeStageVolume or NodePublishVolume ended by its deadline, or no process listens on the driver's socket."""
    event = _mount_words(view, pod)
    signs = (
        "deadlineexceeded",
        "deadline_exceeded",
        "deadline exceeded",
        "unavailable",
        "connection refused",
        "no answer",
    )
    if event is None or not any(sign in event.message.lower() for sign in signs):
        return None
    crashed = exits_on(view, pod.spec.node_name)
    why = f" (its process {crashed})" if crashed else ""
    sentence = f"the driver on node {pod.spec.node_name} does not answer{why}: {event.message}"
    return Finding(sentence, _step(pod), said(event))


@cause(
    "pod-mount-option-refused",
    Pod,
    "The kernel refuses the mount options",
    "Correct mountOptions of the class, or of the volume.",
)
def mount_option_refused(view: ClusterView, pod: Pod) -> Finding | None:
    """mount(2) answered that an option is invalid; the options come from the class or the volume."""
    event = _mount_words(view, pod)
    options = [volume for volume in view.volumes_used_by(pod) if volume.spec.mount_options]
    signs = ("invalid argument", "bad option", "unknown mount option", "unrecognized mount option")
    if event is None or not options or not any(sign in event.message.lower() for sign in signs):
        return None
    return Finding(
        f"mounting {options[0].name} with {','.join(options[0].spec.mount_options)} is refused: {event.message}",
        kubectl("get", "pv", options[0].name, flags=("-o", "jsonpath={.spec.mountOptions}")),
        said(event),
    )


@cause(
    "pod-filesystem-differs",
    Pod,
    "The volume holds another filesystem than is asked for",
    "Set fsType of the class or volume to what the volume holds; it is never formatted over.",
)
def filesystem_differs(view: ClusterView, pod: Pod) -> Finding | None:
    """The volume was formatted with one filesystem and is asked for with another; its data is left as it is."""
    event = _mount_words(view, pod)
    if event is None or not re.search(r"holds \w+ and not|wrong fs type", event.message):
        return None
    return Finding(f"its volume holds another filesystem than is asked for: {event.message}", _step(pod), said(event))


@cause("pod-mount-fails", Pod, "Mounting fails", "Read the driver's words; it is tried again with growing waits.")
def mount_fails(view: ClusterView, pod: Pod) -> Finding | None:
    """Staging or publishing the volume fails; the event holds the driver's words."""
    event = _mount_words(view, pod)
    if event is None:
        return None
    return Finding(f"mounting fails: {event.message}", _step(pod), said(event))


@cause(
    "pod-image",
    Pod,
    "The container's image cannot be had",
    "On the embedded cluster use image: host; elsewhere correct the image's name or the registry's credentials.",
)
def image(view: ClusterView, pod: Pod) -> Finding | None:
    """A container waits for its image."""
    for status in pod.status.container_statuses:
        waiting = status.state.get("waiting") or {}
        if waiting.get("reason") in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
            return Finding(
                f"container {status.name} has no image: {waiting.get('message') or waiting['reason']}", _step(pod)
            )
    return None


@cause(
    "pod-container-config",
    Pod,
    "A container cannot be made as it is described",
    "Correct the container: a secret or config map for its environment, its security context, its command.",
)
def container_config(view: ClusterView, pod: Pod) -> Finding | None:
    """The volumes are mounted, and the container's description cannot be carried out."""
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = status.state.get("waiting") or {}
        if waiting.get("reason") in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
            return Finding(
                f"container {status.name} cannot be made: {waiting.get('message') or waiting['reason']}", _step(pod)
            )
    return None


@cause(
    "pod-fs-group-ignored",
    Pod,
    "The pod's fsGroup has no effect on its volume",
    "Set fsGroupPolicy: File on the CSIDriver (delete and create it), or set owners inside the volume by hand.",
)
def fs_group_ignored(view: ClusterView, pod: Pod) -> Finding | None:
    """The pod asks for a group on its volumes, and the driver's fsGroupPolicy says that ownership is left alone;
    a container that fails may lack the right to write."""
    note = fs_group_note(view, pod)
    if not note or pod.is_deleting or not any(_has_failed(status) for status in pod.status.container_statuses):
        return None
    return Finding(
        f"a container fails, and {note[0]}",
        kubectl("get", "csidrivers", flags=("-o", "custom-columns=NAME:.metadata.name,POLICY:.spec.fsGroupPolicy")),
    )


@cause(
    "pod-crashing",
    Pod,
    "A container ends again and again",
    "Read the container's log; its volumes are mounted.",
)
def crashing(view: ClusterView, pod: Pod) -> Finding | None:
    """The volumes are there and the process fails; a permission error on the volume is a matter of fsGroup."""
    for status in pod.status.container_statuses:
        waiting = status.state.get("waiting") or {}
        if waiting.get("reason") == "CrashLoopBackOff":
            ended = (status.last_state.get("terminated") or {}).get("exitCode", "?")
            return Finding(
                f"container {status.name} ends with code {ended} each time it is started",
                kubectl("logs", "", pod.name, namespace=pod.namespace, flags=("-c", status.name, "--previous")),
                fs_group_note(view, pod),
            )
    return None


@cause(
    "pod-deleting",
    Pod,
    "The pod is being deleted and has not ended",
    "Wait for its grace period; a finalizer is removed by its owner, a dead node needs --force.",
)
def deleting(view: ClusterView, pod: Pod) -> Finding | None:
    """The node stops the containers, unmounts the volumes and lets the object go; a finalizer can hold it longer."""
    if not pod.is_deleting:
        return None
    if pod.finalizers:
        return Finding(f"it is being deleted and finalizer {pod.finalizers[0]} holds it", _step(pod))
    event = view.warning(pod, "FailedUnMount", "FailedKillPod", "FailedUnmapDevice")
    words = f": {event.message}" if event else ""
    return Finding(f"it is being stopped on node {pod.spec.node_name or '(none)'}{words}", _step(pod), said(event))


@cause(
    "pod-starting",
    Pod,
    "The node is starting the pod",
    "Wait; mounting and starting take a moment.",
)
def starting(view: ClusterView, pod: Pod) -> Finding | None:
    """The pod has a node, its volumes are attached, and nothing has failed so far."""
    if not is_starting(pod) or not pod.spec.node_name:
        return None
    return Finding(f"node {pod.spec.node_name} is mounting its volumes or starting its containers", _step(pod))


@cause(
    "pod-volume-deleting",
    Pod,
    "The pod runs, and its claim or volume is being deleted",
    "The pod is not disturbed until it ends. The explanation follows the claim or volume and says how to keep the data.",
)
def volume_deleting(view: ClusterView, pod: Pod) -> Finding | None:
    """A finalizer keeps a claim and its volume as long as the pod uses them; afterwards the deletion goes on."""
    claims, volumes = view.claims_used_by(pod), view.volumes_used_by(pod)
    if pod.is_deleting or pod.is_terminated:
        return None
    for claim in claims:
        if claim.is_deleting:
            return Finding(f"its claim {claim.name} is being deleted and goes when the pod ends", waits_for=claim)
    for volume in volumes:
        if volume.is_deleting:
            return Finding(f"its volume {volume.name} is being deleted", waits_for=volume)
    return None


def _is_absent(message: str) -> bool:
    return "not found" in message.lower() or "does not exist" in message.lower()


def _has_failed(status: ContainerStatus) -> bool:
    """Ended with an error, now or the last time."""
    ended = (status.state.get("terminated") or {}, status.last_state.get("terminated") or {})
    return any(one.get("exitCode") for one in ended)


def fs_group_note(view: ClusterView, pod: Pod) -> tuple[str, ...]:
    context = pod.spec.security_context
    if context is None or context.fs_group is None:
        return ()
    for volume in view.volumes_used_by(pod):
        if volume.spec.csi is None:
            continue
        driver = view.drivers.get(volume.spec.csi.driver)
        policy = (driver.spec.fs_group_policy if driver is not None else None) or "ReadWriteOnceWithFSType"
        once = set(volume.spec.access_modes) <= {"ReadWriteOnce", "ReadWriteOncePod"}
        if policy == "None" or (policy == "ReadWriteOnceWithFSType" and not (once and volume.spec.csi.fs_type)):
            return (
                f"fsGroup {context.fs_group} is not applied to volume {volume.name}: "
                f"fsGroupPolicy of {volume.spec.csi.driver} is {policy}",
            )
    return ()
