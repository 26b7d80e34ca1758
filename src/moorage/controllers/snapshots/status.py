"""What the status of a snapshot becomes when its content changed. Pure.

Owns: copying from content to snapshot, single and group: what is written once, what follows, what is cleared.
May not touch: the API.
Start reading at: `snapshot_status`, `group_status`.
"""

from typing import Any

from moorage.kube.objects.meta import timestamp_text
from moorage.kube.objects.snapshots import (
    ContentStatus,
    GroupContentStatus,
    GroupSnapshotStatus,
    SnapshotError,
    SnapshotStatus,
    VolumeGroupSnapshot,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from moorage.kube.quantity import BadQuantity, bytes_of, bytes_text

Fields = dict[str, Any]


def is_ready(snapshot: VolumeSnapshot) -> bool:
    status = snapshot.status
    return status is not None and status.ready_to_use is True and status.error is None


def is_bound(snapshot: VolumeSnapshot) -> bool:
    return bool(snapshot.status is not None and snapshot.status.bound_volume_snapshot_content_name)


def is_group_ready(group: VolumeGroupSnapshot) -> bool:
    return group.status is not None and group.status.ready_to_use is True and group.status.error is None


def is_group_bound(group: VolumeGroupSnapshot) -> bool:
    return bool(group.status is not None and group.status.bound_volume_group_snapshot_content_name)


def snapshot_status(snapshot: VolumeSnapshot, content: VolumeSnapshotContent, group_name: str) -> Fields:
    """The fields of a snapshot's status that change, as a merge patch; empty when none does."""
    have, found = snapshot.status or SnapshotStatus(), content.status or ContentStatus()
    ready = found.ready_to_use is True
    fields: Fields = {}
    if not have.bound_volume_snapshot_content_name:
        fields["boundVolumeSnapshotContentName"] = content.name
    if have.creation_time is None and found.creation_time is not None:
        fields["creationTime"] = timestamp_text(found.creation_time / 1e9)
    if have.ready_to_use is not ready:
        fields["readyToUse"] = ready
    if found.restore_size is not None and not _size(have.restore_size):
        wanted = bytes_text(found.restore_size)
        if have.restore_size != wanted:
            fields["restoreSize"] = wanted
    if group_name and not have.volume_group_snapshot_name:
        fields["volumeGroupSnapshotName"] = group_name
    return fields | _error(have.error, None if ready else found.error, is_ready_now=ready)


def group_status(group: VolumeGroupSnapshot, content: VolumeGroupSnapshotContent) -> Fields:
    """The fields of a group snapshot's status that change, as a merge patch; empty when none does."""
    have, found = group.status or GroupSnapshotStatus(), content.status or GroupContentStatus()
    ready = found.ready_to_use is True
    fields: Fields = {}
    if not have.bound_volume_group_snapshot_content_name:
        fields["boundVolumeGroupSnapshotContentName"] = content.name
    if have.creation_time is None and found.creation_time is not None:
        fields["creationTime"] = found.creation_time
    if have.ready_to_use is not ready:
        fields["readyToUse"] = ready
    return fields | _error(have.error, None if ready else found.error, is_ready_now=ready)


def _error(have: SnapshotError | None, found: SnapshotError | None, *, is_ready_now: bool) -> Fields:
    if found is not None and (have is None or have.message != found.message):
        return {"error": {"time": found.time, "message": found.message}}
    if have is not None and is_ready_now:
        return {"error": None}
    return {}


def _size(text: str | int | None) -> int:
    try:
        return bytes_of(text)
    except BadQuantity:
        return 0
