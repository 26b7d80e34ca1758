"""The snapshot controller's view of the API, and its writes.

Owns: the informers of the snapshot kinds, guarded patches (each carries the resourceVersion, so that a finalizer or
annotation list is never overwritten), and errors that a user is to read in an object's status.
May not touch: decisions.
Start reading at: `Store`, `Fault`.
"""

import time
from collections.abc import Mapping
from typing import Any, TypeVar

from moorage.errors import MoorageError
from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informer, Informers
from moorage.kube.control.events import Recorder
from moorage.kube.errors import Conflict, NotFound
from moorage.kube.objects.core import Node, PersistentVolume, PersistentVolumeClaim
from moorage.kube.objects.meta import KubeObject, timestamp_text
from moorage.kube.objects.snapshots import (
    VolumeGroupSnapshot,
    VolumeGroupSnapshotClass,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)

T = TypeVar("T", bound=KubeObject)


class SnapshotProblem(MoorageError):
    """Something a user has to know of: an event with this reason, and (unless told not to) the object's status."""

    code = "FAILED_PRECONDITION"

    def __init__(self, reason: str, message: str, *, in_status: bool = True, unready: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.in_status = in_status
        self.unready = unready


class SnapshotStore:
    """Reads from informers, writes through the client, and lets the informers know at once."""

    def __init__(self, client: Client, informers: Informers, recorder: Recorder, *, groups: bool, nodes: bool) -> None:
        self.client = client
        self.recorder = recorder
        self.has_groups = groups
        self.snapshots = informers.of(VolumeSnapshot)
        self.contents = informers.of(VolumeSnapshotContent)
        self.classes = informers.of(VolumeSnapshotClass)
        self.claims = informers.of(PersistentVolumeClaim)
        self.volumes = informers.of(PersistentVolume)
        self.nodes: Informer[Node] | None = informers.of(Node) if nodes else None
        self._informers: dict[type, Informer[Any]] = {
            VolumeSnapshot: self.snapshots,
            VolumeSnapshotContent: self.contents,
            VolumeSnapshotClass: self.classes,
            PersistentVolumeClaim: self.claims,
            PersistentVolume: self.volumes,
        }
        if groups:
            self.groups = informers.of(VolumeGroupSnapshot)
            self.group_contents = informers.of(VolumeGroupSnapshotContent)
            self.group_classes = informers.of(VolumeGroupSnapshotClass)
            self._informers |= {
                VolumeGroupSnapshot: self.groups,
                VolumeGroupSnapshotContent: self.group_contents,
                VolumeGroupSnapshotClass: self.group_classes,
            }
            self.group_contents.index("handle", _group_handle)
        self.snapshots.index("claim", _source_claim)
        self.volumes.index("handle", _volume_handle)

    async def wait_synced(self) -> None:
        for informer in self._informers.values():
            await informer.wait_synced()
        if self.nodes is not None:
            await self.nodes.wait_synced()

    def volume_with(self, driver: str, handle: str) -> PersistentVolume | None:
        """The volume of a driver with this handle."""
        found = self.volumes.at("handle", f"{driver}^{handle}")
        return found[0] if found else None

    async def patch(self, obj: T, patch: Mapping[str, Any], *, status: bool = False) -> T:
        """Change an object as it was read; Conflict when it has changed since, and then the informer knows how."""
        try:
            written = await self.client.patch(
                type(obj),
                obj.name,
                patch,
                obj.namespace,
                subresource="status" if status else "",
                version=obj.metadata.resource_version,
            )
        except Conflict:
            await self.live(type(obj), obj.name, obj.namespace)
            raise
        self._informers[type(obj)].remember(written)
        return written

    async def set_status(self, obj: T, fields: Mapping[str, Any]) -> T:
        return await self.patch(obj, {"status": fields}, status=True) if fields else obj

    async def protect(self, obj: T, *finalizers: str) -> T:
        """Add finalizers that are missing."""
        missing = [name for name in finalizers if name not in obj.finalizers]
        return await self._set_finalizers(obj, [*obj.finalizers, *missing]) if missing else obj

    async def unprotect(self, obj: T, *finalizers: str) -> T:
        """Remove finalizers; an object that goes with its last one is gone."""
        left = [name for name in obj.finalizers if name not in finalizers]
        if len(left) == len(obj.finalizers):
            return obj
        try:
            return await self._set_finalizers(obj, left)
        except NotFound:
            return obj

    async def _set_finalizers(self, obj: T, finalizers: list[str]) -> T:
        return await self.patch(obj, {"metadata": {"finalizers": finalizers}})

    async def annotate(self, obj: T, annotations: Mapping[str, str]) -> T:
        if all(obj.annotations.get(key) == value for key, value in annotations.items()):
            return obj
        return await self.patch(obj, {"metadata": {"annotations": dict(annotations)}})

    async def create(self, kind: type[T], body: Mapping[str, Any], namespace: str = "") -> T:
        made = await self.client.create(kind, body, namespace)
        self._informers[kind].remember(made)
        return made

    async def live(self, kind: type[T], name: str, namespace: str = "") -> T | None:
        """The object as the server has it now; the informer learns it too."""
        found = await self.client.find(kind, name, namespace)
        if found is not None:
            self._informers[kind].remember(found)
        return found

    async def delete(self, obj: KubeObject) -> None:
        if obj.is_deleting:
            return
        try:
            await self.client.delete(type(obj), obj.name, obj.namespace, uid=obj.uid)
        except NotFound:
            return

    async def report(self, obj: VolumeSnapshot | VolumeGroupSnapshot, fault: SnapshotProblem) -> None:
        """Tell the user, once for each different message."""
        known = obj.status.error.message if obj.status is not None and obj.status.error is not None else None
        if fault.in_status and known == str(fault):
            return
        self.recorder.warning(obj, fault.reason, str(fault))
        if not fault.in_status:
            return
        fields: dict[str, Any] = {"error": {"time": timestamp_text(time.time()), "message": str(fault)}}
        if fault.unready or obj.status is None or obj.status.ready_to_use is None:
            fields["readyToUse"] = False
        await self.set_status(obj, fields)


def _source_claim(snapshot: VolumeSnapshot) -> list[str]:
    name = snapshot.spec.source.persistent_volume_claim_name
    return [f"{snapshot.namespace}/{name}"] if name else []


def _volume_handle(volume: PersistentVolume) -> list[str]:
    csi = volume.spec.csi
    return [f"{csi.driver}^{csi.volume_handle}"] if csi is not None else []


def _group_handle(content: VolumeGroupSnapshotContent) -> list[str]:
    handle = content.status.volume_group_snapshot_handle if content.status is not None else None
    return [handle] if handle else []
