"""A node that is gone for good: what waits for it is let go, what is in use is only reported."""

from typing import Any

from moorage.kube.objects import (
    Lease,
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeAttachment,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from moorage.sidecars.lost_node import carry_out, plan
from moorage.sidecars.roles import Role
from moorage.testing import Abilities

SELECTED = "volume.kubernetes.io/selected-node"
LOCAL = Abilities(plugin=("CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"))


async def test_what_waits_for_a_lost_node_is_let_go(make_lab):
    async with make_lab(LOCAL) as lab:
        lab.driver.topology = {"host": "node-1"}
        await lab.make_node("node-1", keys=("host",), host="node-1")
        await lab.make_class(volumeBindingMode="WaitForFirstConsumer")
        running = lab.start(Role.PROVISIONER, node="node-1", node_deployment=True)
        for name in ("kept", "released"):
            await lab.make_claim(name, annotations={SELECTED: "node-1"})
            await lab.bound(name)

        async def is_noted():
            return await lab.client.find(Lease, "test-csi-moorage-dev-intents-node-1", "default")

        await lab.until(is_noted)
        await lab.kill(running)
        await lab.client.delete(PersistentVolumeClaim, "released", "default")
        await lab.make_claim("waiting", annotations={SELECTED: "node-1"})

        async def is_released():
            return any(volume.status.phase == "Released" for volume in await lab.volumes())

        async def is_asked():
            return "volume.kubernetes.io/storage-provisioner" in (await lab.claim("waiting")).annotations

        await lab.until(is_released)
        await lab.until(is_asked)
        steps = await plan(lab.client, lab.driver.name, "node-1", "default")
        assert sorted(step.what for step in steps) == ["forget-volume", "keep", "remove", "reschedule"]
        for step in steps:
            await carry_out(lab.client, step)

        async def is_settled():
            return [volume.status.phase for volume in await lab.volumes()] == ["Bound"]

        await lab.until(is_settled)
        assert SELECTED not in (await lab.claim("waiting")).annotations
        assert (await lab.claim("kept")).status.phase == "Bound"
        assert len((await lab.client.list(PersistentVolume)).items) == 1


async def test_what_only_the_lost_nodes_finalizers_hold_is_let_go(make_lab):
    async with make_lab(LOCAL) as lab:
        lab.driver.topology = {"host": "node-1"}
        await lab.make_node("node-1", keys=("host",), host="node-1")
        await lab.make_class(volumeBindingMode="WaitForFirstConsumer")
        running = lab.start(Role.PROVISIONER, node="node-1", node_deployment=True)
        await lab.make_claim("origin", annotations={SELECTED: "node-1"})
        claim = await lab.bound("origin")
        await lab.kill(running)
        made = await make_held_objects(lab, claim.spec.volume_name)
        for kind, name, namespace in made:
            await lab.client.delete(kind, name, namespace)
            assert (await lab.client.get(kind, name, namespace)).is_deleting
        for node in ("node-2", "node-1"):
            steps = await plan(lab.client, lab.driver.name, node, "default")
            for step in steps:
                await carry_out(lab.client, step)
            left = {name for kind, name, namespace in made if await lab.client.find(kind, name, namespace) is not None}
            assert left == ({name for _, name, _ in made} if node == "node-2" else set())


async def make_held_objects(lab, volume):
    """One object of each kind that a node's process holds with a finalizer, all of node-1."""
    labels = {"snapshot.storage.kubernetes.io/managed-by": "node-1"}
    prefix, group = "snapshot.storage.kubernetes.io", "groupsnapshot.storage.kubernetes.io"
    protection = {"finalizers": ["provisioner.storage.kubernetes.io/cloning-protection"]}
    await lab.client.patch(PersistentVolumeClaim, "origin", {"metadata": protection}, "default")
    await lab.attach("va", volume)
    held = {"metadata": {"finalizers": ["external-attacher/test-csi-moorage-dev"]}}
    await lab.client.patch(VolumeAttachment, "va", held)
    finalizers = ["provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection"]
    metadata: dict[str, Any] = {"name": "s", "namespace": "default", "finalizers": finalizers}
    body = {"metadata": metadata, "spec": {"source": {"persistentVolumeClaimName": "origin"}}}
    snapshot = await lab.client.create(VolumeSnapshot, body, "default")
    common = {"driver": lab.driver.name, "deletionPolicy": "Delete"}
    reference = {"name": "s", "namespace": "default", "uid": snapshot.uid}
    spec: dict[str, Any] = {**common, "volumeSnapshotRef": reference, "source": {"volumeHandle": "h1"}}
    metadata = {
        "name": "content",
        "labels": labels,
        "finalizers": [f"{prefix}/volumesnapshotcontent-bound-protection"],
    }
    await lab.client.create(VolumeSnapshotContent, {"metadata": metadata, "spec": spec})
    reference = {"name": "g", "namespace": "default"}
    spec = {**common, "volumeGroupSnapshotRef": reference, "source": {"volumeHandles": ["h1"]}}
    finalizers = [f"{group}/volumegroupsnapshotcontent-bound-protection"]
    metadata = {"name": "group", "labels": labels, "finalizers": finalizers}
    await lab.client.create(VolumeGroupSnapshotContent, {"metadata": metadata, "spec": spec})
    return [
        (PersistentVolumeClaim, "origin", "default"),
        (VolumeAttachment, "va", ""),
        (VolumeSnapshot, "s", "default"),
        (VolumeSnapshotContent, "content", ""),
        (VolumeGroupSnapshotContent, "group", ""),
    ]
