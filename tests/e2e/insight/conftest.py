"""A cluster for explanations: the embedded API server, controllers by name, a scripted driver and its sidecars.

`expect` asks as the command line does and waits until the wanted cause is told; what was told last is in the failure.
"""

import asyncio
import contextlib
import io
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.support.steps import Shell, check_marks, is_command, is_look

from moorage.cli.main import main
from moorage.controllers import run as controllers
from moorage.insight.explain import ObjectNotFound, Story, explain
from moorage.kube.api.client import Client
from moorage.kube.api.config import from_kubeconfig, from_values
from moorage.kube.errors import NotFound
from moorage.kube.objects import (
    CSIDriver,
    CSINode,
    CSIStorageCapacity,
    Lease,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    StorageClass,
    VolumeAttributesClass,
    VolumeSnapshot,
    VolumeSnapshotClass,
)
from moorage.sidecars.roles import Role
from moorage.sidecars.run import WantedRoles, run
from moorage.sidecars.settings import SidecarEnvironment, SidecarSettings
from moorage.testing import Abilities, Fault, ScriptedDriver, serve

DRIVER = "test.csi.moorage.dev"
PATIENCE_S = 45.0
STAY = ["sh", "-c", "trap exit TERM; sleep 1000 & wait"]  # until told to go, and then at once


@dataclass
class Lab:
    """One cluster under test."""

    client: Client
    driver: ScriptedDriver | None
    server: Any
    kubeconfig: Path
    shell: Shell
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def check_cause(
        self,
        reference: str,
        cause: str,
        *words: str,
        step: str = "",
        last: str = "",
        evidence: str = "",
        shows: str | None = None,
        ends: Callable[[], object] | None = None,
        leaves: bool = False,
        then: Callable[[], Awaitable[object]] | None = None,
        in_words: Mapping[str, Callable[[], object]] | None = None,
    ) -> Story:
        """Wait until the chain of an explanation holds a cause; its sentence must hold the words.

        The command line must say the same: it runs with the cluster's kubeconfig, as a person would type it.
        `last` is the cause at the chain's end when that is another one; `step` and `evidence` are parts of theirs.

        Then the steps are taken literally. `shows`: the first one is a look whose output holds these words. `ends`: it
        waits until this has been called. `leaves`: all are taken, and the cause is gone while the data is still there;
        `then` does at last what a step or the remedy says in words, `in_words` in between, by the step's beginning.
        """
        story = await self._told(reference, cause, words, step, last, evidence)
        check_marks(story)
        if shows is not None:
            assert is_look(story.next_step), story.next_step
            assert shows in await self.shell.run(story.next_step)
        if ends is not None:
            await self._take_waiting(story, ends)
        if leaves or then is not None or in_words is not None:
            await self._take_all(story, reference, cause, then, in_words or {})
        return story

    async def _take_waiting(self, story: Story, ends: Callable[[], object]) -> None:
        assert story.next_step.startswith("moorage explain "), story.next_step
        process = await self.shell.start(story.next_step)
        async with asyncio.timeout(PATIENCE_S):
            first = await process.stdout.readline()
            ends()
            rest, _ = await process.communicate()
        assert process.returncode == 0, rest
        assert b"nothing is wrong" in first + rest

    async def _take_all(self, story: Story, reference: str, cause: str, then: Any, in_words: Any) -> None:
        before = await self._data("Bound", "Released")
        for each in (story.next_step, *(later.command for later in story.then)):
            done = next((work for beginning, work in in_words.items() if each.startswith(beginning)), None)
            if done is not None:
                done()
            elif is_command(each):
                await self.shell.run(each)
            else:
                assert then is not None, each
        if then is not None:
            await then()
        async with asyncio.timeout(PATIENCE_S):
            while await self._holds(reference, cause):
                await asyncio.sleep(0.03)
        assert before <= await self._data()

    async def _holds(self, reference: str, cause: str) -> bool:
        try:
            told = await explain(self.client, reference, "default")
        except ObjectNotFound:
            return False
        return any(link.cause == cause for link in told.chain)

    async def _data(self, *phases: str) -> set[str]:
        """The volumes that the driver has, and the objects (in these phases) that lead to them."""
        volumes = (await self.client.list(PersistentVolume)).items
        kept = {one.name for one in volumes if not phases or one.status.phase in phases}
        return kept | (set(self.driver.backend.volumes) if self.driver is not None else set())

    async def _told(
        self, reference: str, cause: str, words: tuple[str, ...], step: str, last: str, evidence: str
    ) -> Story:
        story: Story | None = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        story = await explain(self.client, reference, "default")
                    except ObjectNotFound:
                        story = None
                    link = next((one for one in story.chain if one.cause == cause), None) if story else None
                    is_told = link is not None and all(word in link.sentence for word in words)
                    is_told = is_told and story.cause == (last or cause) and _shows(story, step, evidence)
                    if is_told and await asyncio.to_thread(self._is_printed, reference, words, step, evidence):
                        break
                    await asyncio.sleep(0.03)
        except TimeoutError:
            pytest.fail(f"{reference}: wanted {cause} with {words} and step {step!r}, was told {story}")
        assert story.stuck
        assert story.sentence.startswith(f"{reference}: ")
        assert "\n" not in story.sentence
        return story

    def _is_printed(self, reference: str, words: tuple[str, ...], step: str, evidence: str) -> bool:
        """Whether `moorage explain` prints the sentence and the next step now; the cluster may have moved on."""
        argv = ["explain", reference, "-n", "default", "--kubeconfig", str(self.kubeconfig)]
        with (
            contextlib.redirect_stdout(io.StringIO()) as printed,
            mock.patch("sys.argv", ["moorage", *argv]),
            mock.patch("moorage.log.configure"),
            contextlib.suppress(SystemExit),
        ):
            main(argv)
        text = printed.getvalue()
        first, _, rest = text.partition("\n")
        _, found, after = rest.partition("Next step:\n")
        is_said = first.startswith(f"{reference}: ") and all(word in text for word in words)
        return is_said and bool(found) and step in after and evidence in rest

    async def check_well(self, reference: str) -> Story:
        """Wait until nothing is wrong with an object."""
        story: Story | None = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while story is None or story.stuck:
                    story = await explain(self.client, reference, "default")
                    await asyncio.sleep(0.03)
        except TimeoutError:
            pytest.fail(f"{reference}: is not well: {story}")
        assert "nothing is wrong" in story.sentence
        return story

    def control(self, *names: str, client_of: type[Client] = Client) -> None:
        """Start controllers."""
        client = client_of(from_values(self.server.insecure_url, self.server.token), identity="controllers")

        async def work() -> None:
            async with client:
                await controllers.run(client, controllers.ControllerSettings(names=names))

        self.tasks.append(asyncio.create_task(work(), name="controllers"))

    def sidecars(self, *roles: str, **settings: Any) -> asyncio.Task[None]:
        """Start sidecars of the scripted driver."""
        given = {"csi_address": self.driver.endpoint, "retry_interval_start_s": 0.1, "retry_interval_max_s": 0.5}
        wanted = WantedRoles(
            SidecarSettings(**(given | settings)),
            SidecarEnvironment(namespace="default", hostname="host-1"),
            frozenset(Role(role) for role in roles),
        )
        api = from_values(self.server.insecure_url, self.server.token)
        task = asyncio.create_task(run(wanted, api), name="sidecars")
        self.tasks.append(task)
        return task

    def refuse(self, method: str, code: str, concerns: Callable[[Any], bool] = lambda request: True) -> None:
        """The driver answers calls of a method with a code, from now on: all, or those with certain requests."""
        before = self.driver.chooser
        self.driver.chooser = lambda name, request: (
            Fault(code) if name == method and concerns(request) else before(name, request) if before else None
        )

    async def storage_class(self, name: str = "fast", late: bool = False, default: bool = False, **more: Any) -> None:
        notes = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
        body = {
            "metadata": {"name": name, "annotations": notes},
            "provisioner": DRIVER,
            "allowVolumeExpansion": True,
            "volumeBindingMode": "WaitForFirstConsumer" if late else "Immediate",
        }
        await self.client.create(StorageClass, body | more)

    async def csi_driver(self, **spec: Any) -> None:
        await self.client.create(CSIDriver, {"metadata": {"name": DRIVER}, "spec": {"attachRequired": False, **spec}})

    async def claim(
        self, name: str = "data", storage_class: str | None = "fast", size: str = "1Gi", **spec: Any
    ) -> None:
        meta = spec.pop("metadata", {})
        body: dict[str, Any] = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
        if storage_class is not None:
            body["storageClassName"] = storage_class
        await self.client.create(
            PersistentVolumeClaim, {"metadata": {"name": name, **meta}, "spec": body | spec}, "default"
        )

    async def bound(self, name: str = "data", **more: Any) -> PersistentVolumeClaim:
        """A claim that the sidecars have provisioned and the binder has bound."""
        await self.claim(name, **more)
        return await self.until(PersistentVolumeClaim, name, lambda claim: claim.status.phase == "Bound")

    async def volume(self, name: str = "pv-1", size: str = "1Gi", **spec: Any) -> None:
        body = {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "csi": {"driver": DRIVER, "volumeHandle": f"handle-{name}"},
        }
        await self.client.create(PersistentVolume, {"metadata": {"name": name}, "spec": body | spec})

    async def node(self, name: str = "node-1", ready: bool = True, count: int | None = None, **labels: str) -> None:
        spelled = {"kubernetes.io/hostname": name} | {key.replace("__", "/"): value for key, value in labels.items()}
        notes = {"volumes.kubernetes.io/controller-managed-attach-detach": "true"}
        made = await self.client.create(Node, {"metadata": {"name": name, "labels": spelled, "annotations": notes}})
        await self.set_ready(name, ready)
        driver: dict[str, Any] = {"name": DRIVER, "nodeID": name, "topologyKeys": []}
        if count is not None:
            driver["allocatable"] = {"count": count}
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": made.uid}
        meta = {"name": name, "ownerReferences": [owner]}
        await self.client.create(CSINode, {"metadata": meta, "spec": {"drivers": [driver]}})

    async def set_ready(self, name: str, ready: bool) -> None:
        condition = {"type": "Ready", "status": "True" if ready else "Unknown", "reason": "NodeStatusUnknown"}
        if ready:
            condition["reason"] = "KubeletReady"
        status = {"conditions": [condition], "allocatable": {"cpu": "8", "memory": "8Gi", "pods": "100"}}
        await self.client.patch(Node, name, {"status": status}, subresource="status")

    async def pod(self, name: str = "web", *claims: str, node: str = "", **spec: Any) -> None:
        volumes = [{"name": f"v{at}", "persistentVolumeClaim": {"claimName": one}} for at, one in enumerate(claims)]
        container = {"name": "main", "image": "host", "command": STAY}
        body = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0, **spec}
        if node:
            body["nodeName"] = node
        mounts = [{"name": volume["name"], "mountPath": f"/mnt/{volume['name']}"} for volume in body["volumes"]]
        body["containers"][0]["volumeMounts"] = mounts
        await self.client.create(Pod, {"metadata": {"name": name}, "spec": body}, "default")

    async def snapshot_class(self, name: str = "snaps", driver: str = DRIVER, default: bool = False) -> None:
        notes = {"snapshot.storage.kubernetes.io/is-default-class": "true"} if default else {}
        body = {"metadata": {"name": name, "annotations": notes}, "driver": driver, "deletionPolicy": "Delete"}
        await self.client.create(VolumeSnapshotClass, body)

    async def snapshot(
        self, name: str = "snap", claim: str = "data", cls: str | None = "snaps", content: str = ""
    ) -> None:
        source = {"volumeSnapshotContentName": content} if content else {"persistentVolumeClaimName": claim}
        spec = {"source": source, **({"volumeSnapshotClassName": cls} if cls else {})}
        await self.client.create(VolumeSnapshot, {"metadata": {"name": name}, "spec": spec}, "default")

    async def room(self, storage_class: str, node: str, capacity: str) -> None:
        topology = {"matchLabels": {"kubernetes.io/hostname": node}}
        body = {"metadata": {"name": node}, "storageClassName": storage_class, "capacity": capacity}
        await self.client.create(CSIStorageCapacity, body | {"nodeTopology": topology}, "default")

    async def attributes_class(self, name: str, driver: str = DRIVER, **parameters: str) -> None:
        body = {"metadata": {"name": name}, "driverName": driver, "parameters": parameters or {"iops": "5"}}
        await self.client.create(VolumeAttributesClass, body)

    async def lease(self, name: str, renewed: str = "2020-01-01T00:00:00.000000Z") -> None:
        spec = {"holderIdentity": "host-0", "leaseDurationSeconds": 15, "renewTime": renewed}
        await self.client.create(Lease, {"metadata": {"name": name}, "spec": spec}, "default")

    async def patch_policy(self, policy: str) -> None:
        """Give every volume a reclaim policy."""
        for volume in (await self.client.list(PersistentVolume)).items:
            body = {"spec": {"persistentVolumeReclaimPolicy": policy}}
            await self.client.patch(PersistentVolume, volume.name, body)

    async def check_data(self) -> None:
        """The volumes of deleted claims are Released, and the driver still has them."""
        for volume in (await self.client.list(PersistentVolume)).items:
            await self.until(PersistentVolume, volume.name, lambda one: one.status.phase == "Released")
            assert volume.spec.csi.volume_handle in self.driver.backend.volumes

    async def resize(self, name: str, size: str) -> None:
        patch = {"spec": {"resources": {"requests": {"storage": size}}}}
        await self.client.patch(PersistentVolumeClaim, name, patch, "default")

    async def until(self, kind: Any, name: str, is_so: Callable[[Any], bool]) -> Any:
        """Wait until an object is as wanted, and return it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for task in self.tasks:
                    if task.done() and not task.cancelled():
                        task.result()
                found = await self.client.find(kind, name, "default" if kind.resource.namespaced else "")
                if found is not None and is_so(found):
                    return found
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def _shows(story: Story, step: str, evidence: str) -> bool:
    return step in story.next_step and (not evidence or any(evidence in line for line in story.evidence))


@contextlib.asynccontextmanager
async def laboratory(folder: Path) -> AsyncIterator[Lab]:
    async with (
        serve(folder / "api") as server,
        Client(from_values(server.insecure_url, server.token), identity="test") as client,
        ScriptedDriver(f"unix://{folder}/csi.sock", DRIVER, Abilities()) as driver,
    ):
        lab = Lab(client, driver, server, server.kubeconfig, Shell(server.kubeconfig, folder))
        try:
            yield lab
        finally:
            for gate in driver._gates.values():
                gate.set()
            await lab.stop()


@pytest.fixture
async def lab(tmp_path_factory):
    """A cluster without controllers and sidecars; a test starts those that it needs."""
    async with laboratory(tmp_path_factory.mktemp("lab")) as made:
        yield made


@pytest.fixture(scope="session")
def up():
    """`moorage up` in a process of its own, once for the run: the directory that it keeps its things in."""
    directory = Path(tempfile.mkdtemp(prefix="mi-"))  # sockets want short paths
    command = [sys.executable, "-m", "moorage.cli.main", "up", "--data-dir", str(directory), "--pool-size", "4Gi"]
    with (directory / "up.out").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + 90
            while b"Moorage is up" not in (directory / "up.out").read_bytes():
                assert process.poll() is None, (directory / "up.out").read_text()
                assert time.monotonic() < deadline, (directory / "up.out").read_text()
                time.sleep(0.05)
            yield directory
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
    shutil.rmtree(directory)


@pytest.fixture
async def stack(up, tmp_path):
    """The whole stack with real mounts, as a cluster to ask about."""
    async with Client(from_kubeconfig(up / "kubeconfig"), identity="test") as client:
        made = Lab(client, None, None, up / "kubeconfig", Shell(up / "kubeconfig", tmp_path))
        yield made
        async with asyncio.timeout(PATIENCE_S):
            while await _remains(client):
                await asyncio.sleep(0.05)


async def _remains(client: Client) -> bool:
    """Delete what a test has left; whether anything is still there."""
    found: list[Any] = []
    for kind in (Pod, VolumeSnapshot, PersistentVolumeClaim, PersistentVolume):
        items = (await client.list(kind)).items
        found += items
        for one in items:
            is_volume_of_ours = kind is PersistentVolume and one.spec.persistent_volume_reclaim_policy == "Delete"
            if not one.is_deleting and not is_volume_of_ours:
                with contextlib.suppress(NotFound):
                    await client.delete(kind, one.name, one.namespace, **({"grace_s": 1} if kind is Pod else {}))
    return bool(found)
