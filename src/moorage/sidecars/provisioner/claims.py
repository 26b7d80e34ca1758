"""The claim worker: one claim at a time from "asked of us" to a saved PersistentVolume.

Owns: the attempts under way, and the claims that are not to be tried again for a while.
The volume is saved with its claimRef; the binder does the rest.
Start reading at: `ClaimWorker.sync`.
"""

import asyncio
import time
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.csi.pending import on_behalf_of
from moorage.kube import names
from moorage.kube.control.events import Recorder
from moorage.kube.errors import AlreadyExists, ApiError, NotFound
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, StorageClass
from moorage.kube.secrets import BadSecret, read_secret
from moorage.kube.volumes import claim_class
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.edits import remove_annotation
from moorage.sidecars.errors import OtherProvisioner, ProvisionError, ProvisioningState, SidecarError
from moorage.sidecars.provisioner import pv_document
from moorage.sidecars.provisioner.abandoned_intents import Intent
from moorage.sidecars.provisioner.attempt import ProvisionAttempt
from moorage.sidecars.provisioner.decide import state_after, volume_name, why_not_provision
from moorage.sidecars.provisioner.intents import Journal
from moorage.sidecars.provisioner.ownership import Ownership
from moorage.sidecars.provisioner.prepare import Preparer
from moorage.sidecars.provisioner.source_protection import SourceProtection
from moorage.sidecars.retry_later import RetryLater

log = get_logger(__name__)

_INFEASIBLE_S = 300.0
_SAY_AFTER_S = 1.0
_CLEANUPS = 5
_CLEANUP_S = 10.0


class ClaimWorker:
    """Provisions claims; the keys of `controller` are UIDs."""

    def __init__(self, context: RoleContext, events: Recorder, journal: Journal) -> None:
        self._context = context
        workers = context.settings.workers_for("provisioner")
        self.controller = context.controller("claims", self.sync, workers)
        self._events = events
        self._journal = journal
        self._prepare = Preparer(context)
        self._protection = SourceProtection(context)
        self._ownership = Ownership(context, events)
        self._identity = pv_document.identity_of(context.driver.name, context.around.node_name)
        self._slow: RetryLater[tuple[str, str]] = RetryLater(_INFEASIBLE_S)
        self.waiting: set[str] = set()  # claims that failed for something of the cluster, which may change
        self._uncertain: set[str] = set()  # an earlier call for the claim may have made a volume
        self._covered: dict[str, list[Intent]] = {}  # others' notes that an end of the attempt begun last may remove
        self.attempts: dict[str, ProvisionAttempt] = {}

    async def sync(self, uid: str) -> float | None:
        """Take one claim a step further."""
        self.waiting.discard(uid)
        attempt = self.attempts.get(uid)
        if attempt is None:
            claim = self._claim(uid)
            if claim is None:
                self._ownership.forget(uid)
                return None
            storage_class = self._context.caches.classes.get(claim_class(claim))
            if why_not_provision(claim, storage_class, self._context.driver.name) or self._saved(uid):
                return None
            if storage_class is None:
                self.waiting.add(uid)
                raise SidecarError(f"claim {claim.key}: class {claim_class(claim)!r} does not exist")
            if slow_s := self._slow.left_s((uid, storage_class.uid)):
                self.waiting.add(uid)  # another class of that name may be feasible
                return slow_s
            wait_s = await self._ownership.wait_s(claim, storage_class)
            if wait_s is None or wait_s > 0:
                return wait_s
            return await self._begin(claim, storage_class)
        self._covered[uid] = self._journal.abandoned(uid)
        if await self._is_settled(uid):
            self._end(uid)
            return None
        if not self._journal.has(uid):
            await self._journal.note(uid, attempt)
        return await self._carry_out(uid, attempt)

    def adopt(self, found: dict[str, ProvisionAttempt]) -> None:
        """Continue the attempts of an earlier leader, or of this process before it was killed."""
        for uid, attempt in found.items():
            self.attempts.setdefault(uid, attempt)
        self._uncertain.update(self.attempts)
        for uid in self.attempts:
            self.controller.queue.add(uid)

    def take_over(self, notes: list[Intent]) -> None:
        """Repeat the attempts of instances that have ended. Attempts that are open here continue."""
        self._uncertain.update(note.uid for note in notes if note.uid in self.attempts)
        for uid, attempt in self._journal.read(note for note in notes if note.uid not in self.attempts).items():
            self.attempts[uid] = attempt
            self._uncertain.add(uid)
            self.controller.queue.add(uid)

    async def _begin(self, claim: PersistentVolumeClaim, storage_class: StorageClass) -> float | None:
        uid = claim.uid
        try:
            attempt = await self._prepare.attempt(claim, storage_class)
            if attempt.source is not None:
                await self._protection.protect(attempt.source)
        except OtherProvisioner as reason:
            self._events.normal(claim, "Provisioning", str(reason))
            return None
        except (ProvisionError, ApiError) as error:
            state = error.state if isinstance(error, ProvisionError) else ProvisioningState.NO_CHANGE
            source = claim.spec.data_source or claim.spec.data_source_ref
            self._context.metrics.provisioned.failed(storage_class.name, source.kind if source is not None else "")
            return await self._failed(uid, claim, storage_class.name, storage_class.uid, str(error), state)
        # From here on the claim may vanish: the attempt alone is enough to reach an end.
        self.attempts[uid] = attempt
        await self._journal.note(uid, attempt)
        return await self._carry_out(uid, attempt)

    async def _carry_out(self, uid: str, attempt: ProvisionAttempt) -> float | None:
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        text = f"asking driver {self._context.driver.name} to make a volume for class {attempt.class_name}"
        saying = loop.call_later(_SAY_AFTER_S, self._events.normal, attempt.claim, "Provisioning", text)
        try:
            made = await self._create(uid, attempt)
            await self._save(attempt, made)
        except ProvisionError as error:
            about = self._claim(uid) or attempt.claim
            self._context.metrics.provisioned.failed(attempt.class_name, attempt.source_kind)
            return await self._failed(uid, about, attempt.class_name, attempt.class_uid, str(error), error.state)
        finally:
            saying.cancel()
        self._end(uid)
        self._context.metrics.provisioned.succeeded(started, attempt.class_name, attempt.source_kind)
        self._events.normal(attempt.claim, "ProvisioningSucceeded", f"Successfully provisioned volume {attempt.name}")
        log.info("volume provisioned", claim=f"{attempt.claim.namespace}/{attempt.claim.name}", volume=attempt.name)
        if attempt.source is not None and attempt.source.is_snapshot:
            await self._protection.release_snapshot(attempt.source)
        return None

    async def _create(self, uid: str, attempt: ProvisionAttempt) -> pb.Volume:
        context = self._context
        request = pb.CreateVolumeRequest()
        request.CopyFrom(attempt.request)
        timeout_s = context.settings.timeout_for("provisioner")
        try:
            request.secrets.update(await read_secret(context.client, attempt.secret))
        except (BadSecret, ApiError) as error:
            raise ProvisionError(str(error), ProvisioningState.NO_CHANGE) from error
        try:
            with on_behalf_of(self._events.event, attempt.claim):
                response = await context.driver.client.CreateVolume(request, timeout_s=timeout_s)
        except CsiError as error:
            for tell in context.on_failed_creation:
                tell(attempt.class_name)
            state = state_after(error, context.driver.capabilities.has_topology, attempt.has_selected_node)
            if uid in self._uncertain and error.code in ("UNKNOWN", "INTERNAL"):
                state = ProvisioningState.BACKGROUND  # says that this call failed, not that an earlier one made nothing
            elif state is ProvisioningState.BACKGROUND:
                self._uncertain.add(uid)
            raise ProvisionError(str(error), state) from error
        made = response.volume
        fault = _fault_of(attempt, made)
        if fault:
            await self._undo(made.volume_id, dict(request.secrets), fault)
        return made

    async def _undo(self, volume_id: str, secrets: dict[str, str], fault: str) -> None:
        """A volume that is not what was asked for must go again; only then is the attempt over."""
        request = pb.DeleteVolumeRequest(volume_id=volume_id, secrets=secrets)
        deadline = time.monotonic() + _CLEANUP_S
        reason = ""
        for _ in range(_CLEANUPS):
            try:
                left_s = max(0.1, deadline - time.monotonic())
                await self._context.driver.client.DeleteVolume(request, timeout_s=left_s)
                raise ProvisionError(f"{fault}; it was deleted again", ProvisioningState.FINISHED)
            except CsiError as error:
                reason = str(error)
        raise ProvisionError(f"{fault}, and deleting it again failed: {reason}", ProvisioningState.BACKGROUND)

    async def _save(self, attempt: ProvisionAttempt, made: pb.Volume) -> None:
        document = pv_document.document(attempt.skeleton, made, attempt.requested_bytes, self._identity)
        try:
            await self._context.writer.create(PersistentVolume, document)
        except AlreadyExists:
            await self._settle(attempt, made, document)
        except ApiError as error:
            message = f"volume {made.volume_id} was made, but its PersistentVolume could not be saved: {error}"
            raise ProvisionError(message, ProvisioningState.BACKGROUND) from error

    async def _settle(self, attempt: ProvisionAttempt, made: pb.Volume, document: dict[str, Any]) -> None:
        """Compare with the PersistentVolume that exists already, saved by us or by another instance."""
        try:
            saved = await self._context.writer.fresh(PersistentVolume, attempt.name)
        except ApiError as error:
            raise ProvisionError(str(error), ProvisioningState.BACKGROUND) from error
        if saved is None:
            raise ProvisionError(f"PersistentVolume {attempt.name} came and went", ProvisioningState.BACKGROUND)
        is_released = saved.status.phase in ("Released", "Failed")
        if saved.is_deleting or (is_released and saved.spec.persistent_volume_reclaim_policy == "Delete"):
            # Its volume may be deleted already, and then ours is a new one, perhaps under the same id. It must get its
            # own object once this one is gone, or it would never be deleted.
            raise ProvisionError(
                f"an earlier PersistentVolume {attempt.name} is still being deleted", ProvisioningState.BACKGROUND
            )
        theirs = saved.spec.csi
        if theirs is not None and (theirs.driver, theirs.volume_handle) == (self._context.driver.name, made.volume_id):
            return
        volumes = self._context.caches.volumes
        used = any(v.spec.csi is not None and v.spec.csi.volume_handle == made.volume_id for v in volumes)
        log.warning("volume was made twice", claim=attempt.claim.name, spare=made.volume_id, is_used=used)
        if not used:
            secrets = await read_secret(self._context.client, attempt.secret)
            fault = f"PersistentVolume {attempt.name} stands for another volume than {made.volume_id}"
            await self._undo(made.volume_id, secrets, fault)

    async def _failed(
        self, uid: str, about: Any, class_name: str, class_uid: str, reason: str, state: ProvisioningState
    ) -> float | None:
        """Tell the user what failed and what comes next. Returns the seconds until the next attempt, or raises."""
        message = f'failed to provision volume with StorageClass "{class_name}": {reason}'
        if state in (ProvisioningState.FINISHED, ProvisioningState.INFEASIBLE, ProvisioningState.RESCHEDULE):
            self._end(uid)
        elif state is ProvisioningState.NO_CHANGE:
            self.waiting.add(uid)
        if state is ProvisioningState.RESCHEDULE and isinstance(about, PersistentVolumeClaim):
            self._ownership.decline(uid)
            follows = self._ownership.what_follows(self._context.caches.classes.get(class_name))
            self._events.warning(about, "ProvisioningFailed", f"{message}; {follows}")
            if await self._reschedule(about):
                return None
        elif state is ProvisioningState.INFEASIBLE:
            note = f"the request cannot be met as it is; it is tried again in {_INFEASIBLE_S / 60:.0f} minutes"
            self._events.warning(about, "ProvisioningFailed", f"{message}; {note}")
            self._slow.add((uid, class_uid))
            self.waiting.add(uid)
            return self._slow.left_s((uid, class_uid))
        else:
            note = "the volume may still appear, so it is " if state is ProvisioningState.BACKGROUND else ""
            note += self._context.settings.retry_words
            self._events.warning(about, "ProvisioningFailed", f"{message}; {note}")
        log.warning("provisioning failed", claim=uid, state=state.value, reason=reason)
        raise ProvisionError(message, state)

    async def _reschedule(self, claim: PersistentVolumeClaim) -> bool:
        change = remove_annotation(names.SELECTED_NODE, names.ALPHA_SELECTED_NODE)
        try:
            changed = await self._context.writer.update(PersistentVolumeClaim, claim.name, claim.namespace, change)
        except NotFound:
            return True
        except ApiError as error:
            log.warning("selected node could not be removed", claim=claim.key, reason=str(error))
            return False
        return changed is not None

    def _claim(self, uid: str) -> PersistentVolumeClaim | None:
        return self._context.caches.claim_with_uid(uid)

    def _saved(self, uid: str) -> list[PersistentVolume]:
        """Return the PersistentVolumes for this claim, whatever their prefix."""
        settings, driver = self._context.settings, self._context.driver.name
        name = volume_name(settings.volume_name_prefix, settings.volume_name_uuid_length, uid)
        found = self._context.caches.volumes_of_claim(uid)
        return [v for v in found if v.name == name or v.annotations.get(names.PROVISIONED_BY) == driver]

    async def _is_settled(self, uid: str) -> bool:
        """Whether the claim's volume is saved and bound, also according to the API server.

        The cache may be old: another instance may have deleted that volume, and an earlier call of ours recreated it.
        """
        for volume in self._saved(uid):
            if _is_bound(volume):
                found = await self._context.client.find(PersistentVolume, volume.name)
                if found is not None and found.uid == volume.uid and _is_bound(found):
                    return True
        return False

    def _end(self, uid: str) -> None:
        self._uncertain.discard(uid)
        covered = self._covered.pop(uid, [])
        if self.attempts.pop(uid, None) is not None:
            self._journal.forget(uid, covered)


def _is_bound(volume: PersistentVolume) -> bool:
    """Whether the volume is bound and not being deleted: nothing that an earlier call created can be lost."""
    return volume.status.phase == "Bound" and not volume.is_deleting


def _fault_of(attempt: ProvisionAttempt, made: pb.Volume) -> str:
    """What is wrong with a volume that the driver says it made, or the empty string."""
    if not made.volume_id:
        raise ProvisionError("CreateVolume returned a volume without an id", ProvisioningState.BACKGROUND)
    if made.capacity_bytes and made.capacity_bytes < attempt.requested_bytes:
        return f"volume {made.volume_id} has {made.capacity_bytes} bytes, fewer than {attempt.requested_bytes}"
    if attempt.source_is_required and not made.HasField("content_source"):
        return f"volume {made.volume_id} was made without its data source"
    return ""
