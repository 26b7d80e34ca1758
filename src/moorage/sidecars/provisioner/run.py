"""Wires the provisioner: informers to queues, queues to workers. Decides nothing."""

import asyncio
import uuid
from typing import Any

from moorage.kube import names
from moorage.kube.control.controller import Watch, run, wait_synced
from moorage.kube.names import lease_name
from moorage.kube.objects import CSINode, KubeObject, PersistentVolume, PersistentVolumeClaim, VolumeAttachment
from moorage.sidecars.context import RoleContext
from moorage.sidecars.provisioner.claims import ClaimWorker
from moorage.sidecars.provisioner.decide import is_candidate
from moorage.sidecars.provisioner.deletion import VolumeWorker
from moorage.sidecars.provisioner.intents import Journal
from moorage.sidecars.provisioner.source_protection import SourceProtection
from moorage.sidecars.roles import Role
from moorage.sidecars.settings import SidecarSettings


class Provisioner:
    """Stands for external-provisioner."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        settings = context.settings
        workers = settings.workers_for(Role.PROVISIONER)
        self._events = context.recorder(f"{context.driver.name}_{context.around.hostname}_{uuid.uuid4()}")
        patience_s = _patience_s(settings)
        self._journal = Journal(context.client, _journal_name(context), _namespace(context), patience_s=patience_s)
        self._journal.is_enabled = settings.intent_journal
        self._claim_worker = ClaimWorker(context, self._events, self._journal)
        self._volume_worker = VolumeWorker(context, self._events)
        self._protection = SourceProtection(context)
        self._claims = self._claim_worker.controller
        self._volumes = context.controller("volumes", self._volume_worker.sync, workers)
        self._sources = context.controller(
            "clone-sources", self._protection.sync_clone_source, settings.cloning_protection_threads
        )

    async def run(self) -> None:
        """Provision and delete until cancelled."""
        context, can = self._context, self._context.driver.capabilities
        watches, reads = self._watches(), [context.caches.csi_nodes] if context.settings.node_deployment else []
        await wait_synced(*(watch.cache for watch in watches), *reads)
        self._claim_worker.adopt(await self._journal.load())
        self._volume_worker.begin()
        controllers = [self._claims, self._volumes]
        if can.controller("CLONE_VOLUME"):
            controllers.append(self._sources)
        beside = [self._keep_journal]
        if context.settings.snapshot_orphan_sweep_interval_s > 0:
            beside.append(self._sweep_forever)
        async with self._events:
            await run(controllers, watches, reads=reads, beside=beside)

    def _watches(self) -> list[Watch[Any]]:
        caches, can = self._context.caches, self._context.driver.capabilities
        watches: list[Watch[Any]] = [
            Watch(caches.classes, self._on_surroundings, replay=False),
            Watch(caches.claims, self._on_claim),
            Watch(caches.volumes, self._on_volume),
        ]
        if can.attaches:
            watches.append(Watch(caches.attachments, self._on_attachment, replay=False))
        if can.has_topology and not self._context.settings.node_deployment:
            watches += [
                Watch(caches.csi_nodes, self._on_surroundings, replay=False),
                Watch(self._context.nodes, self._on_surroundings, replay=False),
            ]
        return watches

    async def _keep_journal(self) -> None:
        await self._journal.run(self._claim_worker.take_over)

    def _on_claim(self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        if new is not None and is_candidate(new, self._context.driver.name):
            self._claims.queue.add(new.uid)
        if new is not None and new.is_deleting and names.CLONE_PROTECTION in new.finalizers:
            self._sources.queue.add(new.key)
        if new is None and old is not None:
            for volume in self._context.caches.volumes_of_claim(old.uid):
                self._on_volume(None, volume)
            for source in (old.spec.data_source, old.spec.data_source_ref):
                if source is not None and source.kind == "PersistentVolumeClaim":
                    self._sources.queue.add(f"{source.namespace or old.namespace}/{source.name}")

    def _on_surroundings(self, old: KubeObject | None, new: KubeObject | None) -> None:
        """Enqueue claims that wait for a class, a node or a driver's registration, because one of them has changed."""
        is_telling = old is None or new is None or old.metadata.labels != new.metadata.labels
        if is_telling or isinstance(new, CSINode):
            for uid in list(self._claim_worker.waiting):
                self._claims.queue.add(uid)

    def _on_volume(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        if new is None and old is not None:
            self._volume_worker.forget(old)
        elif new is not None and self._volume_worker.concerns(new):
            self._volumes.queue.add(new.name)

    def _on_attachment(self, old: VolumeAttachment | None, new: VolumeAttachment | None) -> None:
        name = old.spec.source.persistent_volume_name if new is None and old is not None else None
        volume = self._context.caches.volumes.get(name) if name else None
        if volume is not None:
            self._on_volume(None, volume)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._context.settings.snapshot_orphan_sweep_interval_s)
            await self._protection.sweep()


def _patience_s(settings: SidecarSettings) -> float:
    """Return how long another instance's note may stay unchanged before its writer counts as gone.

    0 if only one instance can be running. Half of it must be enough for a call: see `Journal.has`.
    """
    if settings.leader_election or settings.node_deployment:
        return 0.0
    return max(settings.retry_interval_max_s, 2 * settings.timeout_for(Role.PROVISIONER))


def _journal_name(context: RoleContext) -> str:
    name = f"{lease_name(Role.PROVISIONER, context.driver.name)}-intents".lower()
    return f"{name}-{context.around.node_name}" if context.settings.node_deployment else name


def _namespace(context: RoleContext) -> str:
    return context.settings.leader_election_namespace or context.around.namespace
