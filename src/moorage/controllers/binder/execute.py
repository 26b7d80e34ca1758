"""Carry out the binder's decisions: guarded patches in order, and events.

Owns: the order of the writes and the events about them. `plan.py` decides what to do, `writes.py` what to write.
Start reading at: `BinderExecutor.bind`.
"""

from moorage.controllers.binder import writes
from moorage.controllers.binder.plan import (
    AssignClass,
    BindClaim,
    ClaimAction,
    ConfirmClaim,
    EmitEvent,
    LookAtClaim,
    RequestVolume,
    SetClaimPhase,
    SetVolumePhase,
    Tell,
    TellMissing,
    TryLater,
    Unbind,
    VolumeAction,
)
from moorage.errors import MoorageError
from moorage.kube.api.client import Client
from moorage.kube.control.events import Recorder
from moorage.kube.control.writer import Writer
from moorage.kube.objects import KubeObject, PersistentVolume, PersistentVolumeClaim, StorageClass
from moorage.log import get_logger

log = get_logger(__name__)


class NotNow(MoorageError):
    """The objects contradict each other. Retry later, in case a user fixes them."""

    code = "FAILED_PRECONDITION"


class BinderExecutor:
    """Makes the binder's writes. Each returns the object as written, for the next write to build on."""

    def __init__(self, client: Client, writer: Writer, recorder: Recorder) -> None:
        self._client = client
        self._writer = writer
        self._recorder = recorder

    async def on_claim(self, action: ClaimAction, claim: PersistentVolumeClaim) -> PersistentVolumeClaim:
        match action:
            case BindClaim(volume):
                return await self.bind(claim, volume)
            case SetClaimPhase(phase, note):
                written = await self._writer.patch(claim, writes.claim_status(claim, phase, None), subresource="status")
                if note is not None and claim.status.phase != phase:
                    self.tell(note, written)
                return written
            case AssignClass(name):
                patch: writes.Patch = {"spec": {"storageClassName": name}}
                log.info("claim gets the default class", claim=claim.key, storage_class=name)
                return await self._writer.patch(claim, patch)
            case RequestVolume(provisioner):
                return await self._request_volume(claim, provisioner)
            case Tell(note):
                self.tell(note, claim)
            case TellMissing(name, note):
                if await self._client.find(StorageClass, name) is None:
                    self.tell(note, claim)  # else the claim is enqueued when the class reaches the cache
            case TryLater(reason):
                raise NotNow(reason)
        return claim

    async def on_volume(
        self, action: VolumeAction, volume: PersistentVolume, claim: PersistentVolumeClaim | None
    ) -> PersistentVolume:
        match action:
            case SetVolumePhase(phase, note):
                message = note.message if note is not None else ""
                patch = writes.volume_phase(volume, phase, message)
                written = await self._writer.patch(volume, patch, subresource="status")
                if patch is not None:
                    log.info("volume entered phase", volume=volume.name, phase=phase)
                if note is not None and patch is not None:
                    self.tell(note, written)
                return written
            case Unbind():
                volume = await self._writer.patch(volume, writes.unbinding(volume))
                return await self._writer.patch(volume, writes.volume_phase(volume, "Available"), subresource="status")
            case Tell(note):
                subject = claim if note.about == "claim" else volume
                if subject is not None:
                    self.tell(note, subject)
            case LookAtClaim() | ConfirmClaim():
                raise AssertionError(f"{action} is for the caller")
        return volume

    async def bind(self, claim: PersistentVolumeClaim, volume: PersistentVolume) -> PersistentVolumeClaim:
        """Bind with four writes, the volume's before the claim's. A write that would change nothing is left out.

        After a crash between any two of them, the same plan leads here again and finishes the binding.
        """
        volume = await self._writer.patch(volume, writes.volume_binding(volume, claim))
        volume = await self._writer.patch(volume, writes.volume_phase(volume, "Bound"), subresource="status")
        claim = await self._writer.patch(claim, writes.claim_binding(claim, volume))
        before = claim.status.phase
        claim = await self._writer.patch(claim, writes.claim_status(claim, "Bound", volume), subresource="status")
        if before != claim.status.phase:
            log.info("claim is bound", claim=claim.key, volume=volume.name)
        return claim

    async def keep_claim(self, claim: PersistentVolumeClaim) -> PersistentVolumeClaim:
        return await self._writer.patch(claim, writes.claim_upkeep(claim))

    async def keep_volume(self, volume: PersistentVolume) -> PersistentVolume:
        return await self._writer.patch(volume, writes.volume_upkeep(volume))

    def tell(self, note: EmitEvent, subject: KubeObject) -> None:
        self._recorder.event(subject, note.type, note.reason, note.message)

    async def _request_volume(self, claim: PersistentVolumeClaim, provisioner: str) -> PersistentVolumeClaim:
        claim = await self._writer.patch(claim, writes.provisioner_request(claim, provisioner))
        text = (
            f"Waiting for a volume to be created either by the external provisioner '{provisioner}' or manually by the"
            " system administrator. If volume creation is delayed, please verify that the provisioner is running and"
            " correctly registered."
        )
        self.tell(EmitEvent("claim", "Normal", "ExternalProvisioning", text), claim)
        return claim
