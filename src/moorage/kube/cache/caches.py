"""The caches that the parts of one process share, by kind, and lookups that several of them need.

Owns: one typed attribute per kind, created at first use, and the shared indexes.
Start reading at: `Caches`.

Read an attribute of an optional kind (snapshots, attributes classes) only after `is_served` has said that the cluster
has it: an informer of an unknown kind never becomes complete.
"""

from functools import cached_property

from moorage.kube.cache.informer import Informer
from moorage.kube.cache.informers import Informers
from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.snapshots import (
    VolumeGroupSnapshot,
    VolumeGroupSnapshotClass,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.kube.objects.storage import (
    CSIDriver,
    CSINode,
    CSIStorageCapacity,
    StorageClass,
    VolumeAttachment,
    VolumeAttributesClass,
)
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import (
    claim_uid_of,
    claims_of,
    handle_of,
    node_attached_to,
    node_of,
    uid_of,
    volume_attached_by,
)


class Caches:
    """The informers of one process. Reading an attribute creates and starts the informer of that kind."""

    def __init__(self, informers: Informers) -> None:
        self.informers = informers

    @cached_property
    def pods(self) -> Informer[Pod]:
        return self.informers.of(Pod)

    @cached_property
    def nodes(self) -> Informer[Node]:
        return self.informers.of(Node)

    @cached_property
    def claims(self) -> Informer[PersistentVolumeClaim]:
        return self.informers.of(PersistentVolumeClaim)

    @cached_property
    def volumes(self) -> Informer[PersistentVolume]:
        return self.informers.of(PersistentVolume)

    @cached_property
    def classes(self) -> Informer[StorageClass]:
        return self.informers.of(StorageClass)

    @cached_property
    def attributes_classes(self) -> Informer[VolumeAttributesClass]:
        return self.informers.of(VolumeAttributesClass)

    @cached_property
    def drivers(self) -> Informer[CSIDriver]:
        return self.informers.of(CSIDriver)

    @cached_property
    def csi_nodes(self) -> Informer[CSINode]:
        return self.informers.of(CSINode)

    @cached_property
    def capacities(self) -> Informer[CSIStorageCapacity]:
        return self.informers.of(CSIStorageCapacity)

    @cached_property
    def attachments(self) -> Informer[VolumeAttachment]:
        return self.informers.of(VolumeAttachment)

    @cached_property
    def snapshots(self) -> Informer[VolumeSnapshot]:
        return self.informers.of(VolumeSnapshot)

    @cached_property
    def snapshot_contents(self) -> Informer[VolumeSnapshotContent]:
        return self.informers.of(VolumeSnapshotContent)

    @cached_property
    def snapshot_classes(self) -> Informer[VolumeSnapshotClass]:
        return self.informers.of(VolumeSnapshotClass)

    @cached_property
    def groups(self) -> Informer[VolumeGroupSnapshot]:
        return self.informers.of(VolumeGroupSnapshot)

    @cached_property
    def group_contents(self) -> Informer[VolumeGroupSnapshotContent]:
        return self.informers.of(VolumeGroupSnapshotContent)

    @cached_property
    def group_classes(self) -> Informer[VolumeGroupSnapshotClass]:
        return self.informers.of(VolumeGroupSnapshotClass)

    # Lookups. Each builds its index at the first call.

    def pods_using(self, claim_key: str) -> list[Pod]:
        """Return the pods that name a claim, or for which it is created."""
        return self.pods.by(claims_of, claim_key)

    def pods_on(self, node: str) -> list[Pod]:
        return self.pods.by(node_of, node)

    def claim_with_uid(self, uid: str) -> PersistentVolumeClaim | None:
        return next(iter(self.claims.by(uid_of, uid)), None)

    def volumes_of_claim(self, uid: str) -> list[PersistentVolume]:
        """Return the volumes that are bound to the claim with this uid."""
        return self.volumes.by(claim_uid_of, uid)

    def volume_with_handle(self, driver: str, handle: str) -> PersistentVolume | None:
        return next(iter(self.volumes.by(handle_of, f"{driver}^{handle}")), None)

    def attachments_of(self, volume: str) -> list[VolumeAttachment]:
        """Return the attachments of a PersistentVolume."""
        return self.attachments.by(volume_attached_by, volume)

    def attachments_on(self, node: str) -> list[VolumeAttachment]:
        return self.attachments.by(node_attached_to, node)
