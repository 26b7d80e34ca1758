"""One volume through its whole life on a cluster of two nodes, each step shown and checked.

Owns: the story that `moorage demo` tells. Every step ends with a check of what it promised; a check that fails ends the
demo with the sentence of what was expected.
Start reading at: `Demo.play`.
"""

import asyncio
import re
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from moorage.cluster.run import Cluster
from moorage.cluster.settings import UpSettings
from moorage.errors import MoorageError
from moorage.host import loop, mountinfo
from moorage.host.safe_remove import remove_tree
from moorage.insight.narrator import Narrator, TimelineEntry
from moorage.kube.api.client import PatchType
from moorage.kube.errors import ApiError, NotFound
from moorage.kube.names import HOSTNAME
from moorage.kube.objects import (
    KubeObject,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
    VolumeSnapshot,
)
from moorage.kube.quantity import bytes_of

T = TypeVar("T", bound=KubeObject)

_NS = "default"
_PATIENCE_S = 30.0
# Appends increasing numbers, and says what it sees of the volume's size. As process 1 a shell heeds only what it traps.
_WRITER = """
trap 'exit 0' TERM
test -f /data/ledger && echo "resumed at $(tail -n 1 /data/ledger)"
n=$(tail -n 1 /data/ledger 2>/dev/null || echo 0)
while :; do
  n=$((n + 1)); echo $n >>/data/ledger; sync /data/ledger
  echo "wrote $n size $(stat -f -c '%b %S' /data)"
  sleep 0.1
done
"""
_READER = """
trap 'exit 0' TERM
for v in restored cloned; do echo $v $(cat /$v/ledger | tr '\\n' ' '); done
sleep infinity & wait
"""


class DemoFailed(MoorageError):
    """A step did not do what it promised."""


@dataclass(frozen=True)
class DemoStep:
    """One step as it went: what it was, what was checked, and who did what meanwhile."""

    title: str
    checked: str
    seconds: float
    moments: list[TimelineEntry]
    began: float


class Demo:
    """Plays the story against a cluster of its own."""

    def __init__(self, on_step: Callable[[DemoStep], None], keep_dir: Path | None = None) -> None:
        self._on_step = on_step
        self._root = keep_dir or Path(tempfile.mkdtemp(prefix="moorage-demo-"))
        self.settings = UpSettings(data_dir=self._root, nodes=2, pool_size_bytes=4 << 30)
        self.cluster = Cluster(self.settings)
        self._last = 0

    async def play(self) -> None:
        """The whole story; DemoFailed when a check does not hold. Nothing is left behind either way."""
        self.settings.checked()
        began = time.time()
        try:
            report = await self.cluster.start()
            self._tell("The stack comes up", f"{len(report.nodes)} nodes, driver {report.driver}", began, [])
            logs = [self.cluster.layout.log(f"{name}-driver") for name in self.settings.node_names]
            async with self.cluster.client() as self._client, Narrator(logs).following(self._client) as self._narrator:
                await self._story()
        finally:
            began = time.time()
            await self.cluster.stop()
            self._check_released()
            self._tell("The stack goes down", "no mount and no loop device is left", began, [])
            remove_tree(self._root)

    async def _story(self) -> None:
        for title, act in (
            ("Provision, Attach, Mount: a claim and a pod", self._first_pod),
            ("Snapshot while the pod writes", self._take_snapshot),
            ("Restore the snapshot, clone the volume", self._restore_and_clone),
            ("Grow the volume in use", self._grow),
            ("Move the pod to the other node", self._move),
            ("Delete the claim, recover its volume", self._recover),
            ("Remove everything", self._remove_all),
        ):
            began = time.time()
            checked = await act()
            await asyncio.sleep(0.05)  # the last lines reach the driver's log
            self._tell(title, checked, began, self._narrator.since(began))

    async def _first_pod(self) -> str:
        await self._create(PersistentVolumeClaim, claim("data", "64Mi"))
        await self._create(Pod, pod("writer", {"data": "data"}, _WRITER))
        running = await self._pod_running("writer")
        self._last = await self._written("writer", at_least=3)
        return f"the pod runs on {running.spec.node_name} and has written 1…{self._last}"

    async def _take_snapshot(self) -> str:
        source = {"persistentVolumeClaimName": "data"}
        await self._create(VolumeSnapshot, {"metadata": {"name": "moment"}, "spec": {"source": source}})
        await self._until(
            VolumeSnapshot,
            "moment",
            lambda s: s.status is not None and bool(s.status.ready_to_use),
            "the snapshot to be ready",
        )
        return "ready to use; the pod went on writing"

    async def _restore_and_clone(self) -> str:
        snapshot = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "moment"}
        await self._create(PersistentVolumeClaim, claim("restored", "96Mi", snapshot))
        origin = {"kind": "PersistentVolumeClaim", "name": "data"}
        await self._create(PersistentVolumeClaim, claim("cloned", "64Mi", origin))
        await self._create(Pod, pod("reader", {"restored": "restored", "cloned": "cloned"}, _READER))
        await self._pod_running("reader")
        text = await self._log_with("reader", r"cloned .*\d")
        ledgers = {line.split()[0]: [int(word) for word in line.split()[1:]] for line in text.splitlines()}
        for name in ("restored", "cloned"):
            numbers = ledgers.get(name, [])
            _require(
                numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 0, f"{name} holds 1…n without a gap"
            )
        _require(len(ledgers["restored"]) <= len(ledgers["cloned"]), "the clone is not older than the snapshot")
        return f"the restore holds 1…{len(ledgers['restored'])}, the clone 1…{len(ledgers['cloned'])}, without a gap"

    async def _grow(self) -> str:
        before = await self._size_seen("writer")
        await self._client.patch(
            PersistentVolumeClaim, "data", {"spec": {"resources": {"requests": {"storage": "128Mi"}}}}, _NS
        )
        await self._until(
            PersistentVolumeClaim,
            "data",
            lambda c: bytes_of(c.status.capacity.get("storage")) >= 128 << 20,
            "the claim to grow",
        )
        after = await self._poll(
            lambda: self._size_seen("writer"), lambda size: size > before, "the pod to see the new size"
        )
        return f"the running pod sees {after >> 20} MiB, it saw {before >> 20} MiB"

    async def _move(self) -> str:
        old = await self._client.get(Pod, "writer", _NS)
        self._last = await self._written("writer", at_least=self._last)
        await self._client.delete(Pod, "writer", _NS, grace_s=0)
        other = next(name for name in self.settings.node_names if name != old.spec.node_name)
        await self._create(Pod, pod("moved", {"data": "data"}, _WRITER, node=other))
        running = await self._pod_running("moved")
        resumed = int((await self._log_with("moved", r"resumed at (\d+)")).split("resumed at ")[1].split()[0])
        _require(running.spec.node_name == other, f"the pod runs on {other}")
        _require(resumed >= self._last, f"the data has at least {self._last}, found {resumed}")
        return f"from {old.spec.node_name} to {other}; it goes on after {resumed}, nothing is lost"

    async def _recover(self) -> str:
        bound = await self._client.get(PersistentVolumeClaim, "data", _NS)
        volume = bound.spec.volume_name
        self._last = await self._written("moved", at_least=1)
        await self._client.patch(PersistentVolume, volume, {"spec": {"persistentVolumeReclaimPolicy": "Retain"}})
        await self._client.delete(Pod, "moved", _NS, grace_s=0)
        await self._client.delete(PersistentVolumeClaim, "data", _NS)
        await self._until(
            PersistentVolume, volume, lambda v: v.status.phase == "Released", "the volume to be Released", ""
        )
        await self._client.patch(
            PersistentVolume, volume, [{"op": "remove", "path": "/spec/claimRef"}], how=PatchType.JSON
        )
        wanted = claim("data", "64Mi")
        wanted["spec"] |= {"volumeName": volume, "storageClassName": bound.spec.storage_class_name}
        await self._create(PersistentVolumeClaim, wanted)
        await self._create(Pod, pod("again", {"data": "data"}, _WRITER))
        await self._pod_running("again")
        resumed = int((await self._log_with("again", r"resumed at (\d+)")).split("resumed at ")[1].split()[0])
        _require(resumed >= self._last, f"the recovered volume has at least {self._last}, found {resumed}")
        await self._client.patch(PersistentVolume, volume, {"spec": {"persistentVolumeReclaimPolicy": "Delete"}})
        return f"the new claim has the old volume and its data (after {resumed})"

    async def _remove_all(self) -> str:
        for name in ("again", "reader"):
            await self._client.delete(Pod, name, _NS, grace_s=0)
        await self._client.delete(VolumeSnapshot, "moment", _NS)
        for name in ("data", "restored", "cloned"):
            await self._client.delete(PersistentVolumeClaim, name, _NS)
        for kind in (Pod, PersistentVolumeClaim, VolumeSnapshot, PersistentVolume, VolumeAttachment):
            await self._poll(partial(self._count, kind), lambda n: n == 0, f"every {kind.resource.kind} to go")
        pool = self.cluster.layout.pool
        left = [*(pool / "volumes").iterdir(), *(pool / "snapshots").iterdir()]
        _require(not left, f"the pool is empty, found {left}")
        return "no object, volume or snapshot is left"

    def _check_released(self) -> None:
        mounted = [mount.target for mount in mountinfo.mounts_below(self._root)]
        _require(not mounted, f"nothing is mounted below {self._root}, found {mounted}")
        devices = [str(device.path) for device in loop.attached(self._root)]
        _require(not devices, f"no loop device is left, found {devices}")

    def _tell(self, title: str, checked: str, began: float, moments: list[TimelineEntry]) -> None:
        self._on_step(DemoStep(title, checked, time.time() - began, moments, began))

    async def _create(self, kind: type[T], body: dict[str, Any]) -> T:
        return await self._client.create(kind, body, _NS)

    async def _pod_running(self, name: str) -> Pod:
        return await self._until(Pod, name, lambda p: p.status.phase == "Running", f"pod {name} to run")

    async def _until(self, kind: type[T], name: str, holds: Callable[[T], bool], what: str, namespace: str = _NS) -> T:
        found: T = await self._poll(lambda: self._client.get(kind, name, namespace), holds, what)
        return found

    async def _poll(self, read: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool], what: str) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            value = await read()
            if holds(value):
                return value
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {_PATIENCE_S:.0f} s for {what}")
            await asyncio.sleep(0.02)

    async def _count(self, kind: type[KubeObject]) -> int:
        return len((await self._client.list(kind)).items)

    async def _log(self, name: str) -> str:
        try:
            return (await self._client.request("GET", Pod.resource.path(_NS, name, "log"))).decode()
        except (NotFound, ApiError):
            return ""  # the container is starting

    async def _log_with(self, name: str, pattern: str) -> str:
        text: str = await self._poll(
            lambda: self._log(name), lambda text: re.search(pattern, text) is not None, f"pod {name} to say {pattern!r}"
        )
        return text

    async def _written(self, name: str, at_least: int) -> int:
        """The last number that the pod said it had written and synced."""

        async def last() -> int:
            numbers = re.findall(r"wrote (\d+)", await self._log(name))
            return int(numbers[-1]) if numbers else 0

        return int(await self._poll(last, lambda number: number >= at_least, f"pod {name} to write {at_least} numbers"))

    async def _size_seen(self, name: str) -> int:
        seen = re.findall(r"size (\d+) (\d+)", await self._log(name))
        return int(seen[-1][0]) * int(seen[-1][1]) if seen else 0


def claim(name: str, size: str, source: dict[str, str] | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    if source is not None:
        spec["dataSource"] = source
    return {"metadata": {"name": name}, "spec": spec}


def pod(name: str, claims: dict[str, str], script: str, node: str = "") -> dict[str, Any]:
    """A pod that runs a script with each claim mounted at /NAME."""
    mounts = [{"name": volume, "mountPath": f"/{volume}"} for volume in claims]
    volumes = [{"name": v, "persistentVolumeClaim": {"claimName": c}} for v, c in claims.items()]
    container = {"name": "main", "image": "host", "command": ["sh", "-c", script], "volumeMounts": mounts}
    spec: dict[str, Any] = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 1}
    if node:
        spec["nodeSelector"] = {HOSTNAME: node}
    return {"metadata": {"name": name}, "spec": spec}


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise DemoFailed(f"expected that {what}")
