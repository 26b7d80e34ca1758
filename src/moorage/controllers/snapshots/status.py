"""How the status of a snapshot follows from its content. Pure.

Owns: copying from content to snapshot, single and group: what is written once, what follows, what is cleared.
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


def is_ready(snapshot: VolumeSnapshot | VolumeGroupSnapshot) -> bool:
    """Whether a snapshot can be used, and no error is noted."""
    status = snapshot.status
    return status is not None and status.ready_to_use is True and status.error is None


def error_of(snapshot: VolumeSnapshot | VolumeGroupSnapshot) -> str | None:
    """Return the message of the error in the status."""
    return snapshot.status.error.message if snapshot.status is not None and snapshot.status.error is not None else None


def snapshot_status(snapshot: VolumeSnapshot, content: VolumeSnapshotContent, group_name: str) -> Fields:
    """Return the fields of a snapshot's status that change, as a merge patch."""
    have, found = snapshot.status or SnapshotStatus(), content.status or ContentStatus()
    fields: Fields = {}
    if not have.bound_volume_snapshot_content_name:
        fields["boundVolumeSnapshotContentName"] = content.name
    created = timestamp_text(found.creation_time / 1e9) if found.creation_time is not None else None
    fields |= _progress(have, found, created)
    if found.restore_size is not None and not _size(have.restore_size):
        wanted = bytes_text(found.restore_size)
        if have.restore_size != wanted:
            fields["restoreSize"] = wanted
    if group_name and not have.volume_group_snapshot_name:
        fields["volumeGroupSnapshotName"] = group_name
    return fields


def group_status(group: VolumeGroupSnapshot, content: VolumeGroupSnapshotContent) -> Fields:
    """Return the fields of a group snapshot's status that change, as a merge patch."""
    have, found = group.status or GroupSnapshotStatus(), content.status or GroupContentStatus()
    fields: Fields = {}
    if not have.bound_volume_group_snapshot_content_name:
        fields["boundVolumeGroupSnapshotContentName"] = content.name
    return fields | _progress(have, found, found.creation_time)


def _progress(
    have: SnapshotStatus | GroupSnapshotStatus, found: ContentStatus | GroupContentStatus, created: str | None
) -> Fields:
    ready, fields = found.ready_to_use is True, Fields()
    if have.creation_time is None and created is not None:
        fields["creationTime"] = created
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
