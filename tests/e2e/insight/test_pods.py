"""Why a pod does not start or end, as far as no mount is needed: claims, scheduling, attaching."""

import pytest

from moorage.kube.api.client import Client
from moorage.kube.errors import Forbidden
from moorage.kube.objects import (
    CSINode,
    Event,
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
        *("pod/a", "pod-claim-missing", "claim nowhere, which does not exist"),
        step="kubectl -n default get pvc",
        shows="No resources found",
    )
    await lab.pod("b", **ephemeral("tmp"))
    step = "get events"
    await lab.check_cause("pod/b", "pod-ephemeral-claim-missing", "claim b-tmp", step=step, shows="No resources found")
    await lab.claim("c-tmp", "fast")
    await lab.pod("c", **ephemeral("tmp"))
    lab.control("ephemeral")
    cause, step = "pod-ephemeral-claim-foreign", "get pvc c-tmp"
    story = await lab.check_cause("pod/c", cause, "claim c-tmp", step=step, shows="uid:")
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
        *("pod/second", "pod-rwop-conflict", "pod first has it"),
        step="kubectl -n default describe pod first",
        leaves=True,
    )
    await lab.until(Pod, "second", lambda pod: pod.spec.node_name == "node-1")
    assert [later.command for later in story.then] == ["kubectl -n default delete pod first"]


async def test_no_node_fits_and_why_for_each(lab):
    await lab.pod("web")
    await lab.check_cause(
        *("pod/web", "pod-scheduler-not-running", "schedulerName is default-scheduler"),
        step="kube-system",
        shows="No resources found",
    )
    lab.control("scheduler")
    await lab.node("node-1")
    await lab.client.patch(Node, "node-1", {"spec": {"unschedulable": True}})
    await lab.pod("picky", nodeSelector={"disk": "fast"})
    step, shows = "describe pod picky", "FailedScheduling"
    story = await lab.check_cause("pod/picky", "pod-no-node-fits", "0/1 nodes are available", step=step, shows=shows)
    assert story.evidence == ["node-1: ready, cordoned"]


async def test_the_volume_is_where_the_pod_cannot_be(lab):
    lab.control("binder", "scheduler")
    await lab.node("node-1")
    await lab.node("node-2")
    await bound_statically(lab, **on("node-1"))
    await lab.pod("a", "data", nodeSelector={"kubernetes.io/hostname": "node-2"})
    await lab.check_cause(
        *("pod/a", "pod-volume-elsewhere", "from node-1 only, where the pod may not run"),
        step="nodeAffinity",
        shows="node-1",
    )
    await lab.client.patch(Node, "node-1", {"spec": {"unschedulable": True}})
    await lab.pod("b", "data")
    await lab.check_cause("pod/b", "pod-volume-elsewhere", "from node-1 only, which cannot take pods now")
    await lab.client.delete(Node, "node-1")
    step = "kubectl get nodes"
    await lab.check_cause("pv/pv-data", "volume-node-gone", "only from node-1", step=step, shows="hostname=node-2")
    await lab.check_cause("pod/b", "pod-volume-elsewhere", "from no node that exists")


async def test_no_node_has_room_or_takes_more_volumes(lab):
    lab.control("binder", "scheduler")
    await lab.csi_driver(storageCapacity=True)
    await lab.storage_class("late", late=True)
    await lab.node("node-1", count=1)
    await lab.room("late", "node-1", "100Mi")
    await lab.claim("big", "late", size="1Gi")
    await lab.pod("big", "big")
    words = ("it asks for 1Gi for claim big, and the most that one place has is 100Mi (kubernetes.io/hostname=node-1)",)
    await lab.check_cause("pod/big", "pod-no-capacity", *words, step="csistoragecapacities", shows="100Mi")
    await bound_statically(lab, "one")
    await bound_statically(lab, "two")
    await lab.pod("first", "one", node="node-1")
    await lab.pod("second", "two")
    await lab.check_cause(
        *("pod/second", "pod-attach-limit", "no node can take another volume"),
        step="kubectl get csinodes",
        shows="count: 1",
    )


async def test_the_node_of_the_pod_is_gone_or_not_ready(lab):
    await lab.pod("a", node="node-9")
    step = "kubectl get nodes"
    story = await lab.check_cause("pod/a", "pod-node-gone", "node-9 does not exist", step=step, leaves=True)
    assert [later.command for later in story.then] == ["kubectl -n default delete pod a --force --grace-period=0"]
    assert "two pods may write" in story.then[0].harm
    await lab.node("node-1", ready=False)
    await lab.pod("b", node="node-1")
    await lab.check_cause(
        "pod/b", "pod-node-not-ready", "node node-1 is not ready", last="node-not-ready", step="describe node"
    )
    await lab.set_ready("node-1", True)
    step = "describe pod b"
    await lab.check_cause("pod/b", "pod-starting", "node node-1 is mounting", step=step, shows="node-1")
    await lab.client.patch(Pod, "b", {"metadata": {"finalizers": ["example.com/mine"]}}, "default")
    await lab.client.delete(Pod, "b", "default")
    await lab.check_cause("pod/b", "pod-deleting", "finalizer example.com/mine holds it", shows="Termination")


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
        *("pod/web", "pod-attach-not-begun", "has not been attached to node-1"),
        step="kubectl get volumeattachments",
        shows="No resources found",
    )
    lab.control("attachdetach")
    words = f"waits for volume {claim.spec.volume_name} to be attached to node-1"
    story = await lab.check_cause("pod/web", "pod-attaching", words, last="attachment-attacher-not-running")
    attachment = story.chain[1].object
    await lab.lease("external-attacher-leader-test-csi-moorage-dev")
    words, cause = "whose lease has run out", "attachment-attacher-not-running"
    await lab.check_cause(attachment, cause, words, step="attacher", shows="NAMESPACE")
    lab.refuse("ControllerPublishVolume", "INTERNAL")
    lab.sidecars("attacher")
    words = ("attaching to node-1 fails: ", "as the script says")
    await lab.check_cause("pod/web", "attachment-attach-fails", *words, step="yaml", shows="attachError")
    lab.driver.chooser = None
    await lab.check_cause("pod/web", "pod-starting")
    assert "attached to node-1" in (await lab.check_well(attachment)).sentence

    await lab.pod("rival", "data", node="node-2")
    words = f"volume {claim.spec.volume_name} is still attached to node node-1 and used by pod web"
    step, evidence = "kubectl -n default describe pod web", "already used by pod(s) web"

    async def share() -> None:
        await lab.shell.run("kubectl delete pod rival")
        await lab.pod("rival", "data", node="node-1", nodeSelector={"kubernetes.io/hostname": "node-1"})

    await lab.check_cause("pod/rival", "pod-multi-attach", words, step=step, evidence=evidence, then=share)
    assert not (await lab.client.get(Pod, "web", "default")).is_deleting
    await lab.shell.run("kubectl delete pod rival")
    await lab.pod("rival", "data", node="node-2")

    unique = f"kubernetes.io/csi/{lab.driver.name}^{await handle(lab, claim)}"
    await lab.client.patch(Node, "node-1", {"status": {"volumesInUse": [unique]}}, subresource="status")
    await lab.set_ready("node-1", False)
    words, last = "last said that it uses the volume", "node-not-ready"
    story = await lab.check_cause(
        "pod/rival", "attachment-node-not-ready", words, last=last, step="describe node node-1"
    )
    assert [link.cause for link in story.chain] == ["pod-multi-attach", "attachment-node-not-ready", "node-not-ready"]
    assert "out-of-service=nodeshutdown:NoExecute" in story.then[0].command
    assert "if the machine still runs" in story.then[0].harm
    assert "out-of-service" in (await lab.check_cause("pod/web", "pod-node-not-ready", last=last)).then[0].command
    lab.control("nodelifecycle")
    await lab.check_cause(attachment, "attachment-node-not-ready", words, last=last, leaves=True)
    await lab.check_cause("pod/rival", "pod-starting")
    assert lab.driver.backend.published[await handle(lab, claim)] == {"node-2"}


async def test_the_driver_does_not_answer_on_the_node(lab):
    lab.control("binder")
    await lab.csi_driver()
    await lab.node("node-1")
    await bound_statically(lab)
    await lab.pod("web", "data", node="node-1")
    web = await lab.client.get(Pod, "web", "default")
    about = {"kind": "Pod", "namespace": "default", "name": "web", "uid": web.uid}
    words = "MountDevice failed: NodeStageVolume: DEADLINE_EXCEEDED: no answer in 120 s"
    told = {"reason": "FailedMount", "type": "Warning", "message": words, "involvedObject": about}
    await lab.client.create(Event, {"metadata": {"name": "web.1"}, **told}, "default")
    await lab.check_cause("pod/web", "pod-driver-silent", "on node node-1 does not answer", words, shows=words)


async def handle(lab, claim):
    return (await lab.client.get(PersistentVolume, claim.spec.volume_name)).spec.csi.volume_handle


async def test_the_driver_is_not_on_the_node_or_takes_no_inline_volumes(lab):
    lab.control("binder")
    await lab.csi_driver(volumeLifecycleModes=["Persistent"])
    await lab.node("node-1")
    await lab.pod("inline", node="node-1", volumes=[{"name": "x", "csi": {"driver": lab.driver.name}}])
    await lab.check_cause(
        *("pod/inline", "pod-inline-not-allowed", "does not take inline volumes (volume x)"),
        step="kubectl get csidriver",
        shows="Persistent",
    )
    await bound_statically(lab)
    await lab.client.patch(CSINode, "node-1", {"spec": {"drivers": []}})
    await lab.pod("web", "data", node="node-1")
    words = f"driver {lab.driver.name} is not registered on node node-1"
    await lab.check_cause("pod/web", "pod-driver-not-registered", words, shows="kind: CSINode")


@pytest.mark.parametrize("is_there", [True, False])
async def test_an_attachment_without_its_volume_or_node(lab, is_there):
    spec = {"attacher": lab.driver.name, "nodeName": "node-1", "source": {"persistentVolumeName": "pv-9"}}
    await lab.client.create(VolumeAttachment, {"metadata": {"name": "va"}, "spec": spec})
    if is_there:
        await lab.node("node-1")
        words, step = "volume pv-9 does not exist", "kubectl get pv"
        await lab.check_cause("va/va", "attachment-volume-gone", words, step=step, shows="No resources found")
    else:
        words, step = "node node-1 does not exist", "kubectl get nodes"
        await lab.check_cause("va/va", "attachment-node-gone", words, step=step, shows="No resources found")


async def test_detaching_waits_fails_and_the_driver_leaves_the_node(lab):
    await lab.node("node-1")
    await lab.volume("pv-1")
    finalizer = f"external-attacher/{lab.driver.name.replace('.', '-')}"
    spec = {"attacher": lab.driver.name, "nodeName": "node-1", "source": {"persistentVolumeName": "pv-1"}}
    meta = {"name": "va", "finalizers": [finalizer]}
    await lab.client.create(VolumeAttachment, {"metadata": meta, "spec": spec})
    await lab.client.patch(CSINode, "node-1", {"spec": {"drivers": []}})
    await lab.check_cause(
        *("va/va", "attachment-driver-not-on-node", "not registered on node node-1"),
        step="get csinode node-1",
        shows="kind: CSINode",
    )
    drivers = [{"name": lab.driver.name, "nodeID": "node-1", "topologyKeys": []}]
    await lab.client.patch(CSINode, "node-1", {"spec": {"drivers": drivers}})
    await lab.client.delete(VolumeAttachment, "va")
    words = "being detached from node-1"
    await lab.check_cause("va/va", "attachment-detach-waits", words, step="attacher", shows="NAMESPACE")
    lab.refuse("ControllerUnpublishVolume", "INTERNAL")
    lab.sidecars("attacher")
    words = ("detaching from node-1 fails: ", "as the script says")
    await lab.check_cause("va/va", "attachment-detach-fails", *words, shows="detachError")


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
        shows="No resources found",
        evidence="exceeded quota: small",
    )
