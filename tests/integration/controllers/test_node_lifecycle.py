"""A node that falls silent is marked, tainted and left by its pods; one that is out of service gives them up."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.controllers.replay import Stage, open_stage

from moorage.kube.api.client import PatchType
from moorage.kube.errors import NotFound
from moorage.kube.objects.core import Lease, Node
from moorage.kube.objects.meta import micro_timestamp_text, timestamp_text
from moorage.kube.objects.pods import Pod

GRACE_S = 0.4
UNREACHABLE = "node.kubernetes.io/unreachable"


@pytest.fixture
async def quick(stage_dir: Path) -> AsyncIterator[Stage]:
    """A stage whose nodes count as silent after `GRACE_S`."""
    from moorage.controllers.context import ControllerOptions

    async with open_stage(stage_dir) as stage:
        stage.options = ControllerOptions(node_grace_s=GRACE_S)
        yield stage
        await stage.stop()


async def until(found: Callable[[], Awaitable[Any]], timeout_s: float = 20) -> Any:
    async with asyncio.timeout(timeout_s):
        while not (value := await found()):
            await asyncio.sleep(0.02)
    return value


async def add_node(stage: Stage, name: str = "n1") -> None:
    await stage.client.create(Node, {"metadata": {"name": name}})
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "lastHeartbeatTime": timestamp_text(time.time()),
    }
    await stage.client.patch(
        Node, name, {"status": {"conditions": [ready]}}, subresource="status", how=PatchType.STRATEGIC
    )


async def add_pod(stage: Stage, name: str, *tolerations: dict[str, Any]) -> Pod:
    spec = {"containers": [{"name": "c", "image": "app"}], "nodeName": "n1", "tolerations": list(tolerations)}
    return await stage.client.create(Pod, {"metadata": {"name": name}, "spec": spec}, "default")


async def beat(stage: Stage, name: str = "n1") -> None:
    """Renew the node's lease again and again."""
    spec = {"holderIdentity": name, "leaseDurationSeconds": 40}
    await stage.client.create(Lease, {"metadata": {"name": name}, "spec": spec}, "kube-node-lease")
    while True:
        patch = {"spec": {"renewTime": micro_timestamp_text(time.time())}}
        await stage.client.patch(Lease, name, patch, "kube-node-lease")
        await asyncio.sleep(GRACE_S / 8)


async def is_silent(stage: Stage) -> bool:
    node = await stage.client.get(Node, "n1")
    unknown = {one.type for one in node.status.conditions if one.status == "Unknown"}
    return "Ready" in unknown and {taint.key for taint in node.spec.taints} == {UNREACHABLE}


async def is_gone(stage: Stage, name: str) -> bool:
    try:
        await stage.client.get(Pod, name, "default")
    except NotFound:
        return True
    return False


async def test_a_silent_node_is_marked_and_comes_back_by_itself(quick: Stage) -> None:
    await add_node(quick)
    await quick.start(("nodelifecycle",))
    beating = asyncio.create_task(beat(quick))
    await asyncio.sleep(3 * GRACE_S)
    node = await quick.client.get(Node, "n1")
    assert node.is_ready
    assert node.spec.taints == []

    beating.cancel()
    await until(lambda: is_silent(quick))
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": "2099-01-01T00:00:00Z"}
    patch = {"status": {"conditions": [ready]}}
    await quick.client.patch(Node, "n1", patch, subresource="status", how=PatchType.STRATEGIC)

    async def is_free() -> bool:
        return not (await quick.client.get(Node, "n1")).spec.taints

    await until(is_free)


async def test_pods_leave_a_silent_node_when_their_toleration_ends(quick: Stage) -> None:
    await add_node(quick)
    soon = {"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    await add_pod(quick, "soon", soon)
    await add_pod(quick, "stays", {"operator": "Exists"})
    await add_pod(quick, "later")  # gets the usual 300 seconds
    await quick.start(("nodelifecycle",))
    await until(lambda: is_silent(quick))

    async def is_deleted() -> bool:
        return (await quick.client.get(Pod, "soon", "default")).is_deleting

    await until(is_deleted)
    for name in ("stays", "later"):
        assert not (await quick.client.get(Pod, name, "default")).is_deleting


async def test_a_terminating_pod_is_removed_only_if_its_node_is_out_of_service(quick: Stage) -> None:
    await add_node(quick)
    pod = await add_pod(quick, "p", {"key": UNREACHABLE, "operator": "Exists"})
    await quick.start(("nodelifecycle",))
    await until(lambda: is_silent(quick))
    await quick.client.delete(Pod, "p", "default", uid=pod.uid)
    await quick.settle()
    assert not await is_gone(quick, "p")  # the node may come back and still write to the volume

    taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    patch = [{"op": "add", "path": "/spec/taints/-", "value": taint}]
    await quick.client.patch(Node, "n1", patch, how=PatchType.JSON)
    await until(lambda: is_gone(quick, "p"))


async def test_pods_of_a_deleted_node_are_removed(quick: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage.controllers.nodelifecycle.run.ORPHAN_S", 0.2)
    await add_node(quick)
    await add_pod(quick, "p")
    await quick.start(("nodelifecycle",))
    await quick.settle()
    assert not await is_gone(quick, "p")
    await quick.client.delete(Node, "n1")
    await until(lambda: is_gone(quick, "p"))
