"""What needs other objects: namespaces that exist, default classes, finalizers that protect.

Owns: the checks and defaults that Kubernetes does in admission plugins.
May not touch: HTTP.
Start reading at: `on_create`.
"""

from moorage.apiserver.errors import forbidden, not_found
from moorage.apiserver.kinds.registry import Kind, Object
from moorage.apiserver.store.store import Store, Transaction, decode
from moorage.apiserver.writing.service_accounts import admit_account
from moorage.kube.names import (
    BETA_DEFAULT_CLASS,
    BETA_STORAGE_CLASS,
    CLAIM_PROTECTION,
    CLASS_PROTECTION,
    DEFAULT_CLASS,
    NOT_READY,
    UNREACHABLE,
    VOLUME_PROTECTION,
)
from moorage.kube.quantity import bytes_of

_PERMANENT = ("default", "kube-system", "kube-public", "kube-node-lease")
_DEFAULT_CLASS = (DEFAULT_CLASS, BETA_DEFAULT_CLASS)


def check_namespace(txn: Transaction, kind: Kind, namespace: str, name: str) -> None:
    """Objects are created only in namespaces that exist and are not going away."""
    if not kind.is_namespaced:
        return
    record = txn.get("namespaces", "", namespace)
    if record is None:
        raise not_found("namespaces", "", namespace)
    if b'"phase":"Terminating"' in record.body:
        why = f"unable to create new content in namespace {namespace} because it is being terminated"
        cause = {"reason": "NamespaceTerminating", "message": f"namespace {namespace} is being terminated",
                 "field": "metadata.namespace"}  # fmt: skip
        raise forbidden(kind.plural, kind.group, name, why, [cause])


def on_create(store: Store, txn: Transaction, kind: Kind, obj: Object) -> None:
    match kind.stored_as:
        case "persistentvolumeclaims":
            _add_finalizer(obj, CLAIM_PROTECTION)
            _default_class(store, obj)
        case "persistentvolumes":
            _add_finalizer(obj, VOLUME_PROTECTION)
        case "volumeattributesclasses.storage.k8s.io":
            _add_finalizer(obj, CLASS_PROTECTION)
        case "pods":
            _admit_pod(store, txn, obj)


def on_update(txn: Transaction, kind: Kind, obj: Object, old: Object) -> None:
    if kind.stored_as == "persistentvolumeclaims":
        _admit_growth(txn, obj, old)


def on_delete(kind: Kind, obj: Object) -> None:
    if kind.stored_as == "namespaces" and obj["metadata"]["name"] in _PERMANENT[:2] + _PERMANENT[2:3]:
        raise forbidden("namespaces", "", obj["metadata"]["name"], "this namespace may not be deleted")


def _admit_pod(store: Store, txn: Transaction, pod: Object) -> None:
    """An account, tolerations for nodes that fail, and a priority, as on every cluster."""
    spec = pod["spec"]
    admit_account(txn, pod)
    tolerations = spec.setdefault("tolerations", [])
    for key in (NOT_READY, UNREACHABLE):
        if not any(_tolerates(toleration, key) for toleration in tolerations):
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
    _admit_priority(store, txn, pod)


def _tolerates(toleration: Object, key: str) -> bool:
    return bool(toleration.get("key", key) == key and toleration.get("effect", "NoExecute") == "NoExecute")


_SYSTEM_PRIORITIES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}


def _admit_priority(store: Store, txn: Transaction, pod: Object) -> None:
    spec = pod["spec"]
    name, policy = spec.get("priorityClassName", ""), "PreemptLowerPriority"
    value = 0
    if name in _SYSTEM_PRIORITIES:
        value = _SYSTEM_PRIORITIES[name]
    elif name:
        record = txn.get("priorityclasses.scheduling.k8s.io", "", name)
        if record is None:
            why = f"no PriorityClass with name {name} was found"
            raise forbidden("pods", "", pod["metadata"].get("name", ""), why)
        found = decode(record.body)
        value, policy = found.get("value", 0), found.get("preemptionPolicy", policy)
    else:
        for found in store.objects("priorityclasses.scheduling.k8s.io"):
            if found.get("globalDefault"):
                spec["priorityClassName"] = found["metadata"]["name"]
                value, policy = found.get("value", 0), found.get("preemptionPolicy", policy)
    spec["priority"] = value
    spec.setdefault("preemptionPolicy", policy)


def _admit_growth(txn: Transaction, claim: Object, old: Object) -> None:
    """A claim may ask for more only when it is bound and its class allows expansion."""
    sizes = [((one["spec"].get("resources") or {}).get("requests") or {}).get("storage") for one in (claim, old)]
    if bytes_of(sizes[0]) <= bytes_of(sizes[1]):
        return
    name = claim["metadata"]["name"]
    if (old.get("status") or {}).get("phase") != "Bound":
        raise forbidden("persistentvolumeclaims", "", name, "Only bound persistent volume claims can be expanded")
    wanted = _class_of(claim)
    record = txn.get("storageclasses.storage.k8s.io", "", wanted) if wanted and wanted == _class_of(old) else None
    if record is None or not decode(record.body).get("allowVolumeExpansion"):
        why = (
            "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support"
            " resize"
        )
        raise forbidden("persistentvolumeclaims", "", name, why)


def _class_of(claim: Object) -> str:
    annotations = claim["metadata"].get("annotations") or {}
    found = annotations.get(BETA_STORAGE_CLASS, claim["spec"].get("storageClassName"))
    return str(found or "")


def _add_finalizer(obj: Object, name: str) -> None:
    found = obj["metadata"].setdefault("finalizers", [])
    if name not in found:
        found.append(name)


def _default_class(store: Store, claim: Object) -> None:
    """A claim that names no class gets the newest default one; ties go to the first name."""
    annotations = claim["metadata"].get("annotations") or {}
    spec = claim.get("spec") or {}
    if "storageClassName" in spec or BETA_STORAGE_CLASS in annotations:
        return
    best = default_class(store)
    if best is not None:
        claim.setdefault("spec", {})["storageClassName"] = best


def default_class(store: Store) -> str | None:
    """The name of the effective default StorageClass."""
    found = []
    for record in store.table("storageclasses.storage.k8s.io").records.values():
        if b"is-default-class" not in record.body:
            continue
        meta = decode(record.body)["metadata"]
        if any((meta.get("annotations") or {}).get(key) == "true" for key in _DEFAULT_CLASS):
            found.append(meta)
    found.sort(key=lambda meta: meta["name"])
    found.sort(key=lambda meta: meta["creationTimestamp"], reverse=True)
    return found[0]["name"] if found else None
