"""Group snapshots in whatever version the cluster serves them: the newest is used, and each works."""

import json

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.sidecars.roles import Role
from moorage.sidecars.snapshotter.versions import BY_PREFERENCE, best_served

GROUP = "groupsnapshot.storage.kubernetes.io"
KINDS = ("volumegroupsnapshots", "volumegroupsnapshotcontents", "volumegroupsnapshotclasses")
BY_VERSION = {kinds.content.resource.version: kinds for kinds in BY_PREFERENCE}


async def serve_only(lab, *versions):
    """Change the definitions as a cluster with an older, or a later, release of them has them."""
    for plural in KINDS:
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.groupsnapshot.storage.k8s.io"
        definition = json.loads(await lab.client.request("GET", path))
        for version in definition["spec"]["versions"]:
            version["served"] = version["name"] in versions
        await lab.client.request("PUT", path, definition)


async def make_group(lab, kinds):
    for handle in ("h1", "h2"):
        lab.driver.backend.volumes[handle] = pb.Volume(volume_id=handle, capacity_bytes=1 << 30)
    body = {"metadata": {"name": "groups"}, "driver": lab.driver.name, "deletionPolicy": "Delete"}
    await lab.client.create(kinds.group_class, body)
    spec = {
        "volumeGroupSnapshotRef": {"name": "g", "namespace": "default", "uid": "0ec7e21e-0000-4000-8000-000000000002"},
        "deletionPolicy": "Delete",
        "driver": lab.driver.name,
        "volumeGroupSnapshotClassName": "groups",
        "source": {"volumeHandles": ["h1", "h2"]},
    }
    finalizer = f"{GROUP}/volumegroupsnapshotcontent-bound-protection"
    await lab.client.create(kinds.content, {"metadata": {"name": "group", "finalizers": [finalizer]}, "spec": spec})


@pytest.mark.parametrize(
    ("served", "used"),
    [
        (("v1", "v1beta2", "v1beta1"), "v1"),
        (("v1beta2", "v1beta1"), "v1beta2"),
        (("v1",), "v1"),
        (("v1beta1",), "v1beta1"),
    ],
)
async def test_a_group_lives_and_dies_in_the_newest_version(lab, served, used):
    await serve_only(lab, *served)
    kinds = await best_served(lab.client)
    assert kinds == BY_VERSION[used]
    lab.start(Role.SNAPSHOTTER)
    await make_group(lab, kinds)
    path = kinds.content.resource.path(None, "group")

    async def is_ready():
        found = json.loads(await lab.client.request("GET", path))
        return found if found.get("status", {}).get("readyToUse") else None

    status = (await lab.until(is_ready))["status"]
    field = "volumeSnapshotHandlePairList" if used == "v1beta1" else "volumeSnapshotInfoList"
    assert {member["volumeHandle"] for member in status[field]} == {"h1", "h2"}
    assert all(("restoreSize" in member) == (used != "v1beta1") for member in status[field])

    patch = {"metadata": {"annotations": {f"{GROUP}/volumegroupsnapshot-being-deleted": "yes"}}}
    await lab.client.patch(kinds.content, "group", patch)
    await lab.client.delete(kinds.content, "group")

    async def is_gone():
        return await lab.client.find(kinds.content, "group") is None

    await lab.until(is_gone)
    assert len(lab.driver.requests("DeleteVolumeGroupSnapshot")[0].snapshot_ids) == 2
    assert lab.driver.backend.groups == lab.driver.backend.snapshots == {}


async def test_groups_begin_when_the_cluster_gets_them(lab, monkeypatch):
    monkeypatch.setattr("moorage.sidecars.snapshotter.run._LOOK_FOR_GROUPS_S", 0.05)
    await serve_only(lab)
    assert await best_served(lab.client) is None
    lab.start(Role.SNAPSHOTTER)
    await serve_only(lab, "v1")
    await make_group(lab, BY_VERSION["v1"])

    async def is_made():
        return lab.driver.backend.groups

    assert await lab.until(is_made)
