"""Claims and volumes as they really occur: missing, replaced, shared, read-only, exclusive."""

import asyncio
import contextlib
import itertools

import pytest

from moorage.host import loop, mountinfo
from moorage.kube.objects.core import Event
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.node.volumes import driver_calls
from moorage.node.volumes.mounters import vol_data

pytestmark = pytest.mark.root


async def warnings(lab, words):
    found = await lab.client.list(Event, "default")
    return [one for one in found.items if one.reason == "FailedMount" and words in one.message]


async def test_a_pod_whose_claim_cannot_be_used_is_told_why_and_starts_once_it_can(lab):
    await lab.driver_object()
    async with lab.driver() as driver:
        await lab.start_agent()
        await lab.pod()
        await lab.until(lambda: warnings(lab, "'default/c1' not found"), what="event about the missing claim")
        assert driver.requests("NodeStageVolume") == []
        await lab.volume()
        await lab.phase("p1", "Running")
        await lab.end("p1")


async def test_a_secret_that_is_missing_is_told_of_for_the_step_that_needs_it(lab):
    await lab.driver_object()
    await lab.volume(csi={"nodePublishSecretRef": {"name": "none", "namespace": "default"}})
    async with lab.driver() as driver:
        await lab.start_agent()
        await lab.pod()
        await lab.until(lambda: warnings(lab, 'MountVolume.SetUp failed for volume "pv-c1" : secret default/none'))
        assert (len(driver.requests("NodeStageVolume")), driver.requests("NodePublishVolume")) == (1, [])
        await lab.end("p1")


async def test_a_second_pod_hears_why_it_does_not_get_a_read_write_once_pod_volume(lab):
    await lab.driver_object()
    await lab.volume(modes=("ReadWriteOncePod",))
    async with lab.driver() as driver:
        await lab.start_agent()
        await lab.pod("p1")
        await lab.phase("p1", "Running")
        await lab.pod("p2")
        await lab.until(lambda: warnings(lab, "ReadWriteOncePod"), what="event about the other pod")
        assert len(driver.requests("NodePublishVolume")) == 1
        await lab.delete("p1")
        await lab.phase("p2", "Running")
        await lab.gone("p1")
        await lab.end("p2")


async def bind_anew(lab):
    """The claim c1 is deleted and made anew, bound to another volume."""
    await lab.client.patch(PersistentVolumeClaim, "c1", {"metadata": {"finalizers": None}}, "default")
    await lab.client.delete(PersistentVolumeClaim, "c1", "default")
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": "pv-new"}
    claim = await lab.client.create(
        PersistentVolumeClaim,
        {"metadata": {"name": "c1"}, "spec": {**spec, "resources": {"requests": {"storage": "1Gi"}}}},
        "default",
    )
    owner = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "default", "name": "c1"}
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {**owner, "uid": claim.uid},
        "csi": {"driver": "scripted.dev", "volumeHandle": "vol-new"},
    }
    await lab.client.create(PersistentVolume, {"metadata": {"name": "pv-new"}, "spec": spec})
    status = {"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}}
    await lab.client.patch(PersistentVolumeClaim, "c1", status, "default", subresource="status")


@contextlib.asynccontextmanager
async def outdated(lab):
    """A driver and an agent that has heard of the claim c1, but not that it is bound to another volume by now."""
    await lab.driver_object()
    await lab.volume("c1")
    async with lab.driver() as driver:
        agent = await lab.start_agent()
        await lab.until(lambda: agent.claims.get("default/c1"), what="claim heard of")
        agent.claims._take = lambda event: None  # the watch of claims falls behind
        await bind_anew(lab)
        yield driver, agent


async def test_what_was_heard_of_a_claim_may_be_old_but_its_old_volume_is_shown_to_nobody(lab, monkeypatch):
    monkeypatch.setattr(driver_calls, "_SOON_S", 60.0)  # however slow this machine is now
    async with outdated(lab) as (driver, _):
        await lab.pod("p1", "c1")
        await lab.phase("p1", "Running")
        assert {request.volume_id for request in driver.requests("NodePublishVolume")} == {"vol-new"}
        await lab.end("p1")
        assert len(driver.requests("NodeStageVolume")) == len(driver.requests("NodeUnstageVolume"))


async def test_a_pod_that_runs_keeps_its_volume_when_its_claim_is_made_anew_while_no_agent_is_there(lab):
    async with lab.one_pod() as (driver, pod):
        await lab.crash_agent()
        await bind_anew(lab)
        await lab.start_agent()
        await lab.until(lambda: warnings(lab, "began with volume pv-c1"), what="event about its claim")
        assert str(lab.target(pod)) in lab.mounted()
        assert (await lab.phase("p1", "Running")).status.container_statuses[0].restart_count == 0
        await lab.pod("p2")  # which begins with what the claim leads to now
        await lab.phase("p2", "Running")
        shown = {
            request.target_path.split("/pods/")[1][:36]: request.volume_id
            for request in driver.requests("NodePublishVolume")
        }
        assert (shown.pop(pod.uid), set(shown.values())) == ("vol-c1", {"vol-new"})
        await lab.end("p1", "p2")


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_volume_published_before_a_slow_server_disowned_it_is_seen_by_no_process_and_goes(lab, is_killed):
    async with outdated(lab) as (driver, agent):
        may_answer, find = asyncio.Event(), agent.fetch._claims._client.find

        async def answer_late(kind, *names):
            if kind is PersistentVolumeClaim:
                await may_answer.wait()
            return await find(kind, *names)

        agent.fetch._claims._client.find = answer_late
        await lab.pod("p1", "c1", command="touch /data/was-here; sleep 1000")
        await lab.until(lambda: driver.requests("NodePublishVolume"), what="volume published meanwhile")
        if is_killed:
            await lab.crash_agent()
            await lab.start_agent()
        else:
            may_answer.set()
        await lab.phase("p1", "Running")
        await lab.until(lambda: (driver.data / "vol-new" / "was-here").exists(), what="the pod's file")
        await lab.until(lambda: driver.requests("NodeUnstageVolume"), what="the other volume gone")
        for call in ("NodeUnpublishVolume", "NodeUnstageVolume"):
            assert {request.volume_id for request in driver.requests(call)} == {"vol-c1"}
        assert not (driver.data / "vol-c1" / "was-here").exists()
        await lab.end("p1")


@pytest.mark.parametrize(
    ("pod_says", "pv_says", "mode"),
    list(itertools.product([False, True], [False, True], ["ReadWriteOnce", "ReadOnlyMany"])),
)
async def test_only_the_pods_own_word_makes_a_volume_read_only(lab, pod_says, pv_says, mode):
    await lab.driver_object()
    await lab.volume(modes=(mode,), csi={"readOnly": pv_says})
    async with lab.driver() as driver:
        await lab.start_agent()
        volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "c1", "readOnly": pod_says}}]
        pod = await lab.pod(volumes=volumes)
        await lab.phase("p1", "Running")
        (request,) = driver.requests("NodePublishVolume")
        assert request.readonly is pod_says
        assert ("ro" in mountinfo.mount_at(lab.target(pod)).options) is pod_says
        await lab.end("p1")


def labelled(level):
    return {"securityContext": {"seLinuxOptions": {"level": level}}}


async def test_pods_with_different_labels_have_a_volume_one_after_the_other(lab):
    """As on a host with SELinux: the label goes to the driver, which here makes nothing of it."""
    await lab.driver_object(seLinuxMount=True)
    await lab.volume(csi={"volumeAttributes": {"a": "b"}})
    async with lab.driver() as driver:
        await lab.start_agent(has_se_linux=True)
        pod = await lab.pod("p1", **labelled("s0:c1,c2"))
        await lab.phase("p1", "Running")
        flag = 'context="system_u:object_r:container_file_t:s0:c1,c2"'
        for request in (*driver.requests("NodeStageVolume"), *driver.requests("NodePublishVolume")):
            assert list(request.volume_capability.mount.mount_flags) == [flag]
        written = vol_data.read(lab.target(pod).parent)
        assert written["seLinuxMountContext"] == "system_u:object_r:container_file_t:s0:c1,c2"
        await lab.crash_agent()
        agent = await lab.start_agent(has_se_linux=True)
        await lab.until(lambda: agent.volumes.is_mounted(pod), what="volume confirmed")
        await lab.pod("p2", **labelled("s0:c7"))
        await lab.until(lambda: warnings(lab, "SELinux label"), what="event about the other label")
        assert len({request.target_path for request in driver.requests("NodePublishVolume")}) == 1
        await lab.delete("p1")
        await lab.phase("p2", "Running")
        names = [name for name, _ in driver.calls if name.endswith("stageVolume") or name == "NodeStageVolume"]
        assert names[-2:] == ["NodeUnstageVolume", "NodeStageVolume"]
        assert 's0:c7"' in driver.requests("NodeStageVolume")[-1].volume_capability.mount.mount_flags[0]
        await lab.gone("p1")
        await lab.end("p2")


async def test_without_se_linux_no_mount_has_a_label(lab):
    await lab.driver_object(seLinuxMount=True)
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent(has_se_linux=False)
        await lab.pod("p1", **labelled("s0:c1,c2"))
        await lab.phase("p1", "Running")
        for request in (*driver.requests("NodeStageVolume"), *driver.requests("NodePublishVolume")):
            assert list(request.volume_capability.mount.mount_flags) == []
        await lab.end("p1")


@pytest.mark.parametrize(
    ("mode", "method", "step"),
    [
        ("Filesystem", "NodeStageVolume", "MountVolume.MountDevice"),
        ("Filesystem", "NodePublishVolume", "MountVolume.SetUp"),
        ("Filesystem", "NodeExpandVolume", "MountVolume.NodeExpandVolume"),
        ("Block", "NodeStageVolume", "MapVolume.SetUpDevice"),
        ("Block", "NodePublishVolume", "MapVolume.MapPodDevice"),
    ],
)
async def test_an_event_says_which_step_failed_for_which_volume(lab, mode, method, step):
    await lab.driver_object()
    await lab.volume(mode=mode)
    if method == "NodeExpandVolume":  # the backend has grown while no pod was there
        pending = {"allocatedResourceStatuses": {"storage": "NodeResizePending"}}
        status = {"status": {"allocatedResources": {"storage": "2Gi"}, **pending}}
        await lab.client.patch(PersistentVolumeClaim, "c1", status, "default", subresource="status")
        await lab.client.patch(PersistentVolume, "pv-c1", {"spec": {"capacity": {"storage": "2Gi"}}})
    backing = lab.base / "disk"
    backing.write_bytes(bytes(1 << 20))
    device = loop.attach(backing, direct_io=False)
    try:
        async with lab.driver() as driver:
            (driver.data / "vol-c1.device").symlink_to(device.path)
            await lab.start_agent()
            driver.fail(method, "INTERNAL")
            devices = [{"name": "data", "devicePath": "/dev/disk"}] if mode == "Block" else []
            await lab.pod(devices=devices)
            await lab.until(lambda: warnings(lab, f'{step} failed for volume "pv-c1" : '), what="event")
            await lab.phase("p1", "Running")
            await lab.end("p1")
            if method == "NodeExpandVolume":
                assert driver.sizes == {"vol-c1": 2 << 30}
    finally:
        loop.detach(device)
