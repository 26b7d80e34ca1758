"""PersistentVolumes and PersistentVolumeClaims: defaults, validation, what may change.

Owns: the rules of both kinds.
May not touch: binding; that is the binder's.
Start reading at: `VOLUME`, `CLAIM`.
"""

from typing import Any

from moorage.apiserver.errors import (
    FieldError,
    forbidden_field,
    immutable,
    invalid_value,
    not_supported,
    required,
    too_long,
)
from moorage.apiserver.kinds.metadata import is_subdomain, now_text
from moorage.apiserver.kinds.rules.base import Object, Rules, check_node_selector, quantity_of
from moorage.apiserver.kinds.schema import struct
from moorage.kube.names import BETA_REGION, BETA_STORAGE_CLASS, BETA_ZONE, REGION, ZONE
from moorage.kube.quantity import Quantity

ACCESS_MODES = ("ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod")
RECLAIM_POLICIES = ("Delete", "Recycle", "Retain")
VOLUME_MODES = ("Block", "Filesystem")
RESIZE_STATES = (
    "ControllerResizeInProgress", "ControllerResizeInfeasible", "NodeResizePending", "NodeResizeInProgress",
    "NodeResizeInfeasible",
)  # fmt: skip
_NOT_SOURCES = (
    "capacity", "accessModes", "claimRef", "persistentVolumeReclaimPolicy", "storageClassName", "mountOptions",
    "volumeMode", "nodeAffinity", "volumeAttributesClassName",
)  # fmt: skip
SOURCES = tuple(name for name in struct("core.v1.PersistentVolumeSpec").fields if name not in _NOT_SOURCES)


def _default_volume(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    spec.setdefault("persistentVolumeReclaimPolicy", "Retain")
    spec.setdefault("volumeMode", "Filesystem")
    if "hostPath" in spec and isinstance(spec["hostPath"], dict):
        spec["hostPath"].setdefault("type", "")
    obj.setdefault("status", {}).setdefault("phase", "Pending")


def _create_volume(obj: Object) -> None:
    obj["status"] = {"phase": "Pending", "lastPhaseTransitionTime": now_text()}


def _status_of_volume(new: Object, old: Object) -> None:
    status, before = new.setdefault("status", {}), old.get("status") or {}
    if status.get("phase") != before.get("phase"):
        if status.get("lastPhaseTransitionTime") == before.get("lastPhaseTransitionTime"):
            status["lastPhaseTransitionTime"] = now_text()
    elif "lastPhaseTransitionTime" in before and "lastPhaseTransitionTime" not in status:
        status["lastPhaseTransitionTime"] = before["lastPhaseTransitionTime"]


def check_access_modes(field: str, modes: list[str]) -> list[FieldError]:
    if not modes:
        return [required(field, "at least 1 access mode is required")]
    errors = [not_supported(field, mode, ACCESS_MODES) for mode in modes if mode not in ACCESS_MODES]
    if "ReadWriteOncePod" in modes and len(modes) > 1:
        why = "may not use ReadWriteOncePod with other access modes"
        errors.append(forbidden_field(field, why))
    return errors


def _check_volume(obj: Object) -> list[FieldError]:
    spec: dict[str, Any] = obj.get("spec") or {}
    errors = check_access_modes("spec.accessModes", spec.get("accessModes") or [])
    capacity = spec.get("capacity") or {}
    if not capacity:
        errors.append(required("spec.capacity"))
    elif set(capacity) != {"storage"}:
        errors.append(not_supported("spec.capacity", sorted(capacity), ["storage"]))
    else:
        errors += _check_whole("spec.capacity[storage]", capacity["storage"])
        errors += _check_size("spec.capacity[storage]", capacity["storage"])
    policy = spec.get("persistentVolumeReclaimPolicy")
    if policy not in RECLAIM_POLICIES:
        errors.append(not_supported("spec.persistentVolumeReclaimPolicy", policy, RECLAIM_POLICIES))
    if spec.get("volumeMode") not in VOLUME_MODES:
        errors.append(not_supported("spec.volumeMode", spec.get("volumeMode"), VOLUME_MODES))
    errors += _check_source(spec)
    if "nodeAffinity" in spec:
        affinity = spec["nodeAffinity"] or {}
        if "required" not in affinity:
            errors.append(required("spec.nodeAffinity.required", "must specify required node constraints"))
        else:
            errors += check_node_selector("spec.nodeAffinity.required", affinity["required"])
    if "storageClassName" in spec and not is_subdomain(spec["storageClassName"]):
        errors.append(invalid_value("spec.storageClassName", spec["storageClassName"], "must be a DNS subdomain"))
    return errors


def _check_source(spec: Object) -> list[FieldError]:
    found = [name for name in SOURCES if name in spec]
    errors: list[FieldError] = []
    if not found:
        errors.append(required("spec", "must specify a volume type"))
    errors += [forbidden_field(f"spec.{name}", "may not specify more than 1 volume type") for name in found[1:]]
    csi = spec.get("csi")
    if csi is not None:
        errors += check_driver_name("spec.csi.driver", csi.get("driver", ""))
        if not csi.get("volumeHandle"):
            errors.append(required("spec.csi.volumeHandle"))
        for name in ("controllerPublishSecretRef", "controllerExpandSecretRef", "nodePublishSecretRef",
                     "nodeStageSecretRef", "nodeExpandSecretRef"):  # fmt: skip
            for part in ("name", "namespace") if csi.get(name) is not None else ():
                if not csi[name].get(part):
                    errors.append(required(f"spec.csi.{name}.{part}"))
    local = spec.get("local")
    if local is not None:
        if not local.get("path"):
            errors.append(required("spec.local.path"))
        if "nodeAffinity" not in spec:
            errors.append(required("spec.nodeAffinity", "Local volume requires node affinity"))
    host = spec.get("hostPath")
    if host is not None:
        if not host.get("path"):
            errors.append(required("spec.hostPath.path"))
        elif ".." in host["path"].split("/"):
            errors.append(invalid_value("spec.hostPath.path", host["path"], "must not contain '..'"))
        if host.get("path") == "/" and spec.get("persistentVolumeReclaimPolicy") == "Recycle":
            errors.append(forbidden_field("spec.persistentVolumeReclaimPolicy", "may not be 'recycle' for '/'"))
    return errors + _check_attributes_class(spec, csi is not None)


def _check_attributes_class(spec: Object, has_csi: bool) -> list[FieldError]:
    if "volumeAttributesClassName" not in spec:
        return []
    name = spec["volumeAttributesClassName"]
    where = "spec.volumeAttributesClassName"
    if name == "":
        return [required(where, "an empty string is disallowed")]
    errors = [] if has_csi else [required("spec.csi", "has to be specified when using volumeAttributesClassName")]
    if not is_subdomain(name):
        errors.append(invalid_value(where, name, "must be a DNS subdomain"))
    return errors


def check_driver_name(field: str, name: str) -> list[FieldError]:
    if not name:
        return [required(field)]
    errors = [too_long(field, 63)] if len(name) > 63 else []
    if not is_subdomain(name.lower()):
        errors.append(invalid_value(field, name, "must be a DNS subdomain"))
    return errors


def _check_size(field: str, value: Any) -> list[FieldError]:
    amount, errors = quantity_of(field, value)
    if amount is not None and amount <= Quantity(0):
        errors.append(invalid_value(field, value, "must be greater than zero"))
    return errors


def _check_whole(field: str, value: Any) -> list[FieldError]:
    """A capacity must be a number of bytes that 64 bits hold; the message shows what those would make of it."""
    amount, _ = quantity_of(field, value)
    if amount is None or 0 <= amount.value < 1 << 63:
        return []
    wrapped = (amount.value + (1 << 63)) % (1 << 64) - (1 << 63)
    return [invalid_value(field, wrapped, "must be a valid resource quantity")]


def _update_volume(new: Object, old: Object) -> list[FieldError]:
    spec, before = new.get("spec") or {}, old.get("spec") or {}
    errors: list[FieldError] = []
    source = {name: spec[name] for name in SOURCES if name in spec}
    old_source = {name: before[name] for name in SOURCES if name in before}
    csi, old_csi = source.get("csi"), old_source.get("csi")
    if csi and old_csi and "controllerExpandSecretRef" in csi and "controllerExpandSecretRef" not in old_csi:
        source["csi"] = {key: value for key, value in csi.items() if key != "controllerExpandSecretRef"}
    if source != old_source:
        errors.append(
            forbidden_field("spec.persistentvolumesource", "spec.persistentvolumesource is immutable after creation")
        )
    if spec.get("volumeMode") != before.get("volumeMode"):
        errors.append(immutable("spec.volumeMode", spec.get("volumeMode")))
    if "nodeAffinity" in before and _renamed(spec.get("nodeAffinity")) != _renamed(before["nodeAffinity"]):
        errors.append(immutable("spec.nodeAffinity", spec.get("nodeAffinity")))
    if "volumeAttributesClassName" in before and "volumeAttributesClassName" not in spec:
        errors.append(
            forbidden_field("spec.volumeAttributesClassName", "update from non-nil value to nil is forbidden")
        )
    return errors


_GA_LABELS = {
    "beta.kubernetes.io/os": "kubernetes.io/os", "beta.kubernetes.io/arch": "kubernetes.io/arch",
    BETA_ZONE: ZONE,
    BETA_REGION: REGION,
    "beta.kubernetes.io/instance-type": "node.kubernetes.io/instance-type",
}  # fmt: skip


def _renamed(value: Any) -> Any:
    """Node affinity with beta topology labels under their final names."""
    if isinstance(value, dict):
        return {k: _GA_LABELS.get(v, v) if k == "key" and isinstance(v, str) else _renamed(v) for k, v in value.items()}
    return [_renamed(item) for item in value] if isinstance(value, list) else value


def _default_claim(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    spec.setdefault("volumeMode", "Filesystem")
    mirror_data_source(spec)
    obj.setdefault("status", {}).setdefault("phase", "Pending")


def mirror_data_source(spec: Object) -> None:
    """dataSource and dataSourceRef say the same thing, unless the reference crosses namespaces."""
    source, ref = spec.get("dataSource"), spec.get("dataSourceRef")
    if source and not ref:
        spec["dataSourceRef"] = dict(source)
    elif ref and not source and not ref.get("namespace"):
        mirrored = {key: value for key, value in ref.items() if key in ("apiGroup", "kind", "name")}
        group, kind = ref.get("apiGroup") or "", ref.get("kind")
        if (group, kind) in (("", "PersistentVolumeClaim"), ("snapshot.storage.k8s.io", "VolumeSnapshot")):
            spec["dataSource"] = mirrored


def _create_claim(obj: Object) -> None:
    obj["status"] = {"phase": "Pending"}


def check_claim_spec(spec: Object, where: str = "spec") -> list[FieldError]:
    errors = check_access_modes(f"{where}.accessModes", spec.get("accessModes") or [])
    requests = (spec.get("resources") or {}).get("requests") or {}
    if "storage" not in requests:
        errors.append(required(f"{where}.resources[storage]"))
    else:
        errors += _check_size(f"{where}.resources[storage]", requests["storage"])
    if spec.get("volumeMode", "Filesystem") not in VOLUME_MODES:
        errors.append(not_supported(f"{where}.volumeMode", spec.get("volumeMode"), VOLUME_MODES))
    for name in ("storageClassName", "volumeAttributesClassName"):
        if spec.get(name) and not is_subdomain(spec[name]):
            errors.append(invalid_value(f"{where}.{name}", spec[name], "must be a DNS subdomain"))
    for name in ("dataSource", "dataSourceRef"):
        errors += _check_data_source(f"{where}.{name}", spec.get(name))
    source, ref = spec.get("dataSource"), spec.get("dataSourceRef")
    if source and ref and any((source.get(k) or "") != (ref.get(k) or "") for k in ("apiGroup", "kind", "name")):
        errors.append(invalid_value(where, ref, "must match dataSource"))
    return errors


def _check_data_source(field: str, source: Object | None) -> list[FieldError]:
    if source is None:
        return []
    errors = [required(f"{field}.{name}") for name in ("name", "kind") if not source.get(name)]
    if not source.get("apiGroup") and source.get("kind") not in (None, "", "PersistentVolumeClaim"):
        why = "must be 'PersistentVolumeClaim' when referencing the default apiGroup"
        errors.append(invalid_value(field, source.get("kind"), why))
    return errors


def _check_claim(obj: Object) -> list[FieldError]:
    return check_claim_spec(obj.get("spec") or {})


def _update_claim(new: Object, old: Object) -> list[FieldError]:
    spec, before = new.get("spec") or {}, old.get("spec") or {}
    errors: list[FieldError] = []
    is_bound = (old.get("status") or {}).get("phase") == "Bound"
    allowed = dict(before)
    if not before.get("volumeName") and spec.get("volumeName"):
        allowed["volumeName"] = spec["volumeName"]
    if "storageClassName" not in before and "storageClassName" in spec:
        beta = (old["metadata"].get("annotations") or {}).get(BETA_STORAGE_CLASS)
        if beta is None or beta == spec["storageClassName"]:
            allowed["storageClassName"] = spec["storageClassName"]
    size, had = _request(spec), _request(before)
    if is_bound:
        _allow(allowed, spec, "volumeAttributesClassName")
        if size is not None:
            allowed["resources"] = _with_request(before.get("resources") or {}, size)
    if _comparable(allowed) != _comparable(spec):
        errors.append(
            forbidden_field(
                "spec",
                "spec is immutable after creation except resources.requests and volumeAttributesClassName "
                "for bound claims",
            )
        )
    elif is_bound and size is not None and had is not None:
        errors += _check_shrink(size, had, old)
    return errors + _check_class_kept(spec, before, old)


def _allow(allowed: Object, spec: Object, name: str) -> None:
    allowed.pop(name, None)
    if name in spec:
        allowed[name] = spec[name]


def _request(spec: Object) -> Any:
    return ((spec.get("resources") or {}).get("requests") or {}).get("storage")


def _with_request(resources: Object, size: Any) -> Object:
    return {**resources, "requests": {**(resources.get("requests") or {}), "storage": size}}


def _comparable(spec: Object) -> Object:
    """The spec with its size by value, so that 1Gi equals 1024Mi."""
    size = _request(spec)
    amount, _ = quantity_of("", size) if size is not None else (None, [])
    return {**spec, "resources": _with_request(spec.get("resources") or {}, str(amount.amount) if amount else size)}


def _check_shrink(size: Any, had: Any, old: Object) -> list[FieldError]:
    """A request may shrink only back to above what is there, to recover from an expansion that fails."""
    new_size, errors = quantity_of("spec.resources.requests.storage", size)
    old_size, _ = quantity_of("", had)
    status_size, _ = quantity_of("", ((old.get("status") or {}).get("capacity") or {}).get("storage", "0"))
    if new_size is None or old_size is None or errors or new_size >= old_size:
        return errors
    if status_size is None or new_size <= status_size:
        why = "field can not be less than status.capacity"
        return [forbidden_field("spec.resources.requests.storage", why)]
    return []


def _check_class_kept(spec: Object, before: Object, old: Object) -> list[FieldError]:
    status = old.get("status") or {}
    had, has = before.get("volumeAttributesClassName"), spec.get("volumeAttributesClassName")
    if had and not has and status.get("currentVolumeAttributesClassName"):
        why = "update from non-nil value to nil or an empty string is forbidden when there is a current class"
        return [forbidden_field("spec.volumeAttributesClassName", why)]
    return []


def _check_claim_status(new: Object, old: Object) -> list[FieldError]:
    status = new.get("status") or {}
    errors: list[FieldError] = []
    for key, value in (status.get("allocatedResourceStatuses") or {}).items():
        where = f"status.allocatedResourceStatuses[{key}]"
        if value not in RESIZE_STATES:
            errors.append(not_supported(where, value, RESIZE_STATES))
        if "/" not in key and key != "storage":
            errors.append(not_supported(where, key, ["storage"]))
    for name in ("capacity", "allocatedResources"):
        for key, value in (status.get(name) or {}).items():
            errors += quantity_of(f"status.{name}[{key}]", value)[1]
    return errors


VOLUME = Rules(
    default=_default_volume,
    on_create=_create_volume,
    on_status=_status_of_volume,
    check=_check_volume,
    check_update=_update_volume,
)
CLAIM = Rules(
    default=_default_claim,
    on_create=_create_claim,
    check=_check_claim,
    check_update=_update_claim,
    check_status=_check_claim_status,
)
