"""A whole small cluster for the sidecars: the embedded API server, the binder, a scripted driver, and the sidecars."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from moorage.apiserver.run import ApiServer, Config
from moorage.controllers import run as controllers
from moorage.kube.api.client import Client
from moorage.kube.api.config import from_values
from moorage.kube.objects import (
    CSINode,
    Event,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    StorageClass,
    VolumeAttachment,
)
from moorage.sidecars.roles import Role
from moorage.sidecars.run import WantedRoles, run
from moorage.sidecars.settings import SidecarEnvironment, SidecarSettings
from moorage.testing import Abilities, ScriptedDriver

DRIVER = "test.csi.moorage.dev"


@dataclass
class Lab:
    """One cluster under test."""

    client: Client
    driver: ScriptedDriver
    server: Any
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def api(self) -> Any:
        return from_values(self.server.insecure_url, self.server.token)

    def start(
        self, *roles: Role, node: str = "", host: str = "host-1", pod: str = "", **settings: Any
    ) -> asyncio.Task[None]:
        """Start the sidecars in this process, as an own instance with its own connections."""
        defaults: dict[str, Any] = {
            "csi_address": self.driver.endpoint,
            "retry_interval_start_s": 0.05,
            "retry_interval_max_s": 0.4,
        }
        wanted = WantedRoles(
            SidecarSettings(**(defaults | settings)),
            SidecarEnvironment(node_name=node, namespace="default", hostname=host, pod_name=pod),
            frozenset(roles),
        )
        task = asyncio.create_task(run(wanted, self.api()), name="sidecars-under-test")
        self.tasks.append(task)
        return task

    async def stop_api(self) -> None:
        await self.server.stop()

    async def restart_api(self) -> None:
        """Stop the API server and start it again, on the same port and with what it had stored."""
        port = int(self.server.insecure_url.rpartition(":")[2])
        await self.server.stop()
        self.server = ApiServer(replace(self.server.config, insecure_port=port))
        await self.server.start()

    async def kill(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.tasks.remove(task)

    def check(self) -> None:
        """Sidecars that have ended by themselves say why."""
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def until(self, what: Callable[[], Awaitable[Any]], timeout_s: float = 30.0) -> Any:
        """Wait until `what` gives something true, and return it."""
        async with asyncio.timeout(timeout_s):
            while True:
                self.check()
                found = await what()
                if found:
                    return found
                await asyncio.sleep(0.02)

    async def make_class(self, name: str = "fast", **more: Any) -> StorageClass:
        body = {"metadata": {"name": name}, "provisioner": DRIVER, "reclaimPolicy": "Delete", **more}
        body.setdefault("volumeBindingMode", "Immediate")
        return await self.client.create(StorageClass, body)

    async def make_claim(self, name: str, size: str = "1Gi", **spec: Any) -> PersistentVolumeClaim:
        annotations = spec.pop("annotations", {})
        body = {
            "metadata": {"name": name, "namespace": "default", "annotations": annotations},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": "fast",
                "resources": {"requests": {"storage": size}},
                **spec,
            },
        }
        return await self.client.create(PersistentVolumeClaim, body, "default")

    async def make_node(self, name: str, node_id: str = "", keys: tuple[str, ...] = (), **labels: str) -> None:
        spelled = {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()}
        node = await self.client.create(Node, {"metadata": {"name": name, "labels": spelled}})
        drivers = [{"name": DRIVER, "nodeID": node_id or name, "topologyKeys": list(keys)}]
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.uid}
        body = {"metadata": {"name": name, "ownerReferences": [owner]}, "spec": {"drivers": drivers}}
        await self.client.create(CSINode, body)

    async def claim(self, name: str) -> PersistentVolumeClaim | None:
        return await self.client.find(PersistentVolumeClaim, name, "default")

    async def bound(self, name: str) -> PersistentVolumeClaim:
        async def is_bound() -> Any:
            claim = await self.claim(name)
            return claim if claim is not None and claim.status.phase == "Bound" else None

        found = await self.until(is_bound)
        assert isinstance(found, PersistentVolumeClaim)
        return found

    async def volumes(self) -> list[PersistentVolume]:
        return (await self.client.list(PersistentVolume)).items

    async def events(self, reason: str) -> list[Event]:
        return [event for event in (await self.client.list(Event)).items if event.reason == reason]

    async def attachment(self, name: str) -> VolumeAttachment | None:
        return await self.client.find(VolumeAttachment, name)

    async def attach(self, name: str, volume: str, node: str = "node-1") -> None:
        spec = {"attacher": DRIVER, "nodeName": node, "source": {"persistentVolumeName": volume}}
        await self.client.create(VolumeAttachment, {"metadata": {"name": name}, "spec": spec})

    async def gone(self) -> None:
        """No PersistentVolume and no volume of the back end is left."""

        async def is_empty() -> bool:
            return not await self.volumes() and not self.driver.backend.volumes

        await self.until(is_empty)

    async def nothing_left(self) -> None:
        """Every volume of the back end has its PersistentVolume, and every PersistentVolume its volume."""

        async def same() -> bool:
            handles = {v.spec.csi.volume_handle for v in await self.volumes() if v.spec.csi is not None}
            return handles == set(self.driver.backend.volumes)

        await self.until(same)


@contextlib.asynccontextmanager
async def laboratory(
    abilities: Abilities | None = None, names: tuple[str, ...] = ("binder", "protection"), **api_settings: Any
) -> AsyncIterator[Lab]:
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-sidecars-"))
        config = Config(data_dir=Path(folder) / "api", **({"in_memory": True, "insecure_port": 0} | api_settings))
        server = ApiServer(config)
        await server.start()
        api = from_values(server.insecure_url, server.token)
        client = await stack.enter_async_context(Client(api, identity="test"))
        own = await stack.enter_async_context(Client(api, identity="controllers"))
        driver = await stack.enter_async_context(ScriptedDriver(f"unix://{folder}/csi.sock", DRIVER, abilities))
        lab = Lab(client, driver, server)
        stack.push_async_callback(lab.stop_api)
        helping = asyncio.create_task(controllers.run(own, controllers.ControllerSettings(names)))
        try:
            yield lab
        finally:
            for task in (*lab.tasks, helping):
                task.cancel()
            await asyncio.gather(*lab.tasks, helping, return_exceptions=True)


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    async with laboratory() as found:
        yield found


@pytest.fixture
def make_lab() -> Any:
    """For tests that want another driver or other controllers: `async with make_lab(...) as lab`."""
    return laboratory
