"""The modify worker: a claim that names another VolumeAttributesClass gets its volume changed.

Owns: ControllerModifyVolume and the modify fields of the claim's status.
Start reading at: `ModifyWorker.sync`.
"""

import time
from typing import Any, NoReturn

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.csi.pending import on_behalf_of
from moorage.kube import names
from moorage.kube.api.client import PatchType
from moorage.kube.control.events import Recorder
from moorage.kube.errors import ApiError
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, SecretReference, VolumeAttributesClass
from moorage.kube.objects.meta import timestamp_text
from moorage.kube.secrets import read_secret
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.metrics import code_name
from moorage.sidecars.provisioner.parameters import metadata_parameters
from moorage.sidecars.resizer.pair import bound_pair
from moorage.sidecars.resizer.sizes import condition, without
from moorage.sidecars.retry_later import RetryLater
from moorage.sidecars.settings import duration_text

log = get_logger(__name__)

_MODIFYING, _ERROR = "ModifyingVolume", "ModifyVolumeError"


def is_settled(claim: PersistentVolumeClaim) -> bool:
    """Nothing is under way and the class is the one that is wanted."""
    status, wanted = claim.status, claim.spec.volume_attributes_class_name or ""
    return status.modify_volume_status is None and wanted == (status.current_volume_attributes_class_name or "")


class ModifyWorker:
    """Changes volumes; `sync` is the work of the claims' queue."""

    def __init__(self, context: RoleContext, events: Recorder) -> None:
        self._context = context
        self._events = events
        self._slow: RetryLater[str] = RetryLater(context.settings.retry_interval_max_s)
        self._uncertain: set[str] = set()

    def begin(self) -> None:
        """Finish each change that was under way at the start before another one begins: its progress is unknown."""
        for claim in self._context.caches.claims:
            if _progress(claim) == "InProgress":
                self._uncertain.add(claim.key)

    async def sync(self, key: str) -> float | None:
        """Take one claim's change a step further."""
        pair = bound_pair(self._context, key)
        if pair is None or is_settled(pair[0]):
            return None
        claim, volume = pair
        wanted, under_way = claim.spec.volume_attributes_class_name or "", claim.status.modify_volume_status
        if not wanted and _progress(claim) != "InProgress":
            if under_way is not None:
                await self._cancel(claim)
            return None
        if under_way is not None and _progress(claim) == "InProgress" and (key in self._uncertain or not wanted):
            found = self._context.caches.attributes_classes.get(under_way.target_volume_attributes_class_name)
            if found is None:
                raise SidecarError(
                    f"claim {key}: class {under_way.target_volume_attributes_class_name} of the change is gone"
                )
        else:
            if _progress(claim) == "Infeasible" and under_way is not None:
                same = under_way.target_volume_attributes_class_name == wanted
                if same and self._slow.left_s(key) > 0:
                    return self._slow.left_s(key)
            found = self._context.caches.attributes_classes.get(wanted)
            if found is None:
                await self._wait_for_class(claim, wanted)
                return None  # the claim is enqueued when the class is created
            claim = await self._begin(claim, wanted)
        await self._modify(claim, volume, found)
        return None

    async def _cancel(self, claim: PersistentVolumeClaim) -> None:
        gone = without([_MODIFYING, _ERROR], claim.status.conditions)
        await self._status(claim, {"modifyVolumeStatus": None, **({"conditions": gone} if gone else {})})
        self._events.normal(claim, "VolumeModifyCanceled", "the claim no longer names a VolumeAttributesClass")

    async def _wait_for_class(self, claim: PersistentVolumeClaim, wanted: str) -> None:
        self._events.warning(
            claim, "VolumeModifyFailed", f"VolumeAttributesClass {wanted} does not exist; it goes on when it does"
        )
        if _progress(claim) != "Pending":
            target = {"targetVolumeAttributesClassName": wanted, "status": "Pending"}
            await self._status(claim, {"modifyVolumeStatus": target})

    async def _begin(self, claim: PersistentVolumeClaim, wanted: str) -> PersistentVolumeClaim:
        known = claim.status.modify_volume_status
        if known is not None and (known.status, known.target_volume_attributes_class_name) == ("InProgress", wanted):
            return claim
        target = {"targetVolumeAttributesClassName": wanted, "status": "InProgress"}
        gone = without([_ERROR], claim.status.conditions)
        status = {"modifyVolumeStatus": target, "conditions": [*gone, condition(_MODIFYING, _now())]}
        changed = await self._status(claim, status, guarded=True)
        self._events.normal(claim, "VolumeModify", f"changing the volume to VolumeAttributesClass {wanted}")
        return changed

    async def _modify(
        self, claim: PersistentVolumeClaim, volume: PersistentVolume, wanted: VolumeAttributesClass
    ) -> None:
        context = self._context
        if wanted.driver_name != context.driver.name:
            await self._refuse(claim, wanted)
        parameters = dict(wanted.parameters)
        if context.settings.extra_modify_metadata:
            parameters |= metadata_parameters(claim, volume.name)
        assert volume.spec.csi is not None  # bound_pair saw it
        request = pb.ControllerModifyVolumeRequest(
            volume_id=volume.spec.csi.volume_handle,
            secrets=await read_secret(context.client, _secret_of(volume)),
            mutable_parameters=parameters,
        )
        try:
            timeout_s = context.settings.timeout_for("resizer")
            with on_behalf_of(self._events.event, claim):
                await context.driver.client.ControllerModifyVolume(request, timeout_s=timeout_s)
        except CsiError as error:
            await self._failed(claim, wanted.name, error)
            raise
        await self._record(claim, volume, wanted.name)

    async def _record(self, claim: PersistentVolumeClaim, volume: PersistentVolume, name: str) -> None:
        """Write the volume first, then the claim: after a crash in between, the idempotent call is repeated."""
        if volume.spec.volume_attributes_class_name != name:
            patch = {"spec": {"volumeAttributesClassName": name}}
            await self._context.writer.patch(volume, patch, how=PatchType.STRATEGIC, guarded=False)
        status: dict[str, Any] = {"modifyVolumeStatus": None, "currentVolumeAttributesClassName": name}
        gone = without([_MODIFYING, _ERROR], claim.status.conditions)
        if gone:
            status["conditions"] = gone
        await self._status(claim, status)
        self._uncertain.discard(claim.key)
        self._slow.discard(claim.key)
        self._events.normal(claim, "VolumeModifySuccessful", f"the volume is now of VolumeAttributesClass {name}")
        log.info("volume modified", claim=claim.key, attributes_class=name)

    async def _failed(self, claim: PersistentVolumeClaim, name: str, error: CsiError) -> None:
        key, state = claim.key, "InProgress"
        if not error.is_final:
            self._uncertain.add(key)
        else:
            self._uncertain.discard(key)
            if error.code == "INVALID_ARGUMENT":
                state = "Infeasible"
                self._slow.add(key)
        settings, message = self._context.settings, f"VolumeAttributesClass {name} could not be applied: {error}"
        pause = duration_text(settings.retry_interval_max_s)
        follows = f"name another class, or it is tried again every {pause}" if state == "Infeasible" else ""
        self._events.warning(claim, "VolumeModifyFailed", f"{message}; {follows or settings.retry_words}")
        await self._note_failure(claim, name, str(error), code_name(error.code), state)

    async def _refuse(self, claim: PersistentVolumeClaim, wanted: VolumeAttributesClass) -> NoReturn:
        """Record that the class is of another driver. Raises SidecarError."""
        message = f"VolumeAttributesClass {wanted.name} is of driver {wanted.driver_name}"
        self._slow.add(claim.key)
        self._events.warning(claim, "VolumeModifyFailed", f"{message}; name one of {self._context.driver.name}")
        await self._note_failure(claim, wanted.name, message, "InvalidArgument", "Infeasible")
        raise SidecarError(f"claim {claim.key}: {message}")

    async def _note_failure(
        self, claim: PersistentVolumeClaim, name: str, message: str, reason: str, state: str
    ) -> None:
        log.warning("modification failed", claim=claim.key, reason=message)
        known = next((c for c in claim.status.conditions if c.type == _ERROR), None)
        since = known.last_transition_time if known is not None and known.reason == reason else None
        target = {"targetVolumeAttributesClassName": name, "status": state}
        noted = condition(_ERROR, since or _now(), message, reason)
        try:
            await self._status(claim, {"modifyVolumeStatus": target, "conditions": [noted]})
        except ApiError as failure:
            log.warning("failed modification could not be noted", claim=claim.key, reason=str(failure))

    async def _status(
        self, claim: PersistentVolumeClaim, status: dict[str, Any], *, guarded: bool = False
    ) -> PersistentVolumeClaim:
        patch = {"status": status}
        return await self._context.writer.patch(
            claim, patch, how=PatchType.STRATEGIC, subresource="status", guarded=guarded
        )


def _progress(claim: PersistentVolumeClaim) -> str:
    status = claim.status.modify_volume_status
    return status.status if status is not None else ""


def _secret_of(volume: PersistentVolume) -> SecretReference | None:
    name = volume.annotations.get(names.MODIFY_SECRET_NAME)
    namespace = volume.annotations.get(names.MODIFY_SECRET_NAMESPACE)
    if name and namespace:
        return SecretReference(name=name, namespace=namespace)
    return volume.spec.csi.controller_expand_secret_ref if volume.spec.csi is not None else None


def _now() -> str:
    return timestamp_text(time.time())
