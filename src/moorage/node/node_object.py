"""This node as the cluster sees it: the Node object, its status and its lease.

Owns: registration, heartbeat, conditions, capacity, volumesInUse, and what remains after a graceful stop.
May not touch: drivers and volumes; the volume manager says which volumes are in use.
Start reading at: `NodeObject.register`, `NodeObject.run`.
"""

import asyncio
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moorage import __version__
from moorage.host.boot import boot_id
from moorage.kube import names
from moorage.kube.api.client import Client, PatchType
from moorage.kube.cache.informer import Informer
from moorage.kube.errors import AlreadyExists, ApiError, Forbidden, NotFound
from moorage.kube.names import HOSTNAME, MANAGED_ATTACH
from moorage.kube.objects.core import Lease, Node
from moorage.kube.objects.meta import micro_timestamp_text, timestamp_text
from moorage.kube.objects.storage import CSINode
from moorage.log import get_logger

log = get_logger(__name__)

LEASE_NAMESPACE = "kube-node-lease"
LEASE_S = 40
RENEW_S = 10.0
STATUS_S = 300.0
REST_S = 1.0  # between two writes of the status
ANSWER_S = 10.0  # a write that is never answered leaves time for two more before the lease is over
LAST_WORD_S = 15.0  # longer than what is under way can take
_PRESSURES = ("MemoryPressure", "DiskPressure", "PIDPressure")
_MAX_PODS = 500


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is fixed for the life of the agent."""

    name: str
    root: Path
    address: str
    port: int
    labels: dict[str, str] = field(default_factory=dict)
    certificate: str = ""  # of the agent's endpoint, DER in base64


class NodeObject:
    """Writes the Node and its Lease."""

    def __init__(
        self,
        client: Client,
        facts: NodeFacts,
        nodes: Informer[Node],
        in_use: Callable[[], frozenset[str]],
        in_use_changed: asyncio.Event,
        *,
        on_made_anew: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._facts = facts
        self._nodes = nodes
        self._in_use = in_use
        self._in_use_changed = in_use_changed
        self._on_made_anew = on_made_anew
        self._is_leaving = False
        self._reports_use = False
        self._uid = ""  # of the Node that was registered last
        self._ready: tuple[bool, str, str] = (False, "KubeletNotReady", "the agent is starting")
        self._wake = asyncio.Event()
        self._renewing, self._writing = asyncio.Lock(), asyncio.Lock()
        nodes.subscribe(self._node_changed)

    def _node_changed(self, old: Node | None, new: Node | None) -> None:
        if new is None:
            self._wake.set()
        elif old is None:
            self._in_use_changed.set()  # a new Node lists no volume yet
        elif _ready_in(new) != _condition_status(self._ready[0]):
            self._wake.set()  # another client marked this node as lost, and does not undo that

    async def register(self) -> Node:
        """The Node exists and says that attaching is the controller's business; its labels are there."""
        labels = {
            HOSTNAME: self._facts.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
            **self._facts.labels,
        }
        meta = {"labels": labels, "annotations": {MANAGED_ATTACH: "true"}}
        try:
            node = await self._client.create(Node, {"metadata": {"name": self._facts.name, **meta}, "spec": {}})
            log.info("node registered", node=self._facts.name)
        except AlreadyExists:
            node = await self._client.patch(Node, self._facts.name, {"metadata": meta}, how=PatchType.STRATEGIC)
        self._uid = node.uid
        await self._publish_certificate(node)
        return await self._write_status(node)

    async def _publish_certificate(self, node: Node) -> None:
        """Record the endpoint's certificate in the Node: Moorage's API server connects to no other.

        This needs the verb `attest` on the Node. Without it pods run, but logs and exec do not reach this node.
        """
        known = node.metadata.annotations.get(names.SERVING_CERTIFICATE, "")
        if known == self._facts.certificate:
            return
        meta = {"annotations": {names.SERVING_CERTIFICATE: self._facts.certificate}}
        try:
            await self._client.patch(Node, self._facts.name, {"metadata": meta})
        except Forbidden as error:
            log.warning("certificate is not published", node=self._facts.name, reason=str(error))

    def set_ready(self, ready: bool, reason: str = "KubeletReady", message: str = "the node agent is ready") -> None:
        self._ready = (ready, reason, message)
        self._wake.set()

    def start_reporting_use(self) -> None:
        """Everything on disk is known: from now on volumesInUse is ours. Before, a shorter list could free a volume
        that is still mounted."""
        self._reports_use = True
        self._in_use_changed.set()

    async def run(self) -> None:
        """Keep lease and status current until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew_forever(), name="node-lease")
            tasks.create_task(self._status_forever(), name="node-status")
            tasks.create_task(self._use_forever(), name="node-volumes-in-use")

    async def stopped(self, *, remove: bool) -> None:
        """The agent ends on purpose: the node is not ready, or goes altogether. Returns soon, whatever the API does."""
        self._is_leaving = True
        try:
            # What is under way ends first: later, it would say that the node is ready, or recreate what was removed.
            async with asyncio.timeout(LAST_WORD_S), self._renewing, self._writing:
                if remove:
                    await self._remove()
                else:
                    self._ready = (False, "KubeletNotReady", "the node agent was stopped")
                    await self._write_status()
        except ApiError as error:
            log.warning("the node's last word could not be written", reason=str(error))
        except TimeoutError:
            log.warning("the node's last word could not be written in time", seconds=LAST_WORD_S)

    async def _remove(self) -> None:
        for kind, namespace in ((CSINode, ""), (Lease, LEASE_NAMESPACE), (Node, "")):
            try:
                await self._client.delete(kind, self._facts.name, namespace)
            except NotFound:
                continue

    async def _renew_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(ANSWER_S), self._renewing:
                    await self._renew()
            except TimeoutError:
                log.warning("lease was not renewed in time; it is tried again at once", seconds=ANSWER_S)
                continue
            except ApiError as error:
                log.warning("lease was not renewed", reason=str(error))
            await asyncio.sleep(RENEW_S)

    async def _renew(self) -> None:
        if self._is_leaving:
            return
        name = self._facts.name
        spec = {
            "holderIdentity": name,
            "leaseDurationSeconds": LEASE_S,
            "renewTime": micro_timestamp_text(time.time()),
        }
        try:
            lease = await self._client.patch(Lease, name, {"spec": spec}, LEASE_NAMESPACE)
        except NotFound:
            meta = {"name": name, "namespace": LEASE_NAMESPACE, "ownerReferences": await self._as_owner()}
            await self._client.create(Lease, {"metadata": meta, "spec": spec}, LEASE_NAMESPACE)
            return
        if not lease.metadata.owner_references:
            patch = {"metadata": {"ownerReferences": await self._as_owner()}}
            await self._client.patch(Lease, name, patch, LEASE_NAMESPACE)

    async def _as_owner(self) -> list[dict[str, str]]:
        """The Node, so that its lease goes with it. Asked for, since at the start the copy of it may still be empty."""
        node = await self._client.find(Node, self._facts.name)
        return [{"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid}] if node is not None else []

    async def _status_forever(self) -> None:
        """At most one write a second: two agents of one name would else answer each other as fast as they can."""
        while True:
            try:
                async with asyncio.timeout(STATUS_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                async with asyncio.timeout(ANSWER_S), self._writing:
                    await self._write_or_register()
            except (ApiError, TimeoutError) as error:
                log.warning("node status was not written", reason=_reason(error))
                self._wake.set()
            await asyncio.sleep(REST_S)

    async def _write_or_register(self) -> None:
        if self._is_leaving:
            return
        try:
            is_ours = (await self._write_status()).uid == self._uid
        except NotFound:
            is_ours = False
        if not is_ours:
            await self._again()

    async def _again(self) -> None:
        """A user deleted the Node while the agent runs, and perhaps created another one of the name: register it
        again, with all that it said before."""
        if self._is_leaving:
            return
        log.warning("node object is gone or another one; it is registered again", node=self._facts.name)
        try:
            await self.register()
        finally:  # also when it is cut short: the Node may be there by now
            self._on_made_anew()

    async def _use_forever(self) -> None:
        """volumesInUse follows the volume manager at once: attaching waits for it."""
        failures = 0
        while True:
            await self._in_use_changed.wait()
            self._in_use_changed.clear()
            if not self._reports_use:
                continue
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._write_use()
                failures = 0
            except (ApiError, TimeoutError) as error:
                failures += 1
                log.warning("volumes in use were not reported", reason=_reason(error))
                await asyncio.sleep(min(0.1 * 2.0**failures, 10.0))
                self._in_use_changed.set()

    async def _write_use(self) -> None:
        wanted = sorted(self._in_use())
        node = self._nodes.get(self._facts.name)
        if node is not None and sorted(node.status.volumes_in_use) == wanted:
            return
        patch = {"status": {"volumesInUse": wanted or None}}
        written = await self._client.patch(Node, self._facts.name, patch, subresource="status")
        self._nodes.remember(written)

    async def _write_status(self, known: Node | None = None) -> Node:
        patch = {"status": self._status(known or self._nodes.get(self._facts.name))}
        written = await self._client.patch(Node, self._facts.name, patch, how=PatchType.STRATEGIC, subresource="status")
        self._nodes.remember(written)
        return written

    def _status(self, known: Node | None) -> dict[str, Any]:
        facts = self._facts
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        amounts = {
            "cpu": str(os.cpu_count() or 1),
            "memory": f"{memory // 1024}Ki",
            "pods": str(_MAX_PODS),
            **self._space(),
        }
        system = platform.uname()
        return {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": self._conditions(known),
            "addresses": [
                {"type": "InternalIP", "address": facts.address},
                {"type": "Hostname", "address": facts.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": facts.port}},
            "declaredFeatures": ["ExtendWebSocketsToKubelet"],  # exec comes as a WebSocket, not as SPDY
            "nodeInfo": {
                "architecture": "amd64" if system.machine == "x86_64" else system.machine,
                "bootID": boot_id(),
                "containerRuntimeVersion": f"moorage://{__version__}",
                "kernelVersion": system.release,
                "kubeProxyVersion": "",
                "kubeletVersion": f"v{__version__}-moorage",
                "machineID": _line("/etc/machine-id"),
                "operatingSystem": "linux",
                "osImage": _os_name(),
                "systemUUID": _line("/etc/machine-id"),
            },
        }

    def _space(self) -> dict[str, str]:
        """The size of the disk; nothing when it cannot be read, and then the Node says what it said before."""
        try:
            space = os.statvfs(self._facts.root)
        except OSError as error:
            log.warning("size of the root directory cannot be read", root=str(self._facts.root), reason=str(error))
            return {}
        return {"ephemeral-storage": f"{space.f_blocks * space.f_frsize // 1024}Ki"}

    def _conditions(self, known: Node | None) -> list[dict[str, Any]]:
        now = timestamp_text(time.time())
        before = {one.type: one for one in known.status.conditions} if known else {}
        ready, reason, message = self._ready
        wanted = [(kind, False, f"KubeletHas{_SUFFICIENT[kind]}", "") for kind in _PRESSURES]
        wanted.append(("Ready", ready, reason, message))
        conditions = []
        for kind, holds, why, text in wanted:
            status = _condition_status(holds)
            last = before.get(kind)
            since = last.last_transition_time if last is not None and last.status == status else None
            conditions.append(
                {
                    "type": kind,
                    "status": status,
                    "reason": why,
                    "message": text or f"the node agent sees no {kind}",
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": since or now,
                }
            )
        return conditions


_SUFFICIENT = {"MemoryPressure": "SufficientMemory", "DiskPressure": "NoDiskPressure", "PIDPressure": "SufficientPID"}


def _condition_status(holds: bool) -> str:
    return "True" if holds else "False"


def _ready_in(node: Node) -> str:
    return next((one.status for one in node.status.conditions if one.type == "Ready"), "")


def _reason(error: ApiError | TimeoutError) -> str:
    return str(error) or f"no answer in {ANSWER_S:g} s"


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "Linux"
