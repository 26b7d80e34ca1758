"""Pods find their nodes, and wait for their volumes, on a real API server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from tests.integration.controllers.replay import Stage, open_stage

from moorage.kube.names import BIND_COMPLETED, SELECTED_NODE
from moorage.kube.objects import Event, Node, PersistentVolume, PersistentVolumeClaim, Pod

HOST = "kubernetes.io/hostname"
CONTAINER = {"name": "main", "image": "host", "resources": {"requests": {"cpu": "100m"}}}


class Scene:
    """A stage with nodes and a class whose volumes wait for a pod."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.client = stage.client

    async def post(self, path: str, kind: str, name: str, **fields: Any) -> dict[str, Any]:
        meta = {"name": name, **fields.pop("metadata", {})}
        return msgspec.json.decode(await self.client.request("POST", path, {"kind": kind, "metadata": meta, **fields}))

    async def add_node(self, name: str, cpu: str = "4", **spec: Any) -> None:
        status = {"allocatable": {"cpu": cpu, "memory": "8Gi", "pods": "50"}}
        await self.post("/api/v1/nodes", "Node", name, metadata={"labels": {HOST: name}}, spec=spec)
        await self.client.patch(Node, name, {"status": status}, subresource="status")

    async def add_class(self, name: str = "late") -> None:
        await self.post(
            "/apis/storage.k8s.io/v1/storageclasses",
            "StorageClass",
            name,
            provisioner="csi.example.com",
            volumeBindingMode="WaitForFirstConsumer",
        )

    async def add_claim(self, name: str, size: str = "1Gi") -> None:
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": size}},
            "storageClassName": "late",
        }
        path = "/api/v1/namespaces/default/persistentvolumeclaims"
        await self.post(path, "PersistentVolumeClaim", name, spec=spec)

    async def add_pod(self, name: str, *claims: str, **spec: Any) -> None:
        volumes = [{"name": f"v{n}", "persistentVolumeClaim": {"claimName": claim}} for n, claim in enumerate(claims)]
        body = {"containers": [CONTAINER], "volumes": volumes, **spec}
        await self.post("/api/v1/namespaces/default/pods", "Pod", name, spec=body)

    async def provision(self, claim: PersistentVolumeClaim) -> None:
        """What a provisioner and the binder do together."""
        node = claim.annotations[SELECTED_NODE]
        terms = [{"matchExpressions": [{"key": HOST, "operator": "In", "values": [node]}]}]
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "late",
            "csi": {"driver": "csi.example.com", "volumeHandle": claim.name},
            "claimRef": {"namespace": "default", "name": claim.name, "uid": claim.uid},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
        }
        await self.post("/api/v1/persistentvolumes", "PersistentVolume", f"pv-{claim.name}", spec=spec)
        patch = {"metadata": {"annotations": {BIND_COMPLETED: "yes"}}, "spec": {"volumeName": f"pv-{claim.name}"}}
        await self.client.patch(PersistentVolumeClaim, claim.name, patch, "default")

    async def pod(self, name: str) -> Pod:
        return await self.client.get(Pod, name, "default")

    async def claim(self, name: str) -> PersistentVolumeClaim:
        return await self.client.get(PersistentVolumeClaim, name, "default")

    async def events(self, name: str) -> list[tuple[str, str]]:
        found = await self.client.list(Event, "default")
        return [(event.reason, event.message) for event in found.items if event.involved_object.name == name]


@pytest.fixture
async def scene(stage_dir: Any) -> AsyncIterator[Scene]:
    async with open_stage(stage_dir) as stage:
        scene = Scene(stage)
        await scene.add_class()
        for name in ("a", "b"):
            await scene.add_node(name)
        await stage.start(("scheduler",))
        yield scene


async def test_a_pod_without_volumes_is_bound(scene: Scene) -> None:
    await scene.add_pod("web")
    await scene.stage.settle()
    assert (await scene.pod("web")).spec.node_name == "a"
    assert await scene.events("web") == [("Scheduled", "Successfully assigned default/web to a")]


async def test_pods_are_spread_over_the_nodes(scene: Scene) -> None:
    for number in range(6):
        await scene.add_pod(f"web-{number}")
    await scene.stage.settle()
    nodes = [(await scene.pod(f"web-{number}")).spec.node_name for number in range(6)]
    assert sorted(nodes) == ["a", "a", "a", "b", "b", "b"]


async def test_a_late_claim_gets_its_node_and_the_pod_waits_for_the_volume(scene: Scene) -> None:
    await scene.add_claim("data")
    await scene.add_pod("db", "data", nodeSelector={HOST: "b"})
    await scene.stage.settle()
    claim = await scene.claim("data")
    assert claim.annotations[SELECTED_NODE] == "b"
    assert (await scene.pod("db")).spec.node_name == ""
    await scene.provision(claim)
    await scene.stage.settle()
    assert (await scene.pod("db")).spec.node_name == "b"


async def test_a_node_that_the_provisioner_turns_down_is_not_tried_again_at_once(scene: Scene) -> None:
    await scene.add_claim("data")
    await scene.add_pod("db", "data")
    await scene.stage.settle()
    first = (await scene.claim("data")).annotations[SELECTED_NODE]
    await scene.client.patch(
        PersistentVolumeClaim, "data", {"metadata": {"annotations": {SELECTED_NODE: None}}}, "default"
    )
    await until(scene, lambda claim: claim.annotations.get(SELECTED_NODE) not in (None, first))
    assert "FailedScheduling" in [reason for reason, _ in await scene.events("db")]


async def until(scene: Scene, holds: Callable[[PersistentVolumeClaim], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds(await scene.claim("data")):
            await asyncio.sleep(0.02)


async def test_a_pod_that_fits_nowhere_says_why_and_is_bound_when_a_node_comes(scene: Scene) -> None:
    await scene.add_pod("big", containers=[{**CONTAINER, "resources": {"requests": {"cpu": "6"}}}])
    await scene.stage.settle()
    condition = next(c for c in (await scene.pod("big")).status.conditions if c.type == "PodScheduled")
    assert (condition.status, condition.reason) == ("False", "Unschedulable")
    said = "0/2 nodes are available: 2 Insufficient cpu."
    assert condition.message == f"{said} By node: a: Insufficient cpu; b: Insufficient cpu."
    assert await scene.events("big") == [("FailedScheduling", said)]
    await scene.add_node("large", cpu="8")
    await scene.stage.settle()
    assert (await scene.pod("big")).spec.node_name == "large"


async def test_pods_of_other_schedulers_and_gated_pods_are_left_alone(scene: Scene) -> None:
    await scene.add_pod("theirs", schedulerName="other")
    await scene.add_pod("gated", schedulingGates=[{"name": "later"}])
    await scene.stage.settle()
    assert (await scene.pod("theirs")).spec.node_name == ""
    assert (await scene.pod("gated")).spec.node_name == ""
    await scene.client.patch(Pod, "gated", {"spec": {"schedulingGates": None}}, "default")
    await scene.stage.settle()
    assert (await scene.pod("gated")).spec.node_name != ""


async def test_a_static_volume_is_promised_to_the_claim_before_the_pod_is_bound(scene: Scene) -> None:
    spec = {
        "capacity": {"storage": "5Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "late",
        "csi": {"driver": "csi.example.com", "volumeHandle": "disk"},
        "nodeAffinity": {
            "required": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": HOST, "operator": "In", "values": ["b"]}]}]
            }
        },
    }
    await scene.post("/api/v1/persistentvolumes", "PersistentVolume", "disk", spec=spec)
    await scene.client.patch(PersistentVolume, "disk", {"status": {"phase": "Available"}}, subresource="status")
    await scene.add_claim("data")
    await scene.stage.settle()
    await scene.add_pod("db", "data")
    await scene.stage.settle()
    volume = await scene.client.get(PersistentVolume, "disk")
    assert volume.spec.claim_ref is not None
    assert volume.spec.claim_ref.uid == (await scene.claim("data")).uid
    assert (await scene.pod("db")).spec.node_name == ""
    patch = {"metadata": {"annotations": {BIND_COMPLETED: "yes"}}, "spec": {"volumeName": "disk"}}
    await scene.client.patch(PersistentVolumeClaim, "data", patch, "default")
    await scene.stage.settle()
    assert (await scene.pod("db")).spec.node_name == "b"


async def test_a_claim_that_goes_while_the_pod_waits_frees_the_place(scene: Scene) -> None:
    await scene.add_claim("data")
    await scene.add_pod("db", "data")
    await scene.stage.settle()
    claim = await scene.claim("data")
    await scene.client.patch(PersistentVolumeClaim, "data", {"metadata": {"finalizers": None}}, "default")
    with contextlib.suppress(Exception):
        await scene.client.delete(PersistentVolumeClaim, claim.name, "default")
    async with asyncio.timeout(20):
        while not any("not found" in message for _, message in await scene.events("db")):
            await asyncio.sleep(0.02)
    assert (await scene.pod("db")).spec.node_name == ""


def asks(cpu: str) -> list[dict[str, Any]]:
    return [{**CONTAINER, "resources": {"requests": {"cpu": cpu}}}]


async def test_a_place_that_is_given_up_goes_to_a_pod_that_waits_for_it(scene: Scene) -> None:
    """A pod that waits for its volume holds room on a node that the server knows nothing of."""
    await scene.add_claim("data")
    await scene.add_pod("holder", "data", nodeSelector={HOST: "a"}, containers=asks("3"))
    await scene.stage.settle()
    await scene.add_pod("waiting", nodeSelector={HOST: "a"}, containers=asks("3"))
    await scene.stage.settle()
    assert (await scene.pod("waiting")).spec.node_name == ""
    await scene.client.delete(Pod, "holder", "default", grace_s=0)
    await scene.stage.settle(resync=False)
    assert (await scene.pod("waiting")).spec.node_name == "a"


async def test_a_place_whose_provisioner_turned_it_down_goes_to_a_pod_that_waits_for_it(scene: Scene) -> None:
    await scene.add_claim("data")
    await scene.add_pod("holder", "data", containers=asks("3"))
    await scene.stage.settle()
    first = (await scene.claim("data")).annotations[SELECTED_NODE]
    await scene.add_pod("waiting", nodeSelector={HOST: first}, containers=asks("3"))
    await scene.stage.settle()
    removed = {"metadata": {"annotations": {SELECTED_NODE: None}}}
    await scene.client.patch(PersistentVolumeClaim, "data", removed, "default")
    await scene.stage.settle(resync=False)
    assert (await scene.pod("waiting")).spec.node_name == first


async def test_pods_with_one_late_claim_go_to_one_node(scene: Scene) -> None:
    await scene.add_claim("data")
    await asyncio.gather(*(scene.add_pod(f"db-{number}", "data") for number in range(4)))
    await scene.stage.settle()
    claim = await scene.claim("data")
    await scene.provision(claim)
    await scene.stage.settle()
    nodes = {(await scene.pod(f"db-{number}")).spec.node_name for number in range(4)}
    assert nodes == {claim.annotations[SELECTED_NODE]}
    said = [reason for number in range(4) for reason, _ in await scene.events(f"db-{number}")]
    assert said == ["Scheduled"] * 4


async def test_a_restart_takes_up_where_it_stopped(scene: Scene) -> None:
    await scene.add_claim("data")
    await scene.add_pod("db", "data")
    await scene.stage.settle()
    chosen = (await scene.claim("data")).annotations[SELECTED_NODE]
    await scene.stage.stop()
    await scene.provision(await scene.claim("data"))
    await scene.stage.start(("scheduler",))
    await scene.stage.settle()
    assert (await scene.pod("db")).spec.node_name == chosen


async def test_many_pods_at_once_are_spread(scene: Scene) -> None:
    for number in range(20):
        await scene.add_node(f"n{number}")
    started = time.perf_counter()
    await asyncio.gather(*(scene.add_pod(f"web-{number}") for number in range(200)))
    await scene.stage.settle()
    took = time.perf_counter() - started
    placed = [pod.spec.node_name for pod in (await scene.client.list(Pod, "default")).items]
    assert all(placed)
    assert max(placed.count(node) for node in set(placed)) <= 20, f"not spread, took {took:.1f} s"
