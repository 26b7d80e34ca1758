"""Carries the binder's decisions out: patches that fail rather than race, and events.

Owns: sending the writes in order, keeping what they returned, and telling the user what is new.
May not touch: what to do (`plan.py`) and what to write (`writes.py`).
Start reading at: `Executor.bind`.
"""

from typing import TypeVar

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
from moorage.kube.cache.informer import Informer
from moorage.kube.control.events import Recorder
from moorage.kube.objects import KubeObject, PersistentVolume, PersistentVolumeClaim, StorageClass
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T", bound=KubeObject)


class NotNow(MoorageError):
    """The state of the objects is contradictory; only a later look can tell whether somebody has put it right."""

    code = "FAILED_PRECONDITION"


class BinderExecutor:
    """Makes the binder's writes. Every write returns the object as it is afterwards, for the next write to build on."""

    def __init__(
        self,
        client: Client,
        recorder: Recorder,
        claims: Informer[PersistentVolumeClaim],
        volumes: Informer[PersistentVolume],
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._claims = claims
        self._volumes = volumes

    async def on_claim(self, action: ClaimAction, claim: PersistentVolumeClaim) -> PersistentVolumeClaim:
        match action:
            case BindClaim(volume):
                return await self.bind(claim, volume)
            case SetClaimPhase(phase, note):
                written = await self._write(self._claims, claim, writes.claim_status(claim, phase, None), "status")
                if note is not None and claim.status.phase != phase:
                    self.tell(note, written)
                return written
            case AssignClass(name):
                patch: writes.Patch = {"spec": {"storageClassName": name}}
                log.info("claim gets the default class", claim=claim.key, storage_class=name)
                return await self._write(self._claims, claim, patch)
            case RequestVolume(provisioner):
                return await self._request_volume(claim, provisioner)
            case Tell(note):
                self.tell(note, claim)
            case TellMissing(name, note):
                if await self._client.find(StorageClass, name) is None:
                    self.tell(note, claim)  # otherwise the claim is looked at again when the class is known here too
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
                written = await self._write(self._volumes, volume, patch, "status")
                if patch is not None:
                    log.info("volume entered phase", volume=volume.name, phase=phase)
                if note is not None and patch is not None:
                    self.tell(note, written)
                return written
            case Unbind():
                volume = await self._write(self._volumes, volume, writes.unbinding(volume))
                return await self._write(self._volumes, volume, writes.volume_phase(volume, "Available"), "status")
            case Tell(note):
                subject = claim if note.about == "claim" else volume
                if subject is not None:
                    self.tell(note, subject)
            case LookAtClaim() | ConfirmClaim():
                raise AssertionError(f"{action} is for the caller")
        return volume

    async def bind(self, claim: PersistentVolumeClaim, volume: PersistentVolume) -> PersistentVolumeClaim:
        """The four writes, the volume's before the claim's, each left out if it would change nothing.

        A crash after any of them leaves a state from which the same plan leads here again.
        """
        volume = await self._write(self._volumes, volume, writes.volume_binding(volume, claim))
        volume = await self._write(self._volumes, volume, writes.volume_phase(volume, "Bound"), "status")
        claim = await self._write(self._claims, claim, writes.claim_binding(claim, volume))
        before = claim.status.phase
        claim = await self._write(self._claims, claim, writes.claim_status(claim, "Bound", volume), "status")
        if before != claim.status.phase:
            log.info("claim is bound", claim=claim.key, volume=volume.name)
        return claim

    async def keep_claim(self, claim: PersistentVolumeClaim) -> PersistentVolumeClaim:
        return await self._write(self._claims, claim, writes.claim_upkeep(claim))

    async def keep_volume(self, volume: PersistentVolume) -> PersistentVolume:
        return await self._write(self._volumes, volume, writes.volume_upkeep(volume))

    def tell(self, note: EmitEvent, subject: KubeObject) -> None:
        self._recorder.event(subject, note.type, note.reason, note.message)

    async def _request_volume(self, claim: PersistentVolumeClaim, provisioner: str) -> PersistentVolumeClaim:
        claim = await self._write(self._claims, claim, writes.provisioner_request(claim, provisioner))
        text = (
            f"Waiting for a volume to be created either by the external provisioner '{provisioner}' or manually by the"
            " system administrator. If volume creation is delayed, please verify that the provisioner is running and"
            " correctly registered."
        )
        self.tell(EmitEvent("claim", "Normal", "ExternalProvisioning", text), claim)
        return claim

    async def _write(self, cache: Informer[T], obj: T, patch: writes.Patch | None, subresource: str = "") -> T:
        """Send a patch that holds only for the version it was decided on, and remember the answer at once."""
        if patch is None:
            return obj
        version = obj.metadata.resource_version
        written = await self._client.patch(
            type(obj), obj.name, patch, obj.namespace, subresource=subresource, version=version
        )
        cache.remember(written)
        return written
