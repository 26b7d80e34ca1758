"""Claims, volumes and classes for tests of the binder, written shortly, and the surroundings of a decision."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from moorage.controllers.binder.matching import FreeVolumes
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, StorageClass
from moorage.kube.volumes import default_class

RWO, ROX, RWX = "ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"


def volume(name: str = "volume", size: str = "1Gi", **spec: Any) -> PersistentVolume:
    """A volume, Available unless said otherwise; `claim` and `claim_uid` reserve it, `notes` are annotations."""
    meta = {
        "name": name,
        "uid": f"uid-of-{name}",
        "resourceVersion": "1",
        "annotations": spec.pop("notes", {}),
        "labels": spec.pop("labels", {}),
        "finalizers": spec.pop("finalizers", []),
    }
    if spec.pop("is_deleting", False):
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    phase = spec.pop("phase", "Available")
    if "claim" in spec:
        spec["claimRef"] = {"namespace": "default", "name": spec.pop("claim"), "uid": spec.pop("claim_uid", "")}
    spec = {"accessModes": [RWO], "persistentVolumeReclaimPolicy": "Retain", "capacity": {"storage": size}} | spec
    document = {"metadata": meta, "spec": spec, "status": {"phase": phase}}
    return msgspec.convert(document, PersistentVolume)


def claim(name: str = "claim", size: str = "1Gi", **spec: Any) -> PersistentVolumeClaim:
    """A claim, Pending and with the empty class unless said otherwise."""
    meta = {
        "name": name,
        "namespace": "default",
        "uid": spec.pop("uid", f"uid-of-{name}"),
        "resourceVersion": "7",
        "annotations": spec.pop("notes", {}),
    }
    status = {"phase": spec.pop("phase", "Pending")} | spec.pop("status", {})
    if spec.get("storageClassName", "") is None:
        del spec["storageClassName"]
    else:
        spec.setdefault("storageClassName", "")
    spec = {"accessModes": [RWO], "resources": {"requests": {"storage": size}}} | spec
    return msgspec.convert({"metadata": meta, "spec": spec, "status": status}, PersistentVolumeClaim)


def storage_class(name: str, provisioner: str = "csi.example.com", *, late: bool = False, **meta: Any) -> StorageClass:
    mode = "WaitForFirstConsumer" if late else "Immediate"
    document = {"metadata": {"name": name, **meta}, "provisioner": provisioner, "volumeBindingMode": mode}
    return msgspec.convert(document, StorageClass)


def merged(old: Any, patch: Any) -> Any:
    """A JSON merge patch, applied."""
    if not isinstance(patch, dict):
        return patch
    out = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merged(out.get(key), value)
    return out


class Around:
    """The surroundings of a claim, from lists."""

    def __init__(
        self,
        volumes: Iterable[PersistentVolume] = (),
        classes: Iterable[StorageClass] = (),
        pods: Sequence[str] = (),
    ) -> None:
        self._volumes = {one.name: one for one in volumes}
        self._classes = {one.name: one for one in classes}
        self._pods = pods
        self.free = FreeVolumes(self._volumes.get)
        for one in self._volumes.values():
            self.free.see(None, one)

    def volume(self, name: str) -> PersistentVolume | None:
        return self._volumes.get(name)

    def best_volume(self, claim: PersistentVolumeClaim, *, only_reserved: bool) -> PersistentVolume | None:
        return self.free.best_for(claim, only_reserved=only_reserved)

    def storage_class(self, name: str) -> StorageClass | None:
        return self._classes.get(name)

    def default_class(self) -> StorageClass | None:
        return default_class(self._classes.values())

    def unscheduled_pods(self, claim: PersistentVolumeClaim) -> Sequence[str]:
        return self._pods
