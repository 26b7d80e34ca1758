"""What a cluster looks like at one moment, as far as an explanation needs it.

Owns: `ClusterView`, which is plain data with look-ups. `Reader` fills it, and causes judge it.
Start reading at: `ClusterView`.
"""

import time
from dataclasses import dataclass, field

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
        return [pod for pod in self.pods.values() if claim.key in claims_of(pod) and not pod.is_terminated]

    def claims_used_by(self, pod: Pod) -> list[PersistentVolumeClaim]:
        return [self.claims[key] for key in claims_of(pod) if key in self.claims]

    def volumes_used_by(self, pod: Pod) -> list[PersistentVolume]:
        names = [claim.spec.volume_name for claim in self.claims_used_by(pod)]
        return [self.volumes[name] for name in names if name in self.volumes]

    def attachments_of(self, volume: PersistentVolume) -> list[VolumeAttachment]:
        return [a for a in self.attachments.values() if a.spec.source.persistent_volume_name == volume.name]

    def is_fresh(self, lease: Lease) -> bool:
        """Whether the leader has renewed its lease in time."""
        renewed = seconds_of(lease.spec.renew_time)
        return renewed is not None and self.now - renewed <= float(lease.spec.lease_duration_seconds or 15) + 5

    def is_installed(self, driver: str) -> bool:
        """Whether anything in the cluster knows the driver."""
        return driver in self.drivers or any(self.has_driver(name, driver) for name in self.node_drivers)

    def has_driver(self, node: str, driver: str) -> bool:
        found = self.node_drivers.get(node)
        return found is not None and any(entry.name == driver for entry in found.spec.drivers)


def last_seen(event: Event) -> float:
    return (
        seconds_of(event.last_timestamp)
        or seconds_of(event.event_time)
        or seconds_of(event.metadata.creation_timestamp)
        or 0.0
    )
