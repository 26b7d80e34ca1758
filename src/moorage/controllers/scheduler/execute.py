"""Carry out a placement: write the claims, then bind the pod. Report it if no node suits.

Owns: the writes of scheduling (claimRef of volumes, selected-node of claims, the binding, the PodScheduled condition)
and the reservations that are held from the first write to the last.
Start reading at: `SchedulerExecutor.reserve`, `SchedulerExecutor.advance`.

A pod whose volumes must be created first waits as a reservation, not as a task: any change of its claims enqueues it.
As in Kubernetes, giving up a reservation undoes no write.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moorage.controllers.scheduler.plan import Nowhere, Placement
from moorage.controllers.scheduler.state import SchedulerState
from moorage.controllers.scheduler.volumes import reaches
from moorage.errors import MoorageError
from moorage.kube.api.client import Client, PatchType
from moorage.kube.cache.caches import Caches
from moorage.kube.control.events import Recorder
from moorage.kube.control.writer import Writer
from moorage.kube.errors import Conflict, NotFound
from moorage.kube.names import BIND_COMPLETED, BOUND_BY_CONTROLLER, SELECTED_NODE
from moorage.kube.objects.meta import as_document, reference_to, timestamp_text
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import claim_class, is_meant_for, requested_bytes
from moorage.log import get_logger

log = get_logger(__name__)


class PlacementFailed(MoorageError):
    """The chosen node does not suit after all. The pod is scheduled again after its back-off."""

    code = "ABORTED"


@dataclass(slots=True)
class Reservation:
    """A pod on its way to a node."""

    uid: str
    node: str
    static: tuple[tuple[str, str, str], ...]  # claim key, claim uid, volume
    provision: tuple[tuple[str, str], ...]  # claim key, claim uid
    deadline: float
    is_written: bool = False


class SchedulerExecutor:
    """Holds the reservations and advances them."""

    def __init__(
        self,
        world: SchedulerState,
        caches: Caches,
        client: Client,
        writer: Writer,
        recorder: Recorder,
        clock: Callable[[], float],
        bind_timeout_s: float,
    ) -> None:
        self._world = world
        self._caches = caches
        self._client = client
        self._writer = writer
        self._recorder = recorder
        self._clock = clock
        self._bind_timeout_s = bind_timeout_s
        self.reservations: dict[str, Reservation] = {}
        self.rejected: dict[str, dict[str, int]] = {}  # pod uid to how often each node was turned down
        self.on_freed: Callable[[], None] = lambda: None  # called when a reservation is given up

    def reserve(self, pod: Pod, placement: Placement) -> Reservation:
        """Count the pod and its claims as placed, for the next pod's decision."""
        fit, node = placement.fit, placement.node.name
        reservation = Reservation(
            pod.uid,
            node,
            tuple((claim.key, claim.uid, volume.name) for claim, volume in fit.static),
            tuple((claim.key, claim.uid) for claim in fit.provision),
            self._clock() + self._bind_timeout_s,
        )
        self.reservations[pod.key] = reservation
        self._world.assume(pod, node)
        for claim, volume in fit.static:
            self._world.promised_volumes[volume.name] = claim.uid
        for claim in fit.provision:
            self._world.promised_bytes[claim.uid] = (claim_class(claim), node, requested_bytes(claim))
        return reservation

    def release(self, key: str) -> None:
        """Give up a reservation."""
        reservation = self.reservations.pop(key, None)
        if reservation is None:
            return
        self._world.unassume(reservation.uid)
        self._forget_promises(reservation)
        self.on_freed()

    async def advance(self, pod: Pod, reservation: Reservation) -> float | None:
        """Write what is missing, and bind the pod if its claims are bound. Else return the seconds to wait."""
        try:
            if not reservation.is_written:
                await self._write_claims(reservation)
                reservation.is_written = True
            waits_for = self._unbound(reservation)
            if waits_for and self._clock() >= reservation.deadline:
                raise PlacementFailed(f"binding volumes: timed out waiting for {', '.join(waits_for)}")
            if waits_for:
                return max(0.0, reservation.deadline - self._clock())
            await self._bind(pod, reservation)
        except PlacementFailed as failure:
            self.release(pod.key)
            self._recorder.warning(pod, "FailedScheduling", str(failure))
            raise
        except MoorageError:
            self.release(pod.key)
            raise
        return None

    async def tell(self, pod: Pod, nowhere: Nowhere) -> None:
        """Report in the pod's condition and in an event why it has no node, unless the condition says so already."""
        message = f"{nowhere.message} By node: {nowhere.detail}." if nowhere.detail else nowhere.message
        known = next((c for c in pod.status.conditions if c.type == "PodScheduled"), None)
        if known is not None and (known.status, known.reason, known.message) == ("False", "Unschedulable", message):
            return
        self._recorder.warning(pod, "FailedScheduling", nowhere.message)
        since = known.last_transition_time if known is not None and known.status == "False" else None
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastProbeTime": None,
            "lastTransitionTime": since or timestamp_text(time.time()),
        }
        patch = {"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}}
        await self._writer.patch(pod, patch, how=PatchType.STRATEGIC, subresource="status", guarded=False)

    async def _write_claims(self, reservation: Reservation) -> None:
        for key, uid, name in reservation.static:
            claim, volume = self._claim(key, uid), self._caches.volumes.get(name)
            if volume is None:
                raise PlacementFailed(f'binding volumes: persistentvolume "{name}" not found')
            await self._promise_volume(claim, volume)
        for key, uid in reservation.provision:
            await self._writer.annotate(self._claim(key, uid), {SELECTED_NODE: reservation.node})

    async def _promise_volume(self, claim: PersistentVolumeClaim, volume: PersistentVolume) -> None:
        if volume.is_deleting or (volume.spec.claim_ref is not None and not is_meant_for(volume, claim)):
            raise PlacementFailed(f'binding volumes: persistentvolume "{volume.name}" went to another claim')
        if volume.spec.claim_ref is not None and volume.spec.claim_ref.uid:
            return
        patch: dict[str, Any] = {"spec": {"claimRef": as_document(reference_to(claim))}}
        if volume.spec.claim_ref is None:  # a user's own reservation is not marked as ours
            patch["metadata"] = {"annotations": {BOUND_BY_CONTROLLER: "yes"}}
        await self._writer.patch(volume, patch)

    def _claim(self, key: str, uid: str) -> PersistentVolumeClaim:
        claim = self._caches.claims.get(key)
        if claim is None or claim.uid != uid or claim.is_deleting:
            raise PlacementFailed(f'binding volumes: persistentvolumeclaim "{key}" is gone')
        return claim

    def _unbound(self, reservation: Reservation) -> list[str]:
        """Return the claims that are not bound yet. Raises PlacementFailed if one of them never will be."""
        waiting = []
        for key, uid, name in reservation.static:
            claim = self._claim(key, uid)
            volume = self._caches.volumes.get(name)
            if volume is None or not is_meant_for(volume, claim):
                raise PlacementFailed(f'binding volumes: persistentvolume "{name}" went to another claim')
            if volume.spec.claim_ref is None or not volume.spec.claim_ref.uid:
                raise PlacementFailed(f'binding volumes: ClaimRef got reset for pv "{name}"')
            if not self._is_bound(claim, reservation.node):
                waiting.append(key)
        for key, uid in reservation.provision:
            claim = self._claim(key, uid)
            if self._is_bound(claim, reservation.node):
                continue
            if claim.annotations.get(SELECTED_NODE) != reservation.node:
                turned_down = self.rejected.setdefault(reservation.uid, {})
                turned_down[reservation.node] = turned_down.get(reservation.node, 0) + 1
                raise PlacementFailed(f'binding volumes: provisioning failed for PVC "{claim.name}"')
            waiting.append(key)
        return waiting

    def _is_bound(self, claim: PersistentVolumeClaim, node_name: str) -> bool:
        if not claim.spec.volume_name or BIND_COMPLETED not in claim.annotations:
            return False
        volume, node = self._caches.volumes.get(claim.spec.volume_name), self._caches.nodes.get(node_name)
        if volume is None:
            return False  # not cached yet
        if node is None or not reaches(volume, node):
            raise PlacementFailed(
                f'binding volumes: pv "{volume.name}" node affinity doesn\'t match node "{node_name}"'
            )
        return True

    async def _bind(self, pod: Pod, reservation: Reservation) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": reservation.node},
        }
        try:
            await self._client.request("POST", Pod.resource.path(pod.namespace, pod.name, "binding"), body)
        except (Conflict, NotFound) as error:
            log.info("pod was not bound", pod=pod.key, node=reservation.node, reason=str(error))
            live = await self._client.find(Pod, pod.name, pod.namespace)
            if live is None or live.uid != pod.uid or live.spec.node_name:  # it is gone, or another scheduler bound it
                self.release(pod.key)
                return
            raise
        log.info("pod bound", pod=pod.key, node=reservation.node)
        message = f"Successfully assigned {pod.key} to {reservation.node}"
        self._recorder.normal(pod, "Scheduled", message)
        self.reservations.pop(pod.key, None)  # it stays assumed until the watch shows its node
        self.rejected.pop(pod.uid, None)
        self._forget_promises(reservation)

    def _forget_promises(self, reservation: Reservation) -> None:
        for _, uid, name in reservation.static:
            if self._world.promised_volumes.get(name) == uid:
                del self._world.promised_volumes[name]
        for _, uid in reservation.provision:
            self._world.promised_bytes.pop(uid, None)
