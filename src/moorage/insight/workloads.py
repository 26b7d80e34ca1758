"""Objects that make pods: Deployments and the like, which a cluster without their controller accepts and never runs.

Owns: their kinds, and the sign that a controller has acted on one.
May not touch: writes, terminals.
Start reading at: `Workload.is_untouched`.
"""

from typing import Any, ClassVar

from moorage.kube.objects import KubeObject
from moorage.kube.objects.meta import Resource


class Workload(KubeObject, frozen=True):
    """An object that makes pods. Only what tells whether a controller knows it is read."""

    status: dict[str, Any] = {}

    @property
    def is_untouched(self) -> bool:
        """Whether no controller has written its status yet. Those of Kubernetes do so within a second."""
        return not any(self.status.values())


class Deployment(Workload, frozen=True):
    resource: ClassVar[Resource] = Resource("apps", "v1", "deployments", "Deployment", True)


class ReplicaSet(Workload, frozen=True):
    resource: ClassVar[Resource] = Resource("apps", "v1", "replicasets", "ReplicaSet", True)


class StatefulSet(Workload, frozen=True):
    resource: ClassVar[Resource] = Resource("apps", "v1", "statefulsets", "StatefulSet", True)


class DaemonSet(Workload, frozen=True):
    resource: ClassVar[Resource] = Resource("apps", "v1", "daemonsets", "DaemonSet", True)


class BatchJob(Workload, frozen=True):
    resource: ClassVar[Resource] = Resource("batch", "v1", "jobs", "Job", True)


class CronJob(Workload, frozen=True):
    resource: ClassVar[Resource] = Resource("batch", "v1", "cronjobs", "CronJob", True)


WORKLOADS: dict[str, type[Workload]] = {
    **dict.fromkeys(("deployment", "deploy"), Deployment),
    **dict.fromkeys(("replicaset", "rs"), ReplicaSet),
    **dict.fromkeys(("statefulset", "sts"), StatefulSet),
    **dict.fromkeys(("daemonset", "ds"), DaemonSet),
    "job": BatchJob,
    **dict.fromkeys(("cronjob", "cj"), CronJob),
}
