"""Why a claim is Pending, made for real: API server, binder, scripted driver and provisioner."""

import functools

import pytest

from moorage.kube.objects import Node, PersistentVolumeClaim, Pod, StorageClass, VolumeSnapshot

OTHER = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "default", "name": "other", "uid": "u-1"}


def source(kind, name, group=""):
    return {"dataSource": {"apiGroup": group, "kind": kind, "name": name}}


def snapshot_source(name):
    return source("VolumeSnapshot", name, "snapshot.storage.k8s.io")


async def test_a_volume_by_name_is_missing_taken_or_does_not_fit(lab):
    lab.control("binder")
    await lab.volume("taken", claimRef=OTHER)
    await lab.claim("a", "", volumeName="nowhere")
    await lab.check_cause("pvc/a", "claim-volume-missing", "volume nowhere by name", step="get pv", shows="taken")

    await lab.claim("b", "", volumeName="taken")
    story = await lab.check_cause(
        "pvc/b", "claim-volume-taken", "held by claim default/other", last="volume-released-retained", leaves=True
    )
    await lab.check_well("pvc/b")
    assert '"claimRef": {"namespace": "default", "name": "b"' in story.next_step

    await lab.volume("small", size="1Gi", volumeMode="Block")
    await lab.claim("c", "", size="5Gi", volumeName="small")
    found = await lab.check_cause(
        "pvc/c", "claim-volume-mismatch", "capacity is 1Gi, the claim wants 5Gi", "volumeMode is Block", shows="Block"
    )
    assert found.next_step == "kubectl get pv small -o yaml"

    await lab.volume("kept", claimRef=OTHER, persistentVolumeReclaimPolicy="Delete")
    await lab.storage_class("late", late=True)
    await lab.claim("d", "late", volumeName="kept")
    await lab.pod("d", "d")
    last = "volume-released-undeleted"
    await lab.check_cause("pod/d", "pod-claim-pending", "waits for claim d", last=last)
    await lab.check_cause("pvc/d", "claim-volume-taken", "volume kept is held", last=last, leaves=True)


async def test_the_class_is_missing_absent_or_cannot_provision(lab):
    lab.control("binder")
    await lab.storage_class("fast")
    await lab.claim("a", "gold")
    await lab.check_cause(
        *("pvc/a", "claim-class-missing", "'gold' does not exist (there is: fast)"),
        step="kubectl get storageclass",
        shows="fast",
    )

    await lab.claim("b", None)
    step = "kubectl annotate storageclass fast"
    await lab.check_cause("pvc/b", "claim-class-none", "no class is the default", step=step, leaves=True)

    await lab.volume("free", size="2Gi", accessModes=["ReadOnlyMany"])
    await lab.claim("c", "", size="5Gi")
    step = "kubectl get pv"
    story = await lab.check_cause("pvc/c", "claim-static-no-match", "its class is empty", step=step, shows="free")
    assert "free: capacity is 2Gi, the claim wants 5Gi; access modes are ReadOnlyMany" in story.evidence[0]

    await lab.storage_class("local", provisioner="kubernetes.io/no-provisioner")
    await lab.claim("d", "local")
    await lab.check_cause("pvc/d", "claim-static-no-match", "class local has no provisioner")


async def test_the_default_class_that_counts_does_not_work(lab):
    lab.control("binder", "protection")
    await lab.storage_class("aa-broken", default=True, provisioner="gone.example.com")
    await lab.storage_class("good", default=True)
    await lab.claim("data", None)
    await lab.client.patch(StorageClass, "good", {"metadata": {"labels": {"seen": "yes"}}})
    claim = await lab.until(PersistentVolumeClaim, "data", lambda claim: claim.spec.storage_class_name)
    assert claim.spec.storage_class_name == "aa-broken"  # equally new: the first name
    words = ("are all marked as the default", "driver gone.example.com of class aa-broken is not installed")
    step = "kubectl annotate storageclass aa-broken storageclass.kubernetes.io/is-default-class-"
    lab.sidecars("provisioner")
    again = functools.partial(lab.claim, "data", None)
    await lab.check_cause("pvc/data", "claim-default-ambiguous", *words, step=step, then=again)
    await lab.check_well("pvc/data")


async def test_the_source_is_missing_unfinished_or_too_large(lab):
    lab.control("binder")
    await lab.csi_driver()
    await lab.storage_class("fast")
    await lab.snapshot("early", claim="x")
    await lab.claim("a", **snapshot_source("gone"))
    words, step = "snapshot gone", "get volumesnapshot"
    await lab.check_cause("pvc/a", "claim-source-snapshot-missing", words, step=step, shows="early")

    await lab.claim("b", **snapshot_source("early"))
    await lab.check_cause("pvc/b", "claim-source-snapshot-not-ready", "snapshot early", last="snapshot-class-missing")

    await lab.claim("c", **source("PersistentVolumeClaim", "gone"))
    step = "kubectl -n default get pvc"
    await lab.check_cause("pvc/c", "claim-source-claim-missing", "claim gone", step=step, shows="Pending")

    await lab.claim("origin", "missing")
    await lab.claim("d", **source("PersistentVolumeClaim", "origin"))
    await lab.check_cause("pvc/d", "claim-source-claim-not-bound", "claim origin", last="claim-class-missing")

    reference = {"dataSourceRef": {"apiGroup": "example.com", "kind": "Backup", "name": "monday"}}
    await lab.claim("e", **reference)
    step = "kubectl api-resources --api-group=example.com"
    await lab.check_cause("pvc/e", "claim-populator-missing", "Backup monday", step=step, shows="KIND")


async def test_a_clone_is_smaller_than_its_source_or_of_another_driver(lab):
    lab.control("binder", "protection")
    lab.sidecars("provisioner")
    await lab.storage_class("fast")
    await lab.bound("origin", size="2Gi")
    await lab.claim("a", size="1Gi", **source("PersistentVolumeClaim", "origin"))
    await lab.check_cause(
        *("pvc/a", "claim-source-too-large", "asks for 1Gi, and its source origin has 2Gi"),
        step="at least 2Gi",
        then=lambda: again(lab, "a", size="2Gi", **source("PersistentVolumeClaim", "origin")),
    )
    await lab.check_well("pvc/a")

    await lab.storage_class("foreign", provisioner="other.example.com")
    await lab.claim("b", "foreign", size="2Gi", **source("PersistentVolumeClaim", "origin"))
    await lab.check_cause(
        *("pvc/b", "claim-source-driver-differs", f"of driver {lab.driver.name}", "other.example.com"),
        then=lambda: again(lab, "b", size="2Gi", **source("PersistentVolumeClaim", "origin")),
    )
    await lab.check_well("pvc/b")


async def again(lab, name, *arguments, **spec):
    """Recreate a claim that has no volume yet."""
    await lab.shell.run(f"kubectl delete pvc {name}")
    await lab.claim(name, *arguments, **spec)


async def test_the_source_is_on_its_way_out(lab):
    lab.control("binder", "protection", "snapshots")
    lab.sidecars("provisioner", "snapshotter")
    await lab.storage_class("fast")
    await lab.snapshot_class()
    await lab.bound("data")
    await lab.snapshot("snap")
    await lab.until(VolumeSnapshot, "snap", lambda snap: snap.status is not None and snap.status.ready_to_use)
    lab.refuse("CreateVolume", "INTERNAL")
    await lab.claim("copy", **snapshot_source("snap"))
    await lab.check_cause("pvc/copy", "claim-provisioning-fails", "as the script says", shows="as the script says")
    await lab.client.delete(VolumeSnapshot, "snap", "default")
    await lab.check_cause(
        *("pvc/copy", "claim-source-deleting", "its source snap is being deleted"),
        step="get volumesnapshot snap",
        shows="deletionTimestamp",
    )
    await lab.check_cause(
        "snapshot/snap", "snapshot-deleting-source", "claim copy is being restored", last="claim-source-deleting"
    )


async def test_the_class_waits_for_a_pod_that_the_scheduler_places(lab):
    lab.control("binder")
    await lab.storage_class("late", late=True)
    await lab.claim("data", "late")
    await lab.check_cause(
        *("pvc/data", "claim-first-consumer-no-pod", "no pod does"),
        step="create a pod that uses claim data",
        then=functools.partial(lab.pod, "waits", "data"),
    )
    story = await lab.check_cause(
        "pvc/data", "claim-first-consumer-unscheduled", "pod waits", last="pod-scheduler-not-running"
    )
    assert [link.object for link in story.chain] == ["pvc/data", "pod/waits"]

    await lab.node("node-1")
    await lab.pod("pinned", "data", node="node-1")
    words = "pod pinned sets nodeName: node-1"
    await lab.check_cause(
        "pod/pinned", "pod-node-name-late-binding", "claim data", last="claim-first-consumer-node-name"
    )

    async def recreate() -> None:
        await lab.shell.run("kubectl delete pod pinned waits")
        await lab.pod("pinned", "data", nodeSelector={"kubernetes.io/hostname": "node-1"})
        lab.control("scheduler")

    step = "nodeSelector kubernetes.io/hostname: node-1"
    await lab.check_cause("pvc/data", "claim-first-consumer-node-name", words, step=step, then=recreate)
    lab.sidecars("provisioner")
    await lab.until(Pod, "pinned", lambda pod: pod.spec.node_name == "node-1")


async def test_the_class_makes_volumes_only_where_no_node_or_not_the_pod_is(lab):
    lab.control("binder", "scheduler")
    await lab.csi_driver()
    zones = [{"matchLabelExpressions": [{"key": "zone", "values": ["a", "b"]}]}]
    await lab.storage_class("zonal", late=True, allowedTopologies=zones)
    await lab.node("node-1", zone="c")
    await lab.claim("data", "zonal")
    await lab.pod("web", "data")
    words = "only where zone is a or b, and no node is there (the nodes have: zone=c)"
    step = "kubectl get nodes --label-columns=zone"
    await lab.check_cause("pvc/data", "claim-topology-excluded", words, step=step, shows="ZONE")
    last = "claim-topology-excluded"
    await lab.check_cause("pod/web", "pod-topology-excluded", "claim data", last=last)
    await lab.node("node-2", zone="a")
    await lab.client.patch(Node, "node-2", {"spec": {"unschedulable": True}})
    words = "only where zone is a or b: on node-2, where the pod may not run"
    await lab.check_cause("pod/web", "pod-topology-excluded", words, evidence="node-2: ready, cordoned", shows="web")


async def test_the_driver_or_its_provisioner_is_not_there(lab):
    await lab.storage_class("fast")
    await lab.claim("data")
    await lab.check_cause(
        *("pvc/data", "claim-driver-not-installed", "installed: none"),
        step="kubectl get csidrivers,csinodes",
        shows="No resources found",
    )
    await lab.csi_driver()
    step, shows = "get leases,pods", "No resources found"
    await lab.check_cause("pvc/data", "claim-binder-not-running", "nothing has happened", step=step, shows=shows)
    lab.control("binder")
    await lab.check_cause(
        *("pvc/data", "claim-provisioner-not-running", f"provisioner of {lab.driver.name}"),
        step="provisioner",
        shows="NAMESPACE",
    )
    await lab.lease("test-csi-moorage-dev")
    await lab.check_cause(
        *("pvc/data", "claim-provisioner-not-leading", "held by host-0"),
        step="get lease test-csi-moorage-dev",
        shows="renewTime",
    )
    lab.sidecars("provisioner")
    await lab.check_well("pvc/data")


async def test_a_provisioner_of_no_component_is_named(lab):
    lab.control("binder")
    await lab.storage_class("old", provisioner="kubernetes.io/glusterfs")
    await lab.claim("data", "old")
    await lab.check_cause("pvc/data", "claim-driver-not-installed", "driver kubernetes.io/glusterfs")


async def test_a_secret_of_the_class_is_missing(lab):
    lab.control("binder")
    await lab.csi_driver()
    lab.sidecars("provisioner")
    prefix = "csi.storage.k8s.io/provisioner-secret"
    await lab.storage_class("fast", parameters={f"{prefix}-name": "key", f"{prefix}-namespace": "kube-system"})
    await lab.claim("data")
    step, words = "kubectl -n kube-system get secrets", "secret kube-system/key, which class fast names"
    await lab.check_cause("pvc/data", "claim-secret-missing", words, step=step, shows="No resources found")


@pytest.mark.parametrize(
    ("code", "cause", "words", "shows"),
    [
        ("INVALID_ARGUMENT", "claim-refused", "the driver refuses", "provisioner: test.csi"),
        ("UNAVAILABLE", "claim-driver-silent", "does not answer: CreateVolume: UNAVAILABLE: no answer", "NAMESPACE"),
        ("INTERNAL", "claim-provisioning-fails", "making its volume fails: CreateVolume: INTERNAL: ", "as the script"),
    ],
)
async def test_the_driver_fails_to_make_the_volume(lab, code, cause, words, shows):
    lab.control("binder")
    await lab.csi_driver()
    lab.refuse("CreateVolume", code)
    lab.sidecars("provisioner")
    await lab.storage_class("fast")
    await lab.claim("data")
    await lab.check_cause("pvc/data", cause, words, evidence=f"{code}: as the script says", shows=shows)


async def test_the_driver_has_no_room_and_says_how_much_there_is(lab):
    lab.control("binder")
    await lab.csi_driver()
    lab.refuse("CreateVolume", "RESOURCE_EXHAUSTED")
    lab.sidecars("provisioner")
    await lab.storage_class("fast")
    await lab.claim("data")
    await lab.check_cause("pvc/data", "claim-no-capacity", "no room for 1Gi: CreateVolume: ", "as the script says")
    await lab.room("fast", "node-1", "100Mi")
    await lab.room("fast", "node-2", "300Mi")
    words = "no room for 1Gi; the most that one place has is 300Mi (kubernetes.io/hostname=node-2)"
    await lab.check_cause("pvc/data", "claim-no-capacity", words, shows="300Mi")


async def test_the_driver_makes_no_volume_of_that_size(lab):
    lab.control("binder", "protection")
    await lab.csi_driver()
    lab.refuse("CreateVolume", "OUT_OF_RANGE", lambda request: request.capacity_range.required_bytes > 1 << 30)
    lab.sidecars("provisioner")
    await lab.storage_class("fast")
    await lab.claim("data", size="2Gi")
    words, evidence = "cannot make a volume of that size", "OUT_OF_RANGE: as the script says"
    await lab.check_cause(
        *("pvc/data", "claim-size-impossible", words),
        step="another size",
        evidence=evidence,
        then=lambda: again(lab, "data", size="1Gi"),
    )
    await lab.check_well("pvc/data")


async def test_the_driver_lacks_a_capability(lab):
    lab.driver.abilities.rpcs = ("CREATE_DELETE_VOLUME",)
    lab.control("binder")
    lab.sidecars("provisioner")
    await lab.storage_class("fast")
    await lab.bound("origin")
    await lab.claim("copy", **source("PersistentVolumeClaim", "origin"))
    await lab.check_cause(
        *("pvc/copy", "claim-driver-lacks-capability", "lacks the capability CLONE_VOLUME"),
        step="get pvc copy",
        shows="dataSource",
    )


async def test_the_driver_is_at_work(lab):
    lab.control("binder")
    await lab.csi_driver()
    gate = lab.driver.hold("CreateVolume")
    lab.sidecars("provisioner")
    await lab.storage_class("fast")
    await lab.claim("data")
    words = f"provisioner of {lab.driver.name} is making its volume"
    await lab.check_cause("pvc/data", "claim-provisioning", words, ends=gate.set)
    assert "used by no pod" in (await lab.check_well("pvc/data")).sentence


async def test_the_attributes_class_is_missing(lab):
    lab.control("binder")
    lab.sidecars("provisioner")
    await lab.storage_class("fast")
    await lab.attributes_class("silver")
    await lab.claim("data", volumeAttributesClassName="gold")
    words, step = "VolumeAttributesClass 'gold'", "volumeattributesclass"
    await lab.check_cause("pvc/data", "claim-modifier-missing", words, step=step, shows="silver")
