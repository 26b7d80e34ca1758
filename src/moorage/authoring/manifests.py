"""The Kubernetes objects of a new driver project, for our sidecars or the official ones.

Storage of one node is served by one pod on each node, which provisions there as well. Other storage is provisioned by
one pod, and mounted by one on each node.
Start reading at: `manifests`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Document = dict[str, Any]

_KUBELET = "/var/lib/kubelet"
_OFFICIAL = "registry.k8s.io/sig-storage"
_TAGS = {
    "csi-provisioner": "v6.1.0",
    "csi-attacher": "v4.10.0",
    "csi-resizer": "v2.0.0",
    "csi-snapshotter": "v8.4.0",
    "csi-node-driver-registrar": "v2.15.0",
}
_RIGHTS: Sequence[tuple[str, str, str]] = (
    ("", "persistentvolumes", "get list watch create update patch delete"),
    ("", "persistentvolumeclaims", "get list watch update"),
    ("", "persistentvolumeclaims/status", "patch update"),
    ("", "events", "get list watch create update patch"),
    ("", "nodes", "get list watch"),
    ("", "pods", "get list watch"),
    ("storage.k8s.io", "storageclasses", "get list watch"),
    ("storage.k8s.io", "csinodes", "get list watch"),
    ("storage.k8s.io", "csidrivers", "get list watch"),
    ("storage.k8s.io", "volumeattachments", "get list watch patch"),
    ("storage.k8s.io", "volumeattachments/status", "patch"),
    ("storage.k8s.io", "volumeattributesclasses", "get list watch"),
    ("storage.k8s.io", "csistoragecapacities", "get list watch create update patch delete"),
    ("snapshot.storage.k8s.io", "volumesnapshots", "get list update"),
    ("snapshot.storage.k8s.io", "volumesnapshotclasses", "get list watch"),
    ("snapshot.storage.k8s.io", "volumesnapshotcontents", "get list watch update patch"),
    ("snapshot.storage.k8s.io", "volumesnapshotcontents/status", "update patch"),
    ("groupsnapshot.storage.k8s.io", "volumegroupsnapshotclasses", "list watch"),
    ("groupsnapshot.storage.k8s.io", "volumegroupsnapshotcontents", "list watch patch"),
    ("groupsnapshot.storage.k8s.io", "volumegroupsnapshotcontents/status", "patch"),
    ("apps", "daemonsets", "get"),
    ("apps", "statefulsets", "get"),
    ("coordination.k8s.io", "leases", "get list watch create update patch delete"),
)


def manifests(name: str, driver: str, kind: str, sidecars: str) -> list[Document]:
    """Return every object of a driver, in the order in which they are created."""
    is_local = kind in ("directory", "image")
    node_services = "controller,node" if is_local else "node"
    node_sidecars = _sidecars(sidecars, driver, ["registrar", *(_roles(kind) if is_local else [])], is_local)
    found = [
        _object("v1", "Namespace", name, namespace=""),
        _object("v1", "ServiceAccount", name, namespace=name),
        _object("rbac.authorization.k8s.io/v1", "ClusterRole", name, namespace="", rules=_rules()),
        _object(
            "rbac.authorization.k8s.io/v1",
            "ClusterRoleBinding",
            name,
            namespace="",
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": name}],
        ),
        _object("storage.k8s.io/v1", "CSIDriver", driver, namespace="", spec={"attachRequired": kind == "block"}),
        _object(
            "storage.k8s.io/v1",
            "StorageClass",
            name,
            namespace="",
            provisioner=driver,
            allowVolumeExpansion=True,
            volumeBindingMode="WaitForFirstConsumer" if is_local else "Immediate",
        ),
        _workload("DaemonSet", name, driver, kind, node_services, node_sidecars),
    ]
    if not is_local:
        controller_sidecars = _sidecars(sidecars, driver, _roles(kind), is_local)
        found.append(_workload("StatefulSet", name, driver, kind, "controller", controller_sidecars))
    return found


def _object(version: str, kind: str, name: str, *, namespace: str, **fields: Any) -> Document:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _rules() -> list[Document]:
    return [{"apiGroups": [group], "resources": [kind], "verbs": verbs.split()} for group, kind, verbs in _RIGHTS]


def _roles(kind: str) -> list[str]:
    """Return the sidecars that drivers of a kind need."""
    return [
        "provisioner",
        *(["attacher"] if kind == "block" else []),
        "resizer",
        *(["snapshotter"] if kind == "image" else []),
    ]


def _workload(kind: str, name: str, driver: str, storage: str, services: str, sidecars: Sequence[Document]) -> Document:
    labels = {"app.kubernetes.io/name": f"{name}-{'node' if kind == 'DaemonSet' else 'controller'}"}
    state = f"/var/lib/{driver}"
    mounts = [
        {"name": "socket", "mountPath": "/csi"},
        {"name": "state", "mountPath": state, "mountPropagation": "Bidirectional"},
        {"name": "dev", "mountPath": "/dev"},
    ]
    volumes: list[Document] = [{"name": "state", "hostPath": {"path": state, "type": "DirectoryOrCreate"}}]
    volumes.append({"name": "dev", "hostPath": {"path": "/dev", "type": "Directory"}})
    if kind == "DaemonSet":
        plugin = f"{_KUBELET}/plugins/{driver}"
        mounts.append({"name": "kubelet", "mountPath": _KUBELET, "mountPropagation": "Bidirectional"})
        volumes.append({"name": "kubelet", "hostPath": {"path": _KUBELET, "type": "Directory"}})
        volumes.append({"name": "socket", "hostPath": {"path": plugin, "type": "DirectoryOrCreate"}})
        registry = {"path": f"{_KUBELET}/plugins_registry", "type": "Directory"}
        volumes.append({"name": "registration", "hostPath": registry})
    else:
        volumes.append({"name": "socket", "emptyDir": {}})
    options = {"remote": ["--option=root=/mnt/shared"], "block": ["--option=nodes=any"]}.get(storage, [])
    container = {
        "name": "driver",
        "image": f"localhost/{name}",
        "imagePullPolicy": "IfNotPresent",
        "args": [
            "--endpoint=unix:///csi/csi.sock",
            "--node-id=$(NODE_NAME)",
            f"--services={services}",
            f"--state-dir={state}",
            "--http-endpoint=:9809",
            "--log-format=json",
            *options,
        ],
        "env": [_field("NODE_NAME", "spec.nodeName")],
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": 9809}, "periodSeconds": 20, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "securityContext": {"privileged": True},  # it mounts volumes where the kubelet sees them
        "volumeMounts": mounts,
    }
    if storage == "remote":
        mounts.append({"name": "shared", "mountPath": "/mnt/shared", "mountPropagation": "HostToContainer"})
        volumes.append({"name": "shared", "hostPath": {"path": "/mnt/shared", "type": "Directory"}})
    spec = {
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {"serviceAccountName": name, "containers": [container, *sidecars], "volumes": volumes},
        },
    }
    if kind == "StatefulSet":
        spec |= {"serviceName": f"{name}-controller", "replicas": 1}
    role = "node" if kind == "DaemonSet" else "controller"
    return _object("apps/v1", kind, f"{name}-{role}", namespace=name, spec=spec)


def _sidecars(which: str, driver: str, roles: Sequence[str], is_local: bool) -> list[Document]:
    registration = [f"--kubelet-registration-path={_KUBELET}/plugins/{driver}/csi.sock"]
    if which == "moorage":
        args = ["sidecars", *roles, "--csi-address=/csi/csi.sock"]
        if "registrar" in roles:
            args += [*registration, "--plugin-registration-path=/registration"]
        if is_local:
            args.append("--node-deployment")
        return [_sidecar("sidecars", "localhost/moorage", args, roles)]
    names = {role: f"csi-{'node-driver-' if role == 'registrar' else ''}{role}" for role in roles}
    flags: Mapping[str, list[str]] = {
        "registrar": registration,
        "provisioner": ["--feature-gates=Topology=true", "--node-deployment"] if is_local else [],
        "snapshotter": ["--node-deployment"] if is_local else [],
    }
    return [
        _sidecar(
            names[role],
            f"{_OFFICIAL}/{names[role]}:{_TAGS[names[role]]}",
            ["--csi-address=/csi/csi.sock", *flags.get(role, [])],
            [role],
        )
        for role in roles
    ]


def _sidecar(name: str, image: str, args: list[str], roles: Sequence[str]) -> Document:
    mounts = [{"name": "socket", "mountPath": "/csi"}]
    if "registrar" in roles:
        mounts.append({"name": "registration", "mountPath": "/registration"})
    env = [_field("NODE_NAME", "spec.nodeName"), _field("POD_NAME", "metadata.name")]
    env.append(_field("POD_NAMESPACE", "metadata.namespace"))
    return {"name": name, "image": image, "args": args, "env": env, "volumeMounts": mounts}


def _field(name: str, path: str) -> Document:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
