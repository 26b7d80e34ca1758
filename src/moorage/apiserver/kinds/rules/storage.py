"""The kinds of storage.k8s.io: defaults, validation, what may change.

Owns: StorageClass, VolumeAttachment, CSIDriver, CSINode, CSIStorageCapacity, VolumeAttributesClass.
May not touch: what controllers do with them.
Start reading at: `CLASS` and the other rules at the end.
"""

from typing import Any

from moorage.apiserver.errors import (
    FieldError,
    duplicate,
    forbidden_field,
    immutable,
    invalid_value,
    not_supported,
    required,
    too_long,
    too_many_items,
)
from moorage.apiserver.kinds.metadata import is_subdomain, qualified_problem
from moorage.apiserver.kinds.rules.base import Object, Rules, not_below_zero, not_negative, one_of, unchanged, unique
from moorage.apiserver.kinds.rules.volumes import check_driver_name

LIMIT_BYTES = 256 << 10
LIFECYCLES = ("Ephemeral", "Persistent")
FS_GROUP_POLICIES = ("File", "None", "ReadWriteOnceWithFSType")


def _default_class(obj: Object) -> None:
    obj.setdefault("reclaimPolicy", "Delete")
    obj.setdefault("volumeBindingMode", "Immediate")


def _check_parameters(parameters: Object, may_be_empty: bool = True) -> list[FieldError]:
    errors: list[FieldError] = []
    if not parameters and not may_be_empty:
        return [required("parameters", "must contain at least one key/value pair")]
    if len(parameters) > 512:
        errors.append(too_many_items("parameters", len(parameters), 512))
    if any(not key for key in parameters):
        errors.append(invalid_value("parameters", "", "field can not be empty."))
    if sum(len(k.encode()) + len(v.encode()) for k, v in parameters.items()) > LIMIT_BYTES:
        errors.append(too_long("parameters", LIMIT_BYTES))
    return errors


def _check_class(obj: Object) -> list[FieldError]:
    name = obj.get("provisioner", "")
    errors: list[FieldError] = []
    if not name:
        errors.append(required("provisioner"))
    elif problem := qualified_problem(name.lower()):
        errors.append(invalid_value("provisioner", name, problem))
    errors += _check_parameters(obj.get("parameters") or {})
    errors += one_of("reclaimPolicy", obj.get("reclaimPolicy"), ("Delete", "Retain"))
    errors += one_of("volumeBindingMode", obj.get("volumeBindingMode"), ("Immediate", "WaitForFirstConsumer"))
    seen: list[Any] = []
    for at, term in enumerate(obj.get("allowedTopologies") or []):
        expressions = term.get("matchLabelExpressions") or []
        for n, expression in enumerate(expressions):
            where = f"allowedTopologies[{at}].matchLabelExpressions[{n}]"
            if problem := qualified_problem(expression.get("key", "")):
                errors.append(invalid_value(f"{where}.key", expression.get("key", ""), problem))
            if not expression.get("values"):
                errors.append(required(f"{where}.values"))
            errors += unique(f"{where}.values", expression.get("values") or [])
        shape = {e.get("key"): sorted(e.get("values") or []) for e in expressions}
        if shape in seen:
            errors.append(duplicate(f"allowedTopologies[{at}].matchLabelExpressions", ""))
        seen.append(shape)
    return errors


def _update_class(new: Object, old: Object) -> list[FieldError]:
    changed = [n for n in ("parameters", "provisioner", "reclaimPolicy") if new.get(n) != old.get(n)]
    errors = [forbidden_field(name, f"updates to {name} are forbidden.") for name in changed]
    return errors + unchanged("volumeBindingMode", new.get("volumeBindingMode"), old.get("volumeBindingMode"))


def _check_attachment(obj: Object) -> list[FieldError]:
    spec = obj.get("spec") or {}
    errors = check_driver_name("spec.attacher", spec.get("attacher", ""))
    if not spec.get("nodeName"):
        errors.append(required("spec.nodeName"))
    elif not is_subdomain(spec["nodeName"]):
        errors.append(invalid_value("spec.nodeName", spec["nodeName"], "must be a DNS subdomain"))
    source = spec.get("source") or {}
    found = [name for name in ("persistentVolumeName", "inlineVolumeSpec") if name in source]
    if not found:
        errors.append(required("spec.source", "must specify exactly one of inlineVolumeSpec and persistentVolumeName"))
    elif len(found) > 1:
        why = "must specify exactly one of inlineVolumeSpec and persistentVolumeName"
        errors.append(forbidden_field("spec.source", why))
    elif source.get("persistentVolumeName") == "":
        errors.append(required("spec.source.persistentVolumeName", "must specify non empty persistentVolumeName"))
    return errors


def _update_attachment(new: Object, old: Object) -> list[FieldError]:
    return unchanged("spec", new.get("spec"), old.get("spec"))


def _check_attachment_status(new: Object, _old: Object) -> list[FieldError]:
    status = new.get("status") or {}
    errors: list[FieldError] = []
    metadata = status.get("attachmentMetadata") or {}
    if sum(len(k.encode()) + len(v.encode()) for k, v in metadata.items()) > LIMIT_BYTES:
        errors.append(too_long("status.attachmentMetadata", LIMIT_BYTES))
    for name in ("attachError", "detachError"):
        error = status.get(name) or {}
        if len(error.get("message", "").encode()) > 1024:
            errors.append(too_long(f"status.{name}.message", 1024))
        errors += not_negative(f"status.{name}.errorCode", error.get("errorCode"))
    return errors


def _create_attachment(obj: Object) -> None:
    obj["status"] = {"attached": False}


def _default_driver(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    spec.setdefault("attachRequired", True)
    spec.setdefault("podInfoOnMount", False)
    spec.setdefault("storageCapacity", False)
    spec.setdefault("fsGroupPolicy", "ReadWriteOnceWithFSType")
    spec.setdefault("requiresRepublish", False)
    spec.setdefault("seLinuxMount", False)
    spec.setdefault("preventPodSchedulingIfMissing", False)
    if not spec.get("volumeLifecycleModes"):
        spec["volumeLifecycleModes"] = ["Persistent"]


def _check_driver(obj: Object) -> list[FieldError]:
    spec = obj.get("spec") or {}
    errors = check_driver_name("metadata.name", obj["metadata"].get("name", ""))
    for at, mode in enumerate(spec.get("volumeLifecycleModes") or []):
        if mode not in LIFECYCLES:
            errors.append(not_supported(f"spec.volumeLifecycleModes[{at}]", mode, LIFECYCLES))
    if spec.get("fsGroupPolicy") not in FS_GROUP_POLICIES:
        errors.append(not_supported("spec.fsGroupPolicy", spec.get("fsGroupPolicy"), FS_GROUP_POLICIES))
    requests = spec.get("tokenRequests") or []
    audiences = [request.get("audience", "") for request in requests]
    for at, request in enumerate(requests):
        where = f"spec.tokenRequests[{at}]"
        if audiences.index(audiences[at]) != at:
            errors.append(duplicate(f"{where}.audience", audiences[at]))
        seconds = request.get("expirationSeconds")
        if seconds is not None and seconds < 600:
            errors.append(
                invalid_value(f"{where}.expirationSeconds", seconds, "may not specify a duration less than 10 minutes")
            )
        if seconds is not None and seconds > 2**32:
            errors.append(
                invalid_value(
                    f"{where}.expirationSeconds", seconds, "may not specify a duration larger than 2^32 seconds"
                )
            )
    if spec.get("serviceAccountTokenInSecrets") is not None and not requests:
        errors.append(invalid_value("spec.serviceAccountTokenInSecrets", spec["serviceAccountTokenInSecrets"],
                                    "must be unset when tokenRequests is empty"))  # fmt: skip
    period = spec.get("nodeAllocatableUpdatePeriodSeconds")
    if period is not None and period < 10:
        errors.append(
            invalid_value(
                "spec.nodeAllocatableUpdatePeriodSeconds", period, "must be greater than or equal to 10 seconds"
            )
        )
    return errors


def _update_driver(new: Object, old: Object) -> list[FieldError]:
    spec, before = new.get("spec") or {}, old.get("spec") or {}
    errors: list[FieldError] = []
    for name in ("attachRequired", "volumeLifecycleModes"):
        errors += unchanged(f"spec.{name}", spec.get(name), before.get(name))
    return errors


def _default_csinode(obj: Object) -> None:
    obj.setdefault("spec", {}).setdefault("drivers", [])


def _check_csinode(obj: Object) -> list[FieldError]:
    errors: list[FieldError] = []
    names: list[str] = []
    for at, driver in enumerate((obj.get("spec") or {}).get("drivers") or []):
        where = f"spec.drivers[{at}]"
        errors += check_driver_name(f"{where}.name", driver.get("name", ""))
        if driver.get("name") in names:
            errors.append(duplicate(f"{where}.name", driver.get("name")))
        names.append(driver.get("name", ""))
        node = driver.get("nodeID", "")
        if not node:
            errors.append(required(f"{where}.nodeID"))
        elif len(node) > 256:
            errors.append(invalid_value(f"{where}.nodeID", node, "must be 256 characters or less"))
        errors += not_negative(f"{where}.allocatable.count", (driver.get("allocatable") or {}).get("count"))
        keys = driver.get("topologyKeys") or []
        for key in keys:
            if problem := qualified_problem(key):
                errors.append(invalid_value(f"{where}.topologyKeys", key, problem))
        errors += unique(f"{where}.topologyKeys", keys)
    return errors


def _update_csinode(new: Object, old: Object) -> list[FieldError]:
    before = {d.get("name"): d for d in (old.get("spec") or {}).get("drivers") or []}
    errors: list[FieldError] = []
    for at, driver in enumerate((new.get("spec") or {}).get("drivers") or []):
        had = before.get(driver.get("name"))
        if had is None:
            continue
        changed = [name for name in ("nodeID", "topologyKeys") if driver.get(name) != had.get(name)]
        errors += [immutable(f"spec.drivers[{at}].{name}", driver.get(name)) for name in changed]
    return errors


def _check_capacity(obj: Object) -> list[FieldError]:
    errors: list[FieldError] = []
    name = obj.get("storageClassName", "")
    if not name:
        errors.append(required("storageClassName"))
    elif not is_subdomain(name):
        errors.append(invalid_value("storageClassName", name, "must be a DNS subdomain"))
    return errors + not_below_zero("capacity", obj.get("capacity", "0"))


def _update_capacity(new: Object, old: Object) -> list[FieldError]:
    errors = unchanged("nodeTopology", new.get("nodeTopology"), old.get("nodeTopology"))
    return errors + unchanged("storageClassName", new.get("storageClassName"), old.get("storageClassName"))


def _check_attributes(obj: Object) -> list[FieldError]:
    errors = check_driver_name("driverName", obj.get("driverName", ""))
    return errors + _check_parameters(obj.get("parameters") or {}, may_be_empty=False)


def _update_attributes(new: Object, old: Object) -> list[FieldError]:
    changed = [name for name in ("driverName", "parameters") if new.get(name) != old.get(name)]
    return [forbidden_field(name, f"updates to {name} are forbidden.") for name in changed]


CLASS = Rules(default=_default_class, check=_check_class, check_update=_update_class)
ATTACHMENT = Rules(
    on_create=_create_attachment,
    check=_check_attachment,
    check_update=_update_attachment,
    check_status=_check_attachment_status,
)
DRIVER = Rules(default=_default_driver, check=_check_driver, check_update=_update_driver)
CSI_NODE = Rules(default=_default_csinode, check=_check_csinode, check_update=_update_csinode)
CAPACITY = Rules(check=_check_capacity, check_update=_update_capacity)
ATTRIBUTES_CLASS = Rules(check=_check_attributes, check_update=_update_attributes)
