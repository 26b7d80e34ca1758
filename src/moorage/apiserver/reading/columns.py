"""The columns that kubectl shows for each kind, and what stands in them.

Owns: the table of columns and the cells of built-in kinds.
May not touch: storage; a cell is a function of one object.
Start reading at: `columns_for`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moorage.apiserver.kinds.registry import Object
from moorage.apiserver.reading.durations import age_of
from moorage.apiserver.reading.pod_columns import pod_ready, pod_restarts, pod_status, readiness_gates
from moorage.kube.names import BETA_STORAGE_CLASS

Cell = Callable[[Object], Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column; one of priority 1 appears with `-o wide`."""

    name: str
    cell: Cell
    type: str = "string"
    priority: int = 0
    format: str = ""

    def definition(self) -> Object:
        return {"name": self.name, "type": self.type, "format": self.format, "description": self.name,
                "priority": self.priority}  # fmt: skip


def _at(path: str, default: Any = "") -> Cell:
    steps = path.split(".")

    def cell(obj: Object) -> Any:
        found: Any = obj
        for step in steps:
            found = found.get(step) if isinstance(found, dict) else None
        return default if found is None else found

    return cell


def _text(path: str, default: str = "") -> Cell:
    inner = _at(path)

    def cell(obj: Object) -> str:
        value = inner(obj)
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value) if value not in ("", None) else default

    return cell


NAME = Column("Name", lambda obj: obj["metadata"]["name"], format="name")
AGE = Column("Age", lambda obj: age_of(obj["metadata"].get("creationTimestamp")))

_SHORT_MODES = {"ReadWriteOnce": "RWO", "ReadOnlyMany": "ROX", "ReadWriteMany": "RWX", "ReadWriteOncePod": "RWOP"}


def access_modes(modes: list[str]) -> str:
    """`RWO,ROX`, in Kubernetes' order, each once."""
    return ",".join(short for mode, short in _SHORT_MODES.items() if mode in modes)


def _phase(obj: Object) -> str:
    if obj["metadata"].get("deletionTimestamp"):
        return "Terminating"
    return str((obj.get("status") or {}).get("phase", ""))


def _class(obj: Object) -> str:
    annotations = obj["metadata"].get("annotations") or {}
    beta = annotations.get(BETA_STORAGE_CLASS)
    return beta if beta is not None else (obj.get("spec") or {}).get("storageClassName") or ""


def _claim_of(obj: Object) -> str:
    ref = (obj.get("spec") or {}).get("claimRef")
    return f"{ref.get('namespace', '')}/{ref.get('name', '')}" if ref else ""


def _bound(cell: Cell) -> Cell:
    """Shown only once the claim names a volume."""
    return lambda obj: cell(obj) if (obj.get("spec") or {}).get("volumeName") else ""


def _roles(obj: Object) -> str:
    labels = obj["metadata"].get("labels") or {}
    prefix = "node-role.kubernetes.io/"
    found = {key[len(prefix) :] for key in labels if key.startswith(prefix)}
    if labels.get("kubernetes.io/role"):
        found.add(labels["kubernetes.io/role"])
    return ",".join(sorted(found)) or "<none>"


def _node_status(obj: Object) -> str:
    conditions = {c.get("type"): c.get("status") for c in (obj.get("status") or {}).get("conditions") or []}
    words = ["Unknown" if "Ready" not in conditions else "Ready" if conditions["Ready"] == "True" else "NotReady"]
    if (obj.get("spec") or {}).get("unschedulable"):
        words.append("SchedulingDisabled")
    return ",".join(words)


def _address(kind: str) -> Cell:
    def cell(obj: Object) -> str:
        for address in (obj.get("status") or {}).get("addresses") or []:
            if address.get("type") == kind:
                return str(address.get("address"))
        return "<none>"

    return cell


def _modes(obj: Object) -> str:
    return ",".join((obj.get("spec") or {}).get("volumeLifecycleModes") or []) or "<none>"


def _tokens(obj: Object) -> str:
    requests = (obj.get("spec") or {}).get("tokenRequests") or []
    return ",".join(request.get("audience", "") for request in requests) or "<unset>"


def _event_seen(obj: Object) -> str:
    series = obj.get("series") or {}
    last = series.get("lastObservedTime") or obj.get("lastTimestamp") or obj.get("eventTime")
    return age_of(last or obj["metadata"].get("creationTimestamp"))


def _event_object(obj: Object) -> str:
    about = obj.get("involvedObject") or obj.get("regarding") or {}
    kind = str(about.get("kind", "")).lower()
    return f"{kind}/{about['name']}" if about.get("name") else kind


def _event_source(obj: Object) -> str:
    source = obj.get("source") or obj.get("deprecatedSource") or {}
    component = source.get("component") or obj.get("reportingComponent") or obj.get("reportingController") or ""
    host = source.get("host")
    return f"{component}, {host}" if host else str(component)


def _event_count(obj: Object) -> int:
    series = obj.get("series") or {}
    return int(series.get("count") or obj.get("count") or obj.get("deprecatedCount") or 1)


def _size(*names: str) -> Cell:
    return lambda obj: sum(len(obj.get(name) or {}) for name in names)


def _ready(obj: Object) -> str:
    status = obj.get("status") or {}
    return f"{status.get('readyReplicas', 0)}/{(obj.get('spec') or {}).get('replicas', 0)}"


def _containers(field: str) -> Cell:
    def cell(obj: Object) -> str:
        template = (obj.get("spec") or {}).get("template") or {}
        return ",".join(c.get(field, "") for c in (template.get("spec") or {}).get("containers") or [])

    return cell


def _selector(obj: Object) -> str:
    selector = (obj.get("spec") or {}).get("selector") or {}
    labels = selector.get("matchLabels", selector) or {}
    pairs = [f"{key}={value}" for key, value in sorted(labels.items()) if isinstance(value, str)]
    return ",".join(pairs) or "<none>"


def _ports(obj: Object) -> str:
    ports = (obj.get("spec") or {}).get("ports") or []
    return ",".join(f"{p.get('port')}/{p.get('protocol', 'TCP')}" for p in ports) or "<none>"


def _role_ref(obj: Object) -> str:
    ref = obj.get("roleRef") or {}
    return f"{ref.get('kind', '')}/{ref.get('name', '')}"


def _subjects(kind: str) -> Cell:
    def cell(obj: Object) -> str:
        found = [s for s in obj.get("subjects") or [] if s.get("kind") == kind]
        return ", ".join(f"{s['namespace']}/{s['name']}" if s.get("namespace") else s.get("name", "") for s in found)

    return cell


def _endpoints(obj: Object) -> str:
    found = [f"{address.get('ip')}:{port.get('port')}" for subset in obj.get("subsets") or []
             for port in subset.get("ports") or [] for address in subset.get("addresses") or []]  # fmt: skip
    more = f" + {len(found) - 3} more..." if len(found) > 3 else ""
    return ",".join(found[:3]) + more if found else "<none>"


_WIDE_WORKLOAD = (
    Column("Containers", _containers("name"), priority=1),
    Column("Images", _containers("image"), priority=1),
    Column("Selector", _selector, priority=1),
)


def _count(name: str, path: str) -> Column:
    return Column(name, _at(path, 0), "integer")


_EVENT = [
    Column("Last Seen", _event_seen), Column("Type", _text("type")), Column("Reason", _text("reason")),
    Column("Object", _event_object), Column("Subobject", _text("involvedObject.fieldPath"), priority=1),
    Column("Source", _event_source, priority=1),
    Column("Message", lambda obj: str(obj.get("message") or obj.get("note") or "").strip()),
    Column("First Seen", lambda obj: age_of(obj.get("firstTimestamp") or obj.get("eventTime")
           or obj["metadata"].get("creationTimestamp")), priority=1),
    Column("Count", _event_count, priority=1), Column("Name", NAME.cell, format="name", priority=1),
]  # fmt: skip

COLUMNS: dict[str, list[Column]] = {
    "persistentvolumes": [
        NAME, Column("Capacity", _text("spec.capacity.storage")),
        Column("Access Modes", lambda obj: access_modes((obj.get("spec") or {}).get("accessModes") or [])),
        Column("Reclaim Policy", _text("spec.persistentVolumeReclaimPolicy")), Column("Status", _phase),
        Column("Claim", _claim_of), Column("StorageClass", _class),
        Column("VolumeAttributesClass", _text("spec.volumeAttributesClassName", "<unset>")),
        Column("Reason", _text("status.reason")), AGE,
        Column("VolumeMode", _text("spec.volumeMode", "<unset>"), priority=1),
    ],
    "persistentvolumeclaims": [
        NAME, Column("Status", _phase), Column("Volume", _text("spec.volumeName")),
        Column("Capacity", _bound(_text("status.capacity.storage"))),
        Column("Access Modes", _bound(lambda obj: access_modes((obj.get("status") or {}).get("accessModes") or []))),
        Column("StorageClass", _class),
        Column("VolumeAttributesClass", _text("spec.volumeAttributesClassName", "<unset>")), AGE,
        Column("VolumeMode", _text("spec.volumeMode", "<unset>"), priority=1),
    ],
    "storageclasses.storage.k8s.io": [
        NAME, Column("Provisioner", _text("provisioner")), Column("ReclaimPolicy", _text("reclaimPolicy", "Delete")),
        Column("VolumeBindingMode", _text("volumeBindingMode", "Immediate")),
        Column("AllowVolumeExpansion", lambda obj: bool(obj.get("allowVolumeExpansion")), "boolean"), AGE,
    ],
    "volumeattachments.storage.k8s.io": [
        NAME, Column("Attacher", _text("spec.attacher")), Column("PV", _text("spec.source.persistentVolumeName")),
        Column("Node", _text("spec.nodeName")), Column("Attached", _at("status.attached", False), "boolean"), AGE,
    ],
    "csidrivers.storage.k8s.io": [
        NAME, Column("AttachRequired", _at("spec.attachRequired", True), "boolean"),
        Column("PodInfoOnMount", _at("spec.podInfoOnMount", False), "boolean"),
        Column("StorageCapacity", _at("spec.storageCapacity", False), "boolean"), Column("TokenRequests", _tokens),
        Column("RequiresRepublish", _at("spec.requiresRepublish", False), "boolean"), Column("Modes", _modes), AGE,
    ],
    "csinodes.storage.k8s.io": [
        NAME, Column("Drivers", lambda obj: len((obj.get("spec") or {}).get("drivers") or []), "integer"), AGE,
    ],
    "csistoragecapacities.storage.k8s.io": [
        NAME, Column("StorageClassName", _text("storageClassName")), Column("Capacity", _text("capacity", "<unset>")),
    ],
    "volumeattributesclasses.storage.k8s.io": [NAME, Column("DriverName", _text("driverName")), AGE],
    "pods": [
        NAME, Column("Ready", pod_ready), Column("Status", pod_status), Column("Restarts", pod_restarts), AGE,
        Column("IP", _text("status.podIP", "<none>"), priority=1),
        Column("Node", _text("spec.nodeName", "<none>"), priority=1),
        Column("Nominated Node", _text("status.nominatedNodeName", "<none>"), priority=1),
        Column("Readiness Gates", readiness_gates, priority=1),
    ],
    "nodes": [
        NAME, Column("Status", _node_status), Column("Roles", _roles), AGE,
        Column("Version", _text("status.nodeInfo.kubeletVersion")),
        Column("Internal-IP", _address("InternalIP"), priority=1),
        Column("External-IP", _address("ExternalIP"), priority=1),
        Column("OS-Image", _text("status.nodeInfo.osImage", "<unknown>"), priority=1),
        Column("Kernel-Version", _text("status.nodeInfo.kernelVersion", "<unknown>"), priority=1),
        Column("Container-Runtime", _text("status.nodeInfo.containerRuntimeVersion", "<unknown>"), priority=1),
    ],
    "events": _EVENT,
    "namespaces": [NAME, Column("Status", _text("status.phase")), AGE],
    "configmaps": [NAME, Column("Data", _size("data", "binaryData")), AGE],
    "secrets": [NAME, Column("Type", _text("type")), Column("Data", _size("data")), AGE],
    "serviceaccounts": [NAME, AGE],
    "services": [
        NAME, Column("Type", _text("spec.type")), Column("Cluster-IP", _text("spec.clusterIP", "<none>")),
        Column("External-IP", lambda obj: ",".join((obj.get("spec") or {}).get("externalIPs") or []) or "<none>"),
        Column("Port(s)", _ports), AGE, Column("Selector", _selector, priority=1),
    ],
    "endpoints": [NAME, Column("Endpoints", _endpoints), AGE],
    "leases.coordination.k8s.io": [NAME, Column("Holder", _text("spec.holderIdentity")), AGE],
    "priorityclasses.scheduling.k8s.io": [
        NAME, Column("Value", _at("value", 0), "integer"),
        Column("Global-Default", lambda obj: bool(obj.get("globalDefault")), "boolean"), AGE,
        Column("PreemptionPolicy", _text("preemptionPolicy"), priority=1),
    ],
    "deployments.apps": [
        NAME, Column("Ready", _ready), Column("Up-to-date", _text("status.updatedReplicas", "0")),
        Column("Available", _text("status.availableReplicas", "0")), AGE, *_WIDE_WORKLOAD,
    ],
    "statefulsets.apps": [NAME, Column("Ready", _ready), AGE, *_WIDE_WORKLOAD[:2]],
    "replicasets.apps": [
        NAME, _count("Desired", "spec.replicas"), _count("Current", "status.replicas"),
        _count("Ready", "status.readyReplicas"), AGE, *_WIDE_WORKLOAD,
    ],
    "daemonsets.apps": [
        NAME, _count("Desired", "status.desiredNumberScheduled"), _count("Current", "status.currentNumberScheduled"),
        _count("Ready", "status.numberReady"), _count("Up-to-date", "status.updatedNumberScheduled"),
        _count("Available", "status.numberAvailable"),
        Column("Node Selector", lambda obj: ",".join(f"{k}={v}" for k, v in sorted(((((obj.get("spec") or {}).get(
            "template") or {}).get("spec") or {}).get("nodeSelector") or {}).items())) or "<none>"),
        AGE, *_WIDE_WORKLOAD,
    ],
    "rolebindings.rbac.authorization.k8s.io": [
        NAME, Column("Role", _role_ref), AGE, Column("Users", _subjects("User"), priority=1),
        Column("Groups", _subjects("Group"), priority=1),
        Column("ServiceAccounts", _subjects("ServiceAccount"), priority=1),
    ],
    "customresourcedefinitions.apiextensions.k8s.io": [
        NAME, Column("Created At", lambda obj: obj["metadata"].get("creationTimestamp", "")),
    ],
    "roles.rbac.authorization.k8s.io": [NAME, Column("Created At", _at("metadata.creationTimestamp"))],
}  # fmt: skip
COLUMNS["clusterrolebindings.rbac.authorization.k8s.io"] = COLUMNS["rolebindings.rbac.authorization.k8s.io"]
COLUMNS["clusterroles.rbac.authorization.k8s.io"] = COLUMNS["roles.rbac.authorization.k8s.io"]

_PLAIN = [NAME, AGE]


def columns_for(stored_as: str) -> list[Column]:
    """The columns of a built-in kind; name and age when it has none of its own."""
    return COLUMNS.get(stored_as, _PLAIN)
