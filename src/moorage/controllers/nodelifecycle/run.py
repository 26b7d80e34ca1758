"""The node lifecycle controller and the collector of pods that cannot end by themselves.

Owns: the Unknown conditions and the taints of nodes, the eviction of pods by taints, and the removal of pods whose
node is gone or out of service.
Start reading at: `NodeLifecycle.sync_node`, `NodeLifecycle.sync_pod`, `run`.

kube-controller-manager does the same on a real cluster. This one is for the embedded cluster, so it runs only if it is
asked for by name.
"""

import time
from typing import Any

import msgspec

from moorage.controllers.context import ControllerContext
from moorage.controllers.nodelifecycle import plan
from moorage.controllers.nodelifecycle.plan import Heartbeat
from moorage.kube.api.client import PatchType
from moorage.kube.cache.informers import Informers
from moorage.kube.control.controller import Backoff, Controller, Watch
from moorage.kube.control.controller import run as run_controllers
from moorage.kube.control.events import Recorder
from moorage.kube.control.writer import Writer
from moorage.kube.errors import NotFound
from moorage.kube.objects.core import Lease, Node
from moorage.kube.objects.meta import seconds_of, timestamp_text
from moorage.kube.objects.pods import Pod
from moorage.log import get_logger

log = get_logger(__name__)

COMPONENT = "node-controller"
LEASE_NAMESPACE = "kube-node-lease"
ORPHAN_S = 40.0  # how long a pod outlives its Node object: the node may only be registering again
_ON_NODE = "node-lifecycle/node"


class NodeLifecycle:
    """Marks silent nodes and moves or removes their pods. Keys are node names and pod keys."""

    def __init__(self, context: ControllerContext, writer: Writer, recorder: Recorder) -> None:
        informers: Informers = context.informers
        self.nodes, self.pods = informers.of(Node), informers.of(Pod)
        self.leases = informers.of(Lease, namespace=LEASE_NAMESPACE)
        self.pods.index(_ON_NODE, lambda pod: [pod.spec.node_name])
        self._client, self._writer, self._recorder = context.client, writer, recorder
        self._clock, self._grace_s = context.clock, context.options.node_grace_s
        self._heartbeats: dict[str, Heartbeat] = {}
        self._node_gone_at: dict[str, float] = {}
        backoff = Backoff(context.options.retry_start_s, context.options.retry_max_s)
        self.of_nodes = Controller("node-lifecycle", self.sync_node, workers=4, backoff=backoff)
        self.of_pods = Controller("node-lifecycle-pods", self.sync_pod, workers=8, backoff=backoff)

    def watches(self) -> list[Watch[Any]]:
        """Return what fills the two queues."""
        return [
            Watch(self.nodes, self._on_node),
            Watch(self.leases, self._on_lease),
            self.of_pods.watch(self.pods, lambda old, new: [new.key] if new is not None else []),
        ]

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        node = new or old
        assert node is not None
        self._note_heartbeat(node.name)
        self.of_nodes.queue.add(node.name)
        if old is None or new is None or old.spec.taints != new.spec.taints or old.is_ready != new.is_ready:
            for pod in self.pods.at(_ON_NODE, node.name):
                self.of_pods.queue.add(pod.key)

    def _on_lease(self, old: Lease | None, new: Lease | None) -> None:
        """Note a renewal. It is enqueued only if it is the first, because a live node needs no decision."""
        lease = new or old
        assert lease is not None
        self._note_heartbeat(lease.name)
        if old is None:
            self.of_nodes.queue.add(lease.name)

    def _note_heartbeat(self, name: str) -> None:
        node, now = self.nodes.get(name), self._clock()
        if node is None:
            self._heartbeats.pop(name, None)
            return
        sign = plan.sign_of_life(node, self._lease_of(name))
        self._heartbeats[name] = self._heartbeats.get(name, Heartbeat(sign, now)).after(sign, now)

    def _lease_of(self, name: str) -> Lease | None:
        return self.leases.get(f"{LEASE_NAMESPACE}/{name}")

    async def sync_node(self, name: str) -> float | None:
        """Write the conditions and taints that are due. Returns the seconds until the node would count as silent."""
        node, heartbeat = self.nodes.get(name), self._heartbeats.get(name)
        if node is None or heartbeat is None:
            return None
        silent_in_s = heartbeat.since + self._grace_s - self._clock()
        if silent_in_s <= 0:
            node = await self._mark_silent(node, has_agent=self._lease_of(name) is not None)
        await self._set_taints(node)
        return silent_in_s if silent_in_s > 0 else None

    async def _mark_silent(self, node: Node, has_agent: bool) -> Node:
        conditions = plan.plan_conditions(node, has_agent)
        if not conditions:
            return node
        stamp = timestamp_text(time.time())
        patch = {"status": {"conditions": [{**one, "lastTransitionTime": stamp} for one in conditions]}}
        written = await self._writer.patch(node, patch, subresource="status", how=PatchType.STRATEGIC)
        self._recorder.normal(node, "NodeNotReady", f"Node {node.name} status is now: NodeNotReady")
        log.warning("node is silent", node=node.name, grace_s=self._grace_s)
        return written

    async def _set_taints(self, node: Node) -> None:
        due = plan.plan_taints(node, timestamp_text(time.time()))
        if due != node.spec.taints:
            taints = [msgspec.to_builtins(taint) for taint in due]
            await self._writer.patch(node, {"spec": {"taints": taints or None}})

    async def sync_pod(self, key: str) -> float | None:
        """Evict or remove a pod if that is due. Returns the seconds until it may be."""
        pod = self.pods.get(key)
        if pod is None:
            self._node_gone_at.pop(key, None)
            return None
        node = self.nodes.get(pod.spec.node_name) if pod.spec.node_name else None
        if plan.is_orphan(pod, node):
            return await self._remove_orphan(pod)
        self._node_gone_at.pop(key, None)
        if node is None or pod.is_deleting:
            return None
        if not node.is_ready:
            await self._mark_not_ready(pod)
        return await self._evict(pod, node)

    async def _remove_orphan(self, pod: Pod) -> float | None:
        """Delete the pod without grace. A pod without a Node waits first, and the Node is read once more."""
        if pod.spec.node_name and self.nodes.get(pod.spec.node_name) is None:
            since = self._node_gone_at.setdefault(pod.key, self._clock())
            left_s = since + ORPHAN_S - self._clock()
            if left_s > 0:
                return left_s
            if await self._client.find(Node, pod.spec.node_name) is not None:
                return ORPHAN_S
        log.info("pod removed by force", pod=pod.key, node=pod.spec.node_name)
        await self._fail(pod, "DeletionByPodGC", "PodGC: node no longer exists or is out of service")
        await self._delete(pod, grace_s=0)
        return None

    async def _evict(self, pod: Pod, node: Node) -> float | None:
        delay_s = plan.eviction_delay_s(pod, node.spec.taints)
        if delay_s is None:
            return None
        added = [seconds_of(taint.time_added) for taint in node.spec.taints if taint.effect == "NoExecute"]
        begin = min((at for at in added if at is not None), default=time.time())
        left_s = begin + delay_s - time.time()
        if left_s > 0:
            return left_s
        self._recorder.normal(pod, "TaintManagerEviction", f"Marking for deletion Pod {pod.key}")
        await self._condition(
            pod, "DisruptionTarget", "True", "DeletionByTaintManager", "deleted due to NoExecute taint"
        )
        await self._delete(pod)
        return None

    async def _mark_not_ready(self, pod: Pod) -> None:
        ready = next((one for one in pod.status.conditions if one.type == "Ready"), None)
        if ready is not None and ready.status == "True":
            await self._condition(pod, "Ready", "False", "NodeNotReady", "the node is not ready")

    async def _fail(self, pod: Pod, reason: str, message: str) -> None:
        if pod.status.phase not in ("Failed", "Succeeded"):
            await self._condition(pod, "DisruptionTarget", "True", reason, message, {"phase": "Failed"})

    async def _condition(
        self, pod: Pod, kind: str, status: str, reason: str, message: str, more: dict[str, str] | None = None
    ) -> None:
        stamp = timestamp_text(time.time())
        condition = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": stamp}
        patch = {"status": {**(more or {}), "conditions": [condition]}}
        try:
            await self._writer.patch(pod, patch, subresource="status", how=PatchType.STRATEGIC, guarded=False)
        except NotFound:
            log.debug("pod is gone already", pod=pod.key)

    async def _delete(self, pod: Pod, grace_s: int | None = None) -> None:
        try:
            await self._client.delete(Pod, pod.name, pod.namespace, uid=pod.uid, grace_s=grace_s)
        except NotFound:
            log.debug("pod is gone already", pod=pod.key)


async def run(context: ControllerContext) -> None:
    """Watch nodes until cancelled."""
    recorder = await context.recorders.of(COMPONENT)
    lifecycle = NodeLifecycle(context, Writer(context.client, context.informers), recorder)
    controllers = [lifecycle.of_nodes, lifecycle.of_pods]
    for controller in controllers:
        context.activity.register(controller.queue)
    await run_controllers(controllers, lifecycle.watches())
