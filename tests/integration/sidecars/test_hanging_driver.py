"""A driver that never answers: every role gives up in time, says so where it can, and goes on when the driver does."""

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import (
    CSIStorageCapacity,
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeAttributesClass,
    VolumeGroupSnapshotClass,
    VolumeGroupSnapshotContent,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.kube.quantity import bytes_of
from moorage.sidecars.roles import Role
from moorage.testing import Abilities

QUICK = {"timeout_s": 0.2}
UID = "0ec7e21e-0000-4000-8000-000000000001"


class Hang:
    """A method that hangs from now on, until it is released."""

    def __init__(self, lab, method):
        self._lab, self._method = lab, method
        self._gate = lab.driver.hold(method)

    async def was_given_up(self, times=2):
        """The caller has come back at least this often, so it did not wait for ever."""

        async def came_back():
            return self._lab.driver.count(self._method) >= times

        await self._lab.until(came_back)

    def release(self):
        self._gate.set()


async def bound_claim(lab, *roles, **settings):
    task = lab.start(Role.PROVISIONER, *roles, **QUICK, **settings)
    await lab.make_class(allowVolumeExpansion=True)
    await lab.make_claim("data")
    claim = await lab.bound("data")
    return task, claim


async def told(lab, reason, word="DEADLINE_EXCEEDED"):
    async def is_told():
        return [event for event in await lab.events(reason) if word in event.message]

    return await lab.until(is_told)


async def test_making_and_deleting_volumes(lab):
    hang = Hang(lab, "CreateVolume")
    lab.start(Role.PROVISIONER, **QUICK)
    await lab.make_class()
    await lab.make_claim("data")
    await hang.was_given_up()
    assert "may still appear" in (await told(lab, "ProvisioningFailed"))[0].message
    hang.release()
    await lab.bound("data")
    await lab.nothing_left()

    hang = Hang(lab, "DeleteVolume")
    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    await hang.was_given_up()
    await told(lab, "VolumeFailedDelete")
    [volume] = await lab.volumes()
    assert "external-provisioner.volume.kubernetes.io/finalizer" in volume.finalizers
    hang.release()
    await lab.gone()


async def test_attaching(lab):
    await bound_claim(lab, Role.ATTACHER)
    [volume] = await lab.volumes()
    await lab.make_node("node-1", "id-1")
    hang = Hang(lab, "ControllerPublishVolume")
    await lab.attach("va", volume.name)
    await hang.was_given_up()

    async def has_error():
        found = await lab.attachment("va")
        return found if found.status.attach_error is not None else None

    found = await lab.until(has_error)
    assert "DEADLINE_EXCEEDED" in found.status.attach_error.message
    assert not found.status.attached
    hang.release()

    async def is_attached():
        return (await lab.attachment("va")).status.attached

    await lab.until(is_attached)


async def test_comparing_attachments(lab):
    await bound_claim(lab, Role.ATTACHER, reconcile_sync_s=0.05)
    [volume] = await lab.volumes()
    await lab.make_node("node-1", "id-1")
    hang = Hang(lab, "ListVolumes")
    await lab.attach("va", volume.name)
    await hang.was_given_up()

    async def is_attached():
        return (await lab.attachment("va")).status.attached

    await lab.until(is_attached)  # a list that hangs holds nothing else up
    lab.driver.backend.published[volume.spec.csi.volume_handle].clear()
    hang.release()

    async def is_back():
        return lab.driver.backend.published[volume.spec.csi.volume_handle] == {"id-1"}

    await lab.until(is_back)
    assert (await lab.attachment("va")).status.attach_error is None


async def test_expanding_and_modifying(lab):
    await bound_claim(lab, Role.RESIZER)
    expanding, modifying = Hang(lab, "ControllerExpandVolume"), Hang(lab, "ControllerModifyVolume")
    body = {"metadata": {"name": "gold"}, "driverName": lab.driver.name, "parameters": {"tier": "gold"}}
    await lab.client.create(VolumeAttributesClass, body)
    spec = {"resources": {"requests": {"storage": "2Gi"}}, "volumeAttributesClassName": "gold"}
    await lab.client.patch(PersistentVolumeClaim, "data", {"spec": spec}, "default")
    await expanding.was_given_up()
    await modifying.was_given_up()
    await told(lab, "VolumeResizeFailed")
    await told(lab, "VolumeModifyFailed")
    claim = await lab.claim("data")
    assert claim.status.allocated_resource_statuses["storage"] == "ControllerResizeInProgress"
    assert claim.status.modify_volume_status.status == "InProgress"
    expanding.release()
    modifying.release()

    async def is_done():
        found = await lab.claim("data")
        is_large = bytes_of(found.status.capacity["storage"]) == 2 << 30
        return is_large and found.status.current_volume_attributes_class_name == "gold"

    await lab.until(is_done)


async def make_content(lab):
    lab.driver.backend.volumes["h1"] = pb.Volume(volume_id="h1", capacity_bytes=1 << 30)
    body = {"metadata": {"name": "snaps"}, "driver": lab.driver.name, "deletionPolicy": "Delete"}
    await lab.client.create(VolumeSnapshotClass, body)
    spec = {
        "volumeSnapshotRef": {"name": "s", "namespace": "default", "uid": UID},
        "deletionPolicy": "Delete",
        "driver": lab.driver.name,
        "volumeSnapshotClassName": "snaps",
        "source": {"volumeHandle": "h1"},
    }
    await lab.client.create(VolumeSnapshotContent, {"metadata": {"name": "content"}, "spec": spec})


async def make_group(lab):
    lab.driver.backend.volumes["h1"] = pb.Volume(volume_id="h1", capacity_bytes=1 << 30)
    body = {"metadata": {"name": "groups"}, "driver": lab.driver.name, "deletionPolicy": "Delete"}
    await lab.client.create(VolumeGroupSnapshotClass, body)
    spec = {
        "volumeGroupSnapshotRef": {"name": "g", "namespace": "default", "uid": UID},
        "deletionPolicy": "Delete",
        "driver": lab.driver.name,
        "volumeGroupSnapshotClassName": "groups",
        "source": {"volumeHandles": ["h1"]},
    }
    await lab.client.create(VolumeGroupSnapshotContent, {"metadata": {"name": "content"}, "spec": spec})


@pytest.mark.parametrize(
    ("kind", "make", "method", "reason"),
    [
        (VolumeSnapshotContent, make_content, "CreateSnapshot", "SnapshotCreationFailed"),
        (VolumeGroupSnapshotContent, make_group, "CreateVolumeGroupSnapshot", "GroupSnapshotCreationFailed"),
    ],
)
async def test_making_snapshots(lab, kind, make, method, reason):
    hang = Hang(lab, method)
    lab.start(Role.SNAPSHOTTER, **QUICK)
    await make(lab)
    await hang.was_given_up()
    await told(lab, reason)
    content = await lab.client.get(kind, "content")
    assert [key for key in content.annotations if key.endswith("being-created")]
    hang.release()

    async def is_ready():
        found = await lab.client.get(kind, "content")
        marked = [key for key in found.annotations if key.endswith("being-created")]
        return found.status is not None and found.status.ready_to_use and not marked

    await lab.until(is_ready)


async def test_asking_for_capacity(make_lab):
    async with make_lab(Abilities(plugin=("CONTROLLER_SERVICE",))) as lab:
        hang = Hang(lab, "GetCapacity")
        await lab.make_class(volumeBindingMode="WaitForFirstConsumer")
        await lab.make_node("node-1")
        lab.start(Role.CAPACITY, kube_api_capacity_qps=0.0, capacity_ownerref_level=-1, **QUICK)
        await hang.was_given_up()
        assert (await lab.client.list(CSIStorageCapacity, "default")).items == []
        hang.release()

        async def is_published():
            return (await lab.client.list(CSIStorageCapacity, "default")).items

        assert len(await lab.until(is_published)) == 1


async def test_asking_for_health(lab):
    await bound_claim(lab, Role.HEALTH, list_volumes_interval_s=0.05)
    [volume] = await lab.volumes()
    hang = Hang(lab, "ListVolumes")
    lab.driver.backend.abnormal[volume.spec.csi.volume_handle] = "disk on fire"
    seen = lab.driver.count("ListVolumes")
    await hang.was_given_up(seen + 2)
    assert await lab.events("VolumeConditionAbnormal") == []
    hang.release()
    await told(lab, "VolumeConditionAbnormal", "disk on fire")


async def test_one_volume_that_hangs_holds_no_other_up(lab):
    """The worker of a volume waits, not the queue."""
    gate = lab.driver.hold("hanging volumes")
    lab.start(Role.PROVISIONER, timeout_s=30.0)
    await lab.make_class(parameters={})
    await lab.make_class("slow", parameters={"hang": "yes"})
    await lab.make_claim("stuck", storageClassName="slow")
    await lab.make_claim("data")
    await lab.bound("data")
    assert (await lab.claim("stuck")).status.phase == "Pending"
    gate.set()
    await lab.bound("stuck")
    assert len((await lab.client.list(PersistentVolume)).items) == 2
