"""What happens around the agent: dead mounts, mounts taken away, no room, another driver, other agents."""

import asyncio
import contextlib
import os

import pytest

from moorage.csi import pending
from moorage.errors import MoorageError
from moorage.host import libc, mountinfo, mounts
from moorage.kube.api import config as kube_config
from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.node.config import AgentConfig
from moorage.node.run import run
from moorage.testing import HANG, LIE

pytestmark = pytest.mark.root
VOLUME = "kubernetes.io/csi/scripted.dev^vol-c1"
_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096


def mount_and_kill(target):
    """Mount a FUSE filesystem whose server is gone: every access ends in ENOTCONN."""
    server = os.open("/dev/fuse", os.O_RDWR)
    try:
        libc.mount("dead", str(target), "fuse", 0, f"fd={server},rootmode=40000,user_id=0,group_id=0")
    finally:
        os.close(server)
    assert mounts.is_corrupted(target)


async def test_a_dead_mount_is_taken_away_although_the_driver_did_nothing(lab):
    async with lab.one_pod() as (driver, pod):
        (driver.data / "vol-c1" / "kept").write_text("data")
        staging = next(lab.root.glob("plugins/kubernetes.io/csi/scripted.dev/*/globalmount"))
        for place in (lab.target(pod), staging):
            mounts.unmount(place, lazy=True)
            mount_and_kill(place)
        driver.fail("NodeUnpublishVolume", LIE)
        driver.fail("NodeUnstageVolume", LIE)
        await lab.end("p1")
        assert len(driver.requests("NodeUnpublishVolume")) == len(driver.requests("NodeUnstageVolume")) == 1
        assert (driver.data / "vol-c1" / "kept").read_text() == "data"


async def test_mounts_that_died_while_no_agent_was_there_are_made_anew(lab):
    async with lab.one_pod() as (driver, pod):
        (driver.data / "vol-c1" / "kept").write_text("data")
        await lab.crash_agent()
        staging = next(lab.root.glob("plugins/kubernetes.io/csi/scripted.dev/*/globalmount"))
        for place in (lab.target(pod), staging):
            mounts.unmount(place, lazy=True)
            mount_and_kill(place)
        agent = await lab.start_agent()
        await lab.until(lambda: agent.volumes.is_mounted(pod), what="volume confirmed")
        assert (lab.target(pod) / "kept").read_text() == "data"
        await lab.end("p1")


async def test_a_staged_mount_taken_away_is_made_again_for_the_next_pod(lab):
    async with lab.one_pod() as (driver, _):
        (driver.data / "vol-c1" / "kept").write_text("data")
        staging = next(lab.root.glob("plugins/kubernetes.io/csi/scripted.dev/*/globalmount"))
        mounts.unmount(staging, lazy=True)
        await lab.pod("p2", command="cat /data/kept", restartPolicy="Never")
        await lab.phase("p2", "Succeeded")
        assert mountinfo.mount_at(staging) is not None
        await lab.end("p1", "p2")


async def test_a_container_started_again_finds_its_volume_although_the_mount_was_taken_away(lab):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent()
        command = (
            "[ -e /data/second ] && exit 0; touch /data/first; while [ ! -e /data/go ]; do sleep 0.05; done; exit 1"
        )
        pod = await lab.pod(command=command, restartPolicy="OnFailure")
        data = driver.data / "vol-c1"
        await lab.until((data / "first").exists, what="first attempt runs")
        mounts.unmount(lab.target(pod), lazy=True)
        (data / "second").touch()
        (data / "go").touch()
        await lab.phase("p1", "Succeeded")
        assert len(driver.requests("NodePublishVolume")) >= 2
        await lab.end("p1")


async def test_a_driver_replaced_while_it_stages_is_asked_again_behind_its_new_socket(lab):
    await lab.driver_object()
    await lab.volume()
    old, new = lab.driver(), lab.driver()
    await old.start()
    await lab.start_agent(call_timeout_s=60.0)
    old.fail("NodeStageVolume", HANG)
    await lab.pod()
    await lab.until(lambda: old.requests("NodeStageVolume"), what="the old driver is staging")
    await new.start()  # same paths, other sockets
    await lab.phase("p1", "Running")
    assert new.requests("NodeStageVolume")
    await lab.end("p1")
    await new.stop()
    await old.stop()  # gRPC removes the socket's path, whoever made it last


async def test_a_pod_force_deleted_while_it_starts_leaves_nothing(lab):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        agent = await lab.start_agent(call_timeout_s=1.0)
        driver.fail("NodePublishVolume", HANG, HANG, is_done=True)
        pod = await lab.pod()
        await lab.until(lambda: driver.requests("NodePublishVolume"))
        await lab.delete("p1", grace_s=0)
        assert await lab.client.find(Pod, "p1", "default") is None
        await lab.until(lambda: pod.uid not in agent.pods.workers, what="pod forgotten")
        await lab.until(lambda: VOLUME not in agent.volumes.world.actual, what="volume forgotten")
        assert lab.mounted() == []
        assert not (lab.root / "pods" / pod.uid).exists()
        driver.release()
        await lab.stop_agent()


@contextlib.contextmanager
def small_disk(lab, size="4m"):
    """The agent's root directory on a disk of its own."""
    disk = lab.base / "disk"
    disk.mkdir()
    libc.mount("small", str(disk), "tmpfs", 0, f"size={size}")
    lab.root = disk / "r"
    yield disk
    mounts.unmount(disk, lazy=True)


async def test_a_full_root_directory_holds_pods_up_until_there_is_room(lab):
    await lab.driver_object()
    await lab.volume()
    with small_disk(lab) as disk:
        async with lab.driver() as driver:
            await lab.start_agent()
            await lab.until(lambda: lab.agent.registry.find("scripted.dev"), what="driver registered")
            with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"x" * 4096):
                    pass
            await lab.pod()

            async def complained():
                return [text for text in await lab.messages("FailedMount") if "No space left" in text]

            await lab.until(complained, what="event about the full disk")
            assert driver.requests("NodePublishVolume") == []
            (disk / "filler").unlink()
            await lab.phase("p1", "Running")
            await lab.end("p1")
            assert list((lab.root / "pods").iterdir()) == []


async def test_a_root_directory_that_becomes_read_only_stops_nothing_that_runs(lab):
    await lab.driver_object()
    await lab.volume("c1")
    await lab.volume("c2")
    async with lab.driver():
        await lab.start_agent()
        first = await lab.pod("p1", "c1")
        await lab.phase("p1", "Running")
        pods = lab.root / "pods"
        mounts.bind(pods, pods)
        mounts.bind(lab.target(first), lab.target(first))  # the first pod's volume shows through
        libc.mount("none", str(pods), "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY, "")
        await lab.pod("p2", "c2")

        async def complained():
            return [text for text in await lab.messages("FailedMount") if "Read-only file system" in text]

        await lab.until(complained, what="event about the read-only disk")
        assert (await lab.client.get(Pod, "p1", "default")).status.phase == "Running"
        for one in reversed(mountinfo.mounts_below(pods)):
            if one.target == str(pods):
                mounts.unmount(one.target, lazy=True)
        await lab.phase("p2", "Running")
        await lab.end("p1", "p2")


async def test_a_root_directory_that_cannot_be_written_is_refused_at_the_start(lab):
    lab.root.mkdir()
    mounts.bind(lab.root, lab.root, ["ro"])
    try:
        api = kube_config.from_kubeconfig(lab.server.kubeconfig)
        with pytest.raises(MoorageError, match="Read-only file system"):
            await run(AgentConfig("n1", lab.root, api), asyncio.Event())
    finally:
        mounts.unmount(lab.root)


async def test_several_agents_on_one_machine_keep_out_of_each_others_way(lab):
    await lab.driver_object()
    await lab.volume("c1")
    await lab.volume("c2")
    other_root = lab.base / "r2"
    async with lab.driver() as one:
        second = type(one)(
            other_root / "plugins" / "csi.sock", "scripted.dev", data=one.data, registry=other_root / "plugins_registry"
        )
        await second.start()
        await lab.start_agent()
        stop = asyncio.Event()
        api = kube_config.from_kubeconfig(lab.server.kubeconfig)
        task = asyncio.create_task(run(AgentConfig("n2", other_root, api), stop))

        async def ready():
            assert not task.done()
            node = await lab.client.find(Node, "n2")
            return node is not None and node.is_ready

        await lab.until(ready, what="second agent ready")
        await lab.pod("p1", "c1")
        await lab.pod("p2", "c2", nodeName="n2")
        for name in ("p1", "p2"):
            await lab.phase(name, "Running")
        assert {request.volume_id for request in one.requests("NodePublishVolume")} == {"vol-c1"}
        assert {request.volume_id for request in second.requests("NodePublishVolume")} == {"vol-c2"}
        await lab.end("p1")
        assert (await lab.client.get(Pod, "p2", "default")).status.phase == "Running"
        assert len(mountinfo.mounts_below(other_root)) == 2
        await lab.delete("p2")
        await lab.gone("p2")
        await lab.until(lambda: not mountinfo.mounts_below(other_root))
        stop.set()
        await task
        await second.stop()


async def test_a_privileged_container_mounts_for_the_host_too(lab):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent()
        both = [{"name": "data", "mountPath": "/data", "mountPropagation": "Bidirectional"}]
        command = ("mkdir -p /data/sub && mount -t tmpfs inside /data/sub && touch /data/sub/made /data/ready; "
                   "trap 'umount /data/sub; exit' TERM; sleep 1000 & wait")  # fmt: skip
        plain = await lab.pod("p0", "c1", mounts=both)

        async def refused():
            return [text for text in await lab.messages("Failed") if "only for privileged" in text]

        await lab.until(refused, what="refusal")
        await lab.delete("p0")
        await lab.gone("p0")
        allowed = {"securityContext": {"privileged": True}, "command": ["sh", "-c", command]}
        pod = await lab.pod(mounts=both, terminationGracePeriodSeconds=20, container=allowed)
        assert pod.uid != plain.uid
        await lab.until((driver.data / "vol-c1" / "ready").exists, what="mounted inside")
        assert (lab.target(pod) / "sub" / "made").exists()
        await lab.end("p1")
        assert not (driver.data / "vol-c1" / "sub" / "made").exists()


async def test_what_goes_well_is_told_later_while_many_volumes_wait_for_a_driver(lab):
    """What goes wrong is told at once."""
    await lab.driver_object()
    names = [f"c{number}" for number in range(12)]
    async with lab.driver() as driver:
        agent = await lab.start_agent()
        driver.fail("NodeStageVolume", *[HANG] * len(names))
        for name in names:
            await lab.volume(name)
            await lab.pod(name, name)
        await lab.until(lambda: agent.volumes.under_way == len(names), what="all under way")
        await lab.pod("well", "")
        await lab.phase("well", "Running")
        await lab.pod("badly", "", container={"image": "nginx"})
        await lab.until(lambda: lab.messages("Failed"), what="the warning")
        assert await lab.messages("Started") == []
        driver.release()
        for name in names:
            await lab.phase(name, "Running")
        await lab.until(lambda: is_told(lab, len(names) + 1), what="all told")
        await lab.end(*names, "well", "badly")


async def is_told(lab, count):
    return len(await lab.messages("Started")) == count


async def test_a_call_without_answer_is_told_on_the_pod_while_it_waits(lab, monkeypatch):
    monkeypatch.setattr(pending, "FIRST_S", 0.1)
    await lab.start_agent()
    async with lab.driver() as driver:
        await lab.driver_object()
        await lab.volume()
        gate = driver.hold("NodeStageVolume")
        await lab.pod()
        [message] = await lab.until(lambda: lab.messages("WaitingForDriver"), what="the wait is told")
        assert message.startswith("NodeStageVolume has been waiting for driver scripted.dev since ")
        gate.set()
        [message] = await lab.until(lambda: lab.messages("DriverAnswered"), what="the answer is told")
        assert message.startswith("driver scripted.dev answered NodeStageVolume after ")
        await lab.phase("p1", "Running")
        await lab.end("p1")
