"""The binder, running: informers fill two queues, workers plan and execute. Decides nothing.

Owns: the wiring of `world.py`, `plan.py` and `execute.py`, and the periodic look at what is not at rest.
Start reading at: `run`, `Binder.sync_claim`, `Binder.sync_volume`.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moorage.controllers.binder.execute import BinderExecutor, NotNow
from moorage.controllers.binder.plan import BindClaim, ClaimAction, ConfirmClaim, LookAtClaim, plan_claim, plan_volume
from moorage.controllers.binder.state import BinderState, Keys
from moorage.controllers.context import ControllerContext
from moorage.kube.api.client import Client
from moorage.kube.control.queue import WorkQueue
from moorage.kube.errors import NotFound
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod, StorageClass
from moorage.kube.volumes import reference_key

COMPONENT = "persistentvolume-controller"


class Binder:
    """Two queues over one world. No claim and no volume is worked on twice at a time."""

    def __init__(
        self,
        client: Client,
        world: BinderState,
        executor: BinderExecutor,
        claims: WorkQueue[str],
        volumes: WorkQueue[str],
    ) -> None:
        self._client = client
        self._world = world
        self._executor = executor
        self._claims = claims
        self._volumes = volumes
        self._in_hand: set[str] = set()  # volumes in the middle of a binding

    async def sync_claim(self, key: str) -> None:
        """Bring one claim to where it should be."""
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
                return  # the claim or its volume went away meanwhile, and the watch says so
        if not claim.spec.volume_name and self._world.claims.get(key) is not None:
            self._world.waiting.add(claim)

    @contextmanager
    def _taking(self, actions: list[ClaimAction]) -> Iterator[None]:
        """While a claim is being bound, its volume is offered to no other claim and looked at by nobody else."""
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
                self._volumes.add(volume.name)

    async def sync_volume(self, name: str) -> None:
        """Bring one volume to where it should be."""
        volume = self._world.volumes.get(name)
        if volume is None or name in self._in_hand:
            return  # who has it in hand queues it again
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
                    self._claims.add(action.key)
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
        """The claim as the API has it, because a copy that is late must not cost anybody a volume.

        The API is asked even when the copy is newer than the volume: versions of two kinds are comparable only while
        both come from one history, which an API that was restored from a backup no longer has.
        """
        reference = volume.spec.claim_ref
        if reference is None:
            return None
        if not reference.name or not reference.namespace:  # somebody's typing error must not release a volume
            raise NotNow(f"volume {volume.name} belongs to uid {reference.uid}, but its claimRef names no claim")
        return await self._client.find(PersistentVolumeClaim, reference.name, reference.namespace)


async def run(context: ControllerContext) -> None:
    """Bind claims and volumes until cancelled."""
    informers, options = context.informers, context.options
    world = BinderState(
        informers.of(PersistentVolumeClaim),
        informers.of(PersistentVolume),
        informers.of(StorageClass),
        informers.of(Pod),
    )
    recorder = await context.recorders.of(COMPONENT)
    executor = BinderExecutor(context.client, recorder, world.claims, world.volumes)
    claims: WorkQueue[str] = WorkQueue("binder-claims", start_s=options.retry_start_s, max_s=options.retry_max_s)
    volumes: WorkQueue[str] = WorkQueue("binder-volumes", start_s=options.retry_start_s, max_s=options.retry_max_s)
    binder = Binder(context.client, world, executor, claims, volumes)

    def look_at(concerned: Keys) -> None:
        concerned = world.wants_look(concerned)
        for key in concerned.claims:
            claims.add(key)
        for name in concerned.volumes:
            volumes.add(name)

    def on_volume(old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        world.free.see(old, new)
        look_at(world.keys_for_volume(old, new))

    def on_pod(old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        if pod is not None:
            look_at(world.keys_for_pod(pod))

    context.activity.register(claims)
    context.activity.register(volumes)
    for informer in (world.claims, world.volumes, world.classes, world.pods):
        await informer.wait_synced()  # a claim that is not known yet must not look like one that is gone
    world.volumes.subscribe(on_volume)
    world.claims.subscribe(lambda old, new: look_at(world.keys_for_claim(old, new)))
    world.classes.subscribe(lambda old, new: look_at(world.keys_for_class(old, new)))
    world.pods.subscribe(on_pod)
    context.activity.on_resync(lambda: look_at(world.unsettled()))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(claims.run(binder.sync_claim, options.workers), name="binder-claims")
        tasks.create_task(volumes.run(binder.sync_volume, options.workers), name="binder-volumes")
        tasks.create_task(_resync_forever(look_at, world, options.binder_resync_s), name="binder-resync")


async def _resync_forever(look_at: Callable[[Keys], None], world: BinderState, period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        look_at(world.unsettled())
