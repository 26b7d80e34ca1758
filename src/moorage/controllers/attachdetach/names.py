"""The names that attachments go by: unique volume names, and the names of VolumeAttachment objects.

Owns: how they are made and taken apart. Pure functions.
Start reading at: `volume_name`, `attachment_name`.
"""

import hashlib
from functools import lru_cache
from typing import NewType

VolumeName = NewType("VolumeName", str)
NodeName = NewType("NodeName", str)

_PREFIX = "kubernetes.io/csi/"
MANAGED = "volumes.kubernetes.io/controller-managed-attach-detach"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


def volume_name(driver: str, handle: str) -> VolumeName:
    """The unique name of a CSI volume, as node status lists it."""
    return VolumeName(f"{_PREFIX}{driver}^{handle}")


def driver_and_handle(name: str) -> tuple[str, str] | None:
    """The driver and handle in a unique name; None for a volume of another plugin.

    A driver's name cannot hold `^`, so the first one separates, and a handle may hold more.
    """
    driver, caret, handle = name.removeprefix(_PREFIX).partition("^")
    if not name.startswith(_PREFIX) or not caret or not driver or not handle:
        return None
    return driver, handle


@lru_cache(maxsize=8192)
def attachment_name(volume: VolumeName, node: NodeName) -> str:
    """The name of the VolumeAttachment of a CSI volume on a node, as Kubernetes computes it."""
    parts = driver_and_handle(volume)
    driver, handle = parts if parts is not None else ("", volume)
    return "csi-" + hashlib.sha256(f"{handle}{driver}{node}".encode()).hexdigest()
