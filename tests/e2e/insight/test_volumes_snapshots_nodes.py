"""Why a volume, a snapshot or a node is where it is, made for real."""

import functools

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
    await lab.check_cause(f"pv/{lab.pv}", "volume-delete-fails", "as the script says", shows="as the script says")


async def test_nobody_deletes_a_released_volume(bound_lab):
    lab = bound_lab
    await lab.until(PersistentVolume, lab.pv, lambda volume: "external-provisioner" in str(volume.finalizers))
    lab.provisioner.cancel()
    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    words = f"to be deleted by the provisioner of {lab.driver.name}, which has not done so"
    await lab.check_cause(f"pv/{lab.pv}", "volume-released-undeleted", words, step="provisioner", shows="NAMESPACE")
    await lab.lease("test-csi-moorage-dev")
    await lab.check_cause(f"pv/{lab.pv}", "volume-released-undeleted", "its lease has run out")
    await lab.client.delete(PersistentVolume, lab.pv)
    words = "finalizer external-provisioner.volume.kubernetes.io/finalizer holds it"
    await lab.check_cause(f"pv/{lab.pv}", "volume-deleting-finalizer", words, shows="deletionTimestamp")


async def test_a_released_volume_waits_for_a_person_or_cannot_be_recycled(lab):
    lab.control("binder")
    gone = {"namespace": "default", "name": "gone", "uid": "u-1"}
    await lab.volume("kept", claimRef=gone)
    step = "kubectl patch pv kept --type merge"
    await lab.check_cause(
        *("pv/kept", "volume-released-retained", "claim default/gone is gone and its policy is Retain"),
        step=step,
        then=functools.partial(lab.claim, "gone", "", volumeName="kept"),
    )
    await lab.check_well("pv/kept")
    await lab.volume("old", claimRef=gone, persistentVolumeReclaimPolicy="Recycle")
    words = "No recycler plugin found"
    await lab.check_cause("pv/old", "volume-failed", words, step="kubectl describe pv old", shows=words)


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
    await lab.snapshot_class("foreign", driver="other.example.com")
    step = "kubectl get volumesnapshotclass"
    await lab.check_cause("snapshot/a", "snapshot-class-missing", "'nowhere'", step=step, shows="foreign")
    await lab.snapshot("b", cls=None)
    await lab.check_cause(
        *("snapshot/b", "snapshot-class-none", "no snapshot class is the default"), step=step, shows="other.example.com"
    )
    await lab.snapshot_class()
    await lab.snapshot("c", claim="nowhere")
    await lab.check_cause(
        *("snapshot/c", "snapshot-claim-missing", "claim nowhere does not exist"),
        step="kubectl -n default get pvc",
        shows="data",
    )
    await lab.claim("waits", "missing")
    await lab.snapshot("d", claim="waits")
    await lab.check_cause("snapshot/d", "snapshot-claim-not-bound", "claim waits", last="claim-class-missing")
    await lab.snapshot("e", cls="foreign")
    words = "of driver other.example.com, its claim of"
    await lab.check_cause("snapshot/e", "snapshot-driver-differs", words, shows="snaps")
    await lab.snapshot("f", content="nowhere", cls=None)
    step = "volumesnapshotcontents"
    await lab.check_cause("snapshot/f", "snapshot-content-missing", "content nowhere", step=step, shows="foreign")


async def test_a_snapshot_waits_fails_is_taken_and_lost(bound_lab):
    lab = bound_lab
    await lab.snapshot_class()
    await lab.snapshot("snap")
    await lab.check_cause(
        *("snapshot/snap", "snapshot-snapshotter-not-running", f"snapshotter of {lab.driver.name}"),
        step="snapshotter",
        shows="NAMESPACE",
    )
    lab.refuse("CreateSnapshot", "INTERNAL")
    lab.sidecars("snapshotter")
    words = "as the script says"
    await lab.check_cause("snapshot/snap", "snapshot-fails", words, step="describe volumesnapshot snap", shows=words)
    lab.driver.ready_after = 1_000_000
    lab.driver.chooser = None
    ends = functools.partial(setattr, lab.driver, "ready_after", 0)
    await lab.check_cause("snapshot/snap", "snapshot-not-ready", "still making it", ends=ends)
    lab.refuse("DeleteSnapshot", "INTERNAL")
    await lab.client.delete(VolumeSnapshot, "snap", "default")
    await lab.check_cause(
        *("snapshot/snap", "snapshot-deleting", "could not be deleted", "as the script says"),
        step="describe",
        shows="Finalizers",
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
    words = f"content {content.name} does not exist any more"
    await lab.check_cause("snapshot/snap", "snapshot-content-lost", words, shows="No resources found")


async def test_nobody_handles_snapshots(lab):
    lab.control("binder")
    await lab.storage_class("fast")
    lab.sidecars("provisioner")
    await lab.bound("data")
    await lab.snapshot_class()
    await lab.snapshot("snap")
    await lab.check_cause(
        *("snapshot/snap", "snapshot-controller-not-running", "is it running?"),
        step="snapshot-controller",
        shows="NAMESPACE",
    )


async def test_nodes(lab):
    await lab.node("node-1", count=1)
    await lab.check_well("node/node-1")
    spec = {"attacher": lab.driver.name, "nodeName": "node-1", "source": {"persistentVolumeName": "pv-1"}}
    await lab.client.create(VolumeAttachment, {"metadata": {"name": "va"}, "spec": spec})
    await lab.check_cause(
        *("node/node-1", "node-attach-limit", "takes 1 volumes on it, and 1 are attached"),
        step="csinode node-1",
        shows="count: 1",
    )
    await lab.client.patch(CSINode, "node-1", {"spec": {"drivers": []}})
    step = "kubectl get csinodes"
    await lab.check_cause("node/node-1", "node-without-drivers", "no CSI driver", step=step, shows="node-1")
    await lab.client.patch(Node, "node-1", {"spec": {"unschedulable": True}})
    words, step = "takes no new pods", "kubectl uncordon node-1"
    await lab.check_cause("node/node-1", "node-cordoned", words, step=step, leaves=True)
    await lab.set_ready("node-1", False)
    words, step = "NodeStatusUnknown", "kubectl describe node node-1"
    await lab.check_cause("node/node-1", "node-not-ready", words, step=step, shows=words)
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    await lab.client.patch(Node, "node-1", {"spec": {"taints": [taint]}})
    step = "kubectl taint node node-1 node.kubernetes.io/out-of-service-"
    await lab.check_cause("node/node-1", "node-out-of-service", "taken away at once", step=step, leaves=True)
