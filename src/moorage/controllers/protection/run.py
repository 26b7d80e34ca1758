"""Protection, running: one loop each for claims, volumes and attributes classes. Decides nothing.

Owns: the queues, and the writes of finalizers and of the condition `Unused`.
Start reading at: `run`, `Claims.sync_claim`.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from moorage.controllers.context import ControllerContext
from moorage.controllers.protection.plan import (
    UNUSED,
    AddGuard,
    AskForPods,
    ProtectionAction,
    RemoveGuard,
    SetUnused,
    attributes_classes_of,
    plan_claim,
    plan_guard,
)
from moorage.kube.api.client import Client, PatchType
from moorage.kube.cache.informer import Informer
from moorage.kube.control.queue import WorkQueue
from moorage.kube.errors import NotFound
from moorage.kube.names import CLAIM_PROTECTION, CLASS_PROTECTION, VOLUME_PROTECTION
from moorage.kube.objects import (
    KubeObject,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttributesClass,
)
from moorage.kube.objects.meta import timestamp_text
from moorage.kube.volumes import claims_of
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T", bound=KubeObject)
BY_ATTRIBUTES_CLASS = "by-attributes-class"
_AT_A_TIME = 32


async def run(context: ControllerContext) -> None:
    """Protect claims, volumes and attributes classes until cancelled; each loop runs though another cannot."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_run_claims(context), name="protection-claims")
        tasks.create_task(_run_volumes(context), name="protection-volumes")
        tasks.create_task(_run_classes(context), name="protection-classes")


class ClaimProtection:
    """Claims one by one; those about to be let go namespace by namespace, so that many cost one list of pods."""

    def __init__(
        self,
        client: Client,
        claims: Informer[PersistentVolumeClaim],
        pods: Informer[Pod],
        namespaces: WorkQueue[str],
    ) -> None:
        self._client = client
        self._claims = claims
        self._pods = pods
        self._namespaces = namespaces
        self._leaving: dict[str, dict[str, None]] = {}

    async def sync_claim(self, key: str) -> None:
        """Look at a claim with the pods known here; if none seems to hold it, its namespace is asked."""
        if not await self._settle(key, self._pods.by(claims_of, key), is_confirmed=False):
            namespace = key.partition("/")[0]
            self._leaving.setdefault(namespace, {})[key] = None
            self._namespaces.add(namespace)

    async def sync_namespace(self, namespace: str) -> None:
        """Let go the claims that no pod of the namespace holds, as the API itself lists them.

        Several at a time, so that their writes share commits of the server. One that cannot be let go now holds no
        other up; it stays here and comes again with the namespace.
        """
        leaving = self._leaving.pop(namespace, {})
        slots = asyncio.Semaphore(_AT_A_TIME)
        left = dict(leaving)

        async def let_go(key: str, pods: list[Pod]) -> None:
            async with slots:
                await self._settle(key, pods, is_confirmed=True)
            del left[key]

        try:
            pods = (await self._client.list(Pod, namespace)).items if leaving else []
            outcomes = await asyncio.gather(*(let_go(key, pods) for key in leaving), return_exceptions=True)
            for failure in (each for each in outcomes if each is not None):
                raise failure
        finally:
            if left:
                self._leaving[namespace] = left | self._leaving.get(namespace, {})

    async def _settle(self, key: str, pods: list[Pod], *, is_confirmed: bool) -> bool:
        """Do what the plan says for one claim; False when the pods have to be asked for first."""
        claim = self._claims.get(key)
        if claim is None:
            return True
        actions = plan_claim(claim, pods, is_confirmed=is_confirmed)
        if any(isinstance(action, AskForPods) for action in actions):
            return False
        for action in actions:
            claim = await _execute(self._client, self._claims, claim, CLAIM_PROTECTION, action)
        return True


async def _run_claims(context: ControllerContext) -> None:
    claims, pods = context.informers.of(PersistentVolumeClaim), context.informers.of(Pod)
    queue, namespaces = _queue(context, "protection-claims"), _queue(context, "protection-namespaces")
    work = ClaimProtection(context.client, claims, pods, namespaces)

    def on_claim(_: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        if new is not None and plan_claim(new, pods.by(claims_of, new.key), is_confirmed=False):
            queue.add(new.key)  # most changes of a claim ask nothing of us

    def on_pod(old: Pod | None, new: Pod | None) -> None:
        for pod in (old, new):
            for key in claims_of(pod) if pod is not None else ():
                queue.add(key)

    await claims.wait_synced()
    await pods.wait_synced()
    claims.subscribe(on_claim)
    pods.subscribe(on_pod)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(queue.run(work.sync_claim, context.options.workers), name="protection-claims")
        tasks.create_task(namespaces.run(work.sync_namespace, context.options.workers), name="protection-namespaces")


async def _run_volumes(context: ControllerContext) -> None:
    volumes = context.informers.of(PersistentVolume)

    def is_used(volume: PersistentVolume) -> bool:
        return volume.status.phase == "Bound"

    await _run_guard(context, volumes, VOLUME_PROTECTION, is_used, lambda queue: None)


async def _run_classes(context: ControllerContext) -> None:
    classes = context.informers.of(VolumeAttributesClass)
    volumes, claims = context.informers.of(PersistentVolume), context.informers.of(PersistentVolumeClaim)
    volumes.index(BY_ATTRIBUTES_CLASS, attributes_classes_of)
    claims.index(BY_ATTRIBUTES_CLASS, attributes_classes_of)

    def is_used(attributes_class: VolumeAttributesClass) -> bool:
        name = attributes_class.name
        return bool(volumes.at(BY_ATTRIBUTES_CLASS, name) or claims.at(BY_ATTRIBUTES_CLASS, name))

    def follow_users(queue: WorkQueue[str]) -> None:
        def on_user(
            old: PersistentVolume | PersistentVolumeClaim | None, new: PersistentVolume | PersistentVolumeClaim | None
        ) -> None:
            for name in attributes_classes_of(old) if old is not None else ():
                queue.add(name)

        volumes.subscribe(on_user)
        claims.subscribe(on_user)

    await volumes.wait_synced()
    await claims.wait_synced()
    await _run_guard(context, classes, CLASS_PROTECTION, is_used, follow_users)


async def _run_guard(
    context: ControllerContext,
    informer: Informer[T],
    finalizer: str,
    is_used: Callable[[T], bool],
    follow_users: Callable[[WorkQueue[str]], None],
) -> None:
    queue = _queue(context, f"protection-{informer.kind.resource.plural}")

    async def sync(key: str) -> None:
        obj = informer.get(key)
        if obj is not None:
            for action in plan_guard(obj, finalizer, is_used=is_used(obj)):
                obj = await _execute(context.client, informer, obj, finalizer, action)

    def on_change(_: T | None, new: T | None) -> None:
        if new is not None and plan_guard(new, finalizer, is_used=is_used(new)):
            queue.add(new.key)

    await informer.wait_synced()
    informer.subscribe(on_change)
    follow_users(queue)
    await queue.run(sync, context.options.workers)


async def _execute(client: Client, cache: Informer[T], obj: T, finalizer: str, action: ProtectionAction) -> T:
    """One write, valid only for the version that was judged."""
    kind, how, subresource = type(obj), PatchType.MERGE, ""
    match action:
        case AddGuard():
            patch: dict[str, object] = {"metadata": {"finalizers": [*obj.finalizers, finalizer]}}
        case RemoveGuard():
            patch = {"metadata": {"finalizers": [name for name in obj.finalizers if name != finalizer]}}
        case SetUnused(is_unused):
            patch, how, subresource = {"status": {"conditions": [_unused(is_unused)]}}, PatchType.STRATEGIC, "status"
        case AskForPods():
            return obj
    try:
        version = obj.metadata.resource_version
        written = await client.patch(
            kind, obj.name, patch, obj.namespace, how=how, subresource=subresource, version=version
        )
    except NotFound:
        return obj
    cache.remember(written)
    if isinstance(action, RemoveGuard):  # said once, when it is so: another writer may have been first
        log.info("no longer in use and let go", kind=kind.resource.kind, name=obj.key)
    return written


def _unused(is_unused: bool) -> dict[str, str]:
    return {
        "type": UNUSED,
        "status": "True" if is_unused else "False",
        "reason": "NoPodsUsingPVC" if is_unused else "PodUsingPVC",
        "message": "No pods are currently referencing this PVC"
        if is_unused
        else "A pod is currently referencing this PVC",
        "lastTransitionTime": timestamp_text(time.time()),
    }


def _queue(context: ControllerContext, name: str) -> WorkQueue[str]:
    options = context.options
    queue: WorkQueue[str] = WorkQueue(name, start_s=options.retry_start_s, max_s=options.retry_max_s)
    context.activity.register(queue)
    return queue
