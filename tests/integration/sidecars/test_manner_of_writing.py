"""Each object is written as the official sidecars write it: their RBAC rules suffice, and no more is asked for."""

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.kube.api.client import Client
from moorage.kube.objects import (
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeAttachment,
    VolumeAttributesClass,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.sidecars.roles import Role

ALWAYS = {("POST", "events", ""), ("PATCH", "events", ""), ("POST", "leases", ""), ("PUT", "leases", "")}
STRATEGIC, MERGE, JSON = "strategic-merge", "merge", "json"


@pytest.fixture
def writes(monkeypatch):
    """What the sidecars write: method (of a PATCH also its kind), resource and subresource."""
    seen = set()
    request = Client.request

    async def spy(self, method, path, body=None, *, content_type="application/json", **more):
        if method not in ("GET", "HEAD") and self.identity == "moorage-sidecars":
            parts = path.split("/")[3:] if path.startswith("/api/") else path.split("/")[4:]
            plural, *rest = parts[2:] if parts[0] == "namespaces" and len(parts) > 2 else parts
            kind = content_type.removeprefix("application/").removesuffix("-patch+json")
            manner = f"PATCH {kind}" if method == "PATCH" and plural != "events" else method
            seen.add((manner, plural, rest[1] if len(rest) > 1 else ""))
        return await request(self, method, path, body, content_type=content_type, **more)

    monkeypatch.setattr(Client, "request", spy)
    return seen


async def is_gone(lab, kind, name, namespace=""):
    async def check():
        return await lab.client.find(kind, name, namespace) is None

    await lab.until(check)


async def test_provisioner_attacher_and_resizer(lab, writes):
    lab.start(Role.PROVISIONER, Role.ATTACHER, Role.RESIZER)
    await lab.make_class(allowVolumeExpansion=True)
    await lab.make_node("node-1")
    await lab.make_claim("data")
    claim = await lab.bound("data")
    await lab.make_claim("copy", dataSource={"kind": "PersistentVolumeClaim", "name": "data"})
    await lab.bound("copy")
    await lab.attach("va", claim.spec.volume_name)

    async def is_attached():
        return (await lab.attachment("va")).status.attached

    await lab.until(is_attached)
    vac = {"metadata": {"name": "gold"}, "driverName": lab.driver.name, "parameters": {"tier": "gold"}}
    await lab.client.create(VolumeAttributesClass, vac)
    more = {"spec": {"resources": {"requests": {"storage": "2Gi"}}, "volumeAttributesClassName": "gold"}}
    await lab.client.patch(PersistentVolumeClaim, "data", more, "default")

    async def is_changed():
        status = (await lab.claim("data")).status
        return status.capacity["storage"] == "2Gi" and status.current_volume_attributes_class_name == "gold"

    await lab.until(is_changed)
    await lab.client.delete(VolumeAttachment, "va")
    await is_gone(lab, VolumeAttachment, "va")
    for name in ("data", "copy"):
        await lab.client.delete(PersistentVolumeClaim, name, "default")
    await lab.gone()
    assert writes - ALWAYS == {
        ("POST", "persistentvolumes", ""),
        ("DELETE", "persistentvolumes", ""),
        (f"PATCH {STRATEGIC}", "persistentvolumes", ""),
        (f"PATCH {JSON}", "persistentvolumes", ""),
        ("PUT", "persistentvolumeclaims", ""),
        (f"PATCH {STRATEGIC}", "persistentvolumeclaims", "status"),
        (f"PATCH {MERGE}", "volumeattachments", ""),
        (f"PATCH {MERGE}", "volumeattachments", "status"),
    }


async def test_snapshotter(lab, writes):
    lab.driver.backend.volumes["h1"] = pb.Volume(volume_id="h1", capacity_bytes=1 << 30)
    body = {"metadata": {"name": "snaps"}, "driver": lab.driver.name, "deletionPolicy": "Delete"}
    await lab.client.create(VolumeSnapshotClass, body)
    spec = {
        "volumeSnapshotRef": {"name": "s", "namespace": "default", "uid": "0ec7e21e-0000-4000-8000-000000000001"},
        "deletionPolicy": "Delete",
        "driver": lab.driver.name,
        "volumeSnapshotClassName": "snaps",
        "source": {"volumeHandle": "h1"},
    }
    finalizers = ["snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"]
    metadata = {"name": "content", "finalizers": finalizers}
    await lab.client.create(VolumeSnapshotContent, {"metadata": metadata, "spec": spec})
    lab.start(Role.SNAPSHOTTER)

    async def is_ready():
        found = await lab.client.get(VolumeSnapshotContent, "content")
        return found.status is not None and found.status.ready_to_use

    await lab.until(is_ready)
    deleted = {"metadata": {"annotations": {"snapshot.storage.kubernetes.io/volumesnapshot-being-deleted": "yes"}}}
    await lab.client.patch(VolumeSnapshotContent, "content", deleted)
    await lab.client.delete(VolumeSnapshotContent, "content")
    await is_gone(lab, VolumeSnapshotContent, "content")
    assert {(manner.split()[0], plural, sub) for manner, plural, sub in writes - ALWAYS} == {
        ("PATCH", "volumesnapshotcontents", ""),
        ("PATCH", "volumesnapshotcontents", "status"),
    }


async def test_a_volume_that_is_retained_is_only_patched(lab, writes):
    lab.start(Role.PROVISIONER)
    await lab.make_class(reclaimPolicy="Retain")
    await lab.make_claim("data")
    claim = await lab.bound("data")

    async def is_free():
        volume = await lab.client.get(PersistentVolume, claim.spec.volume_name)
        return not any("external-provisioner" in each for each in volume.finalizers)

    await lab.until(is_free)
    assert writes - ALWAYS == {("POST", "persistentvolumes", ""), (f"PATCH {STRATEGIC}", "persistentvolumes", "")}
