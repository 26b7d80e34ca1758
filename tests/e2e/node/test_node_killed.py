"""The command `moorage node` in its own process, killed without warning."""

import asyncio
import signal
import sys

import pytest

from moorage.host import mountinfo
from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.testing import ScriptedDriver

pytestmark = pytest.mark.root
NODE = "e2e-node"


async def make_pod(client):
    meta = {"name": "c1"}
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": "pv1",
            "resources": {"requests": {"storage": "1Gi"}}}  # fmt: skip
    claim = await client.create(PersistentVolumeClaim, {"metadata": meta, "spec": spec}, "default")
    reference = {"kind": "PersistentVolumeClaim", "namespace": "default", "name": "c1", "uid": claim.uid}
    volume = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "claimRef": reference,
              "persistentVolumeReclaimPolicy": "Retain",
              "csi": {"driver": "e2e.dev", "volumeHandle": "vol1"}}  # fmt: skip
    await client.create(PersistentVolume, {"metadata": {"name": "pv1"}, "spec": volume})
    status = {"phase": "Bound", "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"]}
    await client.patch(PersistentVolumeClaim, "c1", {"status": status}, "default", subresource="status")
    command = "trap exit TERM; while true; do echo tick >> /data/log; sleep 0.05 & wait; done"
    container = {"name": "main", "image": "host", "command": ["sh", "-c", command],
                 "volumeMounts": [{"name": "v", "mountPath": "/data"}]}  # fmt: skip
    pod = {"nodeName": NODE, "terminationGracePeriodSeconds": 2, "containers": [container],
           "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c1"}}]}  # fmt: skip
    return await client.create(Pod, {"metadata": {"name": "p1"}, "spec": pod}, "default")


async def test_a_pod_outlives_the_agent_and_the_next_one_takes_it_up_and_away(base, tmp_path, agent, cluster, until):
    driver = ScriptedDriver(
        base / "root/plugins/e2e/csi.sock", "e2e.dev", data=base / "data", registry=base / "root/plugins_registry"
    )
    async with cluster(tmp_path / "api") as (server, client), driver:
        await client.create(CSIDriver, {"metadata": {"name": "e2e.dev"}, "spec": {"attachRequired": False}})
        first = await agent(base, server.kubeconfig, client)
        await make_pod(client)

        async def running():
            return (await client.get(Pod, "p1", "default")).status.phase == "Running"

        await until(running, what="pod running")
        written = base / "data" / "vol1" / "log"
        await until(written.exists)

        first.kill()
        await first.wait()
        size = written.stat().st_size
        await until(lambda: written.stat().st_size > size, what="the container still writes")

        (base / "agent.log").unlink()
        second = await agent(base, server.kubeconfig, client)
        await until(lambda: len(driver.requests("NodePublishVolume")) >= 2, what="publish confirmed")
        size = written.stat().st_size
        await until(lambda: written.stat().st_size > size, what="the container was not disturbed")
        pod = await client.get(Pod, "p1", "default")
        assert pod.status.container_statuses[0].restart_count == 0
        assert pod.status.phase == "Running"

        await client.delete(Pod, "p1", "default")

        async def gone():
            return await client.find(Pod, "p1", "default") is None

        await until(gone, what="pod gone")
        await until(lambda: not mountinfo.mounts_below(base), what="nothing mounted")
        assert list((base / "root" / "pods").iterdir()) == []
        second.send_signal(signal.SIGTERM)
        assert await second.wait() == 0
        assert not (await client.get(Node, NODE)).is_ready


async def test_a_second_agent_on_the_same_root_is_refused(base, tmp_path, agent, cluster):
    async with cluster(tmp_path / "api") as (server, client):
        first = await agent(base, server.kubeconfig, client)
        second = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "moorage.cli.main", "node", "--node-name", "other", "--root-dir",
            str(base / "root"), "--kubeconfig", str(server.kubeconfig), stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await second.communicate()
        assert second.returncode == 2
        assert b"another node agent uses" in said
        first.send_signal(signal.SIGTERM)
        assert await first.wait() == 0


async def test_removing_the_node_takes_its_objects_with_it(base, tmp_path, agent, cluster):
    async with cluster(tmp_path / "api") as (server, client):
        process = await agent(base, server.kubeconfig, client, "--on-stop", "remove")
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert await client.find(Node, NODE) is None


async def test_every_container_runs_once_although_the_agent_is_killed_while_it_starts_them(
    base, tmp_path, agent, cluster, until
):
    names = [f"p{number}" for number in range(24)]
    (base / "seen").mkdir()

    def started():
        return sum((base / "seen" / name).exists() for name in names)

    async with cluster(tmp_path / "api") as (server, client):
        process = await agent(base, server.kubeconfig, client)
        for name in names:
            command = f"echo begun >> /seen/{name}; trap exit TERM; sleep 1000 & wait"
            container = {"name": "main", "image": "host", "command": ["sh", "-c", command],
                         "volumeMounts": [{"name": "h", "mountPath": "/seen"}]}  # fmt: skip
            spec = {"nodeName": NODE, "restartPolicy": "Never", "terminationGracePeriodSeconds": 5,
                    "automountServiceAccountToken": False, "containers": [container],
                    "volumes": [{"name": "h", "hostPath": {"path": str(base / "seen")}}]}  # fmt: skip
            await client.create(Pod, {"metadata": {"name": name}, "spec": spec}, "default")
        for wanted in (1, 8, 16):
            await until(lambda wanted=wanted: started() >= wanted, what=f"{wanted} containers")
            process.kill()
            await process.wait()
            (base / "agent.log").unlink()
            process = await agent(base, server.kubeconfig, client)

        async def all_running():
            pods = (await client.list(Pod, "default")).items
            assert {pod.status.phase for pod in pods} <= {"Pending", "Running"}
            return all(pod.status.phase == "Running" for pod in pods)

        await until(all_running, what="all running")
        await until(lambda: started() == len(names), what="all begun")
        assert {(base / "seen" / name).read_text() for name in names} == {"begun\n"}
        pods = (await client.list(Pod, "default")).items
        assert {one.restart_count for pod in pods for one in pod.status.container_statuses} == {0}
        for name in names:
            await client.delete(Pod, name, "default")

        async def gone():
            return not (await client.list(Pod, "default")).items

        await until(gone, what="pods gone")
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
