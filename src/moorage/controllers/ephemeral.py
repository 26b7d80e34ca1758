"""Generic ephemeral volumes: create the claim of a pod's volume template, owned by the pod.

Owns: creating those claims. The garbage collector deletes them through the owner reference.
Start reading at: `plan_pod`, `run`.

A claim of the same name that has another owner is left alone; the pod gets an event.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from moorage.controllers.context import ControllerContext
from moorage.errors import MoorageError
from moorage.kube.api.client import Client
from moorage.kube.cache.caches import Caches
from moorage.kube.control.events import Recorder
from moorage.kube.control.writer import Writer
from moorage.kube.errors import AlreadyExists, ApiError, NotFound
from moorage.kube.objects import PersistentVolumeClaim, Pod
from moorage.kube.volumes import ephemeral_claim_name, is_owned_by
from moorage.log import get_logger

log = get_logger(__name__)

COMPONENT = "ephemeral_volume"


class ClaimIsForeign(MoorageError):
    """The claim name that a pod's ephemeral volume needs is taken by a claim that was not created for this pod."""

    code = "FAILED_PRECONDITION"


@dataclass(frozen=True, slots=True)
class MakeClaim:
    """Create the claim for this volume of the pod."""

    volume: str
    claim: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The claim name is taken by a claim that was not created for this pod."""

    volume: str
    claim: str


EphemeralAction = MakeClaim | Refuse


def plan_pod(pod: Pod, claim_at: Callable[[str], PersistentVolumeClaim | None]) -> list[EphemeralAction]:
    """Return what the pod's ephemeral volumes still need. A pod that is being deleted gets no new claim."""
    if pod.is_deleting:
        return []
    actions: list[EphemeralAction] = []
    for volume in pod.spec.volumes:
        if volume.ephemeral is None:
            continue
        name = ephemeral_claim_name(pod, volume)
        claim = claim_at(f"{pod.namespace}/{name}")
        if claim is None:
            actions.append(MakeClaim(volume.name, name))
        elif not is_owned_by(claim, pod):
            actions.append(Refuse(volume.name, name))
    return actions


def claim_from(pod: Pod, volume: dict[str, Any]) -> dict[str, Any]:
    """Return the claim for one volume of a pod. `volume` is raw JSON, so that no field of the template is lost."""
    template = (volume.get("ephemeral") or {}).get("volumeClaimTemplate") or {}
    meta = template.get("metadata") or {}
    owner = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod.name,
        "uid": pod.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "metadata": {
            "name": f"{pod.name}-{volume['name']}",
            "namespace": pod.namespace,
            "labels": meta.get("labels") or {},
            "annotations": meta.get("annotations") or {},
            "ownerReferences": [owner],
        },
        "spec": template.get("spec") or {},
    }


class Ephemeral:
    """Creates claims for pods."""

    def __init__(self, client: Client, writer: Writer, recorder: Recorder, caches: Caches) -> None:
        self._client = client
        self._writer = writer
        self._recorder = recorder
        self._caches = caches

    async def sync(self, key: str) -> None:
        """Create the missing claims of one pod."""
        pod = self._caches.pods.get(key)
        if pod is None:
            return
        for action in plan_pod(pod, self._caches.claims.get):
            try:
                await self._execute(action, pod)
            except MoorageError as error:
                self._recorder.warning(pod, "FailedBinding", f"ephemeral volume {action.volume}: {error}")
                raise

    async def _execute(self, action: EphemeralAction, pod: Pod) -> None:
        match action:
            case Refuse(_, claim):
                raise _foreign(pod, claim)
            case MakeClaim(volume, claim):
                await self._make(pod, volume, claim)

    async def _make(self, pod: Pod, volume: str, claim: str) -> None:
        try:
            raw = msgspec.json.decode(await self._client.request("GET", Pod.resource.path(pod.namespace, pod.name)))
        except NotFound:
            return
        found = next((one for one in raw["spec"].get("volumes") or [] if one["name"] == volume), None)
        if raw["metadata"]["uid"] != pod.uid or found is None:
            return  # the pod was replaced by another of the same name, which is reconciled on its own
        try:
            made = await self._writer.create(PersistentVolumeClaim, claim_from(pod, found), pod.namespace)
        except AlreadyExists as error:  # ours and not cached yet, or another claim
            there = await self._client.find(PersistentVolumeClaim, claim, pod.namespace)
            if there is not None and not is_owned_by(there, pod):
                raise _foreign(pod, claim) from error
            return
        except ApiError as error:
            raise type(error)(error.status, error.reason, f"create PVC {claim}: {error.message}", error.body) from error
        log.info("claim created for an ephemeral volume", pod=pod.key, claim=made.key)


def _foreign(pod: Pod, claim: str) -> ClaimIsForeign:
    return ClaimIsForeign(f"PVC {pod.namespace}/{claim} was not created for pod {pod.key} (pod is not owner)")


async def run(context: ControllerContext) -> None:
    """Create the claims of ephemeral volumes until cancelled."""
    caches = context.caches
    work = Ephemeral(context.client, context.writer, await context.recorders.of(COMPONENT), caches)

    def keys_for_claim(old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> list[str]:
        """A deleted claim is created again while its pod exists."""
        return [pod.key for pod in caches.pods_using(old.key)] if old is not None and new is None else []

    controller = context.controller("ephemeral", work.sync)
    watches = [controller.watch(caches.pods, keys_for_pod), controller.watch(caches.claims, keys_for_claim)]
    await context.run([controller], watches)


def keys_for_pod(old: Pod | None, new: Pod | None) -> list[str]:
    """Return the key of a new pod that has an ephemeral volume."""
    if new is None or old is not None or all(volume.ephemeral is None for volume in new.spec.volumes):
        return []
    return [new.key]
