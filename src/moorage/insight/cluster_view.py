"""What a cluster looks like at one moment, as far as an explanation needs it.

Owns: `ClusterView`, which is plain data with look-ups. `Reader` fills it, and causes judge it.
Start reading at: `ClusterView`.
"""

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

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
    StorageClass,
    VolumeAttachment,
    VolumeAttributesClass,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
    seconds_of,
)
from moorage.kube.volumes import claims_of

T = TypeVar("T")


@dataclass
class ClusterView:
    """Objects by key. `asked_secrets` holds, for each secret that a class names, whether it exists."""

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
    is_complete: bool = False  # nothing will be added: what is looked up often may be grouped once
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returns. A complete view calls it once for each key."""
        if not self.is_complete:
            return make()
        if key not in self._made:
            self._made[key] = make()
        return cast("T", self._made[key])

    def events_of(self, obj: KubeObject) -> list[Event]:
        """Return the events about exactly this object, newest first. Those of a node may hold its name as the uid."""
        found = self.events.get(obj.uid, [])
        if isinstance(obj, Node):
            found = sorted([*found, *self.events.get(obj.name, [])], key=last_seen, reverse=True)
        return found

    def warning(self, obj: KubeObject, *reasons: str) -> Event | None:
        """Return the newest warning about an object, with one of the reasons if any are given."""
        for event in self.events_of(obj):
            if event.type == "Warning" and (not reasons or event.reason in reasons):
                return event
        return None

    def said_since(self, obj: KubeObject, since: float, *reasons: str) -> bool:
        """Whether an event about the object, with one of the reasons, is newer than `since`."""
        return any(event.reason in reasons and last_seen(event) > since for event in self.events_of(obj))

    def pods_of(self, claim: PersistentVolumeClaim) -> list[Pod]:
        """Return the pods that use a claim and have not finished."""
        return [pod for pod in self.pods_naming(claim.key) if not pod.is_terminated]

    def pods_naming(self, claim_key: str) -> list[Pod]:
        """Return the pods that use a claim, finished ones included."""

        def by_claim() -> dict[str, list[Pod]]:
            return grouped((key, pod) for pod in self.pods.values() for key in claims_of(pod))

        return self.once("pods by claim", by_claim).get(claim_key, [])

    def claims_used_by(self, pod: Pod) -> list[PersistentVolumeClaim]:
        return [self.claims[key] for key in claims_of(pod) if key in self.claims]

    def volumes_used_by(self, pod: Pod) -> list[PersistentVolume]:
        names = [claim.spec.volume_name for claim in self.claims_used_by(pod)]
        return [self.volumes[name] for name in names if name in self.volumes]

    def attachments_of(self, volume: PersistentVolume) -> list[VolumeAttachment]:
        def by_volume() -> dict[str, list[VolumeAttachment]]:
            found = self.attachments.values()
            return grouped((each.spec.source.persistent_volume_name or "", each) for each in found)

        return self.once("attachments by volume", by_volume).get(volume.name, [])

    def attachments_on(self, node: str) -> list[VolumeAttachment]:
        def by_node() -> dict[str, list[VolumeAttachment]]:
            return grouped((each.spec.node_name, each) for each in self.attachments.values())

        return self.once("attachments by node", by_node).get(node, [])

    def events_with(self, reason: str) -> list[Event]:
        """Return all events with a reason, of whatever object."""

        def by_reason() -> dict[str, list[Event]]:
            return grouped((event.reason, event) for events in self.events.values() for event in events)

        return self.once("events by reason", by_reason).get(reason, [])

    def is_fresh(self, lease: Lease) -> bool:
        """Whether the leader has renewed its lease in time."""
        renewed = seconds_of(lease.spec.renew_time)
        return renewed is not None and self.now - renewed <= float(lease.spec.lease_duration_seconds or 15) + 5

    def is_installed(self, driver: str) -> bool:
        """Whether anything in the cluster knows the driver."""

        def on_nodes() -> set[str]:
            return {entry.name for found in self.node_drivers.values() for entry in found.spec.drivers}

        return driver in self.drivers or driver in self.once("drivers on nodes", on_nodes)

    def has_driver(self, node: str, driver: str) -> bool:
        found = self.node_drivers.get(node)
        return found is not None and any(entry.name == driver for entry in found.spec.drivers)


def grouped(pairs: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Return the values of each key."""
    found: dict[str, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def last_seen(event: Event) -> float:
    return (
        seconds_of(event.last_timestamp)
        or seconds_of(event.event_time)
        or seconds_of(event.metadata.creation_timestamp)
        or 0.0
    )
