"""Protection, running: one part each for claims, volumes and attributes classes. Decides nothing.

Owns: the watches, and the writes of finalizers and of the condition `Unused`.
Start reading at: `run`, `ClaimProtection.sync_claim`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from moorage.controllers.context import ControllerContext, MakeController
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
from moorage.kube.cache.caches import Caches
from moorage.kube.cache.informer import Informer
from moorage.kube.control.controller import Controller, Watch
from moorage.kube.control.writer import Writer
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
_AT_A_TIME = 32


async def run(context: ControllerContext) -> None:
    """Protect claims, volumes and attributes classes until cancelled. A kind that is not served holds up no other."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_run_claims(context), name="protection-claims")
        tasks.create_task(_run_volumes(context), name="protection-volumes")
        tasks.create_task(_run_classes(context), name="protection-classes")


class ClaimProtection:
    """Reconciles claims one by one, and those about to be released by namespace: many then cost one list of pods."""

    def __init__(self, client: Client, caches: Caches, writer: Writer, make: MakeController) -> None:
        self._client = client
        self._caches = caches
        self._writer = writer
        self._leaving: dict[str, dict[str, None]] = {}
        self.claims = make("protection-claims", self.sync_claim)
        self.namespaces = make("protection-namespaces", self.sync_namespace)

    async def sync_claim(self, key: str) -> None:
        """Reconcile a claim with the cached pods. If none uses it, its namespace is enqueued for a live list."""
        if not await self._settle(key, self._caches.pods_using(key), is_confirmed=False):
            namespace = key.partition("/")[0]
            self._leaving.setdefault(namespace, {})[key] = None
            self.namespaces.queue.add(namespace)

    async def sync_namespace(self, namespace: str) -> None:
        """Release the claims that no pod of the namespace uses, as the API server lists the pods now.

        Several at a time, so that their writes share commits of the server. A claim that cannot be released now holds
        up no other: it stays noted and is tried again with the namespace.
        """
        leaving = self._leaving.pop(namespace, {})
        slots = asyncio.Semaphore(_AT_A_TIME)
        left = dict(leaving)

        async def release(key: str, pods: list[Pod]) -> None:
            async with slots:
                await self._settle(key, pods, is_confirmed=True)
            del left[key]

        try:
            pods = (await self._client.list(Pod, namespace)).items if leaving else []
            outcomes = await asyncio.gather(*(release(key, pods) for key in leaving), return_exceptions=True)
            for failure in (each for each in outcomes if each is not None):
                raise failure
        finally:
            if left:
                self._leaving[namespace] = left | self._leaving.get(namespace, {})

    async def _settle(self, key: str, pods: list[Pod], *, is_confirmed: bool) -> bool:
        """Carry out the plan for one claim. Returns False if the pods must be listed first."""
        claim = self._caches.claims.get(key)
        if claim is None:
            return True
        actions = plan_claim(claim, pods, is_confirmed=is_confirmed)
        if any(isinstance(action, AskForPods) for action in actions):
            return False
        for action in actions:
            claim = await _execute(self._writer, claim, CLAIM_PROTECTION, action)
        return True

    def keys_for_claim(self, _: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> list[str]:
        """Return the claim's key if there is something to do about it; most changes need nothing."""
        if new is None or not plan_claim(new, self._caches.pods_using(new.key), is_confirmed=False):
            return []
        return [new.key]


async def _run_claims(context: ControllerContext) -> None:
    caches = context.caches
    work = ClaimProtection(context.client, caches, context.writer, context.controller)
    watches = [
        work.claims.watch(caches.claims, work.keys_for_claim),
        work.claims.watch(caches.pods, lambda old, new: [key for pod in (old, new) if pod for key in claims_of(pod)]),
    ]
    await context.run([work.claims, work.namespaces], watches)


async def _run_volumes(context: ControllerContext) -> None:
    guard = FinalizerGuard(
        context, context.caches.volumes, VOLUME_PROTECTION, lambda volume: volume.status.phase == "Bound"
    )
    await context.run([guard.controller], [guard.watch()])


async def _run_classes(context: ControllerContext) -> None:
    volumes, claims = context.caches.volumes, context.caches.claims

    def is_used(attributes_class: VolumeAttributesClass) -> bool:
        name = attributes_class.name
        return bool(volumes.by(attributes_classes_of, name) or claims.by(attributes_classes_of, name))

    def no_longer_used(old: PersistentVolume | PersistentVolumeClaim | None, _: Any) -> list[str]:
        return attributes_classes_of(old) if old is not None else []

    guard = FinalizerGuard(context, context.caches.attributes_classes, CLASS_PROTECTION, is_used)
    of_users = [guard.controller.watch(volumes, no_longer_used), guard.controller.watch(claims, no_longer_used)]
    await context.run([guard.controller], [guard.watch(), *of_users])


class FinalizerGuard(Generic[T]):
    """Keeps one finalizer on every object of a kind for as long as the object is in use."""

    def __init__(
        self, context: ControllerContext, cache: Informer[T], finalizer: str, is_used: Callable[[T], bool]
    ) -> None:
        self._writer = context.writer
        self._cache = cache
        self._finalizer = finalizer
        self._is_used = is_used
        self.controller: Controller[str] = context.controller(f"protection-{cache.kind.resource.plural}", self.sync)

    async def sync(self, key: str) -> None:
        """Add or remove the finalizer of one object."""
        obj = self._cache.get(key)
        if obj is not None:
            for action in self._plan(obj):
                obj = await _execute(self._writer, obj, self._finalizer, action)

    def watch(self) -> Watch[T]:
        """Return a watch that enqueues the objects that need a write."""
        return self.controller.watch(self._cache, lambda _, new: [new.key] if new and self._plan(new) else [])

    def _plan(self, obj: T) -> Sequence[ProtectionAction]:
        return plan_guard(obj, self._finalizer, is_used=self._is_used(obj))


async def _execute(writer: Writer, obj: T, finalizer: str, action: ProtectionAction) -> T:
    """Carry out one action, valid only for the version that was judged."""
    try:
        match action:
            case AddGuard():
                return await writer.add_finalizers(obj, finalizer)
            case RemoveGuard():
                left = [name for name in obj.finalizers if name != finalizer]
                released = await writer.patch(obj, {"metadata": {"finalizers": left}})
                log.info("no longer in use; released", kind=obj.resource.kind, name=obj.key)  # only if it was our write
                return released
            case SetUnused(is_unused):
                patch = {"status": {"conditions": [_unused(is_unused)]}}
                return await writer.patch(obj, patch, how=PatchType.STRATEGIC, subresource="status")
            case AskForPods():
                return obj
    except NotFound:
        return obj


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
