"""Why a claim that was bound is not well, made for real: growing, modifying, deleting, losing its volume."""

import functools

import pytest

from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, StorageClass


@pytest.fixture
async def bound_lab(lab):
    """A cluster with a bound claim `data` of 1Gi."""
    lab.control("binder", "protection")
    await lab.csi_driver()
    await lab.storage_class("fast")
    lab.sidecars("provisioner")
    await lab.bound("data")
    return lab


async def modify(lab, name):
    await lab.client.patch(PersistentVolumeClaim, "data", {"spec": {"volumeAttributesClassName": name}}, "default")


async def test_nobody_grows_the_volume_and_then_the_class_forbids_it(bound_lab):
    lab = bound_lab
    await lab.resize("data", "2Gi")
    await lab.check_cause(
        *("pvc/data", "claim-resizer-not-running", f"the resizer of {lab.driver.name} has not begun"),
        step="resizer",
        shows="NAMESPACE",
    )
    await lab.lease("external-resizer-test-csi-moorage-dev")
    await lab.check_cause("pvc/data", "claim-resizer-not-running", "its lease has run out")
    await lab.client.patch(StorageClass, "fast", {"allowVolumeExpansion": False})
    await lab.check_cause(
        *("pvc/data", "claim-resize-not-allowed", "class fast does not allow"),
        step="kubectl patch storageclass fast",
        leaves=True,
    )


async def test_growing_is_under_way_then_done(bound_lab):
    lab = bound_lab
    gate = lab.driver.hold("ControllerExpandVolume")
    lab.sidecars("resizer")
    await lab.resize("data", "2Gi")
    await lab.check_cause("pvc/data", "claim-resizing", "being grown to 2Gi", ends=gate.set)


async def test_growing_fails_and_then_is_refused(bound_lab):
    lab = bound_lab
    lab.refuse("ControllerExpandVolume", "INTERNAL")
    lab.sidecars("resizer")
    await lab.resize("data", "3Gi")
    words, evidence = "growing to 3Gi fails: volume could not be expanded", "as the script says"
    await lab.check_cause("pvc/data", "claim-resize-fails", words, evidence=evidence, shows=evidence)
    lab.driver.chooser = None
    lab.refuse(
        "ControllerExpandVolume", "OUT_OF_RANGE", lambda request: request.capacity_range.required_bytes > 2 << 30
    )
    words, step = "growing to 3Gi was refused for good", "patch pvc data"
    await lab.check_cause("pvc/data", "claim-resize-infeasible", words, step=step, evidence=evidence, leaves=True)
    await lab.check_well("pvc/data")


async def test_the_driver_grows_only_what_no_pod_uses(bound_lab):
    lab = bound_lab
    lab.refuse("ControllerExpandVolume", "FAILED_PRECONDITION")
    await lab.node("node-1")
    await lab.pod("web", "data", node="node-1")
    lab.sidecars("resizer")
    await lab.resize("data", "2Gi")
    step = "describe pod web"
    story = await lab.check_cause("pvc/data", "claim-resize-offline", "pod web does", step=step, leaves=True)
    assert [later.command for later in story.then] == ["kubectl -n default delete pod web"]


async def test_growing_ends_on_the_node(bound_lab):
    lab = bound_lab
    lab.driver.node_expansion = True
    lab.sidecars("resizer")
    await lab.resize("data", "2Gi")
    await lab.node("node-1")
    start = functools.partial(lab.pod, "web", "data", node="node-1")
    step = "start a pod that uses claim data"
    await lab.check_cause("pvc/data", "claim-resize-needs-pod", "grown to 2Gi", step=step, then=start)
    words = "node node-1 has yet to grow"
    await lab.check_cause("pvc/data", "claim-resize-on-node", words, step="describe pod web", shows="node-1")


async def test_attributes_are_refused_pending_or_of_no_class(bound_lab):
    lab = bound_lab
    await lab.attributes_class("silver")
    await modify(lab, "silver")
    await lab.check_cause(
        "pvc/data", "claim-modify-pending", "attributes of silver; the driver's resizer has not begun"
    )
    lab.refuse("ControllerModifyVolume", "INTERNAL")
    lab.sidecars("resizer")
    shows = "VolumeModifyFailed"
    await lab.check_cause("pvc/data", "claim-modify-pending", "attributes of silver: ", step="describe", shows=shows)
    lab.refuse("ControllerModifyVolume", "INVALID_ARGUMENT")
    step = "kubectl get volumeattributesclass silver"
    words = "refuses the attributes of silver"
    await lab.check_cause("pvc/data", "claim-modify-infeasible", words, step=step, shows="iops")
    lab.driver.chooser = None
    await modify(lab, "gone")
    await lab.check_cause("pvc/data", "claim-modifier-missing", "'gone' does not exist", step="volumeattributesclass")


async def test_a_deleted_claim_is_held_by_a_pod_then_by_a_finalizer(bound_lab):
    lab = bound_lab
    finalizers = ["kubernetes.io/pvc-protection", "example.com/mine"]
    await lab.client.patch(PersistentVolumeClaim, "data", {"metadata": {"finalizers": finalizers}}, "default")
    await lab.node("node-1")
    await lab.pod("web", "data", node="node-1")
    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    words = "pod web still uses it"
    story = await lab.check_cause("pvc/data", "claim-deleting-in-use", words, step="Retain", leaves=True)
    assert story.then[-1].command == "kubectl -n default delete pod web"
    assert "its data with it" in story.then[-1].harm

    async def release() -> None:
        await lab.client.patch(PersistentVolumeClaim, "data", {"metadata": {"finalizers": None}}, "default")

    await lab.patch_policy("Delete")
    words = "example.com/mine holds it"
    await lab.check_cause("pvc/data", "claim-deleting-finalizer", words, step="Retain", then=release)
    await lab.check_data()


async def test_nobody_releases_a_deleted_claim(lab):
    lab.control("binder")
    await lab.storage_class("fast")
    lab.sidecars("provisioner")
    await lab.bound("data", metadata={"finalizers": ["kubernetes.io/pvc-protection"]})
    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    words = "the protection controller has not released it"

    async def start() -> None:
        lab.control("protection")

    await lab.check_cause("pvc/data", "claim-deleting-unreleased", words, step="Retain", then=start)
    await lab.check_data()


async def test_a_claim_and_its_pod_lose_the_volume(lab):
    lab.control("binder", "scheduler")
    await lab.volume("pv-1")
    await lab.claim("data", "")
    await lab.until(PersistentVolumeClaim, "data", lambda claim: claim.status.phase == "Bound")
    await lab.node("node-1")
    await lab.client.patch(PersistentVolume, "pv-1", {"metadata": {"finalizers": None}})
    await lab.client.delete(PersistentVolume, "pv-1")
    words, step = "its volume pv-1 does not exist any more", "describe pvc data"
    await lab.check_cause("pvc/data", "claim-lost", words, step=step, shows="ClaimLost")
    await lab.pod("web", "data")
    await lab.check_cause("pod/web", "pod-claim-lost", "claim data has lost its volume", last="claim-lost")
