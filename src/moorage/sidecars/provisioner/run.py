"""Wires the provisioner: informers to queues, queues to workers. Decides nothing."""

import asyncio
import uuid

from moorage.kube.objects import CSINode, KubeObject, PersistentVolume, PersistentVolumeClaim, VolumeAttachment
from moorage.sidecars import names
from moorage.sidecars.context import RoleContext, synced
from moorage.sidecars.leases import lease_name
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
        self._claims = context.queue("claims")
        self._volumes = context.queue("volumes")
        self._sources = context.queue("clone-sources")
        self._events = context.recorder(f"{context.driver.name}_{context.around.hostname}_{uuid.uuid4()}")
        patience_s = _patience_s(context.settings)
        self._journal = Journal(context.client, _journal_name(context), _namespace(context), patience_s=patience_s)
        self._journal.is_enabled = context.settings.intent_journal
        self._claim_worker = ClaimWorker(context, self._claims, self._events, self._journal)
        self._volume_worker = VolumeWorker(context, self._events)
        self._protection = SourceProtection(context)
        self._is_following = False

    async def run(self) -> None:
        """Provision and delete until cancelled."""
        self._follow()
        context, settings = self._context, self._context.settings
        await self._synced()
        self._claim_worker.adopt(await self._journal.load())
        self._look_at_everything()
        workers = settings.workers_for(Role.PROVISIONER)
        async with self._events, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._journal.run(self._claim_worker.take_over), name="intent-journal")
            tasks.create_task(self._claims.run(self._claim_worker.sync, workers), name="claims")
            tasks.create_task(self._volumes.run(self._volume_worker.sync, workers), name="volumes")
            if context.driver.capabilities.controller("CLONE_VOLUME"):
                threads = settings.cloning_protection_threads
                work = self._sources.run(self._protection.sync_clone_source, threads)
                tasks.create_task(work, name="clone-sources")
            if settings.snapshot_orphan_sweep_interval_s > 0:
                tasks.create_task(self._sweep_forever(), name="snapshot-source-sweep")

    def _follow(self) -> None:
        if self._is_following:
            return
        self._is_following = True
        self._context.claims.subscribe(self._on_claim)
        self._context.volumes.subscribe(self._on_volume)
        self._context.classes.subscribe(self._on_surroundings)
        if self._context.driver.capabilities.attaches:
            self._context.attachments.subscribe(self._on_attachment)
        if self._context.driver.capabilities.has_topology and not self._context.settings.node_deployment:
            self._context.csi_nodes.subscribe(self._on_surroundings)
            self._context.nodes.subscribe(self._on_surroundings)

    async def _synced(self) -> None:
        context = self._context
        await synced(context.claims, context.volumes, context.classes)
        if context.driver.capabilities.attaches:
            await synced(context.attachments)
        if context.settings.node_deployment:
            await synced(context.csi_nodes)
        elif context.driver.capabilities.has_topology:
            await synced(context.csi_nodes, context.nodes)

    def _look_at_everything(self) -> None:
        for claim in self._context.claims:
            self._claims.forget(claim.uid)
            self._on_claim(None, claim)
        for volume in self._context.volumes:
            self._volumes.forget(volume.name)
            self._on_volume(None, volume)

    def _on_claim(self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        if new is not None and is_candidate(new, self._context.driver.name):
            self._claims.add(new.uid)
        if new is not None and new.is_deleting and names.CLONE_FINALIZER in new.finalizers:
            self._sources.add(new.key)
        if new is None and old is not None:
            for volume in self._context.volumes.at("claim", old.uid):
                self._on_volume(None, volume)
            for source in (old.spec.data_source, old.spec.data_source_ref):
                if source is not None and source.kind == "PersistentVolumeClaim":
                    self._sources.add(f"{source.namespace or old.namespace}/{source.name}")

    def _on_surroundings(self, old: KubeObject | None, new: KubeObject | None) -> None:
        """A class, a node or a driver's registration changed: claims that failed for lack of it are looked at now."""
        is_telling = old is None or new is None or old.metadata.labels != new.metadata.labels
        if is_telling or isinstance(new, CSINode):
            for uid in list(self._claim_worker.waiting):
                self._claims.add(uid)

    def _on_volume(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        if new is None and old is not None:
            self._volume_worker.forget(old)
        elif new is not None and self._volume_worker.concerns(new):
            self._volumes.add(new.name)

    def _on_attachment(self, old: VolumeAttachment | None, new: VolumeAttachment | None) -> None:
        name = old.spec.source.persistent_volume_name if new is None and old is not None else None
        volume = self._context.volumes.get(name) if name else None
        if volume is not None:
            self._on_volume(None, volume)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._context.settings.snapshot_orphan_sweep_interval_s)
            await self._protection.sweep()


def _patience_s(settings: SidecarSettings) -> float:
    """How long another instance's note stays as it is before its writer counts as gone; 0 when it is, for there is one
    instance only. Half of it must be enough for a call: see `Journal.has`."""
    if settings.leader_election or settings.node_deployment:
        return 0.0
    return max(settings.retry_interval_max_s, 2 * settings.timeout_for(Role.PROVISIONER))


def _journal_name(context: RoleContext) -> str:
    name = f"{lease_name(Role.PROVISIONER, context.driver.name)}-intents".lower()
    return f"{name}-{context.around.node_name}" if context.settings.node_deployment else name


def _namespace(context: RoleContext) -> str:
    return context.settings.leader_election_namespace or context.around.namespace
