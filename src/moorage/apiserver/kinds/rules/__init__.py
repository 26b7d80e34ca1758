"""Defaults, validation and immutability, kind by kind.

Owns: `Rules` and the table from a stored resource to its rules.
May not touch: storage, HTTP; a rule is a function of one object, or of a new and an old one.
Start reading at: `rules_for`.
"""

from functools import lru_cache

from moorage.apiserver.kinds.rules import core, pods, storage, volumes
from moorage.apiserver.kinds.rules.base import Rules


@lru_cache(maxsize=1)
def _table() -> dict[str, Rules]:
    return {
        "persistentvolumes": volumes.VOLUME,
        "persistentvolumeclaims": volumes.CLAIM,
        "storageclasses.storage.k8s.io": storage.CLASS,
        "volumeattachments.storage.k8s.io": storage.ATTACHMENT,
        "csidrivers.storage.k8s.io": storage.DRIVER,
        "csinodes.storage.k8s.io": storage.CSI_NODE,
        "csistoragecapacities.storage.k8s.io": storage.CAPACITY,
        "volumeattributesclasses.storage.k8s.io": storage.ATTRIBUTES_CLASS,
        "pods": pods.POD,
        "namespaces": core.NAMESPACE,
        "nodes": core.NODE,
        "secrets": core.SECRET,
        "configmaps": core.CONFIG_MAP,
        "services": core.SERVICE,
        "events": core.EVENT,
        "leases.coordination.k8s.io": core.LEASE,
        "resourcequotas": core.RESOURCE_QUOTA,
        "priorityclasses.scheduling.k8s.io": core.PRIORITY_CLASS,
        "deployments.apps": core.WORKLOAD,
        "replicasets.apps": core.WORKLOAD,
        "statefulsets.apps": core.WORKLOAD,
        "daemonsets.apps": core.WORKLOAD,
        "jobs.batch": core.JOB,
        "roles.rbac.authorization.k8s.io": core.ROLE,
        "clusterroles.rbac.authorization.k8s.io": core.ROLE,
        "rolebindings.rbac.authorization.k8s.io": core.ROLE_BINDING,
        "clusterrolebindings.rbac.authorization.k8s.io": core.ROLE_BINDING,
    }


_NONE = Rules()


def register(stored_as: str, rules: Rules) -> None:
    """Rules of a kind whose module is not part of this package."""
    _table()[stored_as] = rules


def rules_for(stored_as: str) -> Rules:
    """The rules of a resource; one without its own has only those of metadata."""
    return _table().get(stored_as, _NONE)
