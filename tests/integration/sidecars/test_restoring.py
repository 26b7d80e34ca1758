"""Volumes made from snapshots: what is checked, what is protected meanwhile, and what a crash leaves behind."""

from typing import Any

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import PersistentVolumeClaim, VolumeSnapshot, VolumeSnapshotContent
from moorage.sidecars.roles import Role
from moorage.testing import Abilities

PROTECTED = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection"
CLONED = "provisioner.storage.kubernetes.io/cloning-protection"
MANAGED_BY = "snapshot.storage.kubernetes.io/managed-by"
MODE_CHANGE = "snapshot.storage.kubernetes.io/allow-volume-mode-change"
SOURCE = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"}
LOCAL = Abilities(plugin=("CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"))


async def make_snapshot(lab, name="s", *, finalizers=(), node="", ready=True, **content_spec):
    """A snapshot as the snapshot controller and the snapshotter leave it, with its content."""
    handle = f"snap-{name}"
    lab.driver.backend.snapshots[handle] = pb.Snapshot(snapshot_id=handle, size_bytes=1 << 30, ready_to_use=True)
    metadata = {"name": name, "namespace": "default", "finalizers": list(finalizers)}
    source = {"persistentVolumeClaimName": "gone"}
    made = await lab.client.create(VolumeSnapshot, {"metadata": metadata, "spec": {"source": source}}, "default")
    content: dict[str, Any] = {"name": f"content-{name}", "labels": {MANAGED_BY: node} if node else {}}
    spec: dict[str, Any] = {
        "volumeSnapshotRef": {"name": name, "namespace": "default", "uid": made.uid},
        "deletionPolicy": "Delete",
        "driver": lab.driver.name,
        "source": {"volumeHandle": "h1"},
        **content_spec,
    }
    await lab.client.create(VolumeSnapshotContent, {"metadata": content, "spec": spec})
    status: dict[str, Any] = {"status": {"snapshotHandle": handle, "readyToUse": ready, "restoreSize": 1 << 30}}
    await lab.client.patch(VolumeSnapshotContent, content["name"], status, subresource="status")
    status = {"boundVolumeSnapshotContentName": content["name"], "readyToUse": ready, "restoreSize": "1Gi"}
    await lab.client.patch(VolumeSnapshot, name, {"status": status}, "default", subresource="status")


async def finalizers_of(lab, name="s"):
    return (await lab.client.get(VolumeSnapshot, name, "default")).finalizers


async def test_a_snapshot_is_protected_while_a_volume_is_made_from_it(lab):
    await make_snapshot(lab)
    gate = lab.driver.hold("CreateVolume")
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("copy", dataSource=SOURCE)

    async def is_asked():
        return lab.driver.requests("CreateVolume")

    [request] = await lab.until(is_asked)
    assert request.volume_content_source.snapshot.snapshot_id == "snap-s"
    assert PROTECTED in await finalizers_of(lab)
    gate.set()
    await lab.bound("copy")

    async def is_free():
        return PROTECTED not in await finalizers_of(lab)

    await lab.until(is_free)


@pytest.mark.parametrize(
    ("snapshot", "claim", "words"),
    [
        ({"ready": False}, {}, "is not ready to use yet"),
        ({"driver": "other.csi.moorage.dev"}, {}, "is of driver other.csi.moorage.dev"),
        ({}, {"size": "1Mi"}, "needs 1073741824 bytes"),
        ({"sourceVolumeMode": "Filesystem"}, {"volumeMode": "Block"}, "an administrator can allow that"),
        ({}, {"dataSource": {**SOURCE, "name": "absent"}}, "snapshot default/absent does not exist"),
        ({}, {"dataSource": {**SOURCE, "name": "../../default/volumesnapshots/s"}}, "is no name"),
    ],
)
async def test_a_snapshot_that_cannot_be_restored_is_refused_with_the_reason(lab, snapshot, claim, words):
    await make_snapshot(lab, **snapshot)
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("copy", **({"dataSource": SOURCE} | claim))

    async def told():
        return [event for event in await lab.events("ProvisioningFailed") if words in event.message]

    await lab.until(told)
    assert lab.driver.count("CreateVolume") == 0
    assert PROTECTED not in await finalizers_of(lab)


async def test_an_administrator_may_allow_another_volume_mode(lab):
    await make_snapshot(lab, sourceVolumeMode="Filesystem")
    patch = {"metadata": {"annotations": {MODE_CHANGE: "true"}}}
    await lab.client.patch(VolumeSnapshotContent, "content-s", patch)
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("copy", dataSource=SOURCE, volumeMode="Block")
    await lab.bound("copy")
    assert [volume.spec.volume_mode for volume in await lab.volumes()] == ["Block"]


async def test_what_a_crash_left_protected_is_let_go(lab):
    await make_snapshot(lab, "left", finalizers=[PROTECTED, "somebody.else/keeps"])
    await make_snapshot(lab, "used", finalizers=[PROTECTED], ready=False)
    await lab.make_class()
    await lab.make_claim("waits", dataSource={**SOURCE, "name": "used"})
    lab.start(Role.PROVISIONER, snapshot_orphan_sweep_interval_s=0.05)

    async def is_free():
        return await finalizers_of(lab, "left") == ["somebody.else/keeps"]

    await lab.until(is_free)
    assert await finalizers_of(lab, "used") == [PROTECTED]


async def test_with_node_deployment_each_node_lets_its_own_snapshots_go(make_lab):
    async with make_lab(LOCAL) as lab:
        lab.driver.topology = {"zone": "a"}
        await lab.make_node("node-1", keys=("zone",), zone="a")
        for name, node in (("mine", "node-1"), ("theirs", "node-2"), ("again", "node-1")):
            await make_snapshot(lab, name, finalizers=[PROTECTED], node=node)
        lab.start(Role.PROVISIONER, node="node-1", node_deployment=True, snapshot_orphan_sweep_interval_s=0.05)

        async def are_free():
            return [await finalizers_of(lab, "mine"), await finalizers_of(lab, "again")] == [[], []]

        await lab.until(are_free)
        assert await finalizers_of(lab, "theirs") == [PROTECTED]


async def test_a_source_stays_while_a_clone_in_another_namespace_waits_for_it(lab):
    await lab.client.request("POST", "/api/v1/namespaces", {"metadata": {"name": "other"}})
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("origin")
    await lab.bound("origin")
    patch = {"metadata": {"finalizers": [CLONED]}}
    await lab.client.patch(PersistentVolumeClaim, "origin", patch, "default")
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "1Gi"}},
        "dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "origin", "namespace": "default"},
    }
    body = {"metadata": {"name": "copy", "namespace": "other"}, "spec": spec}
    await lab.client.create(PersistentVolumeClaim, body, "other")

    async def refused():
        return [event for event in await lab.events("ProvisioningFailed") if "gate" in event.message]

    await lab.until(refused)
    await lab.client.delete(PersistentVolumeClaim, "origin", "default")
    await lab.make_claim("later")
    await lab.bound("later")  # by then the source has been looked at too
    assert CLONED in (await lab.claim("origin")).finalizers
    await lab.client.delete(PersistentVolumeClaim, "copy", "other")

    async def is_gone():
        return await lab.claim("origin") is None

    await lab.until(is_gone)
