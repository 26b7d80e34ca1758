"""Volumes of pods, with real mounts and a driver that misbehaves."""

import asyncio
import os
import shutil

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.host import mountinfo, mounts
from moorage.kube.objects.core import Node
from moorage.kube.objects.storage import VolumeAttachment
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import attachment_name
from moorage.node.runtime import namespaces
from moorage.node.volumes.driver_calls import uncover
from moorage.testing import DIE, GARBAGE, HANG, LIE, ScriptedDriver

pytestmark = pytest.mark.root


async def test_a_pod_gets_its_volume_and_leaves_nothing_behind(lab):
    await lab.driver_object(podInfoOnMount=True)
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent()
        pod = await lab.pod(command="echo kept > /data/file; sleep 1000")
        await lab.phase("p1", "Running")
        kept = lab.base / "d" / "scripted.dev" / "vol-c1" / "file"
        await lab.until(kept.exists)
        (stage,), (publish,) = driver.requests("NodeStageVolume"), driver.requests("NodePublishVolume")
        assert stage.staging_target_path == publish.staging_target_path
        assert publish.target_path == str(lab.target(pod))
        assert publish.volume_context["csi.storage.k8s.io/pod.name"] == "p1"
        assert not publish.readonly

        await lab.delete("p1")
        await lab.gone("p1")
        await lab.until(lambda: driver.requests("NodeUnstageVolume"), what="unstaged")
        await lab.until(lambda: not lab.mounted())
        assert not (lab.root / "pods" / pod.uid).exists()
        assert kept.read_text() == "kept\n"
        await lab.stop_agent()


@pytest.mark.parametrize("method", ["NodeStageVolume", "NodePublishVolume"])
@pytest.mark.parametrize("what", ["INTERNAL", "UNAVAILABLE", GARBAGE])
@pytest.mark.parametrize("is_done", [False, True])
async def test_a_wrong_answer_is_survived_whether_or_not_the_work_was_done(lab, method, what, is_done):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent()
        driver.fail(method, what, is_done=is_done)
        await lab.pod()
        await lab.phase("p1", "Running")
        assert len(driver.requests(method)) == 2
        assert any("failed for volume" in text for text in await lab.messages("FailedMount"))
        await lab.end("p1")


@pytest.mark.parametrize("method", ["NodeUnpublishVolume", "NodeUnstageVolume"])
@pytest.mark.parametrize("what", ["INTERNAL", "UNAVAILABLE", LIE])
async def test_teardown_is_repeated_until_the_kernel_agrees(lab, method, what):
    async with lab.one_pod() as (driver, _):
        driver.fail(method, what)
        await lab.delete("p1")
        await lab.gone("p1")
        await lab.until(lambda: not lab.mounted())
        assert len(driver.requests(method)) == 2
        unpublished = [index for index, (name, _) in enumerate(driver.calls) if name == "NodeUnpublishVolume"]
        unstaged = [index for index, (name, _) in enumerate(driver.calls) if name == "NodeUnstageVolume"]
        assert max(unpublished) < min(unstaged)
        await lab.stop_agent()


async def test_a_pod_deleted_while_its_driver_hangs_is_cleaned_up_with_everything_the_driver_may_have_done(lab):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent(call_timeout_s=0.5)
        driver.fail("NodePublishVolume", HANG, HANG, HANG, is_done=True)
        await lab.pod()
        await lab.until(lambda: driver.requests("NodePublishVolume"))
        await lab.delete("p1")
        await lab.gone("p1")
        assert driver.requests("NodeUnpublishVolume")
        await lab.until(lambda: not lab.mounted())
        driver.release()
        await lab.stop_agent()


async def test_a_driver_that_dies_in_the_middle_of_staging_is_asked_again_when_it_is_back(lab):
    await lab.driver_object()
    await lab.volume()
    driver = lab.driver()
    await driver.start()
    await lab.start_agent()
    driver.fail("NodeStageVolume", DIE, is_done=True)
    await lab.pod()
    await lab.until(lambda: driver.requests("NodeStageVolume"))
    await lab.until(lambda: not driver._servers, what="driver dead")
    await driver.start()
    await lab.phase("p1", "Running", timeout_s=60)
    assert len(driver.requests("NodeStageVolume")) == 2, "nobody knows what the first call did"
    await lab.end("p1")
    assert len(driver.requests("NodeUnstageVolume")) == 1
    await driver.stop()


async def test_two_pods_share_a_volume_and_it_is_staged_once_and_unstaged_after_both(lab):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent()
        for name in ("p1", "p2"):
            await lab.pod(name)
        for name in ("p1", "p2"):
            await lab.phase(name, "Running")
        assert len(driver.requests("NodeStageVolume")) == 1
        await lab.delete("p1")
        await lab.gone("p1")
        await asyncio.sleep(0.1)
        assert driver.requests("NodeUnstageVolume") == []
        await lab.delete("p2")
        await lab.gone("p2")
        await lab.until(lambda: driver.requests("NodeUnstageVolume"))
        await lab.until(lambda: not lab.mounted())
        await lab.stop_agent()


async def test_read_write_once_pod_is_for_one_pod(lab):
    await lab.driver_object()
    await lab.volume(modes=("ReadWriteOncePod",))
    async with lab.driver() as driver:
        await lab.start_agent()
        await lab.pod("p1")
        await lab.phase("p1", "Running")
        second = await lab.pod("p2")
        await lab.phase("p2", "Pending")
        await asyncio.sleep(0.2)
        assert {request.target_path for request in driver.requests("NodePublishVolume")} != {str(lab.target(second))}
        assert len(driver.requests("NodePublishVolume")) == 1
        await lab.delete("p1")
        await lab.phase("p2", "Running")
        await lab.end("p2")


async def test_an_attachable_volume_waits_for_the_whole_handshake(lab):
    await lab.driver_object(attachRequired=True)
    await lab.volume()
    unique = "kubernetes.io/csi/scripted.dev^vol-c1"
    async with lab.driver() as driver:
        await lab.start_agent()
        await lab.pod()

        async def reported():
            return unique in (await lab.client.get(Node, "n1")).status.volumes_in_use

        await lab.until(reported, what="volume in use")
        assert driver.requests("NodeStageVolume") == []
        name = attachment_name("scripted.dev", "vol-c1", "n1")
        await lab.client.create(
            VolumeAttachment,
            {
                "metadata": {"name": name},
                "spec": {
                    "attacher": "scripted.dev",
                    "nodeName": "n1",
                    "source": {"persistentVolumeName": "pv-c1"},
                },
            },
        )
        status = {"status": {"attached": True, "attachmentMetadata": {"device": "here"}}}
        await lab.client.patch(VolumeAttachment, name, status, subresource="status")
        await asyncio.sleep(0.1)
        assert driver.requests("NodeStageVolume") == []  # the node does not list it yet
        listed = {"status": {"volumesAttached": [{"name": unique, "devicePath": ""}]}}
        await lab.client.patch(Node, "n1", listed, subresource="status")
        await lab.phase("p1", "Running")
        assert driver.requests("NodeStageVolume")[0].publish_context["device"] == "here"

        await lab.delete("p1")
        await lab.gone("p1")

        async def cleared():
            return unique not in (await lab.client.get(Node, "n1")).status.volumes_in_use

        await lab.until(cleared, what="no longer in use")
        assert driver.requests("NodeUnstageVolume")
        await lab.stop_agent()


async def test_after_a_crash_running_pods_keep_their_volumes_and_dead_ones_lose_them(lab):
    await lab.driver_object()
    await lab.volume("c1")
    await lab.volume("c2")
    async with lab.driver() as driver:
        agent = await lab.start_agent()
        kept = await lab.pod("stays", "c1", "echo $$ > /data/pid; sleep 1000")
        lost = await lab.pod("goes", "c2")
        for name in ("stays", "goes"):
            await lab.phase(name, "Running")
        before = agent.pods.workers[kept.uid].containers["main"][-1].state["pid"]
        await lab.crash_agent()
        await lab.delete("goes", grace_s=0)  # gone from the API while nobody looks
        driver.calls.clear()

        agent = await lab.start_agent()
        await lab.until(lambda: mountinfo.mount_at(lab.target(lost, "c2")) is None, what="orphan unmounted")
        await lab.until(lambda: not (lab.root / "pods" / lost.uid).exists(), what="orphan directory removed")
        await lab.until(lambda: driver.requests("NodePublishVolume"))
        assert {request.volume_id for request in driver.requests("NodeUnpublishVolume")} == {"vol-c2"}
        assert mountinfo.mount_at(lab.target(kept, "c1")) is not None
        container = agent.pods.workers[kept.uid].containers["main"][-1]
        assert container.is_running
        assert container.state["pid"] == before
        await lab.end("stays")


@pytest.mark.parametrize("is_running", [True, False], ids=["seen by the agent", "while no agent runs"])
async def test_a_successor_of_a_force_deleted_pod_never_writes_beside_it(lab, is_running):
    await lab.driver_object()
    await lab.volume("c1")
    async with lab.driver():
        await lab.start_agent()
        await lab.pod("p1", "c1", "trap '' TERM; while :; do echo old >> /data/log; sleep 0.05; done")
        await lab.phase("p1", "Running")
        if not is_running:
            await lab.crash_agent()
        await lab.delete("p1", grace_s=0)
        new = await lab.pod("p1", "c1", "while :; do echo new >> /data/log; sleep 0.05; done")
        if not is_running:
            await lab.start_agent()
        await lab.phase("p1", "Running")
        log = lab.target(new, "c1") / "log"
        await lab.until(lambda: log.read_text().count("new") > 5)
        words = log.read_text().split()
        assert words == sorted(words, reverse=True)  # every "old" before every "new"
        assert "old" in words
        await lab.end("p1")


async def test_a_volume_left_staged_by_a_crash_is_unstaged(lab):
    async with lab.one_pod() as (driver, _):
        driver.fail("NodeUnstageVolume", *["UNAVAILABLE"] * 20)
        await lab.delete("p1")
        await lab.gone("p1")
        await lab.crash_agent()
        driver.recover()
        assert lab.mounted()
        await lab.start_agent()
        await lab.until(lambda: not lab.mounted())
        await lab.stop_agent()


async def test_republishing_repeats_the_call_and_its_failure_leaves_the_mount(lab):
    await lab.driver_object(requiresRepublish=True)
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent(sync_s=0.2)
        pod = await lab.pod()
        await lab.phase("p1", "Running")
        driver.fail("NodePublishVolume", "INTERNAL")
        count = len(driver.requests("NodePublishVolume"))
        await lab.until(lambda: len(driver.requests("NodePublishVolume")) >= count + 2)
        assert mountinfo.mount_at(lab.target(pod)) is not None
        assert len(driver.requests("NodeStageVolume")) == 1
        await lab.end("p1")


async def test_a_volume_grows_while_the_pod_runs(lab):
    async with lab.one_pod() as (driver, _):
        waiting = {
            "allocatedResources": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": "NodeResizePending"},
        }
        await lab.client.patch(PersistentVolumeClaim, "c1", {"status": waiting}, "default", subresource="status")
        await lab.client.patch(PersistentVolume, "pv-c1", {"spec": {"capacity": {"storage": "2Gi"}}})

        async def grown():
            claim = await lab.client.get(PersistentVolumeClaim, "c1", "default")
            return claim.status.capacity["storage"] == "2Gi" and claim

        claim = await lab.until(grown, what="claim grown")
        assert claim.status.allocated_resource_statuses == {}
        assert driver.sizes == {"vol-c1": 2 << 30}
        await lab.end("p1")


async def test_a_driver_that_cannot_grow_says_so_in_the_claim(lab):
    async with lab.one_pod() as (driver, _):
        driver.fail("NodeExpandVolume", "OUT_OF_RANGE")
        waiting = {
            "allocatedResources": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": "NodeResizePending"},
        }
        await lab.client.patch(PersistentVolumeClaim, "c1", {"status": waiting}, "default", subresource="status")
        await lab.client.patch(PersistentVolume, "pv-c1", {"spec": {"capacity": {"storage": "2Gi"}}})

        async def refused():
            claim = await lab.client.get(PersistentVolumeClaim, "c1", "default")
            return claim.status.allocated_resource_statuses.get("storage") == "NodeResizeInfeasible" and claim

        claim = await lab.until(refused, what="refusal recorded")
        assert [one.type for one in claim.status.conditions if "Resize" in one.type] == ["NodeResizeError"]
        await lab.end("p1")


async def test_nothing_is_removed_through_a_mount_that_was_planted_below_a_pod(lab):
    """Somebody bind-mounts precious data below a directory that the agent is about to clean."""
    precious = lab.base / "precious"
    precious.mkdir()
    (precious / "data").write_text("irreplaceable")
    lab.may_leave_mounts = True
    agent = await lab.start_agent()
    empty = [{"name": "data", "emptyDir": {}}]
    pod = await lab.pod(claim="", volumes=empty, mounts=[{"name": "data", "mountPath": "/data"}])
    await lab.phase("p1", "Running")
    inside = lab.root / "pods" / pod.uid / "volumes" / "kubernetes.io~empty-dir" / "data" / "trap"
    inside.mkdir()
    beside = lab.root / "pods" / pod.uid / "containers" / "main" / "trap"
    beside.mkdir()
    for trap in (inside, beside):
        mounts.bind(precious, trap)  # same filesystem: st_dev would not tell
    await lab.delete("p1", grace_s=1)
    worker = agent.pods.workers[pod.uid]
    await lab.until(lambda: not any(c.is_running for a in worker.containers.values() for c in a))
    name = f"kubernetes.io/empty-dir/{pod.uid}-data"
    await lab.until(lambda: agent.volumes.world.actual[name].backoffs, what="unmount refused")
    assert (precious / "data").read_text() == "irreplaceable"

    mounts.unmount(inside)
    await lab.until(lambda: name not in agent.volumes.world.actual, what="volume gone")
    await lab.until(lambda: worker._failures > 0, what="pod directory refused")
    assert (precious / "data").read_text() == "irreplaceable"

    mounts.unmount(beside)
    await lab.gone("p1", timeout_s=30)
    assert not (lab.root / "pods" / pod.uid).exists()
    assert (precious / "data").read_text() == "irreplaceable"
    await lab.stop_agent()


async def test_a_volume_unmounted_behind_the_agents_back_is_no_obstacle(lab):
    async with lab.one_pod() as (driver, pod):
        mounts.unmount(lab.target(pod), lazy=True)
        await lab.end("p1")
        undone = [len(driver.requests(method)) for method in ("NodeUnpublishVolume", "NodeUnstageVolume")]
        assert undone == [1, 1], "the driver is told all the same"


async def test_what_is_mounted_over_a_volume_does_not_cost_its_data(lab, monkeypatch):
    """Drivers take off one mount, and then remove what they take for an empty directory."""

    async def take_off_one(driver, request):
        if mountinfo.mount_at(request.target_path) is not None:
            mounts.unmount(request.target_path)
        shutil.rmtree(request.target_path)
        return pb.NodeUnpublishVolumeResponse()

    monkeypatch.setattr(ScriptedDriver, "NodeUnpublishVolume", take_off_one)
    async with lab.one_pod() as (driver, pod):
        (lab.target(pod) / "data").write_text("irreplaceable")
        for _ in range(2):
            mounts.mount("over", lab.target(pod), "tmpfs")
        await lab.end("p1")
        assert (driver.data / "vol-c1" / "data").read_text() == "irreplaceable"
        assert len(driver.requests("NodeUnpublishVolume")) == 1


def test_a_mount_that_is_there_twice_in_name_only_is_left_to_its_driver(tmp_path):
    """Whoever has bind-mounted the root directory on itself has every later mount below it on both."""
    mounts.mount("parent", tmp_path, "tmpfs")
    try:
        namespaces.mount("none", str(tmp_path), "", namespaces.MS_SHARED)
        root = tmp_path / "root"
        target = root / "target"
        target.mkdir(parents=True)
        mounts.bind(root, root)
        mounts.mount("volume", target, "tmpfs")
        assert len(mountinfo.mounts_at(target)) == 2
        uncover(target)
        assert len(mountinfo.mounts_at(target)) == 2
        mounts.mount("over", target, "tmpfs")
        uncover(target)
        assert {mount.source for mount in mountinfo.mounts_at(target)} == {"volume"}
    finally:
        for one in reversed(mountinfo.mounts_below(tmp_path)):
            if mountinfo.is_mounted(one.target):
                mounts.unmount(one.target, lazy=True)


async def test_files_left_in_a_volume_directory_stop_its_removal_and_are_not_deleted(lab):
    async with lab.one_pod() as (_, pod):
        stray = lab.target(pod).parent / "stray"
        stray.write_text("whose is this")
        await lab.delete("p1")
        agent = lab.agent
        name = "kubernetes.io/csi/scripted.dev^vol-c1"
        await lab.until(lambda: agent.volumes.world.actual[name].backoffs, what="removal refused")
        assert stray.read_text() == "whose is this"
        stray.unlink()
        await lab.gone("p1")
        await lab.until(lambda: not lab.mounted(), what="nothing mounted")
        await lab.stop_agent()


async def test_a_block_volume_is_a_device_in_the_container(lab):
    from moorage.host import loop

    backing = lab.base / "disk"
    backing.write_bytes(b"\0" * (1 << 20))
    device = loop.attach(backing, direct_io=False)
    try:
        await lab.driver_object()
        await lab.volume(mode="Block")
        async with lab.driver() as driver:
            (driver.data / "vol-c1.device").symlink_to(device.path)
            await lab.start_agent()
            pod = await lab.pod(
                command="printf hello > /dev/disk; sync; sleep 1000",
                devices=[{"name": "data", "devicePath": "/dev/disk"}],
            )
            await lab.phase("p1", "Running")
            link = lab.root / "pods" / pod.uid / "volumeDevices" / "kubernetes.io~csi" / "pv-c1"
            assert os.stat(link).st_rdev == os.stat(device.path).st_rdev
            await lab.until(lambda: backing.read_bytes().startswith(b"hello"), what="data on the device")
            await lab.crash_agent()
            await lab.start_agent()
            await lab.delete("p1")
            await lab.gone("p1")
            await lab.until(lambda: driver.requests("NodeUnstageVolume"))
            await lab.until(lambda: not lab.mounted())
            assert not (lab.root / "plugins/kubernetes.io/csi/volumeDevices/pv-c1").exists()
            await lab.stop_agent()
    finally:
        loop.detach(device)


async def test_an_inline_volume_needs_no_stage_and_dies_with_its_pod(lab):
    await lab.driver_object(volumeLifecycleModes=["Ephemeral"])
    async with lab.driver() as driver:
        await lab.start_agent()
        volumes = [{"name": "data", "csi": {"driver": "scripted.dev", "volumeAttributes": {"a": "b"}}}]
        await lab.pod(claim="", volumes=volumes, mounts=[{"name": "data", "mountPath": "/data"}])
        await lab.phase("p1", "Running")
        (request,) = driver.requests("NodePublishVolume")
        assert request.volume_id.startswith("csi-")
        assert request.volume_context["a"] == "b"
        assert driver.requests("NodeStageVolume") == []
        await lab.delete("p1")
        await lab.gone("p1")
        assert driver.requests("NodeUnpublishVolume")[0].volume_id == request.volume_id
        await lab.stop_agent()


async def test_the_groups_files_and_a_read_only_use(lab):
    await lab.driver_object(fsGroupPolicy="File")
    await lab.volume()
    async with lab.driver() as driver:
        data = driver.data / "vol-c1"
        data.mkdir()
        (data / "f").write_text("x")
        await lab.start_agent()
        await lab.pod("p1", securityContext={"fsGroup": 4321})
        await lab.phase("p1", "Running")
        assert (data / "f").stat().st_gid == 4321
        volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "c1", "readOnly": True}}]
        await lab.pod("p2", volumes=volumes, command="touch /data/no && exit 1; exit 0", restartPolicy="Never")
        await lab.phase("p2", "Succeeded")
        assert driver.requests("NodePublishVolume")[-1].readonly
        await lab.end("p1", "p2")
