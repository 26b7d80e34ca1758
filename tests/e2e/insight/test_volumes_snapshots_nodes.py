"""Why a volume, a snapshot or a node is where it is, made for real."""

import pytest

from moorage.kube.objects import (
    CSINode,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeAttachment,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from moorage.kube.volumes import attachment_name


@pytest.fixture
async def bound_lab(lab):
    """A cluster with a bound claim `data`, and its volume's name."""
    lab.control("binder", "protection", "snapshots")
    await lab.csi_driver()
    await lab.storage_class("fast")
    lab.provisioner = lab.sidecars("provisioner")
    lab.pv = (await lab.bound("data")).spec.volume_name
    return lab


async def test_a_deleted_volume_is_held_by_its_claim(bound_lab):
    lab = bound_lab
    await lab.until(PersistentVolume, lab.pv, lambda volume: volume.finalizers)
    await lab.client.delete(PersistentVolume, lab.pv)
    words, step = "claim default/data is bound to it", f"kubectl patch pv {lab.pv} -p"
    await lab.check_cause(f"pv/{lab.pv}", "volume-deleting-bound", words, step=step)
    story = await lab.check_cause("pvc/data", "claim-volume-deleting", "is being deleted", last="volume-deleting-bound")
    assert "Retain" in story.next_step


async def test_the_driver_fails_to_delete_and_then_nobody_does(bound_lab):
    lab = bound_lab
    lab.refuse("DeleteVolume", "INTERNAL")
    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    await lab.check_cause(f"pv/{lab.pv}", "volume-delete-fails", "as the script says", step=f"describe pv {lab.pv}")


async def test_nobody_deletes_a_released_volume(bound_lab):
    lab = bound_lab
    await lab.until(PersistentVolume, lab.pv, lambda volume: "external-provisioner" in str(volume.finalizers))
    lab.provisioner.cancel()
    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    words = f"to be deleted by the provisioner of {lab.driver.name}, which has not done so"
    await lab.check_cause(f"pv/{lab.pv}", "volume-released-undeleted", words, step="provisioner")
    await lab.lease("test-csi-moorage-dev")
    await lab.check_cause(f"pv/{lab.pv}", "volume-released-undeleted", "its lease has run out")
    await lab.client.delete(PersistentVolume, lab.pv)
    words = "finalizer external-provisioner.volume.kubernetes.io/finalizer holds it"
    await lab.check_cause(f"pv/{lab.pv}", "volume-deleting-finalizer", words, step=f"kubectl get pv {lab.pv}")


async def test_a_released_volume_waits_for_a_person_or_cannot_be_recycled(lab):
    lab.control("binder")
    gone = {"namespace": "default", "name": "gone", "uid": "u-1"}
    await lab.volume("kept", claimRef=gone)
    step = "kubectl patch pv kept --type merge"
    await lab.check_cause(
        "pv/kept", "volume-released-retained", "claim default/gone is gone and its policy is Retain", step=step
    )
    await lab.volume("old", claimRef=gone, persistentVolumeReclaimPolicy="Recycle")
    await lab.check_cause("pv/old", "volume-failed", "No recycler plugin found", step="kubectl describe pv old")


async def test_a_deleted_volume_is_still_attached(lab):
    await lab.csi_driver(attachRequired=True)
    await lab.node("node-1")
    await lab.volume("pv-1")
    await lab.client.patch(
        PersistentVolume, "pv-1", {"metadata": {"finalizers": ["external-attacher/test-csi-moorage-dev"]}}
    )
    spec = {"attacher": lab.driver.name, "nodeName": "node-1", "source": {"persistentVolumeName": "pv-1"}}
    name = attachment_name(lab.driver.name, "handle-pv-1", "node-1")
    await lab.client.create(VolumeAttachment, {"metadata": {"name": name}, "spec": spec})
    await lab.client.delete(PersistentVolume, "pv-1")
    last = "attachment-attacher-not-running"
    await lab.check_cause("pv/pv-1", "volume-deleting-attached", "still attached to node node-1", last=last)


async def test_the_class_or_source_of_a_snapshot_is_wrong(bound_lab):
    lab = bound_lab
    await lab.snapshot("a", cls="nowhere")
    await lab.check_cause("snapshot/a", "snapshot-class-missing", "'nowhere'", step="kubectl get volumesnapshotclass")
    await lab.snapshot("b", cls=None)
    await lab.check_cause(
        "snapshot/b", "snapshot-class-none", "no snapshot class is the default", step="volumesnapshotclass"
    )
    await lab.snapshot_class()
    await lab.snapshot("c", claim="nowhere")
    await lab.check_cause(
        "snapshot/c", "snapshot-claim-missing", "claim nowhere does not exist", step="kubectl -n default get pvc"
    )
    await lab.claim("waits", "missing")
    await lab.snapshot("d", claim="waits")
    await lab.check_cause("snapshot/d", "snapshot-claim-not-bound", "claim waits", last="claim-class-missing")
    await lab.snapshot_class("foreign", driver="other.example.com")
    await lab.snapshot("e", cls="foreign")
    await lab.check_cause("snapshot/e", "snapshot-driver-differs", "of driver other.example.com, its claim of")
    await lab.snapshot("f", content="nowhere", cls=None)
    await lab.check_cause("snapshot/f", "snapshot-content-missing", "content nowhere", step="volumesnapshotcontents")


async def test_a_snapshot_waits_fails_is_taken_and_lost(bound_lab):
    lab = bound_lab
    await lab.snapshot_class()
    await lab.snapshot("snap")
    await lab.check_cause(
        "snapshot/snap", "snapshot-snapshotter-not-running", f"snapshotter of {lab.driver.name}", step="snapshotter"
    )
    lab.refuse("CreateSnapshot", "INTERNAL")
    lab.sidecars("snapshotter")
    await lab.check_cause("snapshot/snap", "snapshot-fails", "as the script says", step="describe volumesnapshot snap")
    lab.driver.ready_after = 1_000_000
    lab.driver.chooser = None
    await lab.check_cause("snapshot/snap", "snapshot-not-ready", "still making it")
    lab.driver.ready_after = 0
    await lab.check_well("snapshot/snap")
    lab.refuse("DeleteSnapshot", "INTERNAL")
    await lab.client.delete(VolumeSnapshot, "snap", "default")
    await lab.check_cause(
        "snapshot/snap", "snapshot-deleting", "could not be deleted", "as the script says", step="describe"
    )


async def test_the_content_of_a_snapshot_is_lost(bound_lab):
    lab = bound_lab
    await lab.snapshot_class()
    lab.sidecars("snapshotter")
    await lab.snapshot("snap")
    await lab.check_well("snapshot/snap")
    [content] = (await lab.client.list(VolumeSnapshotContent)).items
    await lab.stop()  # the controller would soon make another
    await lab.client.delete(VolumeSnapshotContent, content.name)
    await lab.client.patch(VolumeSnapshotContent, content.name, {"metadata": {"finalizers": None}})
    await lab.check_cause("snapshot/snap", "snapshot-content-lost", f"content {content.name} does not exist any more")


async def test_nobody_handles_snapshots(lab):
    lab.control("binder")
    await lab.storage_class("fast")
    lab.sidecars("provisioner")
    await lab.bound("data")
    await lab.snapshot_class()
    await lab.snapshot("snap")
    await lab.check_cause(
        "snapshot/snap", "snapshot-controller-not-running", "is it running?", step="snapshot-controller"
    )


async def test_nodes(lab):
    await lab.node("node-1", count=1)
    await lab.check_well("node/node-1")
    spec = {"attacher": lab.driver.name, "nodeName": "node-1", "source": {"persistentVolumeName": "pv-1"}}
    await lab.client.create(VolumeAttachment, {"metadata": {"name": "va"}, "spec": spec})
    await lab.check_cause(
        "node/node-1", "node-attach-limit", "takes 1 volumes on it, and 1 are attached", step="csinode node-1"
    )
    await lab.client.patch(CSINode, "node-1", {"spec": {"drivers": []}})
    await lab.check_cause("node/node-1", "node-without-drivers", "no CSI driver", step="kubectl get csinode node-1")
    await lab.client.patch(Node, "node-1", {"spec": {"unschedulable": True}})
    await lab.check_cause("node/node-1", "node-cordoned", "takes no new pods", step="kubectl uncordon node-1")
    await lab.set_ready("node-1", False)
    await lab.check_cause("node/node-1", "node-not-ready", "NodeStatusUnknown", step="kubectl describe node node-1")
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    await lab.client.patch(Node, "node-1", {"spec": {"taints": [taint]}})
    step = "kubectl taint node node-1 node.kubernetes.io/out-of-service-"
    await lab.check_cause("node/node-1", "node-out-of-service", "taken away at once", step=step)
