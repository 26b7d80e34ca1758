"""Publishes CSIStorageCapacity objects: at once after a change, and on a slow poll.

Owns: the objects with our labels, and the low-rate client that writes them.
Start reading at: `CapacityPublisher.run`, `CapacityPublisher.sync`.
"""

import asyncio
from typing import Any

import msgspec

from moorage.csi import csi_pb2 as pb
from moorage.kube import names
from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informer
from moorage.kube.control.controller import Controller, Resync, Watch, run, wait_synced
from moorage.kube.control.writer import Writer
from moorage.kube.errors import ApiError
from moorage.kube.objects import (
    CSINode,
    CSIStorageCapacity,
    OwnerReference,
    PersistentVolume,
    Pod,
    Resource,
    StorageClass,
    as_document,
)
from moorage.kube.quantity import bytes_of, bytes_text
from moorage.log import get_logger
from moorage.sidecars.capacity.segments import CapacityItem, item_of, items_of, managed_by, segments_of
from moorage.sidecars.context import NodeLabels, RoleContext
from moorage.sidecars.errors import SidecarError

log = get_logger(__name__)

_SOON_S = 0.2  # several changes in a row are one


class CapacityPublisher:
    """Stands for the capacity part of external-provisioner (--enable-capacity)."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        settings = context.settings
        self._controller: Controller[CapacityItem] = context.controller(
            "csistoragecapacity", self.sync, settings.capacity_threads
        )
        self._queue = self._controller.queue
        self._namespace = context.around.capacity_namespace or context.around.namespace
        node = context.around.node_name if settings.node_deployment else ""
        self._labels = {names.CAPACITY_DRIVER: context.driver.name, names.CAPACITY_MANAGED_BY: managed_by(node)}
        self._items: frozenset[CapacityItem] = frozenset()
        self._owner: OwnerReference | None = None
        self._writer = context.writer
        context.on_failed_creation.append(self._refresh_class)
        context.metrics.capacity_goal.set_function(lambda: float(len(self._items)))
        context.metrics.capacity_current.set_function(lambda: float(len(self._published() & self._items)))
        context.metrics.capacity_obsolete.set_function(lambda: float(len(self._published() - self._items)))

    async def run(self) -> None:
        """Publish until cancelled."""
        context, settings = self._context, self._context.settings
        if not context.driver.capabilities.controller("GET_CAPACITY"):
            log.warning("the driver lacks GET_CAPACITY; the role waits for one that has it", driver=context.driver.name)
            await asyncio.Event().wait()
        self._owner = await self._find_owner()
        watches = self._watches()
        await wait_synced(*(watch.cache for watch in watches))
        limits = {"qps": settings.kube_api_capacity_qps, "burst": settings.kube_api_capacity_burst}
        async with Client(context.api, identity="moorage-capacity", **limits) as client:  # type: ignore[arg-type]
            self._writer = Writer(client, context.informers)
            self._refigure()
            await run([self._controller], watches, [Resync(settings.capacity_poll_interval_s, self._enqueue_all)])

    @property
    def _objects(self) -> Informer[CSIStorageCapacity]:
        labels = ",".join(f"{key}={value}" for key, value in sorted(self._labels.items()))
        return self._context.informers.of(CSIStorageCapacity, namespace=self._namespace, labels=labels)

    async def sync(self, item: CapacityItem) -> None:
        """Leave exactly one object with the current figures for an item, or none if the item is not wanted."""
        present = sorted((o for o in self._objects if item_of(o) == item), key=lambda o: o.name)
        if item not in self._items:
            for each in present:
                await self._writer.delete(each)
            return
        answer = await self._ask(item)
        if not present:
            await self._create(item, answer)
            return
        for spare in present[1:]:
            await self._writer.delete(spare)
        await self._update(present[0], answer)

    async def _ask(self, item: CapacityItem) -> pb.GetCapacityResponse:
        storage_class = self._context.caches.classes.get(item.storage_class)
        if storage_class is None:
            raise SidecarError(f"class {item.storage_class} is gone")
        request = pb.GetCapacityRequest(parameters=storage_class.parameters)  # as they are, reserved keys included
        if item.segment:
            request.accessible_topology.segments.update(dict(item.segment))
        timeout_s = self._context.settings.timeout_for("capacity")
        return await self._context.driver.client.GetCapacity(request, timeout_s=timeout_s)

    async def _create(self, item: CapacityItem, answer: pb.GetCapacityResponse) -> None:
        metadata: dict[str, Any] = {"generateName": "csisc-", "namespace": self._namespace, "labels": self._labels}
        if self._owner is not None:
            metadata["ownerReferences"] = [as_document(self._owner)]
        body = {
            "metadata": metadata,
            "storageClassName": item.storage_class,
            "nodeTopology": {"matchLabels": dict(item.segment)} if item.segment else {},
            **_figures(answer),
        }
        await self._writer.create(CSIStorageCapacity, body, self._namespace)

    async def _update(self, known: CSIStorageCapacity, answer: pb.GetCapacityResponse) -> None:
        owned = self._owner is None or any(o.uid == self._owner.uid for o in known.metadata.owner_references)
        is_same_size = known.capacity is not None and bytes_of(known.capacity) == answer.available_capacity
        maximum = answer.maximum_volume_size.value if answer.HasField("maximum_volume_size") else None
        is_same_maximum = maximum == (
            bytes_of(known.maximum_volume_size) if known.maximum_volume_size is not None else None
        )
        if owned and is_same_size and is_same_maximum:
            return
        patch: dict[str, Any] = {"maximumVolumeSize": None, **_figures(answer)}
        if not owned and self._owner is not None:
            owners = [as_document(owner) for owner in known.metadata.owner_references]
            patch["metadata"] = {"ownerReferences": [*owners, as_document(self._owner)]}
        await self._writer.patch(known, patch, guarded=False)

    def _watches(self) -> list[Watch[Any]]:
        context = self._context
        watches: list[Watch[Any]] = [
            Watch(context.caches.classes, self._on_class, replay=False),
            Watch(context.caches.volumes, self._on_volume, replay=False),
            Watch(self._objects, self._on_object),
        ]
        if not context.settings.node_deployment:
            watches += [
                Watch(context.caches.csi_nodes, self._on_csi_node, replay=False),
                Watch(context.nodes, self._on_node, replay=False),
            ]
        return watches

    def _refigure(self) -> None:
        """Recompute the desired capacity objects and enqueue every difference."""
        context, settings = self._context, self._context.settings
        if settings.node_deployment:
            segments = frozenset([tuple(sorted(context.driver.node.segments.items()))])
        else:
            segments = segments_of(context.caches.csi_nodes, context.nodes, context.driver.name)
        before = self._items
        classes, for_immediate = context.caches.classes, settings.capacity_for_immediate_binding
        self._items = items_of(segments, classes, context.driver.name, for_immediate)
        for item in (before ^ self._items) | (self._published() ^ self._items):
            self._queue.add(item)

    def _published(self) -> frozenset[CapacityItem]:
        return frozenset(item_of(each) for each in self._objects)

    def _on_class(self, old: StorageClass | None, new: StorageClass | None) -> None:
        self._refigure()
        changed = new if new is not None and old is not None and old.parameters != new.parameters else None
        if changed is not None:
            self._refresh_class(changed.name)

    def _on_csi_node(self, old: CSINode | None, new: CSINode | None) -> None:
        if old is None or new is None or old.spec != new.spec:
            self._refigure()

    def _on_node(self, old: NodeLabels | None, new: NodeLabels | None) -> None:
        if old is None or new is None or old.labels != new.labels:
            self._refigure()

    def _on_object(self, old: CSIStorageCapacity | None, new: CSIStorageCapacity | None) -> None:
        """Enqueue what a user or another program has deleted, added or doubled."""
        found = new or old
        if found is None:
            return
        item = item_of(found)
        is_wanted = item in self._items
        is_missing = new is None and is_wanted
        is_obsolete = new is not None and not is_wanted
        is_double = new is not None and old is None and sum(1 for o in self._objects if item_of(o) == item) > 1
        if is_missing or is_obsolete or is_double:
            self._queue.add(item)

    def _on_volume(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        """Enqueue the items whose room changes because a volume was created, deleted or expanded."""
        volume = new or old
        if volume is None or volume.spec.csi is None or volume.spec.csi.driver != self._context.driver.name:
            return
        if old is not None and new is not None and old.spec.capacity == new.spec.capacity:
            return
        for item in self._items:
            if self._is_touched(item, volume):
                self._queue.add_after(item, _SOON_S)

    @staticmethod
    def _is_touched(item: CapacityItem, volume: PersistentVolume) -> bool:
        affinity = volume.spec.node_affinity
        if affinity is None or affinity.required is None:
            return volume.spec.storage_class_name == item.storage_class
        terms = [{r.key: r.values for r in t.match_expressions} for t in affinity.required.node_selector_terms]
        return any(all(value in term.get(key, [value]) for key, value in item.segment) for term in terms)

    def _refresh_class(self, name: str) -> None:
        for item in self._items:
            if item.storage_class == name:
                self._queue.add_after(item, _SOON_S)

    def _enqueue_all(self) -> None:
        for item in self._items | self._published():
            self._queue.add(item)

    async def _find_owner(self) -> OwnerReference | None:
        """Return the owner of the objects, so that they are deleted with the deployment."""
        level, pod_name = self._context.settings.capacity_ownerref_level, self._context.around.pod_name
        if level < 0:
            return None
        if not pod_name:
            log.warning("POD_NAME is not set: capacity objects will have no owner and outlive this deployment")
            return None
        path = Pod.resource.path(self._namespace, pod_name)
        document = msgspec.json.decode(await self._context.client.request("GET", path), type=dict[str, Any])
        for _ in range(level):
            owners = [o for o in document["metadata"].get("ownerReferences") or [] if o.get("controller")]
            if not owners:
                raise SidecarError(
                    f"{document['kind']} {document['metadata']['name']} has no controller; "
                    "set --capacity-ownerref-level lower"
                )
            document = await self._read_owner(owners[0])
        return OwnerReference(
            api_version=document["apiVersion"],
            kind=document["kind"],
            name=document["metadata"]["name"],
            uid=document["metadata"]["uid"],
            controller=True,
        )

    async def _read_owner(self, owner: dict[str, Any]) -> dict[str, Any]:
        """Read an owner. If that is not allowed, return what the reference says: it is enough for the last level."""
        group, _, version = owner["apiVersion"].rpartition("/")
        kind = Resource(group, version, owner["kind"].lower() + "s", owner["kind"], namespaced=True)
        meta = {"name": owner["name"], "uid": owner["uid"]}
        own = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "metadata": meta}
        try:
            path = kind.path(self._namespace, owner["name"])
            return {**own, **msgspec.json.decode(await self._context.client.request("GET", path), type=dict[str, Any])}
        except ApiError as error:
            log.debug("owner cannot be read", owner=owner["name"], reason=str(error))
            return own


def _figures(answer: pb.GetCapacityResponse) -> dict[str, str]:
    figures = {"capacity": bytes_text(answer.available_capacity)}
    if answer.HasField("maximum_volume_size"):
        figures["maximumVolumeSize"] = bytes_text(answer.maximum_volume_size.value)
    return figures
