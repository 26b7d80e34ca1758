"""Contents become snapshots at the driver: the snapshotter against a scripted driver, the controller's part by hand."""

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import (
    PersistentVolume,
    VolumeGroupSnapshotClass,
    VolumeGroupSnapshotContent,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.sidecars.roles import Role
from moorage.testing import Abilities

BEING_CREATED = "snapshot.storage.kubernetes.io/volumesnapshot-being-created"
BEING_DELETED = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted"
MANAGED_BY = "snapshot.storage.kubernetes.io/managed-by"
FINALIZER = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"
GROUP = "groupsnapshot.storage.kubernetes.io"


async def make_content(lab, name="content", policy="Delete", **source):
    if not lab.driver.backend.volumes:
        lab.driver.backend.volumes["h1"] = pb.Volume(volume_id="h1", capacity_bytes=1 << 30)
        body = {"metadata": {"name": "snaps"}, "driver": lab.driver.name, "deletionPolicy": policy}
        await lab.client.create(VolumeSnapshotClass, body)
    spec = {
        "volumeSnapshotRef": {"name": "s", "namespace": "default", "uid": "0ec7e21e-0000-4000-8000-000000000001"},
        "deletionPolicy": policy,
        "driver": lab.driver.name,
        "volumeSnapshotClassName": "snaps",
        "source": source or {"volumeHandle": "h1"},
    }
    body = {"metadata": {"name": name, "finalizers": [FINALIZER]}, "spec": spec}
    await lab.client.create(VolumeSnapshotContent, body)


async def content_of(lab, name="content"):
    return await lab.client.find(VolumeSnapshotContent, name)


async def ready(lab, name="content"):
    async def is_ready():
        content = await content_of(lab, name)
        is_done = content.status is not None and content.status.ready_to_use
        return content if is_done and BEING_CREATED not in content.annotations else None

    return await lab.until(is_ready)


async def remove(lab, name="content"):
    patch = {"metadata": {"annotations": {BEING_DELETED: "yes"}}}
    await lab.client.patch(VolumeSnapshotContent, name, patch)
    await lab.client.delete(VolumeSnapshotContent, name)

    async def is_gone():
        return await content_of(lab, name) is None

    await lab.until(is_gone)


async def test_a_snapshot_is_made_and_deleted(lab):
    lab.driver.ready_after = 2
    lab.start(Role.SNAPSHOTTER, extra_create_metadata=True)
    await make_content(lab)
    content = await ready(lab)
    assert content.status.snapshot_handle == "snap-snapshot-0ec7e21e-0000-4000-8000-000000000001"
    assert content.status.creation_time == 1_700_000_000_000_000_005
    assert content.status.restore_size == 1 << 30
    assert lab.driver.count("CreateSnapshot") == 3
    request = lab.driver.requests("CreateSnapshot")[0]
    assert request.parameters["csi.storage.k8s.io/volumesnapshot/name"] == "s"
    await remove(lab)
    assert lab.driver.backend.snapshots == {}


@pytest.mark.parametrize(
    "code", ["INTERNAL", "INVALID_ARGUMENT", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"]
)
async def test_a_failure_is_noted_and_tried_again(lab, code):
    lab.driver.fail("CreateSnapshot", code, times=2)
    lab.start(Role.SNAPSHOTTER)
    await make_content(lab)
    content = await ready(lab)
    assert content.status.error is None
    assert lab.driver.count("CreateSnapshot") == 3
    message = (await lab.events("SnapshotCreationFailed"))[0].message
    assert code in message
    assert message.endswith("retried with growing pauses of 0.05s to 0.4s")


async def test_a_snapshot_that_may_still_appear_is_not_forgotten(lab):
    """Deleted while the driver's answer is open: the content stays until it is final, then the snapshot goes."""
    lab.driver.fail("CreateSnapshot", "DEADLINE_EXCEEDED", times=4, is_done=True)
    lab.start(Role.SNAPSHOTTER)
    await make_content(lab)

    async def is_open():
        content = await content_of(lab)
        return BEING_CREATED in content.annotations and lab.driver.backend.snapshots

    await lab.until(is_open)
    await remove(lab)
    assert lab.driver.backend.snapshots == {}


@pytest.mark.parametrize("code", ["INTERNAL", "UNAVAILABLE"])
async def test_a_failed_deletion_is_told_and_tried_again(lab, code):
    lab.start(Role.SNAPSHOTTER)
    await make_content(lab)
    await ready(lab)
    lab.driver.fail("DeleteSnapshot", code, times=2)
    await remove(lab)
    assert lab.driver.count("DeleteSnapshot") == 3
    assert code in (await lab.events("SnapshotDeleteError"))[0].message


async def test_a_retained_snapshot_stays(lab):
    lab.start(Role.SNAPSHOTTER)
    await make_content(lab, policy="Retain")
    await ready(lab)
    await remove(lab)
    assert len(lab.driver.backend.snapshots) == 1


async def test_a_snapshot_made_elsewhere_is_looked_up(lab):
    lab.driver.backend.snapshots["old"] = pb.Snapshot(snapshot_id="old", size_bytes=7, ready_to_use=True)
    lab.start(Role.SNAPSHOTTER)
    await make_content(lab, snapshotHandle="old")
    content = await ready(lab)
    assert (content.status.snapshot_handle, content.status.restore_size) == ("old", 7)
    assert lab.driver.count("CreateSnapshot") == 0


async def make_group(lab):
    for handle in ("h1", "h2"):
        lab.driver.backend.volumes[handle] = pb.Volume(volume_id=handle, capacity_bytes=1 << 30)
    body = {"metadata": {"name": "groups"}, "driver": lab.driver.name, "deletionPolicy": "Delete"}
    await lab.client.create(VolumeGroupSnapshotClass, body)
    spec = {
        "volumeGroupSnapshotRef": {"name": "g", "namespace": "default", "uid": "0ec7e21e-0000-4000-8000-000000000002"},
        "deletionPolicy": "Delete",
        "driver": lab.driver.name,
        "volumeGroupSnapshotClassName": "groups",
        "source": {"volumeHandles": ["h1", "h2"]},
    }
    finalizer = f"{GROUP}/volumegroupsnapshotcontent-bound-protection"
    body = {"metadata": {"name": "group", "finalizers": [finalizer]}, "spec": spec}
    await lab.client.create(VolumeGroupSnapshotContent, body)


@pytest.mark.parametrize("code", ["", "INTERNAL", "UNAVAILABLE"])
async def test_a_group_is_snapshotted_and_deleted_as_one(lab, code):
    if code:
        lab.driver.fail("CreateVolumeGroupSnapshot", code, times=2)
        lab.driver.fail("DeleteVolumeGroupSnapshot", code, times=2)
    lab.start(Role.SNAPSHOTTER)
    await make_group(lab)

    async def is_ready():
        content = await lab.client.find(VolumeGroupSnapshotContent, "group")
        return content if content.status is not None and content.status.ready_to_use else None

    content = await lab.until(is_ready)
    members = content.status.volume_snapshot_info_list
    assert {info.volume_handle for info in members} == {"h1", "h2"}
    assert bool(await lab.events("GroupSnapshotCreationFailed")) == bool(code)
    patch = {"metadata": {"annotations": {f"{GROUP}/volumegroupsnapshot-being-deleted": "yes"}}}
    await lab.client.patch(VolumeGroupSnapshotContent, "group", patch)
    await lab.client.delete(VolumeGroupSnapshotContent, "group")

    async def is_gone():
        return await lab.client.find(VolumeGroupSnapshotContent, "group") is None

    await lab.until(is_gone)
    assert lab.driver.backend.groups == {}
    assert lab.driver.backend.snapshots == {}
    assert lab.driver.count("DeleteSnapshot") == 0


LOCAL = Abilities(plugin=("CONTROLLER_SERVICE", "GROUP_CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"))


async def make_placed_volume(lab, handle, zone):
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}]
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "csi": {"driver": lab.driver.name, "volumeHandle": handle},
        "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
    }
    await lab.client.create(PersistentVolume, {"metadata": {"name": f"pv-{handle}"}, "spec": spec})


async def group(lab):
    return await lab.client.find(VolumeGroupSnapshotContent, "group")


async def remove_group(lab):
    patch = {"metadata": {"annotations": {f"{GROUP}/volumegroupsnapshot-being-deleted": "yes"}}}
    await lab.client.patch(VolumeGroupSnapshotContent, "group", patch)
    await lab.client.delete(VolumeGroupSnapshotContent, "group")

    async def is_gone():
        return await group(lab) is None

    await lab.until(is_gone)


async def test_with_node_deployment_a_content_without_a_node_goes_to_where_its_snapshot_is(make_lab):
    async with make_lab(LOCAL) as lab:
        await lab.make_node("node-1", keys=("zone",), zone="a")
        lab.driver.topology = {"zone": "a"}
        await make_content(lab, "elsewhere", snapshotHandle="snap-elsewhere")
        lab.driver.backend.snapshots["snap-here"] = pb.Snapshot(snapshot_id="snap-here", ready_to_use=True)
        await make_content(lab, "here", snapshotHandle="snap-here")
        lab.start(Role.SNAPSHOTTER, node="node-1", node_deployment=True)
        assert (await ready(lab, "here")).labels == {MANAGED_BY: "node-1"}

        async def has_asked_for_both():
            asked = {request.snapshot_id for name, request in lab.driver.calls if name == "ListSnapshots"}
            return asked == {"snap-here", "snap-elsewhere"}

        await lab.until(has_asked_for_both)
        other = await content_of(lab, "elsewhere")
        assert (other.labels, other.status) == ({}, None)


async def test_with_node_deployment_a_content_without_a_node_goes_to_where_its_volume_is(make_lab):
    async with make_lab(LOCAL) as lab:
        lab.driver.topology = {"zone": "a"}
        await lab.make_node("node-1", keys=("zone",), zone="a")
        for zone, handle in (("a", "h1"), ("b", "h2")):
            await make_placed_volume(lab, handle, zone)
        await make_content(lab, "here", volumeHandle="h1")
        await make_content(lab, "elsewhere", volumeHandle="h2")
        lab.start(Role.SNAPSHOTTER, node="node-1", node_deployment=True)
        assert (await ready(lab, "here")).labels == {MANAGED_BY: "node-1"}
        other = await content_of(lab, "elsewhere")
        assert (other.labels, other.status) == ({}, None)


async def test_with_node_deployment_a_group_is_made_where_its_volumes_are_and_stays_that_nodes(make_lab):
    async with make_lab(LOCAL) as lab:
        for handle in ("h1", "h2"):
            await make_placed_volume(lab, handle, "b")
        await make_group(lab)
        lab.driver.topology = {"zone": "a"}
        elsewhere = lab.start(Role.SNAPSHOTTER, node="node-1", host="h-1", node_deployment=True)

        async def has_looked():
            return lab.driver.count("NodeGetInfo") == 1

        await lab.until(has_looked)
        lab.driver.topology = {"zone": "b"}
        lab.start(Role.SNAPSHOTTER, node="node-2", host="h-2", node_deployment=True)

        async def is_ready():
            found = await group(lab)
            return found if found.status is not None and found.status.ready_to_use else None

        found = await lab.until(is_ready)
        assert found.labels[MANAGED_BY] == "node-2"
        assert lab.driver.count("CreateVolumeGroupSnapshot") == 1
        for handle in ("h1", "h2"):  # whose group it is must not depend on its volumes
            await lab.client.patch(PersistentVolume, f"pv-{handle}", {"metadata": {"finalizers": None}})
            await lab.client.delete(PersistentVolume, f"pv-{handle}")
        await remove_group(lab)
        assert lab.driver.backend.groups == {}
        assert lab.driver.count("DeleteVolumeGroupSnapshot") == 1
        assert not elsewhere.done()


async def test_with_node_deployment_a_group_over_two_nodes_is_refused_and_can_be_deleted(make_lab):
    async with make_lab(LOCAL) as lab:
        await make_placed_volume(lab, "h1", "a")
        await make_placed_volume(lab, "h2", "b")
        await make_group(lab)
        lab.driver.topology = {"zone": "a"}
        lab.start(Role.SNAPSHOTTER, node="node-1", node_deployment=True)

        async def is_told():
            found = await group(lab)
            has_error = found.status is not None and found.status.error is not None
            return await lab.events("GroupSnapshotCreationFailed") if has_error else None

        [event, *_] = await lab.until(is_told)
        assert "volume h2 is not on node node-1" in event.message
        assert "choose volumes of one node" in (await group(lab)).status.error.message
        await remove_group(lab)
        assert lab.driver.count("CreateVolumeGroupSnapshot") == lab.driver.count("DeleteVolumeGroupSnapshot") == 0
