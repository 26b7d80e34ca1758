"""The ClusterRoles and bindings that every cluster has.

Owns: their names and rules, after those of Kubernetes, for the kinds that this server has.
Start reading at: `default_roles`.
"""

from moorage.apiserver.access.pki import NODE_CLIENT
from moorage.apiserver.access.rbac import GROUP
from moorage.apiserver.kinds.registry import Object

_READ = "get list watch"
_WRITE = "create delete deletecollection patch update"
_ALL = f"{_READ} {_WRITE}"
_LABELS = {"kubernetes.io/bootstrapping": "rbac-defaults"}
_ANNOTATIONS = {"rbac.authorization.kubernetes.io/autoupdate": "true"}
_AGGREGATE = "rbac.authorization.k8s.io/aggregate-to-"

# role: verbs, API group ("" is core, written as -), resources
_TABLE = """
cluster-admin | * | * | *
system:basic-user | create | authorization.k8s.io | selfsubjectaccessreviews selfsubjectrulesreviews
system:basic-user | create | authentication.k8s.io | selfsubjectreviews
system:auth-delegator | create | authentication.k8s.io | tokenreviews
system:auth-delegator | create | authorization.k8s.io | subjectaccessreviews
system:persistent-volume-provisioner | get list watch create delete | - | persistentvolumes
system:persistent-volume-provisioner | get list watch update | - | persistentvolumeclaims
system:persistent-volume-provisioner | get list watch | storage.k8s.io | storageclasses
system:persistent-volume-provisioner | watch | - | events
system:persistent-volume-provisioner | create patch update | - | events
system:kubelet-api-admin | READ | - | nodes
system:kubelet-api-admin | proxy | - | nodes
system:kubelet-api-admin | * | - | nodes/log nodes/metrics nodes/pods nodes/proxy nodes/stats
system:aggregate-to-view | READ | - | bindings configmaps endpoints events limitranges namespaces namespaces/status
system:aggregate-to-view | READ | - | persistentvolumeclaims persistentvolumeclaims/status pods pods/log pods/status
system:aggregate-to-view | READ | - | replicationcontrollers replicationcontrollers/scale replicationcontrollers/status
system:aggregate-to-view | READ | - | resourcequotas resourcequotas/status serviceaccounts services services/status
system:aggregate-to-view | READ | apps | controllerrevisions daemonsets daemonsets/status deployments deployments/scale
system:aggregate-to-view | READ | apps | deployments/status replicasets replicasets/scale replicasets/status
system:aggregate-to-view | READ | apps | statefulsets statefulsets/scale statefulsets/status
system:aggregate-to-view | READ | batch | cronjobs cronjobs/status jobs jobs/status
system:aggregate-to-view | READ | discovery.k8s.io | endpointslices
system:aggregate-to-view | READ | networking.k8s.io | ingresses ingresses/status networkpolicies
system:aggregate-to-view | READ | policy | poddisruptionbudgets poddisruptionbudgets/status
system:aggregate-to-view | READ | resource.k8s.io | resourceclaims resourceclaims/status resourceclaimtemplates
system:aggregate-to-view | READ | snapshot.storage.k8s.io | volumesnapshots
system:aggregate-to-view | READ | groupsnapshot.storage.k8s.io | volumegroupsnapshots
system:aggregate-to-edit | READ | - | pods/attach pods/exec pods/portforward pods/proxy secrets services/proxy
system:aggregate-to-edit | impersonate | - | serviceaccounts
system:aggregate-to-edit | WRITE | - | pods pods/attach pods/exec pods/portforward pods/proxy
system:aggregate-to-edit | create | - | pods/eviction serviceaccounts/token
system:aggregate-to-edit | WRITE | - | configmaps events persistentvolumeclaims replicationcontrollers secrets
system:aggregate-to-edit | WRITE | - | replicationcontrollers/scale serviceaccounts services services/proxy
system:aggregate-to-edit | WRITE | apps | daemonsets deployments deployments/rollback deployments/scale replicasets
system:aggregate-to-edit | WRITE | apps | replicasets/scale statefulsets statefulsets/scale
system:aggregate-to-edit | WRITE | batch | cronjobs jobs
system:aggregate-to-edit | WRITE | coordination.k8s.io | leases
system:aggregate-to-edit | READ | coordination.k8s.io | leases
system:aggregate-to-edit | WRITE | networking.k8s.io | ingresses networkpolicies
system:aggregate-to-edit | WRITE | policy | poddisruptionbudgets
system:aggregate-to-edit | WRITE | resource.k8s.io | resourceclaims resourceclaimtemplates
system:aggregate-to-edit | WRITE | snapshot.storage.k8s.io | volumesnapshots
system:aggregate-to-edit | WRITE | groupsnapshot.storage.k8s.io | volumegroupsnapshots
system:aggregate-to-admin | create | authorization.k8s.io | localsubjectaccessreviews
system:aggregate-to-admin | ALL | rbac.authorization.k8s.io | rolebindings roles
"""
_HEALTH = ("/healthz", "/livez", "/readyz")
_URLS = {
    "cluster-admin": ("*",),
    "system:public-info-viewer": (*_HEALTH, "/version", "/version/"),
    "system:discovery": ("/api", "/api/*", "/apis", "/apis/*", "/healthz", "/livez", "/openapi", "/openapi/*",
                         "/readyz", "/version", "/version/"),
    "system:monitoring": ("/metrics", *(f"{path}{end}" for path in _HEALTH for end in ("", "/*"))),
}  # fmt: skip
_AGGREGATED = {"admin": ("admin", "edit", "view"), "edit": ("edit", "view"), "view": ("view",)}
_BINDINGS = {
    "cluster-admin": ("Group:system:masters",),
    "system:basic-user": ("Group:system:authenticated",),
    "system:discovery": ("Group:system:authenticated",),
    "system:kubelet-api-admin": (f"User:{NODE_CLIENT}",),
    "system:public-info-viewer": ("Group:system:authenticated", "Group:system:unauthenticated"),
    "system:monitoring": ("Group:system:monitoring",),
}


def default_roles() -> list[Object]:
    rules: dict[str, list[Object]] = {}
    for line in _TABLE.strip().splitlines():
        role, verbs, group, resources = (part.strip() for part in line.split("|"))
        words = {"READ": _READ, "WRITE": _WRITE, "ALL": _ALL}.get(verbs, verbs).split()
        rule = {"verbs": words, "apiGroups": ["" if group == "-" else group], "resources": resources.split()}
        rules.setdefault(role, []).append(rule)
    for role, urls in _URLS.items():
        verbs_on_urls = ["*"] if role == "cluster-admin" else ["get"]
        rules.setdefault(role, []).append({"verbs": verbs_on_urls, "nonResourceURLs": list(urls)})
    roles = [{"metadata": _metadata(name), "rules": found} for name, found in rules.items()]
    for name, parts in _AGGREGATED.items():
        selectors = [{"matchLabels": {f"{_AGGREGATE}{part}": "true"}} for part in parts]
        joined = [rule for part in parts for rule in rules[f"system:aggregate-to-{part}"]]
        aggregation = {"clusterRoleSelectors": selectors}
        roles.append({"metadata": _metadata(name), "aggregationRule": aggregation, "rules": joined})
    return roles


def default_bindings() -> list[Object]:
    return [
        {
            "metadata": _metadata(role),
            "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": role},
            "subjects": [_subject(*subject.split(":", 1)) for subject in subjects],
        }
        for role, subjects in _BINDINGS.items()
    ]


def _subject(kind: str, name: str) -> Object:
    return {"apiGroup": GROUP, "kind": kind, "name": name}


def _metadata(name: str) -> Object:
    _, is_part, target = name.partition("system:aggregate-to-")
    labels = {**_LABELS, **({f"{_AGGREGATE}{target}": "true"} if is_part else {})}
    return {"name": name, "labels": labels, "annotations": _ANNOTATIONS}
