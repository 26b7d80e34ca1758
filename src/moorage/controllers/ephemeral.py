"""Generic ephemeral volumes: makes the claim that a pod's volume template asks for, owned by the pod.

Owns: creating those claims. Their end is the garbage collector's work, through the owner reference.
May not touch: claims that somebody else made under the same name; that is told as an event.
Start reading at: `plan_pod`, `run`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from moorage.controllers.context import ControllerContext
from moorage.errors import MoorageError
from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informer
from moorage.kube.control.events import Recorder
from moorage.kube.control.queue import WorkQueue
from moorage.kube.errors import AlreadyExists, ApiError, NotFound
from moorage.kube.objects import PersistentVolumeClaim, Pod
from moorage.kube.volumes import claims_of, ephemeral_claim_name, is_owned_by
from moorage.log import get_logger

log = get_logger(__name__)

COMPONENT = "ephemeral_volume"


class ClaimIsForeign(MoorageError):
    """The claim of the name that a pod's ephemeral volume needs was not made for this pod."""

    code = "FAILED_PRECONDITION"


@dataclass(frozen=True, slots=True)
class MakeClaim:
    """Create the claim for this volume of the pod."""

    volume: str
    claim: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The name is taken by a claim of somebody else."""

    volume: str
    claim: str


EphemeralAction = MakeClaim | Refuse


def plan_pod(pod: Pod, claim_at: Callable[[str], PersistentVolumeClaim | None]) -> list[EphemeralAction]:
    """What the pod's ephemeral volumes still need; a pod that is going gets nothing new."""
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
    """The claim for one volume of a pod as the API has it, so that no field of the template is lost."""
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
    """Makes claims for pods, one pod at a time."""

    def __init__(
        self, client: Client, recorder: Recorder, pods: Informer[Pod], claims: Informer[PersistentVolumeClaim]
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._pods = pods
        self._claims = claims

    async def sync(self, key: str) -> None:
        pod = self._pods.get(key)
        if pod is None:
            return
        for action in plan_pod(pod, self._claims.get):
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
            return  # another pod of this name, which has its own turn
        try:
            made = await self._client.create(PersistentVolumeClaim, claim_from(pod, found), pod.namespace)
        except AlreadyExists as error:  # ours, not heard of yet, or somebody's who was quicker
            there = await self._client.find(PersistentVolumeClaim, claim, pod.namespace)
            if there is not None and not is_owned_by(there, pod):
                raise _foreign(pod, claim) from error
            return
        except ApiError as error:
            raise type(error)(error.status, error.reason, f"create PVC {claim}: {error.message}", error.body) from error
        self._claims.remember(made)
        log.info("claim made for an ephemeral volume", pod=pod.key, claim=made.key)


def _foreign(pod: Pod, claim: str) -> ClaimIsForeign:
    return ClaimIsForeign(f"PVC {pod.namespace}/{claim} was not created for pod {pod.key} (pod is not owner)")


async def run(context: ControllerContext) -> None:
    """Make the claims of ephemeral volumes until cancelled."""
    pods, claims = context.informers.of(Pod), context.informers.of(PersistentVolumeClaim)
    recorder = await context.recorders.of(COMPONENT)
    options = context.options
    queue: WorkQueue[str] = WorkQueue("ephemeral", start_s=options.retry_start_s, max_s=options.retry_max_s)
    context.activity.register(queue)
    work = Ephemeral(context.client, recorder, pods, claims)

    def on_pod(old: Pod | None, new: Pod | None) -> None:
        if new is not None and old is None and any(volume.ephemeral is not None for volume in new.spec.volumes):
            queue.add(new.key)

    def on_claim(old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        if old is not None and new is None:  # a claim that was deleted is made again while its pod is there
            for pod in pods.by(claims_of, old.key):
                queue.add(pod.key)

    await pods.wait_synced()
    await claims.wait_synced()
    pods.subscribe(on_pod)
    claims.subscribe(on_claim)
    await queue.run(work.sync, options.workers)
