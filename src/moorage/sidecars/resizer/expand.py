"""The resize worker: a claim that asks for more gets a larger volume.

Owns: ControllerExpandVolume, the volume's capacity, and the resize fields of the claim's status.
Start reading at: `ExpandWorker.sync`.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.csi.pending import on_behalf_of
from moorage.kube import names
from moorage.kube.api.client import PatchType
from moorage.kube.control.events import Recorder
from moorage.kube.errors import ApiError, Conflict, NotFound
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod
from moorage.kube.objects.meta import timestamp_text
from moorage.kube.quantity import bytes_text
from moorage.kube.secrets import read_secret
from moorage.kube.volumes import claims_of
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.resizer import sizes as target
from moorage.sidecars.resizer.pair import bound_pair
from moorage.sidecars.resizer.sizes import Sizes
from moorage.sidecars.retry_later import RetryLater
from moorage.sidecars.settings import duration_text

log = get_logger(__name__)

# Conflicts in a row after which an expansion is tried again as a whole.
RECORD_ATTEMPTS = 5


class ExpandWorker:
    """Expands volumes; `sync` is the work of the claims' queue."""

    def __init__(self, context: RoleContext, events: Recorder) -> None:
        self._context = context
        self._events = events
        self._slow: RetryLater[str] = RetryLater(context.settings.retry_interval_max_s)
        self._final_errors: set[str] = set()
        self._in_use: set[str] = set()

    async def sync(self, key: str) -> float | None:
        """Take one claim's expansion a step further."""
        pair = bound_pair(self._context, key)
        if pair is None:
            return None
        claim, volume = pair
        sizes = Sizes.of(claim, volume)
        volume = await self._forget_old_size(volume, sizes)
        if sizes.requested <= sizes.usable:
            return None
        expands = self._context.driver.capabilities.controller("EXPAND_VOLUME")
        failed = key in self._final_errors
        size = target.target_bytes(sizes, had_final_error=failed, expands_on_controller=expands)
        if size is None:
            return None
        wait_s = self._wait_s(key, sizes, size)
        if wait_s > 0:
            return wait_s
        claim = await self._begin(claim, sizes, size)
        answer = await self._expand(claim, volume, size)
        await self._record(claim, volume, sizes, *answer)
        self._final_errors.discard(key)
        self._in_use.discard(key)
        self._slow.discard(key)
        return None

    def _wait_s(self, key: str, sizes: Sizes, size: int) -> float:
        """An infeasible size is tried once more soon, and then only after the longest pause."""
        if sizes.state != target.CONTROLLER_INFEASIBLE:
            return 0.0
        is_known = not self._slow.add(key)
        return self._slow.left_s(key) if is_known and sizes.allocated == size else 0.0

    async def _forget_old_size(self, volume: PersistentVolume, sizes: Sizes) -> PersistentVolume:
        if sizes.usable < sizes.volume or names.PRE_RESIZE_CAPACITY not in volume.annotations:
            return volume
        return await self._patch_volume(volume, {"metadata": {"annotations": {names.PRE_RESIZE_CAPACITY: None}}})

    async def _begin(self, claim: PersistentVolumeClaim, sizes: Sizes, size: int) -> PersistentVolumeClaim:
        """Record in the status what is about to be done. Raises Conflict if the claim has changed since it was read."""
        status: dict[str, Any] = {"allocatedResources": {"storage": bytes_text(size)}}
        old = [] if sizes.allocated == size else target.without(target.RESIZE_CONDITIONS[1:], claim.status.conditions)
        conditions = old
        if not any(c.type == target.RESIZING for c in claim.status.conditions):
            conditions = [*old, target.condition(target.RESIZING, _now())]
        if conditions:
            status["conditions"] = conditions
        if sizes.allocated != size or not sizes.state:
            status["allocatedResourceStatuses"] = {"storage": target.CONTROLLER_IN_PROGRESS}
        if len(status) == 1 and sizes.allocated == size and not self._has_note(claim):
            return claim
        patch: dict[str, Any] = {"status": status}
        if self._has_note(claim):
            patch["metadata"] = {"annotations": {names.NODE_EXPANSION_NOT_REQUIRED: None}}
        return await self._patch_claim(claim, patch)

    @staticmethod
    def _has_note(claim: PersistentVolumeClaim) -> bool:
        return names.NODE_EXPANSION_NOT_REQUIRED in claim.annotations

    async def _expand(self, claim: PersistentVolumeClaim, volume: PersistentVolume, size: int) -> tuple[int, bool]:
        """The size that the volume has now, and whether its node must act."""
        context = self._context
        begins = f"expanding volume {volume.name} to {bytes_text(size)}"
        if not context.driver.capabilities.controller("EXPAND_VOLUME"):
            self._events.normal(claim, "Resizing", begins)
            return size, True
        await self._check_offline(claim)
        csi = volume.spec.csi
        assert csi is not None  # bound_pair saw it
        request = pb.ControllerExpandVolumeRequest(
            volume_id=csi.volume_handle,
            capacity_range=pb.CapacityRange(required_bytes=size),
            secrets=await read_secret(context.client, csi.controller_expand_secret_ref),
            volume_capability=context.volume_capability(volume.spec),
        )
        self._events.normal(claim, "Resizing", begins)
        try:
            timeout_s = context.settings.timeout_for("resizer")
            with on_behalf_of(self._events.event, claim):
                answer = await context.driver.client.ControllerExpandVolume(request, timeout_s=timeout_s)
        except CsiError as error:
            await self._failed(claim, error, size)
            raise
        return answer.capacity_bytes or size, answer.node_expansion_required

    async def _check_offline(self, claim: PersistentVolumeClaim) -> None:
        """Raise SidecarError while pods use a volume that the driver has refused to expand in use."""
        if claim.key not in self._in_use or not self._context.settings.handle_volume_inuse_error:
            return
        pods = (await self._context.client.list(Pod, claim.namespace)).items
        users = [pod.name for pod in pods if not pod.is_terminated and claim.key in claims_of(pod)]
        if users:
            message = f"the driver only supports offline expansion; it goes on when pod {users[0]} has ended"
            self._events.warning(claim, "VolumeResizeFailed", message)
            raise SidecarError(f"claim {claim.key}: {message}")
        self._in_use.discard(claim.key)

    async def _failed(self, claim: PersistentVolumeClaim, error: CsiError, size: int) -> None:
        key = claim.key
        if error.code == "FAILED_PRECONDITION":
            self._in_use.add(key)
        status: dict[str, Any] = {}
        settings = self._context.settings
        note = settings.retry_words
        if error.is_final:
            self._final_errors.add(key)
            status["conditions"] = [target.condition(target.CONTROLLER_ERROR, _now(), str(error))]
            if error.is_infeasible:
                status["allocatedResourceStatuses"] = {"storage": target.CONTROLLER_INFEASIBLE}
                pause = duration_text(settings.retry_interval_max_s)
                note = f"the driver cannot make it so large; ask for less, or it is tried again every {pause}"
            else:
                self._slow.discard(key)
        else:
            self._final_errors.discard(key)
        message = f"volume could not be expanded to {bytes_text(size)}: {error}; {note}"
        self._events.warning(claim, "VolumeResizeFailed", message)
        log.warning("expansion failed", claim=key, reason=str(error), is_final=error.is_final)
        if status:
            try:
                await self._patch_claim(claim, {"status": status}, guarded=False)
            except ApiError as failure:
                log.warning("failed expansion could not be noted", claim=key, reason=str(failure))

    async def _record(
        self, claim: PersistentVolumeClaim, volume: PersistentVolume, sizes: Sizes, size: int, needs_node: bool
    ) -> None:
        patch: dict[str, Any] = {}
        if size > sizes.volume:
            patch["spec"] = {"capacity": {"storage": bytes_text(size)}}
        if needs_node and names.PRE_RESIZE_CAPACITY not in volume.annotations:
            patch["metadata"] = {"annotations": {names.PRE_RESIZE_CAPACITY: bytes_text(sizes.usable)}}
        if patch:
            await self._patch_volume(volume, patch)
        if needs_node:
            await self._on_newest(claim, self._hand_over)
        else:
            await self._on_newest(claim, lambda newest: self._finish(newest, size))

    async def _on_newest(
        self, claim: PersistentVolumeClaim, write: Callable[[PersistentVolumeClaim], Awaitable[None]]
    ) -> None:
        """Write what the driver has done. After a conflict, write again on the newest version of the claim.

        The driver is not called again. Raises Conflict if the claim now records another expansion.
        """
        for _ in range(RECORD_ATTEMPTS - 1):
            try:
                await write(claim)
                return
            except Conflict:
                newest = await self._context.client.get(PersistentVolumeClaim, claim.name, claim.namespace)
                if not _is_same_expansion(claim, newest):
                    raise
                claim = newest
        await write(claim)

    async def _hand_over(self, claim: PersistentVolumeClaim) -> None:
        message = "the volume is larger; its filesystem grows when a pod uses it on a node"
        conditions = target.without([target.CONTROLLER_ERROR], claim.status.conditions)
        status = {
            "conditions": [*conditions, target.condition(target.FS_PENDING, _now(), message)],
            "allocatedResourceStatuses": {"storage": target.NODE_PENDING},
        }
        await self._patch_claim(claim, {"status": status})
        self._events.normal(claim, "FileSystemResizeRequired", "Require file system resize of volume on node")

    async def _finish(self, claim: PersistentVolumeClaim, size: int) -> None:
        status: dict[str, Any] = {
            "capacity": {"storage": bytes_text(size)},
            "allocatedResourceStatuses": {"storage": None},
        }
        gone = target.without(target.RESIZE_CONDITIONS, claim.status.conditions)
        if gone:
            status["conditions"] = gone
        annotations = {names.NODE_EXPANSION_NOT_REQUIRED: "true"}
        patch = {"metadata": {"annotations": annotations}, "status": status}
        await self._patch_claim(claim, patch)
        self._events.normal(claim, "VolumeResizeSuccessful", f"Resize volume succeeded: {bytes_text(size)}")
        log.info("volume expanded", claim=claim.key, bytes=size)

    async def _patch_claim(
        self, claim: PersistentVolumeClaim, patch: dict[str, Any], *, guarded: bool = True
    ) -> PersistentVolumeClaim:
        return await self._context.writer.patch(
            claim, patch, how=PatchType.STRATEGIC, subresource="status", guarded=guarded
        )

    async def _patch_volume(self, volume: PersistentVolume, patch: dict[str, Any]) -> PersistentVolume:
        try:
            return await self._context.writer.patch(volume, patch, how=PatchType.STRATEGIC, guarded=False)
        except NotFound:
            raise SidecarError(f"volume {volume.name} is gone") from None


def _is_same_expansion(one: PersistentVolumeClaim, other: PersistentVolumeClaim) -> bool:
    return (
        one.uid == other.uid
        and one.status.allocated_resources == other.status.allocated_resources
        and one.status.allocated_resource_statuses == other.status.allocated_resource_statuses
    )


def _now() -> str:
    return timestamp_text(time.time())
