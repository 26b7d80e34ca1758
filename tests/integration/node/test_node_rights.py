"""An agent with the rights that Kubernetes gives to a node: it may read its pods' claims and volumes, not list them."""

import json

import pytest

from moorage.kube.api import config as kube_config
from moorage.kube.objects.storage import CSINode
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim

pytestmark = pytest.mark.root

READ, WATCH, WRITE = ["get"], ["get", "list", "watch"], ["create", "get", "update", "patch", "delete"]
RULES = [
    ("", ["nodes", "pods"], WATCH),
    ("", ["nodes"], ["create", "update", "patch", "attest"]),
    ("", ["pods"], ["create", "delete"]),
    ("", ["nodes/status", "pods/status", "persistentvolumeclaims/status"], ["update", "patch"]),
    ("", ["configmaps", "secrets", "persistentvolumeclaims", "persistentvolumes"], READ),
    ("", ["events"], ["create", "update", "patch"]),
    ("", ["serviceaccounts/token"], ["create"]),
    ("coordination.k8s.io", ["leases"], WRITE),
    ("storage.k8s.io", ["csidrivers"], WATCH),
    ("storage.k8s.io", ["csinodes"], [*WRITE, "watch"]),
    ("storage.k8s.io", ["volumeattachments"], READ),
    ("authentication.k8s.io", ["tokenreviews"], ["create"]),
    ("authorization.k8s.io", ["subjectaccessreviews"], ["create"]),
]


@pytest.fixture
async def rights(lab):
    """The credentials of such a node."""
    account = "/api/v1/namespaces/kube-system/serviceaccounts"
    roles = "/apis/rbac.authorization.k8s.io/v1"
    rules = [{"apiGroups": [group], "resources": kinds, "verbs": verbs} for group, kinds, verbs in RULES]
    await lab.client.request("POST", account, {"metadata": {"name": "node"}})
    await lab.client.request("POST", f"{roles}/clusterroles", {"metadata": {"name": "node"}, "rules": rules})
    binding = {
        "metadata": {"name": "node"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "node"},
        "subjects": [{"kind": "ServiceAccount", "name": "node", "namespace": "kube-system"}],
    }
    await lab.client.request("POST", f"{roles}/clusterrolebindings", binding)
    answer = await lab.client.request("POST", f"{account}/node/token", {"spec": {"expirationSeconds": 3600}})
    return kube_config.from_values(lab.server.insecure_url, json.loads(answer)["status"]["token"])


async def test_a_pod_lives_its_whole_life(lab, rights):
    await lab.driver_object(podInfoOnMount=True, tokenRequests=[{"audience": "vault"}])
    async with lab.driver() as driver:
        agent = await lab.start_agent(rights, sync_s=1.0)
        assert agent.claims.is_by_name
        assert agent.pvs.is_by_name

        async def registered():
            found = await lab.client.find(CSINode, "n1")
            return found is not None and [one.name for one in found.spec.drivers] == ["scripted.dev"]

        await lab.until(registered, what="driver in CSINode")
        await lab.pod(command="echo kept > /data/file; sleep 1000")
        await lab.volume()  # after its pod: it is not there when the agent first asks for it
        await lab.phase("p1", "Running")
        kept = lab.base / "d" / "scripted.dev" / "vol-c1" / "file"
        await lab.until(kept.exists)

        waiting = {
            "allocatedResources": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": "NodeResizePending"},
        }
        await lab.client.patch(PersistentVolume, "pv-c1", {"spec": {"capacity": {"storage": "2Gi"}}})
        await lab.client.patch(PersistentVolumeClaim, "c1", {"status": waiting}, "default", subresource="status")

        async def grown():
            claim = await lab.client.get(PersistentVolumeClaim, "c1", "default")
            return claim.status.capacity["storage"] == "2Gi"

        await lab.until(grown, what="claim grown")
        assert driver.sizes == {"vol-c1": 2 << 30}

        await lab.end("p1")


async def test_a_restarted_agent_leaves_what_runs_alone(lab, rights):
    """Nothing is unmounted because a claim has not been read yet."""
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent(rights)
        await lab.pod(command="while sleep 0.05; do date >> /data/file || exit 1; done")
        before = await lab.phase("p1", "Running")
        await lab.crash_agent()
        asked = len(driver.requests("NodePublishVolume"))
        await lab.start_agent(rights)
        await lab.until(
            lambda: len(driver.requests("NodePublishVolume")) > asked, what="volume confirmed by its driver"
        )
        after = await lab.phase("p1", "Running")
        assert driver.requests("NodeUnpublishVolume") == []
        assert driver.requests("NodeUnstageVolume") == []
        assert after.status.container_statuses[0].restart_count == 0
        assert after.status.container_statuses[0].container_id == before.status.container_statuses[0].container_id
        await lab.end("p1")


@pytest.mark.parametrize("command", ["sleep 1000", "exit 3"], ids=["running", "between two attempts"])
async def test_a_pod_keeps_its_volume_when_its_claim_went_while_no_agent_was_there(lab, command):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent()
        pod = await lab.pod(command=command)
        await lab.phase("p1", "Running")
        await lab.crash_agent()
        await lab.client.patch(PersistentVolumeClaim, "c1", {"metadata": {"finalizers": None}}, "default")
        await lab.client.delete(PersistentVolumeClaim, "c1", "default")
        assert await lab.client.find(PersistentVolumeClaim, "c1", "default") is None
        await lab.volume("c2")
        await lab.start_agent()
        await lab.pod("p2", "c2")
        await lab.phase("p2", "Running")
        assert str(lab.target(pod)) in lab.mounted()
        assert driver.requests("NodeUnpublishVolume") == [], "the pod is not over and has the volume"
        await lab.delete("p1")
        await lab.gone("p1")
        assert len(driver.requests("NodeUnpublishVolume")) == 1
        await lab.end("p2")
