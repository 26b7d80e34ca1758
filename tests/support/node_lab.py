"""A node with a real API server, real mounts and a scripted driver."""

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from moorage.host import mountinfo, mounts
from moorage.host.safe_remove import remove_tree
from moorage.kube.api import config as kube_config
from moorage.kube.api.client import Client
from moorage.kube.objects.core import Event, Node
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.node.config import AgentConfig
from moorage.node.run import Agent, run
from moorage.node.runtime.cgroups import ContainerCgroups
from moorage.testing import ScriptedDriver, serve, until


class Lab:
    """Everything a test of the agent needs."""

    def __init__(self, base: Path, server, client):
        self.base, self.server, self.client = base, server, client
        self.root = base / "r"
        self.until = until
        self._stop: Any = None
        self._task: Any = None
        self.agent: Any = None

    async def start_agent(self, api=None, **settings):
        """Run an agent in this loop; it is ready when this returns."""
        self._stop = asyncio.Event()
        api = api or kube_config.from_kubeconfig(self.server.kubeconfig)
        config = AgentConfig("n1", self.root, api, **{"call_timeout_s": 5.0, "drain_timeout_s": 20.0, **settings})
        caught: list[Agent] = []
        original = Agent.subscribe

        def subscribe(agent):
            caught.append(agent)
            original(agent)

        Agent.subscribe = subscribe  # type: ignore[method-assign]
        try:
            self._task = asyncio.create_task(run(config, self._stop))

            async def ready():
                if self._task.done():
                    self._task.result()
                node = await self.client.find(Node, "n1")
                return caught and caught[0].volumes.world.is_ready and node is not None and node.is_ready

            await until(ready, what="agent ready")
        finally:
            Agent.subscribe = original  # type: ignore[method-assign]
        self.agent = caught[0]
        return self.agent

    async def stop_agent(self):
        if self._task is not None:
            self._stop.set()
            await self._task
            self._task = None

    async def crash_agent(self):
        """End it without any of its farewells, as kill -9 would."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    def driver(self, name="scripted.dev", **settings):
        return ScriptedDriver(
            self.root / "plugins" / name / "csi.sock",
            name,
            data=self.base / "d" / name,
            registry=self.root / "plugins_registry",
            **settings,
        )

    async def driver_object(self, name="scripted.dev", **spec):
        body = {"metadata": {"name": name}, "spec": {"attachRequired": False, **spec}}
        await self.client.create(CSIDriver, body)

    async def volume(
        self, name="c1", driver="scripted.dev", size="1Gi", mode="Filesystem", modes=("ReadWriteOnce",), csi=None
    ):
        """A claim bound to a volume, as binder and provisioner would leave them."""
        claim = await self.client.create(
            PersistentVolumeClaim,
            {
                "metadata": {"name": name},
                "spec": {
                    "accessModes": list(modes),
                    "storageClassName": "",
                    "volumeMode": mode,
                    "volumeName": f"pv-{name}",
                    "resources": {"requests": {"storage": size}},
                },
            },
            "default",
        )
        await self.client.create(
            PersistentVolume,
            {
                "metadata": {"name": f"pv-{name}"},
                "spec": {
                    "capacity": {"storage": size},
                    "accessModes": list(modes),
                    "volumeMode": mode,
                    "persistentVolumeReclaimPolicy": "Retain",
                    "claimRef": {
                        "apiVersion": "v1",
                        "kind": "PersistentVolumeClaim",
                        "namespace": "default",
                        "name": name,
                        "uid": claim.uid,
                    },
                    "csi": {"driver": driver, "volumeHandle": f"vol-{name}", "fsType": "ext4", **(csi or {})},
                },
            },
        )
        status = {"status": {"phase": "Bound", "capacity": {"storage": size}, "accessModes": list(modes)}}
        await self.client.patch(PersistentVolumeClaim, name, status, "default", subresource="status")

    async def pod(self, name="p1", claim="c1", command="sleep 1000", devices=(), volumes=None, mounts=None, **spec):
        container = {
            "name": "main",
            "image": "host",
            "command": ["sh", "-c", command.replace("sleep 1000", "trap exit TERM; sleep 1000 & wait")],
            "volumeMounts": mounts
            if mounts is not None
            else ([] if devices or not claim else [{"name": "data", "mountPath": "/data"}]),
            "volumeDevices": list(devices),
            **spec.pop("container", {}),
        }
        data = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
        return await self.client.create(
            Pod,
            {
                "metadata": {"name": name},
                "spec": {
                    "nodeName": "n1",
                    "terminationGracePeriodSeconds": 1,
                    "automountServiceAccountToken": False,  # tests that want it say so
                    "containers": [container],
                    "volumes": volumes if volumes is not None else data,
                    **spec,
                },
            },
            "default",
        )

    async def phase(self, name, wanted, timeout_s=60.0):
        async def reached():
            pod = await self.client.find(Pod, name, "default")
            return pod if pod is not None and pod.status.phase == wanted else None

        return await until(reached, timeout_s, f"pod {name} {wanted}")

    async def gone(self, name, timeout_s=60.0):
        async def absent():
            return await self.client.find(Pod, name, "default") is None

        await until(absent, timeout_s, f"pod {name} gone")

    async def delete(self, name, **options):
        await self.client.delete(Pod, name, "default", **options)

    @contextlib.asynccontextmanager
    async def one_pod(self, **settings):
        """A driver, an agent and a pod that runs with a volume: the beginning of many stories."""
        await self.driver_object()
        await self.volume()
        async with self.driver() as driver:
            await self.start_agent(**settings)
            pod = await self.pod()
            await self.phase("p1", "Running")
            yield driver, pod

    async def end(self, *names):
        """The end of many: these pods go, nothing stays mounted, and the agent stops."""
        for name in names:
            await self.delete(name)
            await self.gone(name)
        await self.until(lambda: not self.mounted(), what="nothing mounted")
        await self.stop_agent()

    async def messages(self, reason):
        found = await self.client.list(Event, "default")
        return [one.message for one in found.items if one.reason == reason]

    async def failed_mounts(self):
        found = await self.client.list(Event, "default")
        return [one for one in found.items if one.reason == "FailedMount"]

    def target(self, pod, claim="c1"):
        return self.root / "pods" / pod.uid / "volumes" / "kubernetes.io~csi" / f"pv-{claim}" / "mount"

    def mounted(self):
        return [one.target for one in mountinfo.mounts_below(self.root)]


@contextlib.asynccontextmanager
async def node_lab(tmp_path):
    """A lab, and nothing left mounted when it ends."""
    base = Path("/tmp") / f"moorage-node-{tmp_path.name[-20:]}-{time.monotonic_ns() % 10**9}"
    async with serve(tmp_path / "api", enforces_rbac=True) as server:
        base.mkdir()
        config = kube_config.from_values(server.insecure_url, server.token)
        async with Client(config) as client:
            made = Lab(base, server, client)
            yield made
            if made._task is not None:
                await made.crash_agent()
    left = made.mounted()
    await kill_containers(made.root)
    for one in reversed(mountinfo.mounts_below(base)):
        mounts.unmount(one.target, lazy=True)
    with contextlib.suppress(Exception):
        remove_tree(base)
    assert left == [] or getattr(made, "may_leave_mounts", False), f"mounts were left: {left}"


async def kill_containers(root):
    for state in root.glob("pods/*/containers/*/*/state.json"):
        found = json.loads(state.read_text())
        if "exit_code" not in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found["shim"], signal.SIGKILL)
    groups = ContainerCgroups("n1")
    for pod in root.glob("pods/*"):
        await asyncio.sleep(0.2)
        groups.remove(pod.name)
    groups.remove_own()
