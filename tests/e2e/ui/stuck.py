"""Stuck objects for the page's tests: manifests, each with the reference under which the page lists it."""

from typing import Any

Manifest = dict[str, Any]

_SNAPSHOT = "snapshot.storage.k8s.io/v1"


def claim(name: str, status: Manifest | None = None, **spec: Any) -> Manifest:
    wanted = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, **spec}
    body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "default"}}
    return {**body, "spec": wanted, **({"status": status} if status else {})}


def volume(name: str, phase: str, **spec: Any) -> Manifest:
    wanted = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "csi": {"driver": "d.example", "volumeHandle": name},
        **spec,
    }
    body = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": wanted}
    return {**body, "status": {"phase": phase}}


def pod(name: str, *claims: str, **spec: Any) -> Manifest:
    volumes = [{"name": f"v{at}", "persistentVolumeClaim": {"claimName": each}} for at, each in enumerate(claims)]
    wanted = {"containers": [{"name": "c", "image": "host"}], "volumes": volumes, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}, "spec": wanted}


def snapshot(name: str, **spec: Any) -> Manifest:
    body = {"apiVersion": _SNAPSHOT, "kind": "VolumeSnapshot", "metadata": {"name": name, "namespace": "default"}}
    return {**body, "spec": spec}


def attachment(name: str, node: str, of: str, **status: Any) -> Manifest:
    spec = {"attacher": "d.example", "nodeName": node, "source": {"persistentVolumeName": of}}
    body = {"apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment", "metadata": {"name": name}, "spec": spec}
    return {**body, "status": {"attached": False, **status}}


def node(name: str, ready: str) -> Manifest:
    status = {"conditions": [{"type": "Ready", "status": ready, "reason": "KubeletStopped", "message": "stopped"}]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status}


STUCK: dict[str, Manifest] = {
    "pvc/class-missing": claim("class-missing", storageClassName="nowhere"),
    "pvc/class-none": claim("class-none"),
    "pvc/static": claim("static", storageClassName=""),
    "pvc/volume-missing": claim("volume-missing", storageClassName="", volumeName="not-there"),
    "pvc/no-driver": claim("no-driver", storageClassName="fast"),
    "pvc/no-pod": claim("no-pod", storageClassName="late"),
    "pvc/no-snapshot": claim(
        "no-snapshot",
        storageClassName="fast",
        dataSource={"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "gone"},
    ),
    "pvc/no-source": claim(
        "no-source", storageClassName="fast", dataSource={"kind": "PersistentVolumeClaim", "name": "gone"}
    ),
    "pvc/no-modifier": claim("no-modifier", storageClassName="fast", volumeAttributesClassName="gone"),
    "pvc/lost": claim("lost", {"phase": "Lost"}, storageClassName="", volumeName="pv-lost"),
    "pv/released": volume("released", "Released", persistentVolumeReclaimPolicy="Retain"),
    "pv/undeleted": volume("undeleted", "Released", persistentVolumeReclaimPolicy="Delete"),
    "pv/failed": volume("failed", "Failed", persistentVolumeReclaimPolicy="Delete"),
    "pod/claim-missing": pod("claim-missing", "never-made"),
    "pod/node-gone": pod("node-gone", nodeName="no-such-node"),
    "pod/secret-missing": pod(
        "secret-missing", nodeName="good", volumes=[{"name": "s", "secret": {"secretName": "gone"}}]
    ),
    "va/node-gone": attachment("node-gone", "no-such-node", "free"),
    "va/volume-gone": attachment("volume-gone", "good", "no-such-volume"),
    "va/fails": attachment("fails", "good", "free", attachError={"message": "the array said no"}),
    "snapshot/class-missing": snapshot(
        "class-missing", source={"persistentVolumeClaimName": "x"}, volumeSnapshotClassName="gone"
    ),
    "snapshot/claim-missing": snapshot(
        "claim-missing", source={"persistentVolumeClaimName": "gone"}, volumeSnapshotClassName="snaps"
    ),
    "node/bad": node("bad", "False"),
}

BESIDE: tuple[Manifest, ...] = (
    {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "fast"},
        "provisioner": "not-installed.example",
        "volumeBindingMode": "Immediate",
    },
    {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "late"},
        "provisioner": "not-installed.example",
        "volumeBindingMode": "WaitForFirstConsumer",
    },
    {
        "apiVersion": _SNAPSHOT,
        "kind": "VolumeSnapshotClass",
        "metadata": {"name": "snaps"},
        "driver": "d.example",
        "deletionPolicy": "Delete",
    },
    {"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": "d.example"}, "spec": {}},
    node("good", "True"),
    volume("free", "Available"),
)
