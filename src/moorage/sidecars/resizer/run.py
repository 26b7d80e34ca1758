"""Wires the resizer and the modifier: claims to queues, queues to workers."""

import asyncio

from moorage.kube.objects import PersistentVolumeClaim, VolumeAttributesClass
from moorage.log import get_logger
from moorage.sidecars import names
from moorage.sidecars.context import RoleContext, is_served, synced
from moorage.sidecars.resizer.expand import ExpandWorker
from moorage.sidecars.resizer.modify import ModifyWorker, is_settled
from moorage.sidecars.resizer.sizes import Sizes
from moorage.sidecars.roles import Role

log = get_logger(__name__)


def may_need_resize(old: PersistentVolumeClaim | None, new: PersistentVolumeClaim) -> bool:
    """Whether something about the size changed; our own notes about failures must not defeat the back-off."""
    if new.status.phase != "Bound" or not new.spec.volume_name:
        return False
    if old is None or old.metadata.resource_version == new.metadata.resource_version:
        return True
    return _about_size(old) != _about_size(new)


def _about_size(claim: PersistentVolumeClaim) -> tuple[object, ...]:
    return (
        claim.status.phase,
        claim.spec.resources.requests.get("storage"),
        claim.annotations.get(names.RESIZER),
        claim.status.capacity.get("storage"),
        claim.status.allocated_resource_statuses.get("storage", "").removeprefix("ControllerResize"),
    )


class Resizer:
    """Stands for external-resizer, both of its controllers."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._events = context.recorder(f"external-resizer {context.driver.name}")
        self._sizes = context.queue(f"{context.driver.name}-pvc")
        self._changes = context.queue(f"{context.driver.name}-pvc-modify")
        self._expand = ExpandWorker(context, self._events)
        self._modify: ModifyWorker | None = None
        self._is_following = False

    async def run(self) -> None:
        """Expand and modify until cancelled."""
        context, can = self._context, self._context.driver.capabilities
        await synced(context.claims, context.volumes)
        modifies = can.controller("MODIFY_VOLUME") and context.settings.gate("VolumeAttributesClass", True)
        modifies = modifies and await is_served(context.client, VolumeAttributesClass)
        if modifies:
            await self._prepare_modify()
        self._follow()
        self._look_at_everything()
        workers = context.settings.workers_for(Role.RESIZER)
        async with self._events, asyncio.TaskGroup() as tasks:
            if can.resizes:
                tasks.create_task(self._sizes.run(self._expand.sync, workers), name="expansion")
            if modifies and self._modify is not None:
                tasks.create_task(self._changes.run(self._modify.sync, workers), name="modification")

    async def _prepare_modify(self) -> None:
        classes = self._context.informers.of(VolumeAttributesClass)
        await synced(classes)
        if self._modify is None:
            self._modify = ModifyWorker(self._context, self._events, classes)
            classes.subscribe(self._on_class)
        self._modify.begin()

    def _follow(self) -> None:
        if not self._is_following:
            self._is_following = True
            self._context.claims.subscribe(self._on_claim)

    def _look_at_everything(self) -> None:
        for claim in self._context.claims:
            self._sizes.forget(claim.key)
            self._changes.forget(claim.key)
            self._on_claim(None, claim)

    def _on_claim(self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        if new is None or not self._is_known(new):
            return
        if may_need_resize(old, new) and not self._is_as_large_as_asked(new):
            self._sizes.add(new.key)
        if new.status.phase == "Bound" and not is_settled(new) and _may_need_change(old, new):
            self._changes.add(new.key)

    def _is_as_large_as_asked(self, claim: PersistentVolumeClaim) -> bool:
        """Most claims are, and need no worker; one whose expansion has just ended leaves a note to be removed."""
        volume = self._context.volumes.get(claim.spec.volume_name)
        if volume is None or names.PRE_RESIZE_CAPACITY in volume.annotations:
            return False
        sizes = Sizes.of(claim, volume)
        return sizes.requested <= sizes.usable

    def _is_known(self, claim: PersistentVolumeClaim) -> bool:
        """Leaves out what is plainly another driver's; an unseen volume is looked for by the worker."""
        volume = self._context.volumes.get(claim.spec.volume_name)
        if volume is None or volume.spec.csi is None:
            return volume is None or claim.annotations.get(names.RESIZER) == self._context.driver.name
        return volume.spec.csi.driver == self._context.driver.name

    def _on_class(self, old: VolumeAttributesClass | None, new: VolumeAttributesClass | None) -> None:
        if new is None or old is not None:
            return
        for claim in self._context.claims:
            if claim.spec.volume_attributes_class_name == new.name and not is_settled(claim):
                self._changes.add(claim.key)


def _may_need_change(old: PersistentVolumeClaim | None, new: PersistentVolumeClaim) -> bool:
    if old is None or old.metadata.resource_version == new.metadata.resource_version or old.status.phase != "Bound":
        return True
    renamed = old.spec.volume_attributes_class_name != new.spec.volume_attributes_class_name
    return renamed or new.status.modify_volume_status is None
