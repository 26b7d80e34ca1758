"""Volume figures for machines: the summary API and Prometheus text.

Owns: the two formats. Pure.
"""

from collections.abc import Iterable
from typing import Any

from moorage.kube.objects.meta import timestamp_text
from moorage.node.volumes.stats import Usage

_METRICS = (
    ("capacity_bytes", "Capacity in bytes of the volume", "capacity"),
    ("available_bytes", "Number of available bytes in the volume", "available"),
    ("used_bytes", "Number of used bytes in the volume", "used"),
    ("inodes", "Maximum number of inodes in the volume", "inodes"),
    ("inodes_free", "Number of free inodes in the volume", "inodes_free"),
    ("inodes_used", "Number of used inodes in the volume", "inodes_used"),
)


def prometheus(usages: Iterable[Usage]) -> str:
    """kubelet_volume_stats_*, one series for each claim, whichever of its pods was asked."""
    by_claim = {(usage.namespace, usage.claim): usage for usage in usages if usage.claim}
    lines = []
    for name, text, attribute in _METRICS:
        lines += [f"# HELP kubelet_volume_stats_{name} {text}", f"# TYPE kubelet_volume_stats_{name} gauge"]
        for (namespace, claim), usage in sorted(by_claim.items()):
            labels = f'namespace="{namespace}",persistentvolumeclaim="{claim}"'
            lines.append(f"kubelet_volume_stats_{name}{{{labels}}} {getattr(usage, attribute)}")
    return "\n".join(lines) + "\n"


def summary(node: str, usages: Iterable[Usage]) -> dict[str, Any]:
    """The body of /stats/summary, as far as volumes go; a volume under two names in a pod is there twice."""
    pods: dict[str, dict[str, Any]] = {}
    for usage in usages:
        reference = {"name": usage.pod, "namespace": usage.namespace, "uid": usage.uid}
        pod = pods.setdefault(usage.uid, {"podRef": reference, "volume": []})
        volume: dict[str, Any] = {
            "time": timestamp_text(usage.taken_at),
            "availableBytes": usage.available,
            "capacityBytes": usage.capacity,
            "usedBytes": usage.used,
            "inodesFree": usage.inodes_free,
            "inodes": usage.inodes,
            "inodesUsed": usage.inodes_used,
        }
        if usage.claim:
            volume["pvcRef"] = {"name": usage.claim, "namespace": usage.namespace}
        pod["volume"] += [{"name": name, **volume} for name in usage.volumes]
    return {"node": {"nodeName": node}, "pods": list(pods.values())}
