"""On a bad day of the API, and over its restart, every pod still gets exactly one node."""

import asyncio
from pathlib import Path
from typing import Any

from tests.integration.controllers.flaky import Flaky
from tests.integration.controllers.replay import Stage, config_of

from moorage.apiserver.run import ApiServer, Config
from moorage.controllers.context import ControllerOptions
from moorage.kube.api.client import Client
from moorage.kube.names import BIND_COMPLETED, SELECTED_NODE
from moorage.kube.objects import Node, PersistentVolume, PersistentVolumeClaim, Pod, StorageClass

HOST = "kubernetes.io/hostname"


async def furnish(client: Client) -> None:
    for name in ("a", "b", "c"):
        await client.create(Node, {"metadata": {"name": name, "labels": {HOST: name}}})
    body = {"provisioner": "csi.example.com", "volumeBindingMode": "WaitForFirstConsumer"}
    await client.create(StorageClass, {"metadata": {"name": "late"}, **body})


async def add_pod(client: Client, name: str) -> None:
    """A pod with a claim of its own."""
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "late"}
    await client.create(PersistentVolumeClaim, {"metadata": {"name": name}, "spec": spec}, "default")
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]
    body = {"containers": [{"name": "main", "image": "app"}], "volumes": volumes}
    await client.create(Pod, {"metadata": {"name": name}, "spec": body}, "default")


async def provision(client: Client) -> None:
    """One round of a provisioner and the binder: every claim with a node gets a volume there."""
    for claim in (await client.list(PersistentVolumeClaim, "default")).items:
        node = claim.annotations.get(SELECTED_NODE)
        if node is None or claim.spec.volume_name:
            continue
        terms = [{"matchExpressions": [{"key": HOST, "operator": "In", "values": [node]}]}]
        spec: dict[str, Any] = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "csi": {"driver": "csi.example.com", "volumeHandle": claim.name},
            "claimRef": {"namespace": "default", "name": claim.name, "uid": claim.uid},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
        }
        await client.create(PersistentVolume, {"metadata": {"name": claim.name}, "spec": spec})
        patch = {"metadata": {"annotations": {BIND_COMPLETED: "yes"}}, "spec": {"volumeName": claim.name}}
        await client.patch(PersistentVolumeClaim, claim.name, patch, "default")


async def until_placed(client: Client) -> list[Pod]:
    async with asyncio.timeout(60):
        while True:
            await provision(client)
            pods = (await client.list(Pod, "default")).items
            if all(pod.spec.node_name for pod in pods):
                return pods
            await asyncio.sleep(0.02)


async def assert_where_their_volumes_are(client: Client, pods: list[Pod]) -> None:
    for pod in pods:
        claim = await client.get(PersistentVolumeClaim, pod.name, "default")
        assert claim.annotations[SELECTED_NODE] == pod.spec.node_name


async def test_every_pod_gets_a_node_on_a_bad_day(stage: Stage) -> None:
    async with Flaky(config_of(stage.server), seed=5) as flaky:
        stage.controllers_client = flaky
        await furnish(stage.client)
        await stage.start(("scheduler",))
        for number in range(15):
            await add_pod(stage.client, f"pod-{number}")
        pods = await until_placed(stage.client)
        await assert_where_their_volumes_are(stage.client, pods)
        await stage.stop()
    assert flaky.faults > 5


async def test_it_goes_on_when_the_api_has_restarted(tmp_path: Path) -> None:
    server = ApiServer(Config(data_dir=tmp_path, insecure_port=0))
    await server.start()
    async with Client(config_of(server)) as client:
        stage = Stage(server, client, ControllerOptions())
        await furnish(client)
        await stage.start(("scheduler",))
        await add_pod(client, "before")
        await stage.settle()
        await server.stop()
        port = int(server.insecure_url.rpartition(":")[2])
        stage.server = ApiServer(Config(data_dir=tmp_path, insecure_port=port))
        await stage.server.start()
        await add_pod(client, "after")
        pods = await until_placed(client)
        assert {pod.name for pod in pods} == {"before", "after"}
        await assert_where_their_volumes_are(client, pods)
        await stage.stop()
        await stage.server.stop()
