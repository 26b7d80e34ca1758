"""Reading objects and events of a cluster, each once.

Owns: requests, and what could not be read. A kind that is missing or forbidden is noted in `ClusterView.unreadable`;
the rest is still read.
Start reading at: `Reader`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Self

from moorage.insight.cluster_view import ClusterView, last_seen
from moorage.insight.matching import lease_names
from moorage.kube.api.client import Client
from moorage.kube.errors import ApiError
from moorage.kube.names import RESERVED_PREFIX
from moorage.kube.objects import (
    CSIDriver,
    CSINode,
    CSIStorageCapacity,
    Event,
    KubeObject,
    Lease,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    Secret,
    StorageClass,
    VolumeAttachment,
    VolumeAttributesClass,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)

FIELDS: dict[type[KubeObject], str] = {
    StorageClass: "classes",
    Node: "nodes",
    CSIDriver: "drivers",
    CSINode: "node_drivers",
    CSIStorageCapacity: "capacities",
    VolumeAttributesClass: "modifiers",
    VolumeSnapshotClass: "snapshot_classes",
    Lease: "leases",
    PersistentVolumeClaim: "claims",
    Pod: "pods",
    VolumeSnapshot: "snapshots",
    PersistentVolume: "volumes",
    VolumeAttachment: "attachments",
    VolumeSnapshotContent: "contents",
}


async def read_all(client: Client) -> ClusterView:
    """Read the whole cluster, for `moorage explain` without a name."""
    async with Reader(client) as reader:
        await asyncio.gather(*(reader.all(kind) for kind in FIELDS), reader.all_events())
        await asyncio.gather(*(reader.secrets(found) for found in list(reader.view.classes.values())))
        reader.view.is_complete = True
        return reader.view


class Reader:
    """Fills a view of the cluster. Nothing is asked for twice."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asked: dict[tuple[object, ...], asyncio.Task[None]] = {}
        self.view = ClusterView()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the requests that are still running after one has failed."""
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def one(self, kind: type[KubeObject], key: str) -> None:
        """One object by its key; absent ones stay absent."""
        if key:
            await self._once((kind, key, "one"), self._get, kind, key)

    async def _get(self, kind: type[KubeObject], key: str) -> None:
        namespace, name = kind.resource.split(key)
        try:
            found = await self._client.find(kind, name, namespace)
        except ApiError as error:
            self._excuse(kind.resource.kind, error)
            return
        if found is not None:
            getattr(self.view, FIELDS[kind])[found.key] = found

    async def all(self, kind: type[KubeObject], namespace: str = "") -> None:
        """All objects of a kind (in a namespace)."""
        await self._once((kind, namespace, "all"), self._read, kind, namespace, "")

    async def _read(self, kind: type[KubeObject], namespace: str, fields: str) -> None:
        try:
            found = await self._client.list(kind, namespace, fields=fields, page=5000)
        except ApiError as error:
            self._excuse(kind.resource.kind, error)
            return
        getattr(self.view, FIELDS[kind]).update({obj.key: obj for obj in found.items})

    async def pods(self, namespace: str, fields: str) -> None:
        """The pods of a namespace that fields select, unless all of them are asked for."""
        if (Pod, namespace, "all") not in self._asked:
            await self._once((Pod, namespace, fields), self._read, Pod, namespace, fields)

    async def events(self, kind: type[KubeObject], key: str) -> None:
        """The events about one object, by its name: it can be asked for before its uid is known."""
        namespace, name = kind.resource.split(key)
        chosen = f"involvedObject.name={name},involvedObject.kind={kind.resource.kind}"
        await self._once((Event, kind, key), self._events, namespace or "default", chosen)

    async def events_with(self, reason: str) -> None:
        """All events with a reason, of whatever object: for reasons that are rare."""
        await self._once((Event, reason), self._events, "", f"reason={reason}")

    async def all_events(self) -> None:
        await self._events("", "")

    async def _events(self, namespace: str, fields: str) -> None:
        try:
            found = await self._client.list(Event, namespace, fields=fields, page=5000)
        except ApiError as error:
            self._excuse("Event", error)
            return
        told: dict[str, list[Event]] = {}
        for event in found.items:
            told.setdefault(event.involved_object.uid, []).append(event)
        for uid, some in told.items():
            known = {event.uid: event for event in (*self.view.events.get(uid, ()), *some)}
            self.view.events[uid] = sorted(known.values(), key=last_seen, reverse=True)

    async def leases(self, driver: str) -> None:
        """The leases of a driver's sidecars, in every namespace. Never all leases, of which every node has one."""
        names = lease_names(driver)
        await asyncio.gather(
            *(self._once((Lease, name), self._read, Lease, "", f"metadata.name={name}") for name in names)
        )

    async def secrets(self, storage_class: StorageClass) -> None:
        """Whether the secrets exist that a class names outright; templates are left to the provisioner's own words."""
        await asyncio.gather(*(self._once((Secret, *ref), self._secret, *ref) for ref in _secrets_of(storage_class)))

    async def _secret(self, namespace: str, name: str) -> None:
        try:
            found = await self._client.find(Secret, name, namespace)
        except ApiError as error:
            self._excuse("Secret", error)
            return
        self.view.asked_secrets[f"{namespace}/{name}"] = found is not None

    def _excuse(self, kind: str, error: ApiError) -> None:
        """Note a kind that is missing or forbidden. Raises the error if there is no server, or no access to it."""
        if error.status in (401, 503):
            raise error
        self.view.unreadable[kind] = str(error)

    async def _once(
        self, key: tuple[object, ...], work: Callable[..., Coroutine[Any, Any, None]], *arguments: object
    ) -> None:
        """Run a piece of work once; later callers wait for the same run."""
        if key not in self._asked:
            self._asked[key] = asyncio.create_task(work(*arguments))
        await asyncio.shield(self._asked[key])


def _secrets_of(storage_class: StorageClass) -> Iterable[tuple[str, str]]:
    parameters = storage_class.parameters
    for key, name in parameters.items():
        if key.startswith(RESERVED_PREFIX) and key.endswith("-secret-name") and "$" not in name:
            namespace = parameters.get(key.removesuffix("-name") + "-namespace", "")
            if namespace and "$" not in namespace:
                yield namespace, name
