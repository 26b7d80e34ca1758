"""A node agent in its own process, with an API server and a driver in this one: for the node_*.py benchmarks."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from moorage.apiserver.testing import serve
from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.host import mountinfo, mounts
from moorage.kube import config as kube_config
from moorage.kube.client import Client
from moorage.kube.informer import Informer
from moorage.kube.objects.core import Node, PersistentVolume, PersistentVolumeClaim, Pod
from moorage.kube.objects.storage import CSIDriver
from moorage.node.testing import ScriptedDriver


class TimedDriver(ScriptedDriver):
    """A driver that takes a given time for each stage and publish, and counts what it took."""

    delay_s = 0.0
    spent_s = 0.0

    async def _NodeStageVolume(self, request: Any) -> Any:
        return await self._timed(ScriptedDriver._NodeStageVolume, request)

    async def _NodePublishVolume(self, request: Any) -> Any:
        return await self._timed(ScriptedDriver._NodePublishVolume, request)

    async def _timed(self, work: Any, request: Any) -> Any:
        started = time.monotonic()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        answer = await work(self, request)
        self.spent_s += time.monotonic() - started
        return answer


class Lab:
    """One node and what it needs."""

    def __init__(self, base: Path, server: Any, client: Client, driver: TimedDriver) -> None:
        self.base, self.server, self.client, self.driver = base, server, client, driver
        self.root = base / "root"
        self.agent: asyncio.subprocess.Process | None = None

    async def start_agent(self) -> float:
        """Seconds until the node is ready."""
        started = time.monotonic()
        log = (self.base / "agent.log").open("ab")
        arguments = ("node", "--node-name", "n1", "--root-dir", str(self.root))
        self.agent = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "moorage.cli.main", *arguments, "--kubeconfig", str(self.server.kubeconfig),
            stderr=log, stdout=log,
        )  # fmt: skip
        while True:
            node = await self.client.find(Node, "n1")
            if node is not None and node.is_ready:
                return time.monotonic() - started
            await asyncio.sleep(0.01)

    async def kill_agent(self) -> None:
        assert self.agent is not None
        self.agent.kill()
        await self.agent.wait()

    def cpu_s(self) -> float:
        """Processor time of the agent so far."""
        assert self.agent is not None
        fields = Path(f"/proc/{self.agent.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def volumes(self, count: int) -> None:
        await asyncio.gather(*(self._volume(f"c{number}") for number in range(count)))

    async def _volume(self, name: str) -> None:
        spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": f"pv-{name}",
                "resources": {"requests": {"storage": "1Gi"}}}  # fmt: skip
        claim = await self.client.create(PersistentVolumeClaim, {"metadata": {"name": name}, "spec": spec}, "default")
        reference = {"kind": "PersistentVolumeClaim", "namespace": "default", "name": name, "uid": claim.uid}
        volume = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "claimRef": reference,
                  "persistentVolumeReclaimPolicy": "Retain",
                  "csi": {"driver": self.driver.name, "volumeHandle": f"v-{name}"}}  # fmt: skip
        await self.client.create(PersistentVolume, {"metadata": {"name": f"pv-{name}"}, "spec": volume})
        status = {"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"]}}
        await self.client.patch(PersistentVolumeClaim, name, status, "default", subresource="status")

    async def pods(self, names: list[str]) -> None:
        await asyncio.gather(*(self._pod(name, claim) for name, claim in zip(names, names, strict=True)))

    async def _pod(self, name: str, claim: str) -> None:
        container = {"name": "main", "image": "host", "command": ["sleep", "100000"],
                     "volumeMounts": [{"name": "data", "mountPath": "/data"}]}  # fmt: skip
        volume = {"name": "data", "persistentVolumeClaim": {"claimName": claim}}
        spec = {"nodeName": "n1", "terminationGracePeriodSeconds": 0, "containers": [container], "volumes": [volume]}
        await self.client.create(Pod, {"metadata": {"name": name}, "spec": spec}, "default")

    async def bare(self, count: int) -> float:
        """Seconds for as many stages and publishes by a client that does nothing else."""
        mode = pb.VolumeCapability(
            mount=pb.VolumeCapability.MountVolume(), access_mode=pb.VolumeCapability.AccessMode(mode=1)
        )
        client = CsiClient(str(self.driver.socket))

        async def one(number: int) -> None:
            staging, target = self.base / f"s{number}", self.base / f"t{number}"
            staging.mkdir()
            common = {"volume_id": f"bare-{number}", "volume_capability": mode, "staging_target_path": str(staging)}
            await client.NodeStageVolume(pb.NodeStageVolumeRequest(**common))
            await client.NodePublishVolume(pb.NodePublishVolumeRequest(target_path=str(target), **common))

        started = time.monotonic()
        await asyncio.gather(*(one(number) for number in range(count)))
        took = time.monotonic() - started
        await client.close()
        return took

    async def all_running(self, count: int) -> None:
        informer = Informer(self.client, Pod)
        task = asyncio.create_task(informer.run())
        try:
            while sum(pod.status.phase == "Running" for pod in informer) < count:
                await asyncio.sleep(0.005)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def lab() -> AsyncIterator[Lab]:
    base = Path(tempfile.mkdtemp(prefix="moorage-node-bench-"))
    driver = TimedDriver(
        "bench.dev", base / "data", base / "root" / "plugins" / "b.sock", base / "root" / "plugins_registry"
    )
    try:
        async with serve(base / "api") as server, driver:
            config = kube_config.from_values(server.insecure_url, server.token)
            async with Client(config) as client:
                await client.create(CSIDriver, {"metadata": {"name": "bench.dev"}, "spec": {"attachRequired": False}})
                made = Lab(base, server, client, driver)
                yield made
                if made.agent is not None and made.agent.returncode is None:
                    await made.kill_agent()
    finally:
        _clean(base)


def _clean(base: Path) -> None:
    import json

    for state in base.glob("root/pods/*/containers/*/*/state.json"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(json.loads(state.read_text())["shim"], signal.SIGKILL)
    time.sleep(0.5)
    for one in reversed(mountinfo.mounts_below(base)):
        mounts.unmount(one.target, lazy=True)
    if not mountinfo.mounts_below(base):
        shutil.rmtree(base, ignore_errors=True)
    from moorage.node.pods.cgroups import Cgroups, find_hierarchies

    groups = Cgroups("n1")
    for _, root in find_hierarchies():
        for pod in (root / "kubepods" / "n1").glob("pod*"):
            groups.remove(pod.name.removeprefix("pod"))
    groups.remove_own()
