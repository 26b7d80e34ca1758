"""Carry out what `plan.py` decided, and record what the API server and the attacher answered.

Owns: the order of writes of an attach and a detach, judging a VolumeAttachment, and the events on pods.
Start reading at: `AttachExecutor.begin`, `AttachExecutor.judge`.

A detach goes in this order: the node's status stops listing the volume, the node's live status is checked for volumes
in use, the VolumeAttachment is deleted. An operation ends when the VolumeAttachment says so, not when our request is
answered: `judge` is called for each change of it.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from moorage.controllers.attachdetach.plan import (
    Attach,
    AttachAction,
    AttachLimits,
    AwaitUnmount,
    Detach,
    GiveUp,
    Keep,
    Verify,
    Warn,
    Withdraw,
)
from moorage.controllers.attachdetach.report import Spawn, StatusReporter
from moorage.controllers.attachdetach.requests import AttachRequests
from moorage.controllers.attachdetach.state import AttachBackoff, AttachPhase, AttachState, TrackedVolume, attachment_of
from moorage.kube.cache.caches import Caches
from moorage.kube.control.events import Recorder
from moorage.kube.errors import AlreadyExists, ApiError, NotFound, Unavailable
from moorage.kube.objects.meta import ObjectReference
from moorage.kube.objects.storage import VolumeAttachment
from moorage.kube.volumes import NodeName, VolumeName, driver_and_handle
from moorage.log import get_logger

log = get_logger(__name__)


class AttachExecutor:
    """Starts actions and records their outcomes in the state."""

    def __init__(
        self,
        world: AttachState,
        caches: Caches,
        requests: AttachRequests,
        events: Recorder,
        clock: Callable[[], float],
        limits: AttachLimits,
    ) -> None:
        self._world = world
        self._caches = caches
        self._requests = requests
        self._events = events
        self._clock = clock
        self._limits = limits
        self.reporter = StatusReporter(world, requests, clock)

    def begin(self, actions: Iterable[AttachAction], spawn: Spawn) -> None:
        """Start each action. Those that send requests run on as tasks."""
        for action in actions:
            self._begin_one(action, spawn)
        self.reporter.begin(spawn)

    def _begin_one(self, action: AttachAction, spawn: Spawn) -> None:
        world, now = self._world, self._clock()
        match action:
            case Attach(volume, node):
                world.attach_begins(volume, node, now)
                spawn(self._run_guarded(self._attach(volume, node), "attach", volume, node), f"attach-{volume}-{node}")
            case Withdraw(volume, node):
                world.leave(volume, node)
            case Detach(volume, node, verify):
                world.detach_begins(volume, node, now)
                work = self._detach(volume, node, verify)
                spawn(self._run_guarded(work, "detach", volume, node), f"detach-{volume}-{node}")
            case AwaitUnmount(volume, node):
                world.volumes[volume].attachments[node].detach_wanted_at = now
                world.wake_at(now + self._limits.force_after_s + 0.001, volume)
            case Keep(volume, node):
                world.volumes[volume].attachments[node].detach_wanted_at = None
            case GiveUp(volume, node):
                self._give_up(volume, node)
            case Verify(volume, node):
                self._verify(volume, node)
            case Warn():
                self._warn(action)

    async def _run_guarded(
        self, work: Coroutine[Any, Any, None], operation: str, volume: VolumeName, node: NodeName
    ) -> None:
        """Run an operation, and record a failure even if it raises an unexpected exception."""
        try:
            await work
        except Exception:
            log.exception("operation failed unexpectedly", operation=operation, volume=volume, node=node)
            self._end_request(volume, node)
            self._world.failed(volume, node, operation, self._clock())

    async def _attach(self, volume: VolumeName, node: NodeName) -> None:
        name, known = attachment_of(volume, node), self._world.volumes[volume]
        try:
            if self._caches.attachments.get(name) is None:
                await self._requests.create_attachment(name, known.driver, node, known.pv_name)
        except AlreadyExists:
            await self._adopt(name)
        except ApiError as error:
            if isinstance(error, Unavailable):  # it may have been created all the same
                self._world.in_doubt[name] = (volume, node)
            self._end_request(volume, node)
            self._fail_attach(volume, node, str(error))
            return
        self._end_request(volume, node)
        self.judge(volume, node)

    async def _adopt(self, name: str) -> None:
        """Cache an attachment that exists already. If that fails, the watch will report it."""
        try:
            await self._requests.refresh_attachment(name)
        except ApiError as error:
            log.debug("attachment is not cached yet", name=name, reason=str(error))

    async def _detach(self, volume: VolumeName, node: NodeName, verify: bool) -> None:
        name = attachment_of(volume, node)
        try:
            if verify and await self._is_in_use(volume, node):
                raise _StillInUse(409, "InUse", f"volume {volume} is still in use on node {node}")
            await self._delete(name)
        except ApiError as error:
            self._end_request(volume, node)
            self._fail_detach(volume, node, str(error))
            return
        self._world.volumes[volume].attachments[node].was_deleted = True
        self._end_request(volume, node)
        self.judge(volume, node)

    async def _is_in_use(self, volume: VolumeName, node: NodeName) -> bool:
        live = await self._requests.live_node(node)
        return live is not None and volume in live.status.volumes_in_use

    async def _delete(self, name: str) -> None:
        try:
            await self._requests.delete_attachment(name)
            if self._caches.attachments.get(name) is None:  # not cached, but it existed: check whether it is gone
                await self._requests.refresh_attachment(name)
        except NotFound:
            log.debug("attachment was gone already", name=name)  # if it is still cached, its DELETED event follows

    def judge(self, volume: VolumeName, node: NodeName) -> None:
        """Update the state of a volume on a node from its VolumeAttachment."""
        attachment = self._world.attachment(volume, node)
        if attachment is None or attachment.is_executing:
            return
        found = self._caches.attachments.get(attachment_of(volume, node))
        match attachment.state:
            case AttachPhase.ATTACHING:
                self._judge_attaching(volume, node, found)
            case AttachPhase.DETACHING:
                self._judge_detaching(volume, node, found)
            case AttachPhase.ATTACHED if found is not None and found.status.attached:
                attachment.doubted_at = None
            case AttachPhase.ATTACHED if attachment.doubted_at is None:
                # Verify later: an attacher that reconciles may report this for a moment.
                attachment.doubted_at = self._clock()
                self._world.wake_at(self._clock() + self._limits.verify_s, volume)
            case AttachPhase.UNCERTAIN | AttachPhase.LEAVING if found is not None and found.status.attached:
                if attachment.backoff.operation == "attach":
                    attachment.backoff = AttachBackoff()
                self._world.dirty.add(volume)

    def attachment_gone(self, volume: VolumeName, node: NodeName) -> None:
        """Record that the VolumeAttachment is gone, which ends every uncertainty."""
        attachment = self._world.attachment(volume, node)
        if attachment is None or attachment.is_executing:
            return
        if attachment.state is AttachPhase.ATTACHED:
            self.judge(volume, node)
        elif attachment.state is not AttachPhase.ATTACHING:  # an attach is awaited until it times out
            self._world.detached(volume, node)

    def _verify(self, volume: VolumeName, node: NodeName) -> None:
        found = self._caches.attachments.get(attachment_of(volume, node))
        log.warning("attached volume lost its attachment", volume=volume, node=node)
        if found is None:
            self._world.detached(volume, node)
        elif not found.status.attached:
            self._world.doubted(volume, node)

    def _judge_attaching(self, volume: VolumeName, node: NodeName, found: VolumeAttachment | None) -> None:
        if found is None:
            return
        if found.is_deleting:
            self._fail_attach(volume, node, "volume attachment is being deleted")
        elif found.status.attached:
            self._succeed(volume, node)
        elif found.status.attach_error is not None:
            self._fail_attach(volume, node, found.status.attach_error.message)

    def _judge_detaching(self, volume: VolumeName, node: NodeName, found: VolumeAttachment | None) -> None:
        attachment = self._world.volumes[volume].attachments[node]
        if found is None and attachment.was_deleted:
            log.info("volume detached", volume=volume, node=node)
            self._world.detached(volume, node)
        elif found is not None and found.status.detach_error is not None:
            self._fail_detach(volume, node, found.status.detach_error.message)

    def _succeed(self, volume: VolumeName, node: NodeName) -> None:
        self._world.attached(volume, node)
        known = self._world.volumes[volume]
        log.info("volume attached", volume=volume, node=node)
        for pod in known.attachments[node].told:
            message = f'AttachVolume.Attach succeeded for volume "{known.pv_name}" '
            self._events.normal(pod, "SuccessfulAttachVolume", message)

    def _fail_attach(self, volume: VolumeName, node: NodeName, reason: str) -> None:
        known = self._world.volumes[volume]
        for pod in known.attachments[node].told:
            message = f'AttachVolume.Attach failed for volume "{known.pv_name}" : {reason}'
            self._events.warning(pod, "FailedAttachVolume", message)
        log.warning("attach failed", volume=volume, node=node, reason=reason)
        self._world.failed(volume, node, "attach", self._clock())

    def _fail_detach(self, volume: VolumeName, node: NodeName, reason: str) -> None:
        log.warning("detach failed", volume=volume, node=node, reason=reason)
        self._world.failed(volume, node, "detach", self._clock())

    def _give_up(self, volume: VolumeName, node: NodeName) -> None:
        known = self._world.volumes[volume]
        if known.attachments[node].state is AttachPhase.ATTACHING:
            driver, handle = driver_and_handle(volume) or (known.driver, volume)
            reason = f"timed out waiting for external-attacher of {driver} CSI driver to attach volume {handle}"
            self._fail_attach(volume, node, reason)
        else:
            self._fail_detach(volume, node, "timed out waiting for the attacher to detach")

    def _warn(self, action: Warn) -> None:
        volume = self._world.volumes[action.volume]
        wish = volume.wanted[action.node]
        wish.was_warned = True
        holders = [pod for node in action.holders for pod in _pods(volume, node)]
        for pod in wish.pods.values():
            message = f'Waiting for detach for volume "{volume.pv_name}" {_held_by(pod, holders)}'
            self._events.warning(pod, "FailedAttachVolume", message)

    def _end_request(self, volume: VolumeName, node: NodeName) -> None:
        self._world.volumes[volume].attachments[node].is_executing = False
        self._world.dirty.add(volume)


class _StillInUse(ApiError):
    """The node's live status lists the volume as in use."""


def _pods(volume: TrackedVolume, node: NodeName) -> list[ObjectReference]:
    wish = volume.wanted.get(node)
    return list(wish.pods.values()) if wish is not None else []


def _held_by(pod: ObjectReference, holders: list[ObjectReference]) -> str:
    """Describe the holders of the volume without naming pods of other namespaces."""
    if not holders:
        return (
            "Volume is already exclusively attached to one node, "
            "waiting on detach before it can be attached to another node"
        )
    near = [holder.name for holder in holders if holder.namespace == pod.namespace]
    far = len(holders) - len(near)
    if not near:
        return f"Volume is already used by {far} pod(s) in different namespaces"
    others = f" and {far} pod(s) in different namespaces" if far else ""
    return f"Volume is already used by pod(s) {', '.join(near)}{others}"
