"""The versions in which a cluster may serve the group snapshot kinds, and the best one that it serves.

v1 and v1beta2 have the same fields. v1beta1 lists handles only, in a list of another name, and is used only where
nothing newer is served: a cluster that has both would lose the members' sizes and times on each write.

Owns: the choice, and the list of members in the words of each version.
Start reading at: `best_served`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from moorage.csi import csi_pb2 as pb
from moorage.kube.api.client import Client
from moorage.kube.api.discovery import is_served
from moorage.kube.objects import VolumeGroupSnapshotClass, VolumeGroupSnapshotContent
from moorage.kube.objects.meta import Resource
from moorage.kube.objects.snapshots import GroupContentStatus, VolumeSnapshotInfo
from moorage.sidecars.snapshotter import decide


def _in(version: str, resource: Resource) -> Resource:
    return msgspec.structs.replace(resource, version=version)


class ContentV1(VolumeGroupSnapshotContent, frozen=True):
    resource: ClassVar[Resource] = _in("v1", VolumeGroupSnapshotContent.resource)


class ClassV1(VolumeGroupSnapshotClass, frozen=True):
    resource: ClassVar[Resource] = _in("v1", VolumeGroupSnapshotClass.resource)


class StatusV1Beta1(GroupContentStatus, frozen=True):
    volume_snapshot_handle_pair_list: list[VolumeSnapshotInfo] = []


class ContentV1Beta1(VolumeGroupSnapshotContent, frozen=True):
    resource: ClassVar[Resource] = _in("v1beta1", VolumeGroupSnapshotContent.resource)
    status: StatusV1Beta1 | None = None


class ClassV1Beta1(VolumeGroupSnapshotClass, frozen=True):
    resource: ClassVar[Resource] = _in("v1beta1", VolumeGroupSnapshotClass.resource)


@dataclass(frozen=True)
class GroupKinds:
    """The kinds in one version."""

    content: type[VolumeGroupSnapshotContent]
    group_class: type[VolumeGroupSnapshotClass]


BY_PREFERENCE: Sequence[GroupKinds] = (
    GroupKinds(ContentV1, ClassV1),
    GroupKinds(VolumeGroupSnapshotContent, VolumeGroupSnapshotClass),
    GroupKinds(ContentV1Beta1, ClassV1Beta1),
)


async def best_served(client: Client) -> GroupKinds | None:
    """The newest version that the cluster serves, or None when it has no group snapshots."""
    for kinds in BY_PREFERENCE:
        if await is_served(client, kinds.content):
            return kinds
    return None


def members_of(status: GroupContentStatus | None) -> list[VolumeSnapshotInfo]:
    """The members as the status has them, in whatever version."""
    if status is None:
        return []
    pairs = status.volume_snapshot_handle_pair_list if isinstance(status, StatusV1Beta1) else []
    return status.volume_snapshot_info_list or pairs


def members_field(content: VolumeGroupSnapshotContent, members: Sequence[pb.Snapshot]) -> dict[str, Any]:
    """The members for the status, under the name that the content's version has for them."""
    if isinstance(content, ContentV1Beta1):
        pairs = [{"volumeHandle": each.source_volume_id, "snapshotHandle": each.snapshot_id} for each in members]
        return {"volumeSnapshotHandlePairList": pairs}
    return {"volumeSnapshotInfoList": [_info(each) for each in members]}


def _info(member: pb.Snapshot) -> dict[str, Any]:
    info: dict[str, Any] = {
        "volumeHandle": member.source_volume_id,
        "snapshotHandle": member.snapshot_id,
        "creationTime": decide.nanoseconds(member),
        "readyToUse": member.ready_to_use,
    }
    return info | ({"restoreSize": member.size_bytes} if member.size_bytes > 0 else {})
