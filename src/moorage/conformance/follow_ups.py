"""Which failures follow from another one, so that one bug is reported as one failure.

Owns: the table. A check on the left runs before those on the right, right after the basic ones.
Start reading at: `FOLLOW_UPS`.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

_RESTARTS = ("Restart.keeps-volumes", "Restart.during-create")
_SIZES = (
    "CreateVolume.*",
    "ControllerExpandVolume.*",
    "ControllerGetVolume.*",
    "ListVolumes.follows",
    "GetMetadata*",
    "GetCapacity.*",
    "Data.*",
    "Answers.numbers",
)
_STEPS = ("Node*", "Data.*", "Orders.*", "Restart.during-publish", "Restart.keeps-data")

FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "Identity.name": ("Identity.version",),
    "NodeGetInfo.works": ("ControllerPublishVolume.*",),
    "CreateVolume.works": ("Claims.served", "Secrets.not-echoed"),
    "NodePublishVolume.works": ("Orders.*", "Leaks.*"),
    "NodeUnpublishVolume.works": ("Leaks.*",),
    "NodeUnstageVolume.works": ("Leaks.*",),
    "CreateVolume.restore": ("CreateVolume.clone", "CreateVolume.restore-*", "Data.restore*", "DeleteVolume.*outlive"),
    "CreateVolume.repeated": ("CreateVolume.*", "DeleteVolume.*", "Leaks.volumes", *_RESTARTS),
    "CreateVolume.size": _SIZES,
    "CreateVolume.limit": ("CreateVolume.*", "GetCapacity.largest"),
    "CreateVolume.other-size": ("CreateVolume.other-source",),
    "DeleteVolume.repeated": ("DeleteVolume.*", "CreateVolume.*", *_RESTARTS),
    "DeleteVolume.is-gone": (
        *("DeleteVolume.*", "CreateVolume.*", "ListVolumes.*", "GetCapacity.follows", "Leaks.volumes"),
        *_RESTARTS,
    ),
    "ValidateVolumeCapabilities.confirms": ("DeleteVolume.clones-outlive", "Restart.keeps-volumes"),
    "ControllerModifyVolume.refuses-unknown": ("ControllerModifyVolume.*", "CreateVolume.mutable-parameters"),
    "ControllerPublishVolume.unknown-node": ("Leaks.volumes",),
    "ControllerUnpublishVolume.repeated": ("Controller*ublishVolume.*", "Data.*", "Leaks.volumes"),
    "ControllerExpandVolume.works": ("Data.grows-*",),
    "GetCapacity.works": ("GetCapacity.*", "Answers.numbers"),
    "ListVolumes.ids": (
        *("ListVolumes.*", "DeleteVolume.concurrent", "CreateVolume.given-up", "Leaks.volumes"),
        *_RESTARTS,
    ),
    "ListVolumes.follows": ("ListVolumes.*", "DeleteVolume.concurrent", "Leaks.volumes", *_RESTARTS),
    "ListVolumes.pages": ("ListVolumes.pages-under-change", "ListVolumes.negative-page"),
    "CreateSnapshot.repeated": (
        "CreateSnapshot.*",
        "GetSnapshot.agrees",
        "ListSnapshots.follows",
        "Restart.*snapshot*",
    ),
    "Data.snapshot-keeps": (
        *("Data.*restore*", "Data.snapshot-*", "GetMetadata*", "DeleteSnapshot.is-gone"),
        *("DeleteVolume.snapshots-outlive", "CreateVolume.*source*", "CreateVolume.restore-*"),
    ),
    "DeleteSnapshot.is-gone": ("DeleteSnapshot.*", "ListSnapshots.follows", "Leaks.snapshots"),
    "ListSnapshots.filters": ("ListSnapshots.*", "CreateSnapshot.given-up", "*GroupSnapshot.*", "Restart.*snapshot*"),
    "NodeStageVolume.repeated": _STEPS,
    "NodePublishVolume.repeated": _STEPS,
    "NodeUnpublishVolume.repeated": _STEPS,
    "NodeUnstageVolume.repeated": _STEPS,
    "Data.survives-restage": ("Data.*", "Orders.*", "Restart.keeps-data", "GetMetadata*"),
    "Data.grows-before-publish": ("Data.grows-while-published",),
    "NodePublishVolume.read-only": ("NodePublishVolume.other-way",),
    "Data.size-is-real": _SIZES,
    "CreateVolume.unknown-source-snapshot": ("DeleteSnapshot.is-gone",),
    "Data.clone-is-a-copy": ("CreateVolume.clone-*", "CreateVolume.unknown-source-volume"),
    "GetMetadataDelta.is-complete": ("GetMetadata*.resumes",),
    "GetMetadataAllocated.is-complete": ("GetMetadata*",),
}


def root_of(check_id: str, broken: Iterable[str]) -> str:
    """Return the failed check that the failure of another one follows from, or an empty string."""
    return next((root for root in broken if root != check_id and _follows(check_id, root)), "")


def _follows(check_id: str, root: str) -> bool:
    """A call that does not work at all explains whatever else fails about it."""
    own = (f"{root.removesuffix('.works')}.*",) if root.endswith(".works") else ()
    return any(fnmatchcase(check_id, pattern) for pattern in (*own, *FOLLOW_UPS.get(root, ())))
