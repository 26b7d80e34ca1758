"""Which kinds are served, and how: the table of built-in kinds and the registry that custom kinds join.

Owns: `Kind`, the built-in table, looking kinds up by path, and what a version of a kind shares with its storage.
May not touch: requests and storage.
Start reading at: `Kind`, `KindRegistry`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from moorage.apiserver.kinds.schema import Type, struct

Object = dict[str, Any]
Convert = Callable[[Object], Object]

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(slots=True)
class Kind:
    """One resource of one group and version."""

    group: str
    version: str
    name: str
    plural: str
    type: Type
    is_namespaced: bool
    short_names: tuple[str, ...] = ()
    singular: str = ""
    list_name: str = ""
    categories: tuple[str, ...] = ()
    has_status: bool = False
    has_scale: bool = False
    status_writes_metadata: bool = False  # PV, PVC and Node take labels and annotations through /status
    needs_version: bool = False  # an update without resourceVersion is refused
    creates_on_update: bool = False
    tracks_generation: bool = False
    answers_deleted: bool = False  # DELETE answers with the object instead of a Status
    lacks_controller: bool = False  # makes pods elsewhere; Moorage has no controller for it
    is_custom: bool = False
    verbs: tuple[str, ...] = VERBS
    selectable: tuple[str, ...] = ()
    stored_as: str = ""
    decode_from: Convert | None = None  # the served form to the stored form
    encode_to: Convert | None = None
    custom: Any = None  # what a CustomResourceDefinition says about this version
    subresources: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        self.singular = self.singular or self.name.lower()
        self.list_name = self.list_name or f"{self.name}List"
        self.stored_as = self.stored_as or (f"{self.plural}.{self.group}" if self.group else self.plural)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


# group/version Kind plural short-names scope flags; flags: status, meta (metadata through /status), strict (needs a
# resourceVersion), create (PUT may create), gen (tracks generation), obj (DELETE answers with the object), scale, unrun
# (makes pods, but not here)
_TABLE = """
v1 Namespace namespaces ns cluster status meta
v1 Node nodes no cluster status meta
v1 Pod pods po ns status meta obj gen
v1 Service services svc ns status meta obj
v1 Endpoints endpoints ep ns create
v1 ConfigMap configmaps cm ns
v1 Secret secrets - ns
v1 ServiceAccount serviceaccounts sa ns obj
v1 Event events ev ns create
v1 PersistentVolume persistentvolumes pv cluster status meta obj
v1 PersistentVolumeClaim persistentvolumeclaims pvc ns status meta obj
v1 LimitRange limitranges limits ns create
v1 ResourceQuota resourcequotas quota ns status meta obj create
v1 PodTemplate podtemplates - ns obj
v1 ReplicationController replicationcontrollers rc ns status gen scale unrun
apps/v1 Deployment deployments deploy ns status gen scale unrun
apps/v1 ReplicaSet replicasets rs ns status gen scale unrun
apps/v1 StatefulSet statefulsets sts ns status gen scale unrun
apps/v1 DaemonSet daemonsets ds ns status gen unrun
apps/v1 ControllerRevision controllerrevisions - ns
batch/v1 Job jobs - ns status gen unrun
batch/v1 CronJob cronjobs cj ns status gen unrun
storage.k8s.io/v1 StorageClass storageclasses sc cluster obj
storage.k8s.io/v1 VolumeAttachment volumeattachments - cluster status strict obj
storage.k8s.io/v1 CSIDriver csidrivers - cluster strict gen obj
storage.k8s.io/v1 CSINode csinodes - cluster status strict obj
storage.k8s.io/v1 CSIStorageCapacity csistoragecapacities - ns strict
storage.k8s.io/v1 VolumeAttributesClass volumeattributesclasses vac cluster obj
coordination.k8s.io/v1 Lease leases - ns create
rbac.authorization.k8s.io/v1 Role roles - ns create
rbac.authorization.k8s.io/v1 ClusterRole clusterroles - cluster create
rbac.authorization.k8s.io/v1 RoleBinding rolebindings - ns create
rbac.authorization.k8s.io/v1 ClusterRoleBinding clusterrolebindings - cluster create
scheduling.k8s.io/v1 PriorityClass priorityclasses pc cluster
policy/v1 PodDisruptionBudget poddisruptionbudgets pdb ns status gen
discovery.k8s.io/v1 EndpointSlice endpointslices - ns gen
networking.k8s.io/v1 NetworkPolicy networkpolicies netpol ns gen
networking.k8s.io/v1 Ingress ingresses ing ns status gen
networking.k8s.io/v1 IngressClass ingressclasses - cluster gen
node.k8s.io/v1 RuntimeClass runtimeclasses - cluster create
resource.k8s.io/v1 DeviceClass deviceclasses - cluster gen
resource.k8s.io/v1 DeviceTaintRule devicetaintrules - cluster status gen
resource.k8s.io/v1 ResourceClaim resourceclaims - ns status obj
resource.k8s.io/v1 ResourceClaimTemplate resourceclaimtemplates - ns obj
resource.k8s.io/v1 ResourceSlice resourceslices - cluster gen obj
apiextensions.k8s.io/v1 CustomResourceDefinition customresourcedefinitions crd,crds cluster status gen strict
"""

_PACKAGES = {
    "": "core",
    "storage.k8s.io": "storage",
    "coordination.k8s.io": "coordination",
    "events.k8s.io": "events",
    "rbac.authorization.k8s.io": "rbac",
    "scheduling.k8s.io": "scheduling",
    "discovery.k8s.io": "discovery",
    "networking.k8s.io": "networking",
    "node.k8s.io": "node",
    "resource.k8s.io": "resource",
    "apiextensions.k8s.io": "apiextensions",
    "authentication.k8s.io": "authentication",
    "authorization.k8s.io": "authorization",
}

_SELECTABLE = {
    "pods": (
        "spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "spec.hostNetwork",
        "status.phase", "status.podIP", "status.podIPs", "status.nominatedNodeName",
    ),
    "nodes": ("spec.unschedulable",),
    "secrets": ("type",),
    "namespaces": ("status.phase", "name"),
    "services": ("spec.clusterIP", "spec.type"),
    "events": (
        "involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
        "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath",
        "reason", "reportingComponent", "source", "type",
    ),
    "replicasets.apps": ("status.replicas",),
    "replicationcontrollers": ("status.replicas",),
    "jobs.batch": ("status.successful",),
    "resourceslices.resource.k8s.io": ("spec.nodeName", "spec.driver"),
}  # fmt: skip

_CATEGORY_ALL: tuple[str, ...] = (
    "pods",
    "services",
    "replicationcontrollers",
    "deployments",
    "replicasets",
    "statefulsets",
)
_CATEGORY_ALL += ("daemonsets", "jobs", "cronjobs")

_SUBRESOURCES = {
    "pods": ("binding", "ephemeralcontainers", "eviction", "exec", "log", "resize"),
    "namespaces": ("finalize",),
    "serviceaccounts": ("token",),
}


def package_of(group: str) -> str:
    """The name of the group's package in type names: `storage` for storage.k8s.io."""
    return _PACKAGES.get(group, group)


def builtin_kinds() -> list[Kind]:
    """Every kind that is there without a CustomResourceDefinition, except for Events of the newer group."""
    return [_kind_from(line.split()) for line in _TABLE.strip().splitlines()]


def _kind_from(words: list[str]) -> Kind:
    api_version, name, plural, short, scope, *flags = words
    group, _, version = api_version.rpartition("/")
    stored_as = f"{plural}.{group}" if group else plural
    return Kind(
        group=group,
        version=version,
        name=name,
        plural=plural,
        type=struct(f"{package_of(group)}.{version}.{name}"),
        is_namespaced=scope == "ns",
        short_names=() if short == "-" else tuple(short.split(",")),
        categories=("all",) if plural in _CATEGORY_ALL else (),
        has_status="status" in flags,
        has_scale="scale" in flags,
        status_writes_metadata="meta" in flags,
        needs_version="strict" in flags,
        creates_on_update="create" in flags,
        tracks_generation="gen" in flags,
        answers_deleted="obj" in flags,
        lacks_controller="unrun" in flags,
        selectable=_SELECTABLE.get(stored_as, ()),
        subresources=_SUBRESOURCES.get(stored_as, ()),
    )


class KindRegistry:
    """The kinds served now, by group, version and plural."""

    def __init__(self, kinds: Iterable[Kind]) -> None:
        self._kinds: dict[tuple[str, str, str], Kind] = {}
        self.revision = 0  # grows with every change, so that documents made from it can be kept
        for kind in kinds:
            self.add(kind)

    def add(self, kind: Kind) -> None:
        self._kinds[kind.group, kind.version, kind.plural] = kind
        self.revision += 1

    def remove(self, group: str, plural: str) -> None:
        """Stop serving all versions of a custom kind."""
        for key, kind in list(self._kinds.items()):
            if kind.is_custom and (kind.group, kind.plural) == (group, plural):
                del self._kinds[key]
        self.revision += 1

    def find(self, group: str, version: str, plural: str) -> Kind | None:
        return self._kinds.get((group, version, plural))

    def by_stored(self, stored_as: str) -> Kind | None:
        """A kind that is kept under this name."""
        return next((kind for kind in self._kinds.values() if kind.stored_as == stored_as), None)

    def by_name(self, api_version: str, name: str) -> Kind | None:
        group, _, version = api_version.rpartition("/")
        for kind in self._kinds.values():
            if (kind.group, kind.version, kind.name) == (group, version, name):
                return kind
        return None

    def all(self) -> list[Kind]:
        return list(self._kinds.values())

    def groups(self) -> dict[str, list[str]]:
        """Group to versions, the preferred version first."""
        found: dict[str, list[str]] = {}
        for kind in self._kinds.values():
            versions = found.setdefault(kind.group, [])
            if kind.version not in versions:
                versions.append(kind.version)
        for versions in found.values():
            versions.sort(key=version_priority, reverse=True)
        return found

    def of(self, group: str, version: str) -> list[Kind]:
        return [kind for kind in self._kinds.values() if (kind.group, kind.version) == (group, version)]


def version_priority(version: str) -> tuple[int, int, int]:
    """Kubernetes' order of versions: v2 > v1 > v1beta2 > v1beta1 > v1alpha1 > anything else."""
    head, _, tail = version.removeprefix("v").partition("beta")
    if not version.startswith("v") or not version[1:2].isdigit():
        return (0, 0, 0)
    for level, word in ((2, "beta"), (1, "alpha")):
        head, found, tail = version[1:].partition(word)
        if found and head.isdigit() and tail.isdigit():
            return (level, int(head), int(tail))
    return (3, int(version[1:]), 0) if version[1:].isdigit() else (0, 0, 0)
