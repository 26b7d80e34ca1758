"""Why a pod does not start or end, as far as no mount is needed: claims, scheduling, attaching."""

import pytest

from moorage.kube.api.client import Client
from moorage.kube.errors import Forbidden
from moorage.kube.objects import (
    CSINode,
    CSIStorageCapacity,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
)

TEMPLATE = {
    "spec": {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "1Gi"}},
    }
}


def ephemeral(name):
    return {"volumes": [{"name": name, "ephemeral": {"volumeClaimTemplate": TEMPLATE}}]}


def on(*nodes):
    """Node affinity of a volume."""
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}
    return {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}}


async def bound_statically(lab, name="data", **spec):
    await lab.volume(f"pv-{name}", claimRef={"namespace": "default", "name": name}, **spec)
    modes = spec.get("accessModes", ["ReadWriteOnce"])
    await lab.claim(name, "", accessModes=modes)
    await lab.until(PersistentVolumeClaim, name, lambda claim: claim.status.phase == "Bound")


async def test_claims_of_the_pod_are_missing_or_foreign(lab):
    await lab.pod("a", "nowhere")
    await lab.check_cause(
        "pod/a", "pod-claim-missing", "claim nowhere, which does not exist", step="kubectl -n default get pvc"
    )
    await lab.pod("b", **ephemeral("tmp"))
    await lab.check_cause("pod/b", "pod-ephemeral-claim-missing", "claim b-tmp", step="get events")
    await lab.claim("c-tmp", "fast")
    await lab.pod("c", **ephemeral("tmp"))
    lab.control("ephemeral")
    story = await lab.check_cause("pod/c", "pod-ephemeral-claim-foreign", "claim c-tmp", step="get pvc c-tmp")
    assert story.chain[0].state == "Pending"


async def test_a_claim_of_the_pod_is_not_bound_or_on_its_way_out(lab):
    lab.control("binder", "scheduler", "protection")
    await lab.node("node-1")
    await lab.claim("a", "missing")
    await lab.pod("a", "a")
    await lab.check_cause("pod/a", "pod-claim-pending", "waits for claim a to be bound", last="claim-class-missing")
    await bound_statically(lab, "b")
    await lab.pod("holder", "b", node="node-1")
    await lab.client.delete(PersistentVolumeClaim, "b", "default")
    await lab.until(PersistentVolumeClaim, "b", lambda claim: claim.is_deleting)
    await lab.pod("b", "b")
    await lab.check_cause("pod/b", "pod-claim-deleting", "claim b is being deleted", last="claim-deleting-in-use")


async def test_one_pod_has_the_claim_for_itself(lab):
    lab.control("binder", "scheduler")
    await lab.node("node-1")
    await bound_statically(lab, accessModes=["ReadWriteOncePod"])
    await lab.pod("first", "data", node="node-1")
    await lab.pod("second", "data")
    story = await lab.check_cause(
        "pod/second", "pod-rwop-conflict", "pod first has it", step="kubectl -n default describe pod first"
    )
    assert [later.command for later in story.then] == ["kubectl -n default delete pod first"]


async def test_no_node_fits_and_why_for_each(lab):
    await lab.pod("web")
    await lab.check_cause(
        "pod/web", "pod-scheduler-not-running", "schedulerName is default-scheduler", step="kube-system"
    )
    lab.control("scheduler")
    await lab.node("node-1")
    await lab.client.patch(Node, "node-1", {"spec": {"unschedulable": True}})
    await lab.pod("picky", nodeSelector={"disk": "fast"})
    story = await lab.check_cause("pod/picky", "pod-no-node-fits", "0/1 nodes are available", step="describe pod picky")
    assert story.evidence == ["node-1: ready, cordoned"]


async def test_the_volume_is_where_the_pod_cannot_be(lab):
    lab.control("binder", "scheduler")
    await lab.node("node-1")
    await lab.node("node-2")
    await bound_statically(lab, **on("node-1"))
    await lab.pod("a", "data", nodeSelector={"kubernetes.io/hostname": "node-2"})
    await lab.check_cause(
        "pod/a", "pod-volume-elsewhere", "from node-1 only, where the pod may not run", step="nodeAffinity"
    )
    await lab.client.patch(Node, "node-1", {"spec": {"unschedulable": True}})
    await lab.pod("b", "data")
    await lab.check_cause("pod/b", "pod-volume-elsewhere", "from node-1 only, which cannot take pods now")
    await lab.client.delete(Node, "node-1")
    await lab.check_cause("pv/pv-data", "volume-node-gone", "only from node-1", step="kubectl get nodes")
    await lab.check_cause("pod/b", "pod-volume-elsewhere", "from no node that exists")


async def test_no_node_has_room_or_takes_more_volumes(lab):
    lab.control("binder", "scheduler")
    await lab.csi_driver(storageCapacity=True)
    await lab.storage_class("late", late=True)
    await lab.node("node-1", count=1)
    topology = {"matchLabels": {"kubernetes.io/hostname": "node-1"}}
    body = {"metadata": {"name": "c"}, "storageClassName": "late", "capacity": "100Mi", "nodeTopology": topology}
    await lab.client.create(CSIStorageCapacity, body, "default")
    await lab.claim("big", "late", size="1Gi")
    await lab.pod("big", "big")
    await lab.check_cause("pod/big", "pod-no-capacity", "no node has enough free storage", step="csistoragecapacities")
    await bound_statically(lab, "one")
    await bound_statically(lab, "two")
    await lab.pod("first", "one", node="node-1")
    await lab.pod("second", "two")
    await lab.check_cause(
        "pod/second", "pod-attach-limit", "no node can take another volume", step="kubectl get csinodes"
    )


async def test_the_node_of_the_pod_is_gone_or_not_ready(lab):
    await lab.pod("a", node="node-9")
    story = await lab.check_cause("pod/a", "pod-node-gone", "node-9 does not exist", step="kubectl get nodes")
    assert [later.command for later in story.then] == ["kubectl -n default delete pod a --force --grace-period=0"]
    assert "two pods may write" in story.then[0].harm
    await lab.node("node-1", ready=False)
    await lab.pod("b", node="node-1")
    await lab.check_cause(
        "pod/b", "pod-node-not-ready", "node node-1 is not ready", last="node-not-ready", step="describe node"
    )
    await lab.set_ready("node-1", True)
    await lab.check_cause("pod/b", "pod-starting", "node node-1 is mounting", step="describe pod b")
    await lab.client.patch(Pod, "b", {"metadata": {"finalizers": ["example.com/mine"]}}, "default")
    await lab.client.delete(Pod, "b", "default")
    await lab.check_cause("pod/b", "pod-deleting", "finalizer example.com/mine holds it")


async def test_attaching_has_not_begun_waits_fails_and_is_held_elsewhere(lab):
    lab.control("binder")
    await lab.csi_driver(attachRequired=True)
    await lab.node("node-1")
    await lab.node("node-2")
    await lab.storage_class("fast")
    lab.sidecars("provisioner")
    claim = await lab.bound("data")
    await lab.pod("web", "data", node="node-1")
    await lab.check_cause(
        "pod/web", "pod-attach-not-begun", "has not been attached to node-1", step="kubectl get volumeattachments"
    )
    lab.control("attachdetach")
    words = f"waits for volume {claim.spec.volume_name} to be attached to node-1"
    story = await lab.check_cause("pod/web", "pod-attaching", words, last="attachment-attacher-not-running")
    attachment = story.chain[1].object
    await lab.lease("external-attacher-leader-test-csi-moorage-dev")
    await lab.check_cause(attachment, "attachment-attacher-not-running", "whose lease has run out", step="attacher")
    lab.refuse("ControllerPublishVolume", "INTERNAL")
    lab.sidecars("attacher")
    await lab.check_cause(
        "pod/web", "attachment-attach-fails", "attaching to node-1 fails: ", "as the script says", step="yaml"
    )
    lab.driver.chooser = None
    await lab.check_cause("pod/web", "pod-starting")
    assert "attached to node-1" in (await lab.check_well(attachment)).sentence

    await lab.pod("rival", "data", node="node-2")
    words = f"volume {claim.spec.volume_name} is still attached to node node-1 and used by pod web"
    step, evidence = "kubectl -n default describe pod web", "already used by pod(s) web"
    story = await lab.check_cause("pod/rival", "pod-multi-attach", words, step=step, evidence=evidence)
    assert [later.command for later in story.then] == ["kubectl -n default delete pod web"]
    assert story.then[0].harm == "stops pod default/web"

    unique = f"kubernetes.io/csi/{lab.driver.name}^{await handle(lab, claim)}"
    await lab.client.patch(Node, "node-1", {"status": {"volumesInUse": [unique]}}, subresource="status")
    await lab.set_ready("node-1", False)
    words = "last said that it uses the volume"
    story = await lab.check_cause(
        "pod/rival", "attachment-node-not-ready", words, last="node-not-ready", step="describe node node-1"
    )
    assert [link.cause for link in story.chain] == ["pod-multi-attach", "attachment-node-not-ready", "node-not-ready"]
    assert "out-of-service=nodeshutdown:NoExecute" in story.then[0].command
    assert "if the machine still runs" in story.then[0].harm


async def handle(lab, claim):
    return (await lab.client.get(PersistentVolume, claim.spec.volume_name)).spec.csi.volume_handle


async def test_the_driver_is_not_on_the_node_or_takes_no_inline_volumes(lab):
    lab.control("binder")
    await lab.csi_driver(volumeLifecycleModes=["Persistent"])
    await lab.node("node-1")
    await lab.pod("inline", node="node-1", volumes=[{"name": "x", "csi": {"driver": lab.driver.name}}])
    await lab.check_cause(
        "pod/inline", "pod-inline-not-allowed", "does not take inline volumes (volume x)", step="kubectl get csidriver"
    )
    await bound_statically(lab)
    await lab.client.patch(CSINode, "node-1", {"spec": {"drivers": []}})
    await lab.pod("web", "data", node="node-1")
    await lab.check_cause(
        "pod/web", "pod-driver-not-registered", f"driver {lab.driver.name} is not registered on node node-1"
    )


@pytest.mark.parametrize("is_there", [True, False])
async def test_an_attachment_without_its_volume_or_node(lab, is_there):
    spec = {"attacher": lab.driver.name, "nodeName": "node-1", "source": {"persistentVolumeName": "pv-9"}}
    await lab.client.create(VolumeAttachment, {"metadata": {"name": "va"}, "spec": spec})
    if is_there:
        await lab.node("node-1")
        await lab.check_cause(
            "va/va", "attachment-volume-gone", "volume pv-9 does not exist", step="kubectl get pv pv-9"
        )
    else:
        await lab.check_cause("va/va", "attachment-node-gone", "node node-1 does not exist", step="kubectl get nodes")


async def test_detaching_waits_fails_and_the_driver_leaves_the_node(lab):
    await lab.node("node-1")
    await lab.volume("pv-1")
    finalizer = f"external-attacher/{lab.driver.name.replace('.', '-')}"
    spec = {"attacher": lab.driver.name, "nodeName": "node-1", "source": {"persistentVolumeName": "pv-1"}}
    meta = {"name": "va", "finalizers": [finalizer]}
    await lab.client.create(VolumeAttachment, {"metadata": meta, "spec": spec})
    await lab.client.patch(CSINode, "node-1", {"spec": {"drivers": []}})
    await lab.check_cause(
        "va/va", "attachment-driver-not-on-node", "not registered on node node-1", step="get csinode node-1"
    )
    drivers = [{"name": lab.driver.name, "nodeID": "node-1", "topologyKeys": []}]
    await lab.client.patch(CSINode, "node-1", {"spec": {"drivers": drivers}})
    await lab.client.delete(VolumeAttachment, "va")
    await lab.check_cause("va/va", "attachment-detach-waits", "being detached from node-1", step="attacher")
    lab.refuse("ControllerUnpublishVolume", "INTERNAL")
    lab.sidecars("attacher")
    await lab.check_cause("va/va", "attachment-detach-fails", "detaching from node-1 fails: ", "as the script says")


class OverQuota(Client):
    """A client whose claims the API server refuses, in the words of Kubernetes' quota admission.

    The embedded API server keeps ResourceQuotas and does not enforce them.
    """

    async def create(self, kind, body, namespace="", **more):
        if kind is PersistentVolumeClaim:
            used = "requested: requests.storage=1Gi, used: requests.storage=0, limited: requests.storage=1Mi"
            words = f'persistentvolumeclaims "{body["metadata"]["name"]}" is forbidden: exceeded quota: small, {used}'
            raise Forbidden(403, "Forbidden", words)
        return await super().create(kind, body, namespace, **more)


async def test_a_quota_refuses_the_claim_of_an_ephemeral_volume(lab):
    await lab.storage_class()
    lab.control("ephemeral", client_of=OverQuota)
    await lab.pod("web", **ephemeral("tmp"))
    await lab.check_cause(
        "pod/web",
        "pod-quota",
        "claim web-tmp for its ephemeral volume exceeds the quota of namespace default",
        step="kubectl -n default describe resourcequota",
        evidence="exceeded quota: small",
    )
