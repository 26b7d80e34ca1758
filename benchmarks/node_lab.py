"""A node agent and a driver in processes of their own, with an API server in this one: for the node_*.py benchmarks.

The driver is `ScriptedDriver` (bind mounts only; it may be told to take its time), `moorage plugin` with image volumes
(formatted, attached to a loop device and mounted), or any other program that serves CSI, given as its command line.
"""

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

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.host import loop, mountinfo, mounts
from moorage.kube.api import config as kube_config
from moorage.kube.api.client import Client, PatchType
from moorage.kube.cache.informer import Informer
from moorage.kube.errors import AlreadyExists
from moorage.kube.objects.core import Node, ServiceAccount
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.testing import ScriptedDriver, serve

PUBLISHED = "published"  # a file below the plain driver's directory: one byte for each publish
PLAIN, IMAGE, OTHER = "plain", "image", "other"
NAMES = {PLAIN: "bench.dev", IMAGE: "csi.moorage.dev", OTHER: "other.dev"}
IDLE, STOLEN = 4, 8  # kinds of processor time; stolen is what a virtual machine did not get
_MOUNTED = pb.VolumeCapability(
    mount=pb.VolumeCapability.MountVolume(fs_type="ext4"), access_mode=pb.VolumeCapability.AccessMode(mode=1)
)


class TimedDriver(ScriptedDriver):
    """A driver that takes a given time for each stage and publish."""

    delay_s = 0.0

    async def NodeStageVolume(self, request: Any) -> Any:
        await asyncio.sleep(self.delay_s)
        return await ScriptedDriver.NodeStageVolume(self, request)

    async def NodePublishVolume(self, request: Any) -> Any:
        await asyncio.sleep(self.delay_s)
        answer = await ScriptedDriver.NodePublishVolume(self, request)
        with (self.data / PUBLISHED).open("ab") as file:
            file.write(b".")
        return answer


class Lab:
    """One node and what it needs."""

    def __init__(self, base: Path, kubeconfig: str, client: Client, kind: str, command: list[str]) -> None:
        self.base, self.kubeconfig, self.client, self.kind, self.command = base, kubeconfig, client, kind, command
        self.root = base / "root"
        self.socket = self.root / "plugins" / "b.sock"
        self.csi = CsiClient(str(self.socket), timeout_s=300)
        self.agent: asyncio.subprocess.Process | None = None
        self.driver: asyncio.subprocess.Process | None = None
        self.beside: list[int] = []  # processes of a control plane
        self._made = 0

    async def start_driver(self, delay_s: float) -> None:
        """Run the driver and announce it."""
        self.socket.parent.mkdir(parents=True)
        pool = self.base / "pool"
        pool.mkdir()
        if self.kind == PLAIN:
            program = [sys.executable, str(Path(__file__)), str(self.base), str(delay_s)]
        elif self.kind == IMAGE:
            program = [sys.executable, "-m", "moorage.cli.main", "plugin", "--endpoint", f"unix://{self.socket}",
                       "--node-id", "n1", "--pool", str(pool), "--overcommit", "1000"]  # fmt: skip
        else:
            values = {"{socket}": str(self.socket), "{name}": NAMES[OTHER], "{directory}": str(pool)}
            program = [values.get(word, word) for word in self.command]
        log = (self.base / "driver.log").open("ab")
        self.driver = await asyncio.create_subprocess_exec(*program, stderr=log, stdout=log, start_new_session=True)
        while not self.socket.exists():
            assert self.driver.returncode is None, (self.base / "driver.log").read_text()
            await asyncio.sleep(0.02)

    async def make(self, count: int) -> list[str]:
        """Handles of as many new volumes."""
        names = [f"v{self._made + number}" for number in range(count)]
        self._made += count
        if self.kind == PLAIN:
            return names
        size = pb.CapacityRange(required_bytes=64 << 20)
        gate = asyncio.Semaphore(8)

        async def one(name: str) -> str:
            request = pb.CreateVolumeRequest(name=name, capacity_range=size, volume_capabilities=[_MOUNTED])
            async with gate:
                return str((await self.csi.CreateVolume(request)).volume.volume_id)

        return list(await asyncio.gather(*(one(name) for name in names)))

    async def start_agent(self) -> float:
        """Seconds until the node is ready."""
        started = time.monotonic()
        log = (self.base / "agent.log").open("ab")
        arguments = ("node", "--node-name", "n1", "--root-dir", str(self.root))
        self.agent = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "moorage.cli.main", *arguments, "--kubeconfig", self.kubeconfig,
            stderr=log, stdout=log, start_new_session=True,
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

    def cpu_s(self) -> dict[str, float]:
        """Processor time so far of the agent, of the driver, of this process (the API server, where it is ours, and its
        clients), and of those beside them."""
        assert self.agent is not None
        assert self.driver is not None
        others = {Path(f"/proc/{pid}/comm").read_text().strip(): cpu_s(pid) for pid in self.beside}
        return {"agent": cpu_s(self.agent.pid), "driver": cpu_s(self.driver.pid), "API": time.process_time(), **others}

    def published(self) -> int:
        """How often the plain driver has published a volume."""
        return (self.base / "data" / PUBLISHED).stat().st_size

    async def volumes(self, count: int) -> None:
        handles = await self.make(count)
        await asyncio.gather(*(self._volume(f"c{number}", handle) for number, handle in enumerate(handles)))
        await self._settled()

    async def _settled(self) -> None:
        """Where a controller binds claims to volumes, it is to be done before anything is measured."""
        before: list[int] = []
        while True:
            claims = (await self.client.list(PersistentVolumeClaim, "default")).items
            now = [one.version for one in (*claims, *(await self.client.list(PersistentVolume)).items)]
            if now == before and all(claim.status.phase == "Bound" for claim in claims):
                return
            before = now
            await asyncio.sleep(1)

    async def _volume(self, name: str, handle: str) -> None:
        spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": f"pv-{name}",
                "resources": {"requests": {"storage": "1Gi"}}}  # fmt: skip
        claim = await self.client.create(PersistentVolumeClaim, {"metadata": {"name": name}, "spec": spec}, "default")
        reference = {"kind": "PersistentVolumeClaim", "namespace": "default", "name": name, "uid": claim.uid}
        volume = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "claimRef": reference,
                  "persistentVolumeReclaimPolicy": "Retain",
                  "csi": {"driver": NAMES[self.kind], "volumeHandle": handle, "fsType": "ext4"}}  # fmt: skip
        await self.client.create(PersistentVolume, {"metadata": {"name": f"pv-{name}"}, "spec": volume})
        status = {"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"]}}
        await self.client.patch(PersistentVolumeClaim, name, status, "default", subresource="status")

    async def pods(self, names: list[str]) -> None:
        """Pods with claims of the same names."""
        await asyncio.gather(*(self._pod(name, claim=name) for name in names))

    async def remove_pods(self, names: list[str]) -> None:
        """Until nothing of them is left on the node."""
        await asyncio.gather(*(self.client.delete(Pod, name, "default", grace_s=0) for name in names))
        while {pod.name for pod in (await self.client.list(Pod, "default")).items}.intersection(names):
            await asyncio.sleep(0.2)
        while len(os.listdir(self.root / "pods")) > len((await self.client.list(Pod, "default")).items):
            await asyncio.sleep(0.2)
        await quiet()

    async def _pod(self, name: str, claim: str = "", node: str = "n1") -> None:
        mounts = [{"name": "data", "mountPath": "/data"}] if claim else []
        volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
        container = {"name": "main", "image": "host", "command": ["sleep", "100000"], "volumeMounts": mounts}
        spec = {"nodeName": node, "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False,
                "containers": [container], "volumes": volumes}  # fmt: skip
        await self.client.create(Pod, {"metadata": {"name": name}, "spec": spec}, "default")

    async def bare(self, handles: list[str], at_once: int = 1000) -> float:
        """Seconds to stage and publish these volumes by a client that does nothing else. They are to be made before
        anything is measured: a driver that has more volumes may take longer for each."""
        gate = asyncio.Semaphore(at_once)

        async def one(handle: str) -> None:
            async with gate:
                await self._publish(handle)

        started = time.monotonic()
        await asyncio.gather(*(one(handle) for handle in handles))
        took = time.monotonic() - started
        await asyncio.gather(*(self._unpublish(handle) for handle in handles))
        return took

    async def without_agent(self, handles: list[str]) -> float:
        """Seconds for what no agent could leave out: that many pods are created, the driver is asked for a volume for
        each, and a status is written to each. They have the names of these volumes, and no claims."""
        gate = asyncio.Semaphore(8)
        container = {"name": "main", "image": "host", "imageID": "", "restartCount": 0, "ready": True,
                     "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}  # fmt: skip
        patch = {"status": {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [container]}}

        async def one(handle: str) -> None:
            await self._pod(handle, node="elsewhere")
            async with gate:
                await self._publish(handle)
            await self.client.patch(Pod, handle, patch, "default", how=PatchType.STRATEGIC, subresource="status")

        started = time.monotonic()
        await asyncio.gather(*(one(handle) for handle in handles))
        took = time.monotonic() - started
        await asyncio.gather(*(self._unpublish(handle) for handle in handles))
        await asyncio.gather(*(self.client.delete(Pod, handle, "default", grace_s=0) for handle in handles))
        return took

    def _paths(self, handle: str) -> tuple[Path, Path]:
        return self.base / "bare" / handle / "s", self.base / "bare" / handle / "t"

    async def _publish(self, handle: str) -> None:
        staging, target = self._paths(handle)
        common = {"volume_id": handle, "volume_capability": _MOUNTED, "staging_target_path": str(staging)}
        staging.mkdir(parents=True, exist_ok=True)
        await self.csi.NodeStageVolume(pb.NodeStageVolumeRequest(**common))
        await self.csi.NodePublishVolume(pb.NodePublishVolumeRequest(target_path=str(target), **common))

    async def _unpublish(self, handle: str) -> None:  # every mount that is left makes the next one slower
        staging, target = self._paths(handle)
        await self.csi.NodeUnpublishVolume(pb.NodeUnpublishVolumeRequest(volume_id=handle, target_path=str(target)))
        await self.csi.NodeUnstageVolume(
            pb.NodeUnstageVolumeRequest(volume_id=handle, staging_target_path=str(staging))
        )

    async def all_running(self, names: list[str]) -> None:
        """Listens and does not ask: what it takes would be taken from what is measured."""
        informer = Informer(self.client, Pod, fields="status.phase=Running")
        missing = set(names)
        are_all = asyncio.Event()

        def heard(_old: Pod | None, new: Pod | None) -> None:
            if new is not None:
                missing.discard(new.name)
                if not missing:
                    are_all.set()

        informer.subscribe(heard)
        task = asyncio.create_task(informer.run())
        try:
            await are_all.wait()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def quiet() -> None:
    """Until the machine has next to nothing to do: controllers go on for a while after whatever was done."""
    while True:
        before = machine_s(IDLE)
        await asyncio.sleep(1)
        if machine_s(IDLE) - before > 0.9 * (os.cpu_count() or 1):
            return


def machine_s(kind: int) -> float:
    """Processor time of the whole machine so far."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[kind]) / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def api(base: Path, kubeconfig: str) -> AsyncIterator[tuple[str, Client]]:
    """The path of a kubeconfig and a client: of the API server that it names, or of one in this process."""
    if kubeconfig:
        async with Client(kube_config.load(kubeconfig)) as client:
            with contextlib.suppress(AlreadyExists):  # where no controller makes it
                await client.create(ServiceAccount, {"metadata": {"name": "default"}}, "default")
            yield kubeconfig, client
        return
    async with (
        serve(base / "api") as server,
        Client(kube_config.from_values(server.insecure_url, server.token)) as client,
    ):
        yield str(server.kubeconfig), client


@contextlib.asynccontextmanager
async def lab(
    kind: str = PLAIN, delay_s: float = 0.0, command: list[str] | None = None, kubeconfig: str = ""
) -> AsyncIterator[Lab]:
    base = Path(tempfile.mkdtemp(prefix="moorage-node-bench-"))
    # Not on the disk: ext4 looks at every inode that was deleted less than a minute ago for each new one, and undoing
    # what was measured deletes thousands. The agent's directories hold next to nothing; volumes are on the disk.
    for name in ("root", "bare"):
        (base / name).mkdir()
        mounts.mount("moorage-bench", base / name, "tmpfs")
    registry = base / "root" / "plugins_registry"
    announced = ScriptedDriver(base / "root" / "plugins" / "b.sock", NAMES[kind], data=base / "data", registry=registry)
    made: Lab | None = None
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that nothing is left then either
    try:
        async with api(base, kubeconfig) as (path, client):
            spec = {"attachRequired": False}
            await client.create(CSIDriver, {"metadata": {"name": NAMES[kind]}, "spec": spec})
            made = Lab(base, path, client, kind, command or [])
            await made.start_driver(delay_s)
            await announced.announce()
            yield made
            await made.csi.close()
            await announced.stop(leave_sockets=True)
    finally:
        for process in (made.agent, made.driver) if made is not None else ():
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
        _clean(base)


def _clean(base: Path) -> None:
    import json

    for state in base.glob("root/pods/*/containers/*/*/state.json"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(json.loads(state.read_text())["shim"], signal.SIGKILL)
    time.sleep(0.5)
    table = mountinfo.mounts()
    for one in reversed(mountinfo.mounts_below(base, table)):
        mounts.unmount(one.target, lazy=True)
    for device in loop.attached(base):
        loop.detach(device)
    if not mountinfo.mounts_below(base):
        shutil.rmtree(base, ignore_errors=True)
    from moorage.node.runtime.cgroups import ContainerCgroups, find_hierarchies

    groups = ContainerCgroups("n1")
    for _, root in find_hierarchies():
        for pod in (root / "kubepods" / "n1").glob("pod*"):
            groups.remove(pod.name.removeprefix("pod"))
    groups.remove_own()


async def _drive(base: Path, delay_s: float) -> None:
    driver = TimedDriver(base / "root" / "plugins" / "b.sock", "bench.dev", data=base / "data")
    driver.delay_s = delay_s
    async with driver:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_drive(Path(sys.argv[1]), float(sys.argv[2])))
