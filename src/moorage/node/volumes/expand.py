"""Growing a volume on this node after its backend has grown.

Owns: the rules of the node's part of expansion, NodeExpandVolume, and the claim's status around it.
Start reading at: `Grower.grow`, `decide`.
"""

import time
from dataclasses import dataclass
from enum import Enum
from typing import Any

from moorage.csi.errors import CsiError
from moorage.kube.api.client import Client, PatchType
from moorage.kube.cache.informer import Informer
from moorage.kube.control.events import Recorder
from moorage.kube.errors import ApiError
from moorage.kube.names import NODE_EXPANSION_NOT_REQUIRED
from moorage.kube.objects.meta import ObjectReference, as_document, timestamp_text
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.volumes import PersistentVolumeClaim
from moorage.kube.quantity import Quantity
from moorage.kube.volumes import VolumeName
from moorage.log import get_logger
from moorage.node.layout import NodeLayout
from moorage.node.plugins.registry import DriverRegistry
from moorage.node.volumes import rules, wire
from moorage.node.volumes.driver_calls import driver_and_capabilities
from moorage.node.volumes.live_reads import Fetch
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import ActualVolume, CsiSource, MountState, StepFailure, StepOutcome, VolumeUse

log = get_logger(__name__)

_RESIZE_CONDITIONS = frozenset({"Resizing", "FileSystemResizePending", "ControllerResizeError", "NodeResizeError"})
NOT_YET = "waiting for the claim's resize state"
_INFEASIBLE = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "NOT_FOUND"})


class Choice(Enum):
    """What the claim's status says about growing on this node."""

    NOTHING = "nothing to do now"
    RECORD = "already done elsewhere"
    GROW = "grow"
    GROW_UNTRACKED = "grow for a resizer that keeps no state in the claim"
    GROW_SILENTLY = "grow, the claim's status is already final"


@dataclass(frozen=True, slots=True)
class ExpandDecision:
    choice: Choice
    target_bytes: int = 0


def decide(claim: PersistentVolumeClaim, volume_bytes: int) -> ExpandDecision:
    """Whether to grow here, and to what size; pure."""
    state = claim.status.allocated_resource_statuses.get("storage", "")
    allocated = _bytes(claim.status.allocated_resources.get("storage"))
    usable = _bytes(claim.status.capacity.get("storage"))
    if not allocated and not state:
        if usable >= volume_bytes:
            return ExpandDecision(Choice.RECORD, volume_bytes)
        return ExpandDecision(Choice.GROW_UNTRACKED, volume_bytes)
    if state in ("NodeResizePending", "NodeResizeInProgress"):
        return ExpandDecision(Choice.GROW, allocated or volume_bytes)
    if not state and usable >= allocated:
        shared = "ReadWriteMany" in claim.spec.access_modes and NODE_EXPANSION_NOT_REQUIRED not in claim.annotations
        return ExpandDecision(Choice.GROW_SILENTLY if shared else Choice.RECORD, allocated)
    return ExpandDecision(Choice.NOTHING)


class Grower:
    """Grows volumes and tells the claim."""

    def __init__(
        self,
        layout: NodeLayout,
        client: Client,
        registry: DriverRegistry,
        fetch: Fetch,
        claims: Informer[PersistentVolumeClaim],
        recorder: Recorder,
    ) -> None:
        self._layout = layout
        self._client = client
        self._registry = registry
        self._fetch = fetch
        self._claims = claims
        self._recorder = recorder
        self._final_errors: set[VolumeName] = set()

    def forget(self, name: VolumeName) -> None:
        """The volume has left this node, or has its size: what was refused before says nothing of the next time."""
        self._final_errors.discard(name)

    async def grow_at_mount(self, use: VolumeUse, volume: ActualVolume) -> StepOutcome:
        """Before a pod starts: the volume gets the size that its claim was promised."""
        if not isinstance(use.source, CsiSource) or use.source.is_ephemeral or not use.source.claim:
            return StepOutcome()
        known = volume.size_bytes or use.claim_size_bytes  # the claim may say more than this node has done
        if not 0 < use.claim_size_bytes < use.size_bytes or volume.growth_refused or not use.claim_expands:
            return StepOutcome(size_bytes=known)
        if use.read_only and volume.state_of(use.pod.uid) is MountState.MOUNTED:
            return StepOutcome(size_bytes=known)  # published once more; the reader knows its size since then
        try:
            outcome = await self.grow(use, volume)
        except ApiError as error:
            raise StepFailed(
                StepFailure.UNCERTAIN, "expand", f"claim {use.source.claim} cannot be served: {error}"
            ) from error
        if outcome.message == NOT_YET:  # its time comes while the pod runs
            return StepOutcome(size_bytes=use.claim_size_bytes)
        if outcome.failure is not None and not outcome.growth_refused:
            raise StepFailed(StepFailure.UNCERTAIN, "expand", outcome.message)
        return outcome

    async def grow(self, use: VolumeUse, volume: ActualVolume) -> StepOutcome:
        """Grow if the claim's status says so; failing writes the reason into the claim."""
        source = use.source
        assert isinstance(source, CsiSource)
        namespace, _, name = source.claim.partition("/")
        claim = await self._client.find(PersistentVolumeClaim, name, namespace)
        if claim is None:
            return StepOutcome(size_bytes=use.size_bytes)
        if use.read_only:
            for about in (_pod(use), claim):
                self._recorder.warning(about, "FileSystemResizeFailed", "volume is used read-only; it is not grown")
            return StepOutcome(size_bytes=use.claim_size_bytes)
        decision = decide(claim, use.size_bytes)
        if decision.choice is Choice.NOTHING:
            return StepOutcome(StepFailure.TRANSIENT, "expand", NOT_YET)
        if decision.choice is Choice.RECORD:
            self.forget(use.volume)
            return StepOutcome(size_bytes=max(decision.target_bytes, use.size_bytes))
        try:
            return await self._expand(use, source, claim, decision)
        except StepFailed as error:
            self._recorder.warning(_pod(use), "VolumeResizeFailed", f"volume {use.outer_names[0]}: {error}")
            raise

    async def _expand(
        self, use: VolumeUse, source: CsiSource, claim: PersistentVolumeClaim, decision: ExpandDecision
    ) -> StepOutcome:
        silently = decision.choice is Choice.GROW_SILENTLY
        target = decision.target_bytes
        driver, capabilities = await driver_and_capabilities(self._registry, source.driver, "expand")
        if rules.EXPAND not in capabilities:
            if silently:
                return StepOutcome(size_bytes=max(target, use.size_bytes))
            cannot = CsiError(
                "NodeExpandVolume", "UNIMPLEMENTED", f"driver {source.driver} cannot grow volumes on a node"
            )
            return await self._refused(use, claim, target, cannot)
        if decision.choice is Choice.GROW:
            claim = await self._write(claim, {"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}})
        secrets = await self._fetch.secret(source.expand_secret)
        request = wire.expand_request(
            use, source, *self._paths(use, source, capabilities), target, secrets, capabilities
        )
        try:
            await driver.client.NodeExpandVolume(request)
        except CsiError as error:
            return await self._refused(use, claim, target, error)
        self.forget(use.volume)
        for about in (_pod(use), claim):
            self._recorder.normal(about, "FileSystemResizeSuccessful", f"volume {source.spec_name} was grown")
        if not silently:
            await self._finished(claim, target)
        log.info("volume grown", volume=use.volume, pod=use.pod.uid, size=target)
        return StepOutcome(size_bytes=max(target, use.size_bytes))

    def _paths(self, use: VolumeUse, source: CsiSource, capabilities: frozenset[str]) -> tuple[Any, Any]:
        if source.is_block:
            path = self._layout.block_map(source.spec_name, use.pod.uid)
            return path, self._layout.block_staging(source.spec_name)
        staging = self._layout.staging_target(source.driver, source.handle) if rules.STAGE in capabilities else None
        return self._layout.publish_target(use.pod.uid, source.spec_name), staging

    async def _refused(self, use: VolumeUse, claim: PersistentVolumeClaim, target: int, error: CsiError) -> StepOutcome:
        self._recorder.warning(_pod(use), "VolumeResizeFailed", f"volume {use.outer_names[0]}: {error}")
        told = {"type": "NodeResizeError", "status": "True", "message": str(error)}
        status: dict[str, Any] = {"conditions": [{**told, "lastTransitionTime": timestamp_text(time.time())}]}
        request = _bytes(claim.spec.resources.requests.get("storage"))
        is_final = rules.failure_from(error) is StepFailure.FINAL
        if error.code in _INFEASIBLE or (use.volume in self._final_errors and request != target):
            status["allocatedResourceStatuses"] = {"storage": "NodeResizeInfeasible"}
        if is_final:
            self._final_errors.add(use.volume)
        try:
            await self._client.patch(
                PersistentVolumeClaim,
                claim.name,
                {"status": status},
                claim.namespace,
                how=PatchType.STRATEGIC,  # beside the conditions that others have written during the call
                subresource="status",
            )
        except ApiError as failed:
            log.warning("claim could not be told of the failure", claim=claim.key, reason=str(failed))
        refused = error.code == "FAILED_PRECONDITION"
        return StepOutcome(StepFailure.TRANSIENT, "expand", str(error), growth_refused=refused)

    async def _finished(self, claim: PersistentVolumeClaim, target: int) -> None:
        kept = [as_document(one) for one in claim.status.conditions if one.type not in _RESIZE_CONDITIONS]
        text = Quantity(target).canonical()
        await self._write(
            claim,
            {"capacity": {"storage": text}, "allocatedResourceStatuses": {"storage": None}, "conditions": kept},
        )

    async def _write(self, claim: PersistentVolumeClaim, status: dict[str, Any]) -> PersistentVolumeClaim:
        written = await self._client.patch(
            PersistentVolumeClaim,
            claim.name,
            {"status": status},
            claim.namespace,
            subresource="status",
            version=claim.metadata.resource_version,
        )
        self._claims.remember(written)
        return written


def _bytes(quantity: str | float | None) -> int:
    return Quantity.parse(quantity).value if quantity is not None else 0


def _pod(use: VolumeUse) -> ObjectReference:
    return ObjectReference(
        api_version="v1", kind=Pod.resource.kind, namespace=use.pod.namespace, name=use.pod.name, uid=use.pod.uid
    )
