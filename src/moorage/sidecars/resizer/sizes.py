"""To which size a claim's volume is to be expanded now, and what the claim's status must say. Pure.

Owns: the table of target sizes and the conditions of a resize.
Start reading at: `target_bytes`, `Sizes`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moorage.kube.objects import Condition, PersistentVolume, PersistentVolumeClaim
from moorage.kube.quantity import bytes_of

CONTROLLER_IN_PROGRESS = "ControllerResizeInProgress"
CONTROLLER_INFEASIBLE = "ControllerResizeInfeasible"
NODE_PENDING = "NodeResizePending"

RESIZING, FS_PENDING = "Resizing", "FileSystemResizePending"
CONTROLLER_ERROR, NODE_ERROR = "ControllerResizeError", "NodeResizeError"
RESIZE_CONDITIONS = (RESIZING, FS_PENDING, CONTROLLER_ERROR, NODE_ERROR)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What claim and volume say about the size, in bytes."""

    requested: int
    usable: int  # the claim's status.capacity
    volume: int
    allocated: int | None
    state: str
    is_fs_pending: bool = False

    @classmethod
    def of(cls, claim: PersistentVolumeClaim, volume: PersistentVolume) -> "Sizes":
        allocated = claim.status.allocated_resources.get("storage")
        return cls(
            requested=bytes_of(claim.spec.resources.requests.get("storage")),
            usable=bytes_of(claim.status.capacity.get("storage")),
            volume=bytes_of(volume.spec.capacity.get("storage")),
            allocated=bytes_of(allocated) if allocated is not None else None,
            state=claim.status.allocated_resource_statuses.get("storage", ""),
            is_fs_pending=any(c.type == FS_PENDING and c.status == "True" for c in claim.status.conditions),
        )


def target_bytes(sizes: Sizes, *, had_final_error: bool, expands_on_controller: bool) -> int | None:
    """The size to ask the driver for, or None when nothing is to be asked now."""
    wanted, allocated = sizes.requested, sizes.allocated
    begun = allocated if allocated is not None else wanted
    if sizes.volume < wanted:
        match sizes.state:
            case "NodeResizeInfeasible":
                return begun
            case "NodeResizePending" | "NodeResizeInProgress":
                return begun if sizes.volume < begun else None  # let the node finish what was begun
            case "ControllerResizeInProgress":
                return wanted if had_final_error else begun
        return wanted
    match sizes.state:
        case "NodeResizePending" | "NodeResizeInProgress":
            return None
        case "NodeResizeInfeasible":
            return begun if expands_on_controller else wanted
        case "ControllerResizeInProgress" | "ControllerResizeInfeasible":
            return begun
    if not sizes.state and allocated is not None:
        return allocated
    return None if sizes.is_fs_pending else wanted


def condition(type: str, now: str, message: str = "", reason: str = "") -> dict[str, Any]:
    """One condition as a strategic merge patch carries it."""
    found = {"type": type, "status": "True", "lastTransitionTime": now}
    return found | ({"message": message} if message else {}) | ({"reason": reason} if reason else {})


def without(types: Iterable[str], present: Iterable[Condition]) -> list[dict[str, Any]]:
    """Patch entries that remove the conditions of these types that are present."""
    here = {each.type for each in present}
    return [{"$patch": "delete", "type": type} for type in types if type in here]
