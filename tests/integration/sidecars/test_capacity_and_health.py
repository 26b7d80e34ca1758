"""Capacity objects for the scheduler, and events about sick volumes."""

from moorage.kube.objects import CSIStorageCapacity, PersistentVolume, PersistentVolumeClaim, StorageClass
from moorage.kube.quantity import bytes_of
from moorage.sidecars.roles import Role
from moorage.sidecars.testing import Abilities

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
        assert first.labels["csi.storage.k8s.io/managed-by"] == "external-provisioner"
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
