"""Attachments become published volumes and back: the attacher against a scripted driver."""

from typing import Any

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import PersistentVolume, Secret, VolumeAttachment
from moorage.sidecars.roles import Role
from moorage.testing import Abilities

FINALIZER = "external-attacher/test-csi-moorage-dev"


async def make_volume(lab, name="v1"):
    """A volume that was made by hand, with its counterpart in the back end."""
    lab.driver.backend.volumes["h1"] = pb.Volume(volume_id="h1", capacity_bytes=1 << 30)
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "csi": {"driver": lab.driver.name, "volumeHandle": "h1", "volumeAttributes": {"a": "b"}, "fsType": "ext4"},
        "mountOptions": ["noatime"],
    }
    return await lab.client.create(PersistentVolume, {"metadata": {"name": name}, "spec": spec})


async def attached(lab, name="va"):
    async def is_attached():
        found = await lab.attachment(name)
        return found if found is not None and found.status.attached else None

    return await lab.until(is_attached)


async def test_attach_and_detach_with_finalizers_and_metadata(lab):
    lab.start(Role.ATTACHER)
    await make_volume(lab)
    await lab.make_node("node-1", "id-1")
    await lab.attach("va", "v1")
    found = await attached(lab)
    assert found.status.attachment_metadata == {"device": "/dev/x"}
    assert found.finalizers == [FINALIZER]
    assert found.annotations["csi.alpha.kubernetes.io/node-id"] == "id-1"
    [request] = lab.driver.requests("ControllerPublishVolume")
    assert (request.volume_id, request.node_id) == ("h1", "id-1")
    assert list(request.volume_capability.mount.mount_flags) == ["noatime"]
    assert dict(request.volume_context) == {"a": "b"}
    volume = await lab.client.get(PersistentVolume, "v1")
    assert FINALIZER in volume.finalizers

    await lab.client.delete(PersistentVolume, "v1")
    await lab.client.delete(VolumeAttachment, "va")

    async def is_gone():
        return await lab.attachment("va") is None and await lab.client.find(PersistentVolume, "v1") is None

    await lab.until(is_gone)
    assert lab.driver.backend.published["h1"] == set()


async def test_detach_needs_no_node_when_the_attachment_remembers_its_id(lab):
    from moorage.kube.objects import CSINode, Node

    lab.start(Role.ATTACHER)
    await make_volume(lab)
    await lab.make_node("node-1", "id-1")
    await lab.attach("va", "v1")
    await attached(lab)
    await lab.client.delete(CSINode, "node-1")
    await lab.client.delete(Node, "node-1")
    await lab.client.delete(VolumeAttachment, "va")

    async def is_gone():
        return await lab.attachment("va") is None

    await lab.until(is_gone)
    assert lab.driver.requests("ControllerUnpublishVolume")[-1].node_id == "id-1"


async def test_a_node_without_the_driver_is_an_error_in_the_status(lab):
    lab.start(Role.ATTACHER)
    await make_volume(lab)
    await lab.attach("va", "v1", "nowhere")

    async def told():
        found = await lab.attachment("va")
        return found.status.attach_error

    error = await lab.until(told)
    assert "nowhere" in error.message
    assert error.error_code is None
    assert lab.driver.count("ControllerPublishVolume") == 0


async def test_without_attach_support_attachments_are_marked_attached(make_lab):
    async with make_lab(Abilities(rpcs=("CREATE_DELETE_VOLUME",))) as lab:
        lab.start(Role.ATTACHER)
        await make_volume(lab)
        await lab.attach("va", "v1")
        found = await attached(lab)
        assert found.finalizers == []
        assert lab.driver.count("ControllerPublishVolume") == 0


@pytest.mark.parametrize("page", [0, 1])
async def test_what_the_driver_lost_is_attached_again(lab, page):
    for number in range(3):
        lab.driver.backend.volumes[f"other-{number}"] = pb.Volume(volume_id=f"other-{number}")
    lab.start(Role.ATTACHER, reconcile_sync_s=0.1, max_entries=page)
    await make_volume(lab)
    await lab.make_node("node-1")
    await lab.attach("va", "v1")
    await attached(lab)
    lab.driver.backend.published["h1"].clear()

    async def is_back():
        return lab.driver.backend.published["h1"] == {"node-1"}

    await lab.until(is_back)
    assert lab.driver.count("ControllerPublishVolume") == 2


async def test_what_is_published_anew_has_the_new_metadata_only(lab):
    lab.driver.publish_context = {"device": "/dev/x", "lun": "1"}
    lab.start(Role.ATTACHER, reconcile_sync_s=0.1)
    await make_volume(lab)
    await lab.make_node("node-1")
    await lab.attach("va", "v1")
    await attached(lab)
    lab.driver.publish_context = {"device": "/dev/y"}
    lab.driver.backend.published["h1"].clear()

    async def is_new():
        return (await lab.attachment("va")).status.attachment_metadata == {"device": "/dev/y"}

    await lab.until(is_new)
    assert (await lab.attachment("va")).status.attached


async def test_a_volume_that_the_driver_no_longer_lists_is_told_in_the_status(lab):
    lab.start(Role.ATTACHER, reconcile_sync_s=0.1)
    await make_volume(lab)
    await lab.make_node("node-1")
    await lab.attach("va", "v1")
    await attached(lab)
    lab.driver.backend.volumes.clear()
    lab.driver.backend.published.clear()

    async def is_told():
        return (await lab.attachment("va")).status.attach_error

    error = await lab.until(is_told)
    assert error.error_code == 5  # NOT_FOUND


@pytest.mark.parametrize("is_inline", [True, False])
@pytest.mark.parametrize("can_read_only", [True, False])
async def test_a_volume_is_published_with_its_secret_and_only_as_read_only_as_the_driver_can(
    make_lab, can_read_only, is_inline
):
    rpcs = ("PUBLISH_UNPUBLISH_VOLUME", *(("PUBLISH_READONLY",) if can_read_only else ()))
    async with make_lab(Abilities(rpcs=rpcs)) as lab:
        lab.driver.backend.volumes["h1"] = pb.Volume(volume_id="h1", capacity_bytes=1 << 30)
        body: dict[str, Any] = {"metadata": {"name": "key", "namespace": "default"}, "data": {"token": "c2VjcmV0"}}
        await lab.client.create(Secret, body, "default")
        await lab.make_node("node-1")
        lab.start(Role.ATTACHER, default_fstype="xfs")
        csi = {
            "driver": lab.driver.name,
            "volumeHandle": "h1",
            "readOnly": True,
            "controllerPublishSecretRef": {"name": "key", "namespace": "default"},
        }
        modes = ["ReadWriteOnce", "ReadWriteMany"]
        spec = {"csi": csi, "accessModes": modes, "capacity": {"storage": "1Gi"}}
        if is_inline:
            source = {"inlineVolumeSpec": spec}
            body = {"attacher": lab.driver.name, "nodeName": "node-1", "source": source}
            await lab.client.create(VolumeAttachment, {"metadata": {"name": "va"}, "spec": body})
        else:
            await lab.client.create(PersistentVolume, {"metadata": {"name": "v1"}, "spec": spec})
            await lab.attach("va", "v1")
        await attached(lab)
        [request] = lab.driver.requests("ControllerPublishVolume")
        assert (request.readonly, dict(request.secrets)) == (can_read_only, {"token": "secret"})
        assert request.volume_capability.mount.fs_type == "xfs"
        mode = pb.VolumeCapability.AccessMode.Mode.MULTI_NODE_MULTI_WRITER
        assert request.volume_capability.access_mode.mode == mode
        await lab.client.delete(VolumeAttachment, "va")

        async def is_gone():
            return await lab.attachment("va") is None

        await lab.until(is_gone)
        [request] = lab.driver.requests("ControllerUnpublishVolume")
        assert dict(request.secrets) == {"token": "secret"}
