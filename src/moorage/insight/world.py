"""What a cluster looks like at one moment, as far as an explanation needs it.

Owns: `World` (plain data, with look-ups) and reading it from any Kubernetes API, only what the question calls for.
May not touch: causes; it does not judge.
Start reading at: `read_around`, `read_all`.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from moorage.kube.client import Client
from moorage.kube.errors import ApiError
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
    seconds_of,
)

T = TypeVar("T", bound=KubeObject)


@dataclass
class World:
    """Objects by key. `asked_secrets` tells for each secret that a class or volume names whether it exists."""

    claims: dict[str, PersistentVolumeClaim] = field(default_factory=dict)
    volumes: dict[str, PersistentVolume] = field(default_factory=dict)
    classes: dict[str, StorageClass] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    drivers: dict[str, CSIDriver] = field(default_factory=dict)
    node_drivers: dict[str, CSINode] = field(default_factory=dict)
    attachments: dict[str, VolumeAttachment] = field(default_factory=dict)
    capacities: dict[str, CSIStorageCapacity] = field(default_factory=dict)
    modifiers: dict[str, VolumeAttributesClass] = field(default_factory=dict)
    snapshots: dict[str, VolumeSnapshot] = field(default_factory=dict)
    contents: dict[str, VolumeSnapshotContent] = field(default_factory=dict)
    snapshot_classes: dict[str, VolumeSnapshotClass] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    events: dict[str, list[Event]] = field(default_factory=dict)
    asked_secrets: dict[str, bool] = field(default_factory=dict)
    now: float = field(default_factory=time.time)
    unreadable: dict[str, str] = field(default_factory=dict)  # kind -> why it could not be read

    def events_of(self, obj: KubeObject) -> list[Event]:
        """The events about this very object, newest first."""
        return self.events.get(obj.uid, [])

    def warning(self, obj: KubeObject, *reasons: str) -> Event | None:
        """The newest warning about an object (with one of these reasons)."""
        for event in self.events_of(obj):
            if event.type == "Warning" and (not reasons or event.reason in reasons):
                return event
        return None

    def pods_of(self, claim: PersistentVolumeClaim) -> list[Pod]:
        """Pods that use a claim and have not finished."""
        return [
            pod
            for pod in self.pods.values()
            if pod.namespace == claim.namespace and claim.name in claim_names(pod) and not pod.is_terminated
        ]

    def attachments_of(self, volume: PersistentVolume) -> list[VolumeAttachment]:
        return [a for a in self.attachments.values() if a.spec.source.persistent_volume_name == volume.name]

    def is_fresh(self, lease: Lease) -> bool:
        """Whether a leader has renewed its lease within its own time."""
        renewed = seconds_of(lease.spec.renew_time)
        return renewed is not None and self.now - renewed <= float(lease.spec.lease_duration_seconds or 15) + 5

    def is_installed(self, driver: str) -> bool:
        """Whether anything in the cluster knows the driver."""
        return driver in self.drivers or any(self.has_driver(name, driver) for name in self.node_drivers)

    def has_driver(self, node: str, driver: str) -> bool:
        found = self.node_drivers.get(node)
        return found is not None and any(entry.name == driver for entry in found.spec.drivers)


def claim_names(pod: Pod) -> list[str]:
    """The claims a pod uses, generic ephemeral ones included."""
    names = []
    for volume in pod.spec.volumes:
        if volume.persistent_volume_claim is not None:
            names.append(volume.persistent_volume_claim.claim_name)
        elif volume.ephemeral is not None:
            names.append(f"{pod.name}-{volume.name}")
    return names


def last_seen(event: Event) -> float:
    return (
        seconds_of(event.last_timestamp)
        or seconds_of(event.event_time)
        or seconds_of(event.metadata.creation_timestamp)
        or 0.0
    )


async def read_all(client: Client) -> World:
    """The whole cluster, for `moorage explain` without a name."""
    world = World()
    await asyncio.gather(
        *(_read(client, world, kind, "") for kind in _CLUSTER_KINDS),
        *(_read(client, world, kind, "") for kind in (PersistentVolumeClaim, Pod, VolumeSnapshot)),
        *(_read(client, world, kind, "") for kind in (PersistentVolume, VolumeAttachment, VolumeSnapshotContent)),
        _read_events(client, world, ""),
    )
    await _ask_secrets(client, world)
    return world


async def read_around(client: Client, kind: type[KubeObject], namespace: str) -> World:
    """What an explanation of one object can need: its namespace, and the kinds that the whole cluster shares."""
    world = World()
    namespaced = kind.resource.namespaced
    everywhere = "" if not namespaced else namespace
    await asyncio.gather(
        *(_read(client, world, shared, "") for shared in _CLUSTER_KINDS),
        *(_read(client, world, local, everywhere) for local in (PersistentVolumeClaim, Pod, VolumeSnapshot)),
        *(_read(client, world, wide, "") for wide in (PersistentVolume, VolumeAttachment, VolumeSnapshotContent)),
        _read_events(client, world, everywhere),
        *([_read_events(client, world, "default")] if namespaced and namespace != "default" else []),
    )
    await _ask_secrets(client, world)
    return world


_CLUSTER_KINDS: tuple[type[KubeObject], ...] = (
    StorageClass,
    Node,
    CSIDriver,
    CSINode,
    CSIStorageCapacity,
    VolumeAttributesClass,
    VolumeSnapshotClass,
    Lease,
)
_FIELDS: dict[type[KubeObject], str] = {
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


async def _read(client: Client, world: World, kind: type[T], namespace: str) -> None:
    try:
        found = await client.list(kind, namespace, page=5000)
    except ApiError as error:
        if error.status in (401, 503):
            raise
        world.unreadable[kind.resource.kind] = str(error)  # a cluster without the snapshot kinds, or a right we lack
        return
    setattr(world, _FIELDS[kind], {obj.key: obj for obj in found.items})


async def _read_events(client: Client, world: World, namespace: str) -> None:
    try:
        found = await client.list(Event, namespace, page=5000)
    except ApiError as error:
        if error.status in (401, 503):
            raise
        world.unreadable["Event"] = str(error)
        return
    for event in found.items:
        world.events.setdefault(event.involved_object.uid, []).append(event)
    for some in world.events.values():
        some.sort(key=last_seen, reverse=True)


async def _ask_secrets(client: Client, world: World) -> None:
    wanted = set(_secrets_named(world))

    async def ask(namespace: str, name: str) -> None:
        try:
            world.asked_secrets[f"{namespace}/{name}"] = await client.find(Secret, name, namespace) is not None
        except ApiError as error:
            world.unreadable["Secret"] = str(error)

    await asyncio.gather(*(ask(namespace, name) for namespace, name in sorted(wanted)))


def _secrets_named(world: World) -> Iterable[tuple[str, str]]:
    """Secrets that classes name outright; templates depend on the claim and are left to the provisioner's own words."""
    for storage_class in world.classes.values():
        parameters = storage_class.parameters
        for key, name in parameters.items():
            if key.startswith("csi.storage.k8s.io/") and key.endswith("-secret-name") and "$" not in name:
                namespace = parameters.get(key.removesuffix("-name") + "-namespace", "")
                if namespace and "$" not in namespace:
                    yield namespace, name
