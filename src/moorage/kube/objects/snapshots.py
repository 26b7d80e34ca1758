"""The snapshot kinds of snapshot.storage.k8s.io and groupsnapshot.storage.k8s.io.

Owns: their typed shapes, as far as Moorage's parts read them.
"""

from typing import ClassVar

from moorage.kube.objects.meta import KubeObject, LabelSelector, ObjectReference, Resource, Struct

_SNAPSHOT = "snapshot.storage.k8s.io"
_GROUP = "groupsnapshot.storage.k8s.io"
_GROUP_VERSION = "v1beta2"  # the storage version, and the oldest one that has snapshot info in status


class SnapshotError(Struct, frozen=True):
    time: str | None = None
    message: str | None = None


class SnapshotSource(Struct, frozen=True):
    persistent_volume_claim_name: str | None = None
    volume_snapshot_content_name: str | None = None


class SnapshotSpec(Struct, frozen=True):
    source: SnapshotSource = SnapshotSource()
    volume_snapshot_class_name: str | None = None


class SnapshotStatus(Struct, frozen=True):
    bound_volume_snapshot_content_name: str | None = None
    creation_time: str | None = None
    ready_to_use: bool | None = None
    restore_size: str | int | None = None
    error: SnapshotError | None = None
    volume_group_snapshot_name: str | None = None


class VolumeSnapshot(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(_SNAPSHOT, "v1", "volumesnapshots", "VolumeSnapshot", True)
    spec: SnapshotSpec = SnapshotSpec()
    status: SnapshotStatus | None = None


class VolumeSnapshotClass(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(_SNAPSHOT, "v1", "volumesnapshotclasses", "VolumeSnapshotClass", False)
    driver: str = ""
    parameters: dict[str, str] = {}
    deletion_policy: str = ""


class ContentSource(Struct, frozen=True):
    volume_handle: str | None = None
    snapshot_handle: str | None = None


class ContentSpec(Struct, frozen=True):
    volume_snapshot_ref: ObjectReference = ObjectReference()
    deletion_policy: str = ""
    driver: str = ""
    volume_snapshot_class_name: str | None = None
    source: ContentSource = ContentSource()
    source_volume_mode: str | None = None


class ContentStatus(Struct, frozen=True):
    """`creation_time` is in nanoseconds, `restore_size` in bytes, as the CRD has them."""

    snapshot_handle: str | None = None
    creation_time: int | None = None
    restore_size: int | None = None
    ready_to_use: bool | None = None
    error: SnapshotError | None = None
    volume_group_snapshot_handle: str | None = None


class VolumeSnapshotContent(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(_SNAPSHOT, "v1", "volumesnapshotcontents", "VolumeSnapshotContent", False)
    spec: ContentSpec = ContentSpec()
    status: ContentStatus | None = None


class GroupSnapshotSource(Struct, frozen=True):
    selector: LabelSelector | None = None
    volume_group_snapshot_content_name: str | None = None


class GroupSnapshotSpec(Struct, frozen=True):
    source: GroupSnapshotSource = GroupSnapshotSource()
    volume_group_snapshot_class_name: str | None = None


class GroupSnapshotStatus(Struct, frozen=True):
    bound_volume_group_snapshot_content_name: str | None = None
    creation_time: str | None = None
    ready_to_use: bool | None = None
    error: SnapshotError | None = None


class VolumeGroupSnapshot(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(_GROUP, _GROUP_VERSION, "volumegroupsnapshots", "VolumeGroupSnapshot", True)
    spec: GroupSnapshotSpec = GroupSnapshotSpec()
    status: GroupSnapshotStatus | None = None


class VolumeGroupSnapshotClass(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(
        _GROUP, _GROUP_VERSION, "volumegroupsnapshotclasses", "VolumeGroupSnapshotClass", False
    )
    driver: str = ""
    parameters: dict[str, str] = {}
    deletion_policy: str = ""


class GroupSnapshotHandles(Struct, frozen=True):
    volume_group_snapshot_handle: str = ""
    volume_snapshot_handles: list[str] = []


class GroupContentSource(Struct, frozen=True):
    volume_handles: list[str] | None = None
    group_snapshot_handles: GroupSnapshotHandles | None = None


class GroupContentSpec(Struct, frozen=True):
    volume_group_snapshot_ref: ObjectReference = ObjectReference()
    deletion_policy: str = ""
    driver: str = ""
    volume_group_snapshot_class_name: str | None = None
    source: GroupContentSource = GroupContentSource()


class VolumeSnapshotInfo(Struct, frozen=True):
    volume_handle: str = ""
    snapshot_handle: str = ""
    creation_time: int | None = None
    ready_to_use: bool | None = None
    restore_size: int | None = None


class GroupContentStatus(Struct, frozen=True):
    volume_group_snapshot_handle: str | None = None
    creation_time: str | None = None
    ready_to_use: bool | None = None
    error: SnapshotError | None = None
    volume_snapshot_info_list: list[VolumeSnapshotInfo] = []


class VolumeGroupSnapshotContent(KubeObject, frozen=True):
    resource: ClassVar[Resource] = Resource(
        _GROUP, _GROUP_VERSION, "volumegroupsnapshotcontents", "VolumeGroupSnapshotContent", False
    )
    spec: GroupContentSpec = GroupContentSpec()
    status: GroupContentStatus | None = None
