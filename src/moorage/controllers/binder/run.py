"""The binder, running: watches fill two queues, workers plan and execute. Decides nothing.

Owns: the wiring of `state.py`, `plan.py` and `execute.py`, and the resync of what is not settled.
Start reading at: `run`, `Binder.sync_claim`, `Binder.sync_volume`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moorage.controllers.binder.execute import BinderExecutor, NotNow
from moorage.controllers.binder.plan import BindClaim, ClaimAction, ConfirmClaim, LookAtClaim, plan_claim, plan_volume
from moorage.controllers.binder.state import BinderState, Keys
from moorage.controllers.context import ControllerContext, MakeController
from moorage.kube.api.client import Client
from moorage.kube.control.controller import Resync, Watch
from moorage.kube.errors import NotFound
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod
from moorage.kube.volumes import reference_key

COMPONENT = "persistentvolume-controller"


class Binder:
    """Two controllers over one state: no claim and no volume is reconciled by two workers at the same time."""

    def __init__(self, client: Client, world: BinderState, executor: BinderExecutor, make: MakeController) -> None:
        self._client = client
        self._world = world
        self._executor = executor
        self.claims = make("binder-claims", self.sync_claim)
        self.volumes = make("binder-volumes", self.sync_volume)
        self._in_hand: set[str] = set()  # volumes in the middle of a binding

    async def sync_claim(self, key: str) -> None:
        """Reconcile one claim."""
        self._world.waiting.drop(key)
        claim = self._world.claims.get(key)
        if claim is None:
            return
        actions = plan_claim(claim, self._world)  # no await between choosing a volume and taking it
        with self._taking(actions):
            try:
                claim = await self._executor.keep_claim(claim)
                for action in actions:
                    claim = await self._executor.on_claim(action, claim)
            except NotFound:
                return  # the claim or its volume is gone; the watch will report it
        if not claim.spec.volume_name and self._world.claims.get(key) is not None:
            self._world.waiting.add(claim)

    @contextmanager
    def _taking(self, actions: list[ClaimAction]) -> Iterator[None]:
        """Offer the volume to no other claim, and do not reconcile it, while a claim is being bound to it."""
        taken = [action.volume for action in actions if isinstance(action, BindClaim)]
        for volume in taken:
            self._world.free.take(volume.name)
            self._in_hand.add(volume.name)
        try:
            yield
        finally:
            for volume in taken:
                self._in_hand.discard(volume.name)
                self._world.free.see(volume, self._world.volumes.get(volume.name))  # free again, if the write failed
                self.volumes.queue.add(volume.name)

    async def sync_volume(self, name: str) -> None:
        """Reconcile one volume."""
        volume = self._world.volumes.get(name)
        if volume is None or name in self._in_hand:
            return  # enqueued again when the binding ends
        try:
            volume = await self._executor.keep_volume(volume)
            claim = self._claim_of(volume)
            pods = self._pods_of(volume) if claim is None else ()
            actions = plan_volume(volume, claim, is_confirmed=False, pods=pods)
            if any(isinstance(action, ConfirmClaim) for action in actions):
                claim = await self._claim_itself(volume)
                actions = plan_volume(volume, claim, is_confirmed=True, pods=pods)
            for action in actions:
                if isinstance(action, LookAtClaim):
                    self.claims.queue.add(action.key)
                else:
                    volume = await self._executor.on_volume(action, volume, claim)
        except NotFound:
            return

    def _claim_of(self, volume: PersistentVolume) -> PersistentVolumeClaim | None:
        reference = volume.spec.claim_ref
        return self._world.claims.get(reference_key(reference)) if reference is not None else None

    def _pods_of(self, volume: PersistentVolume) -> tuple[str, ...]:
        reference = volume.spec.claim_ref
        return tuple(self._world.pods_using(reference_key(reference))) if reference is not None else ()

    async def _claim_itself(self, volume: PersistentVolume) -> PersistentVolumeClaim | None:
        """Read the claim from the API server: a cache that is late must not release a volume in use.

        It is read even if the cached claims are newer than the volume. Versions of two kinds are comparable only within
        one history, and a server that was restored from a backup has two.
        """
        reference = volume.spec.claim_ref
        if reference is None:
            return None
        if not reference.name or not reference.namespace:  # a typing error must not release a volume
            raise NotNow(f"volume {volume.name} belongs to uid {reference.uid}, but its claimRef names no claim")
        return await self._client.find(PersistentVolumeClaim, reference.name, reference.namespace)


async def run(context: ControllerContext) -> None:
    """Bind claims and volumes until cancelled."""
    caches = context.caches
    world = BinderState(caches.claims, caches.volumes, caches.classes, caches.pods)
    executor = BinderExecutor(context.client, context.writer, await context.recorders.of(COMPONENT))
    binder = Binder(context.client, world, executor, context.controller)

    def enqueue(keys: Keys) -> None:
        keys = world.unsettled_of(keys)
        for key in keys.claims:
            binder.claims.queue.add(key)
        for name in keys.volumes:
            binder.volumes.queue.add(name)

    def on_volume(old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        world.free.see(old, new)
        enqueue(world.keys_for_volume(old, new))  # once: it takes a waiting claim off its list

    def on_pod(old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        if pod is not None:
            enqueue(world.keys_for_pod(pod))

    watches: list[Watch[Any]] = [
        Watch(world.volumes, on_volume),
        Watch(world.claims, lambda old, new: enqueue(world.keys_for_claim(old, new))),
        Watch(world.classes, lambda old, new: enqueue(world.keys_for_class(old, new))),
        Watch(world.pods, on_pod),
    ]
    resync = Resync(context.options.binder_resync_s, lambda: enqueue(world.unsettled()))
    await context.run([binder.claims, binder.volumes], watches, [resync])
