"""The objects that a new cluster starts with: the driver, storage classes and snapshot classes.

Owns: their names and fields, for Moorage's own driver and for any other.
May not touch: objects that are there already; a person may have changed them.
Start reading at: `default_objects`, `ensure`.
"""

from typing import Any

from moorage.kube.api.client import Client
from moorage.kube.errors import AlreadyExists
from moorage.kube.names import DEFAULT_CLASS, DEFAULT_GROUP_SNAPSHOT_CLASS, DEFAULT_SNAPSHOT_CLASS
from moorage.kube.objects import CSIDriver, KubeObject, StorageClass, VolumeSnapshotClass
from moorage.kube.objects.snapshots import VolumeGroupSnapshotClass

DRIVER = "csi.moorage.dev"
_DEFAULT = {DEFAULT_CLASS: "true"}
_DEFAULT_SNAPSHOT = {DEFAULT_SNAPSHOT_CLASS: "true"}

DefaultObject = tuple[type[KubeObject], dict[str, Any]]


def default_objects(driver: str, *, attaches: bool, is_ours: bool) -> list[DefaultObject]:
    """What a cluster over this driver begins with; a foreign driver gets one plain class of each kind."""
    objects = [_csi_driver(driver, attaches)]
    if is_ours:
        objects += [
            _class("moorage", driver, {"kind": "image"}, annotations=_DEFAULT),
            _class("moorage-immediate", driver, {"kind": "image"}, mode="Immediate"),
            _class("moorage-directory", driver, {"kind": "directory"}),
            _class("moorage-block", driver, {"kind": "image", "provisioning": "thick"}),
        ]
        name = "moorage"
    else:
        name = driver.split(".")[0]
        objects += [
            _class(name, driver, {}, annotations=_DEFAULT),
            _class(f"{name}-immediate", driver, {}, mode="Immediate"),
        ]
    return [*objects, _snapshot_class(name, driver), _group_class(name, driver)]


async def ensure(client: Client, objects: list[DefaultObject]) -> list[str]:
    """Create what is missing; returns the names of what was made."""
    made = []
    for kind, body in objects:
        try:
            await client.create(kind, body)
            made.append(f"{kind.resource.kind}/{body['metadata']['name']}")
        except AlreadyExists:
            continue
    return made


def _csi_driver(driver: str, attach: bool) -> DefaultObject:
    spec = {
        "attachRequired": attach,
        "podInfoOnMount": True,
        "fsGroupPolicy": "File",
        "storageCapacity": True,
        "volumeLifecycleModes": ["Persistent", "Ephemeral"],
    }
    return CSIDriver, {"metadata": {"name": driver}, "spec": spec}


def _class(
    name: str,
    driver: str,
    parameters: dict[str, str],
    *,
    mode: str = "WaitForFirstConsumer",
    annotations: dict[str, str] | None = None,
) -> DefaultObject:
    return StorageClass, {
        "metadata": {"name": name, "annotations": annotations or {}},
        "provisioner": driver,
        "parameters": parameters,
        "volumeBindingMode": mode,
        "allowVolumeExpansion": True,
        "reclaimPolicy": "Delete",
    }


def _snapshot_class(name: str, driver: str) -> DefaultObject:
    meta = {"name": name, "annotations": _DEFAULT_SNAPSHOT}
    return VolumeSnapshotClass, {"metadata": meta, "driver": driver, "deletionPolicy": "Delete"}


def _group_class(name: str, driver: str) -> DefaultObject:
    annotations = {DEFAULT_GROUP_SNAPSHOT_CLASS: "true"}
    meta = {"name": name, "annotations": annotations}
    return VolumeGroupSnapshotClass, {"metadata": meta, "driver": driver, "deletionPolicy": "Delete"}
