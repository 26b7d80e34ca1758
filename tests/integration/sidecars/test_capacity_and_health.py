"""Capacity objects for the scheduler, and events about sick volumes."""

import time

import pytest

from moorage.kube.objects import CSIStorageCapacity, Node, PersistentVolume, PersistentVolumeClaim, Pod, StorageClass
from moorage.kube.objects.meta import timestamp_text
from moorage.kube.quantity import bytes_of
from moorage.sidecars.roles import Role
from moorage.testing import Abilities

TOPOLOGY = Abilities(plugin=("CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"))
FAST = {"kube_api_capacity_qps": 0.0, "capacity_ownerref_level": -1}


async def published(lab):
    found = (await lab.client.list(CSIStorageCapacity, "default")).items
    return {(o.node_topology.match_labels.get("zone"), o.storage_class_name): bytes_of(o.capacity) for o in found}


async def is_published(lab, wanted):
    async def check():
        return await published(lab) == wanted

    await lab.until(check)


async def test_each_place_and_class_has_one_object_with_the_present_room(make_lab):
    async with make_lab(TOPOLOGY) as lab:
        size = lab.driver.capacity_bytes
        await lab.make_class(volumeBindingMode="WaitForFirstConsumer")
        await lab.make_class("now", volumeBindingMode="Immediate")
        await lab.make_node("node-1", keys=("zone",), zone="a")
        await lab.make_node("node-2", keys=("zone",), zone="a")
        lab.start(Role.CAPACITY, Role.PROVISIONER, **FAST)
        await is_published(lab, {("a", "fast"): size})
        await lab.make_node("node-3", keys=("zone",), zone="b")
        await is_published(lab, {("a", "fast"): size, ("b", "fast"): size})
        [first, *_] = (await lab.client.list(CSIStorageCapacity, "default")).items
        assert first.labels == {
            "csi.storage.k8s.io/drivername": lab.driver.name,
            "csi.storage.k8s.io/managed-by": "external-provisioner",
        }
        assert first.name.startswith("csisc-")
        await lab.client.delete(CSIStorageCapacity, first.name, "default")

        async def has_both():
            return set(await published(lab)) == {("a", "fast"), ("b", "fast")}

        await lab.until(has_both)
        await lab.client.delete(StorageClass, "fast")
        await is_published(lab, {})


async def test_a_new_volume_is_seen_in_the_room_at_once(make_lab):
    async with make_lab(Abilities(plugin=("CONTROLLER_SERVICE",))) as lab:
        await lab.make_class(volumeBindingMode="Immediate")
        await lab.make_node("node-1")
        lab.start(Role.CAPACITY, Role.PROVISIONER, capacity_for_immediate_binding=True, **FAST)
        await is_published(lab, {(None, "fast"): lab.driver.capacity_bytes})
        await lab.make_claim("data")
        await is_published(lab, {(None, "fast"): lab.driver.capacity_bytes - (1 << 30)})
        await lab.bound("data")
        await lab.client.delete(PersistentVolumeClaim, "data", "default")
        await is_published(lab, {(None, "fast"): lab.driver.capacity_bytes})
        assert len((await lab.client.list(CSIStorageCapacity, "default")).items) == 1


async def test_a_failed_creation_is_a_reason_to_look_at_the_room(make_lab):
    async with make_lab(Abilities(plugin=("CONTROLLER_SERVICE",))) as lab:
        await lab.make_class(volumeBindingMode="Immediate")
        await lab.make_node("node-1")
        lab.driver.fail("CreateVolume", "INTERNAL", times=1000)
        lab.start(Role.CAPACITY, Role.PROVISIONER, capacity_for_immediate_binding=True, capacity_poll_interval_s=3600.0)
        await is_published(lab, {(None, "fast"): lab.driver.capacity_bytes})
        lab.driver.capacity_bytes = 1 << 20
        await lab.make_claim("data")
        await is_published(lab, {(None, "fast"): 1 << 20})
        assert await lab.volumes() == []


async def test_a_sick_volume_and_its_recovery_are_told(lab):
    lab.start(Role.PROVISIONER, Role.HEALTH, list_volumes_interval_s=0.1)
    await lab.make_class()
    await lab.make_claim("data")
    claim = await lab.bound("data")
    volume = await lab.client.get(PersistentVolume, claim.spec.volume_name)
    lab.driver.backend.abnormal[volume.spec.csi.volume_handle] = "disk on fire"

    async def is_told():
        return await lab.events("VolumeConditionAbnormal")

    [event] = await lab.until(is_told)
    assert event.message == "disk on fire"
    assert event.involved_object.name == "data"
    assert await lab.events("VolumeConditionNormal") == []
    lab.driver.backend.abnormal.clear()

    async def is_well():
        return await lab.events("VolumeConditionNormal")

    await lab.until(is_well)


async def test_roles_that_the_driver_cannot_serve_ask_nothing_of_it_until_it_can(make_lab):
    async with make_lab(Abilities(rpcs=("CREATE_DELETE_VOLUME",))) as lab:
        await lab.make_class(volumeBindingMode="Immediate")
        await lab.make_node("node-1")
        more = {"capacity_for_immediate_binding": True, "monitor_interval_s": 0.02, "list_volumes_interval_s": 0.02}
        lab.start(Role.PROVISIONER, Role.HEALTH, Role.CAPACITY, **more, **FAST)
        await lab.make_claim("data")
        claim = await lab.bound("data")
        asked = {name for name, _ in lab.driver.calls}
        assert asked.isdisjoint({"GetCapacity", "ListVolumes", "ControllerGetVolume"})
        lab.driver.abilities = Abilities(plugin=("CONTROLLER_SERVICE",))
        volume = await lab.client.get(PersistentVolume, claim.spec.volume_name)
        lab.driver.backend.abnormal[volume.spec.csi.volume_handle] = "disk on fire"
        await lab.driver.restart()
        await is_published(lab, {(None, "fast"): lab.driver.capacity_bytes - (1 << 30)})

        async def is_told():
            return await lab.events("VolumeConditionAbnormal")

        await lab.until(is_told)


async def make_pod(lab, name, **body):
    metadata = {"name": name, "namespace": "default", **body.pop("metadata", {})}
    spec = {"containers": [{"name": "c", "image": "host"}], **body}
    return await lab.client.create(Pod, {"metadata": metadata, "spec": spec}, "default")


@pytest.mark.parametrize("level", [-1, 0, 1])
async def test_capacity_objects_belong_to_the_deployment_that_publishes_them(lab, level):
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "sidecars", "uid": "u-1", "controller": True}
    pod = await make_pod(lab, "sidecars-x", metadata={"ownerReferences": [owner]})
    await lab.make_class(volumeBindingMode="WaitForFirstConsumer")
    await lab.make_node("node-1")
    lab.start(Role.CAPACITY, pod="sidecars-x", kube_api_capacity_qps=0.0, capacity_ownerref_level=level)

    async def is_there():
        return (await lab.client.list(CSIStorageCapacity, "default")).items

    [found] = await lab.until(is_there)
    owners = [(each.kind, each.name, each.uid) for each in found.metadata.owner_references]
    assert owners == {-1: [], 0: [("Pod", "sidecars-x", pod.uid)], 1: [("DaemonSet", "sidecars", "u-1")]}[level]


async def test_an_object_without_its_owner_gets_it(lab):
    pod = await make_pod(lab, "sidecars-x")
    await lab.make_class(volumeBindingMode="WaitForFirstConsumer")
    await lab.make_node("node-1")
    first = lab.start(Role.CAPACITY, kube_api_capacity_qps=0.0, capacity_ownerref_level=-1)

    async def objects():
        return (await lab.client.list(CSIStorageCapacity, "default")).items

    [before] = await lab.until(objects)
    await lab.kill(first)
    lab.start(
        Role.CAPACITY,
        pod="sidecars-x",
        kube_api_capacity_qps=0.0,
        capacity_ownerref_level=0,
        capacity_poll_interval_s=0.05,
    )

    async def is_owned():
        found = await objects()
        return [each for each in found if each.metadata.owner_references]

    [after] = await lab.until(is_owned)
    assert (after.uid, after.metadata.owner_references[0].uid) == (before.uid, pod.uid)


async def test_claims_on_a_failed_node_are_told_and_so_is_its_recovery(lab, monkeypatch):
    monkeypatch.setattr("moorage.sidecars.volume_health._NODE_LOOK_S", 0.05)
    lab.start(Role.PROVISIONER, Role.HEALTH, enable_node_watcher=True)
    await lab.make_class()
    await lab.make_claim("data")
    await lab.make_claim("unused")
    await lab.bound("data")
    for name in ("node-1", "node-2"):
        await lab.make_node(name)
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
    await make_pod(lab, "user", volumes=volumes, nodeName="node-1")

    async def ready(status, since_s):
        condition = {"type": "Ready", "status": status, "lastTransitionTime": timestamp_text(time.time() - since_s)}
        patch = {"status": {"conditions": [condition]}}
        await lab.client.patch(Node, "node-1", patch, subresource="status")

    async def told(reason, word):
        async def check():
            return [event for event in await lab.events(reason) if word in event.message]

        return [event.involved_object.name for event in await lab.until(check)]

    await ready("False", 60)  # for a minute: it may come back by itself
    await ready("Unknown", 600)
    assert await told("NodeFailed", "has not been ready for 5 minutes") == ["data"]
    await ready("True", 0)
    assert await told("NodeRecovered", "is ready again") == ["data"]
    assert len(await lab.events("NodeFailed")) == 1
    await lab.client.delete(Node, "node-1")
    assert await told("NodeFailed", "node-1, where pod user uses it, is gone") == ["data"]
