"""Wires the resizer and the modifier: claims to queues, queues to workers."""

from typing import Any

from moorage.kube import names
from moorage.kube.api.discovery import is_served
from moorage.kube.control.controller import Watch, run, wait_synced
from moorage.kube.objects import PersistentVolumeClaim, VolumeAttributesClass
from moorage.sidecars.context import RoleContext
from moorage.sidecars.resizer.expand import ExpandWorker
from moorage.sidecars.resizer.modify import ModifyWorker, is_settled
from moorage.sidecars.resizer.sizes import Sizes
from moorage.sidecars.roles import Role


def may_need_resize(old: PersistentVolumeClaim | None, new: PersistentVolumeClaim) -> bool:
    """Whether something about the size changed. Our own records of failures must not reset the back-off."""
    if new.status.phase != "Bound" or not new.spec.volume_name:
        return False
    if old is None or old.metadata.resource_version == new.metadata.resource_version:
        return True
    return _about_size(old) != _about_size(new)


def _about_size(claim: PersistentVolumeClaim) -> tuple[object, ...]:
    return (
        claim.status.phase,
        claim.spec.resources.requests.get("storage"),
        claim.annotations.get(names.STORAGE_RESIZER),
        claim.status.capacity.get("storage"),
        claim.status.allocated_resource_statuses.get("storage", "").removeprefix("ControllerResize"),
    )


class Resizer:
    """Stands for external-resizer, both of its controllers."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._events = context.recorder(f"external-resizer {context.driver.name}")
        self._expand = ExpandWorker(context, self._events)
        self._modify = ModifyWorker(context, self._events)
        workers = context.settings.workers_for(Role.RESIZER)
        self._sizes = context.controller(f"{context.driver.name}-pvc", self._expand.sync, workers)
        self._changes = context.controller(f"{context.driver.name}-pvc-modify", self._modify.sync, workers)

    async def run(self) -> None:
        """Expand and modify until cancelled."""
        caches, can = self._context.caches, self._context.driver.capabilities
        controllers = [self._sizes] if can.resizes else []
        watches: list[Watch[Any]] = [Watch(caches.claims, self._on_claim)]
        await wait_synced(caches.claims, caches.volumes)
        if await self._modifies():
            self._modify.begin()
            controllers.append(self._changes)
            watches.append(Watch(caches.attributes_classes, self._on_class))
        async with self._events:
            await run(controllers, watches)

    async def _modifies(self) -> bool:
        context = self._context
        if not context.driver.capabilities.controller("MODIFY_VOLUME"):
            return False
        is_wanted = context.settings.gate("VolumeAttributesClass", True)
        return is_wanted and await is_served(context.client, VolumeAttributesClass)

    def _on_claim(self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        if new is None or not self._is_known(new):
            return
        if may_need_resize(old, new) and not self._is_as_large_as_asked(new):
            self._sizes.queue.add(new.key)
        if new.status.phase == "Bound" and not is_settled(new) and _may_need_change(old, new):
            self._changes.queue.add(new.key)

    def _is_as_large_as_asked(self, claim: PersistentVolumeClaim) -> bool:
        """Most claims are, and need no worker. After an expansion, an annotation of the volume must still go."""
        volume = self._context.caches.volumes.get(claim.spec.volume_name)
        if volume is None or names.PRE_RESIZE_CAPACITY in volume.annotations:
            return False
        sizes = Sizes.of(claim, volume)
        return sizes.requested <= sizes.usable

    def _is_known(self, claim: PersistentVolumeClaim) -> bool:
        """Whether the claim may be ours. It may be if its volume is not cached yet; the worker then waits for it."""
        volume = self._context.caches.volumes.get(claim.spec.volume_name)
        if volume is None or volume.spec.csi is None:
            return volume is None or claim.annotations.get(names.STORAGE_RESIZER) == self._context.driver.name
        return volume.spec.csi.driver == self._context.driver.name

    def _on_class(self, old: VolumeAttributesClass | None, new: VolumeAttributesClass | None) -> None:
        if new is None or old is not None:
            return
        for claim in self._context.caches.claims:
            if claim.spec.volume_attributes_class_name == new.name and not is_settled(claim):
                self._changes.queue.add(claim.key)


def _may_need_change(old: PersistentVolumeClaim | None, new: PersistentVolumeClaim) -> bool:
    if old is None or old.metadata.resource_version == new.metadata.resource_version or old.status.phase != "Bound":
        return True
    renamed = old.spec.volume_attributes_class_name != new.spec.volume_attributes_class_name
    return renamed or new.status.modify_volume_status is None
