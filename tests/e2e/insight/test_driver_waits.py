"""What is told of a driver that hangs or crashes, as its callers see it: any driver, ours or not."""

import pytest

from moorage.csi import pending
from moorage.kube.control.events import Recorder
from moorage.kube.names import DRIVER_EXITED
from moorage.kube.objects import (
    CSINode,
    ObjectReference,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
)
from moorage.kube.volumes import attachment_name


@pytest.fixture
async def slow(lab, monkeypatch):
    """A cluster whose sidecars tell at once that they wait; `gates` holds the calls of its driver."""
    monkeypatch.setattr(pending, "FIRST_S", 0.2)
    await lab.csi_driver(attachRequired=True)
    await lab.storage_class("fast")
    await lab.snapshot_class()
    lab.control("binder", "protection", "snapshots")
    lab.sidecars("provisioner", "attacher", "resizer", "snapshotter")
    return lab


async def test_every_caller_says_which_call_the_driver_has_not_answered(slow):
    lab, shows = slow, "NAMESPACE"
    gate = lab.driver.hold("CreateVolume")
    await lab.claim("data")
    words = f"CreateVolume has been waiting for driver {lab.driver.name} for "
    await lab.check_cause("pvc/data", "claim-driver-waits", words, evidence="WaitingForDriver", shows=shows)
    gate.set()
    await lab.check_well("pvc/data")
    claim = await lab.until(PersistentVolumeClaim, "data", lambda one: one.status.phase == "Bound")

    gate = lab.driver.hold("ControllerExpandVolume")
    await lab.resize("data", "2Gi")
    await lab.check_cause("pvc/data", "claim-driver-waits", "ControllerExpandVolume has been waiting", shows=shows)
    gate.set()
    await lab.check_well("pvc/data")

    gate = lab.driver.hold("CreateSnapshot")
    await lab.snapshot("snap")
    await lab.check_cause("snapshot/snap", "snapshot-driver-waits", "CreateSnapshot has been waiting", shows=shows)
    gate.set()
    await lab.check_well("snapshot/snap")

    gate = lab.driver.hold("ControllerPublishVolume")
    await lab.node("node-1")
    pv = claim.spec.volume_name
    volume = await lab.client.get(PersistentVolume, pv)
    name = attachment_name(lab.driver.name, volume.spec.csi.volume_handle, "node-1")
    spec = {"attacher": lab.driver.name, "nodeName": "node-1", "source": {"persistentVolumeName": pv}}
    await lab.client.create(VolumeAttachment, {"metadata": {"name": name}, "spec": spec})
    words = "ControllerPublishVolume has been waiting"
    await lab.check_cause(f"va/{name}", "attachment-driver-waits", words, shows=shows)
    gate.set()
    await lab.check_well(f"va/{name}")

    gate = lab.driver.hold("DeleteVolume")
    await lab.shell.run(f"kubectl delete volumeattachment {name} && kubectl delete volumesnapshot snap")
    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    await lab.check_cause(f"pv/{pv}", "volume-driver-waits", "DeleteVolume has been waiting", shows=shows)
    gate.set()


async def test_a_driver_hangs_or_crashes_on_a_node(lab):
    await lab.csi_driver()
    await lab.node("node-1")
    await lab.volume("pv-1", claimRef={"namespace": "default", "name": "data"})
    lab.control("binder")
    await lab.claim("data", "")
    await lab.until(PersistentVolumeClaim, "data", lambda claim: claim.status.phase == "Bound")
    await lab.pod("web", "data", node="node-1")
    web = await lab.client.get(Pod, "web", "default")
    async with Recorder(lab.client, "kubelet", "node-1") as kubelet, Recorder(lab.client, "moorage-up") as up:
        calls = pending.Calls()
        calls.driver = lab.driver.name
        with pending.on_behalf_of(kubelet.event, web):
            call = calls.begin("NodeStageVolume", None)
        call.started_at -= 70
        call.watch(60.0)
        words, shows = f"NodeStageVolume has been waiting for driver {lab.driver.name} for 7", "web"
        await lab.check_cause("pod/web", "pod-driver-waits", words, shows=shows)
        await lab.check_cause("node/node-1", "node-driver-waits", words, "(for pod default/web)", shows=shows)
        calls.end(call, "OK", 71.0)
        await lab.check_cause("pod/web", "pod-starting")

        await lab.client.patch(CSINode, "node-1", {"spec": {"drivers": []}})
        for _ in range(4):
            about = ObjectReference(api_version="v1", kind="Node", name="node-1", uid="node-1")
            up.warning(about, DRIVER_EXITED, "exited with code 3")
        words = "is not registered on node node-1: its process exited with code 3, 4 times"
        await lab.check_cause("pod/web", "pod-driver-not-registered", words, evidence="")
        words = "no CSI driver is registered on it: its driver's process exited with code 3, 4 times"
        await lab.check_cause("node/node-1", "node-without-drivers", words)
