"""Which failures follow from another one, so that one bug is reported as one failure.

Owns: the table. A check on the left runs before those on the right, right after the basic ones.
Start reading at: `FOLLOW_UPS`.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "CreateVolume.works": ("CreateVolume.*", "Claims.served"),
    "CreateVolume.restore": ("CreateVolume.clone", "CreateVolume.restore-*", "Data.restore*", "DeleteVolume.*outlive"),
    "CreateVolume.repeated": (
        "CreateVolume.*",
        "DeleteVolume.*",
        "Restart.keeps-volumes",
        "Restart.during-create",
        "Leaks.volumes",
    ),
    "CreateVolume.size": (
        "CreateVolume.*",
        "ControllerExpandVolume.*",
        "ControllerGetVolume.*",
        "ListVolumes.follows",
        "GetMetadata*",
        "GetCapacity.*",
        "Data.*",
    ),
    "CreateVolume.unknown-source-snapshot": ("DeleteSnapshot.is-gone",),
    "Data.survives-restage": ("Data.*", "Orders.*", "Restart.keeps-data", "GetMetadata*"),
    "Data.size-is-real": (
        "CreateVolume.*",
        "ControllerExpandVolume.*",
        "ControllerGetVolume.*",
        "ListVolumes.follows",
        "GetMetadata*",
        "GetCapacity.*",
        "Data.*",
        "Answers.numbers",
    ),
    "Data.snapshot-keeps": (
        "Data.*restore*",
        "Data.snapshot-*",
        "GetMetadata*",
        "DeleteSnapshot.is-gone",
        "DeleteVolume.snapshots-outlive",
        "CreateVolume.*source*",
        "CreateVolume.restore-*",
    ),
    "Data.clone-is-a-copy": ("CreateVolume.clone-*", "CreateVolume.unknown-source-volume"),
}


def root_of(check_id: str, broken: Iterable[str]) -> str:
    """Return the failed check that the failure of another one follows from, or an empty string."""
    return next((root for root in broken if root != check_id and _follows(check_id, root)), "")


def _follows(check_id: str, root: str) -> bool:
    return any(fnmatchcase(check_id, pattern) for pattern in FOLLOW_UPS.get(root, ()))
