"""Which steps are made for a volume, with what around them, and what a failed one may take with it."""

import asyncio
import gc
import os
import stat
from pathlib import Path

import pytest

from moorage.host import mountinfo, mounts
from moorage.kube.objects.storage import CsiDriverSpec
from moorage.node.layout import PodUid
from moorage.node.volumes import driver_calls
from moorage.node.volumes.mounters import ownership, vol_data
from moorage.node.volumes.plan import plan_volume
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import CsiSource, MountState, StepFailure, UnmountVolume
from moorage.testing import GARBAGE, LIE

pytestmark = pytest.mark.root
ONE, TWO = PodUid("uid-1"), PodUid("uid-2")
FINAL = ("INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "PERMISSION_DENIED", GARBAGE)
UNCERTAIN = ("CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED")


@pytest.mark.parametrize("stages", [True, False])
async def test_attachment_and_claim_are_confirmed_before_the_driver_is_asked(either, stages):
    either.driver.abilities.node = ("STAGE_UNSTAGE_VOLUME",) if stages else ()
    await either.mount(ONE)
    assert sorted(set(either.fetch.confirmed)) == ["attached", "claim"]
    either.fetch.confirmed.clear()
    await either.mount(ONE)  # published again: nothing new is shown to anybody
    assert "claim" not in either.fetch.confirmed
    either.restart()
    either.fetch.confirmed.clear()
    await either.mount(ONE)  # it was shown before the restart
    assert "claim" not in either.fetch.confirmed
    await either.all_goes(ONE)


class Answer:
    """What an API server says of a claim, late if at all."""

    def __init__(self, bench):
        self.may_come, self.error, self.was_given_up = asyncio.Event(), None, False
        bench.fetch.confirm_claim = self.confirm

    async def confirm(self, pod, source):
        try:
            await self.may_come.wait()
        except asyncio.CancelledError:
            self.was_given_up = True
            raise
        if self.error:
            raise self.error


def not_its_claim():
    return StepFailed(StepFailure.TRANSIENT, "pod", "no longer bound")


async def published_without(bench, **fields):
    """A mount under way whose driver is done, and whose claim nobody has said anything of."""
    answer = Answer(bench)
    mounting = asyncio.create_task(bench.mount(ONE, **fields))
    while not bench.mounted_for(ONE):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    return answer, mounting


async def test_a_claim_that_is_known_to_be_another_one_keeps_the_driver_from_being_asked(either, monkeypatch):
    monkeypatch.setattr(driver_calls, "_SOON_S", 60.0)
    answer = Answer(either)
    answer.error = not_its_claim()
    answer.may_come.set()
    outcome = await either.mount(ONE)
    assert (outcome.failure, outcome.step, outcome.message) == (StepFailure.TRANSIENT, "pod", "no longer bound")
    assert either.driver.requests("NodePublishVolume") == []
    assert either.volume.state_of(ONE) is MountState.ABSENT
    await either.all_goes()


async def test_while_the_claim_is_slow_to_be_read_the_driver_works_but_the_pod_has_nothing(either):
    answer, mounting = await published_without(either)
    assert not mounting.done()
    assert either.volume.state_of(ONE) is MountState.ABSENT
    answer.may_come.set()
    assert (await mounting).failure is None
    assert either.volume.state_of(ONE) is MountState.MOUNTED
    await either.all_goes(ONE)


@pytest.mark.parametrize("error", [not_its_claim(), OSError("no longer bound")], ids=["by the server", "by ourselves"])
async def test_what_was_published_for_a_claim_that_turns_out_to_be_another_one_is_undone_although_held(either, error):
    answer, mounting = await published_without(either)
    answer.error = error
    answer.may_come.set()
    outcome = await mounting
    assert (outcome.failure, outcome.step, outcome.message) == (StepFailure.UNCERTAIN, "pod", "no longer bound")
    either.world.held.add(ONE)  # other volumes of the pod may be in use
    assert plan_volume(either.world, either.name, now=0.0).action == UnmountVolume(either.name, ONE)
    await either.all_goes(ONE)
    assert len(either.driver.requests("NodeUnpublishVolume")) == 1


async def test_no_file_is_given_to_another_group_before_the_claim_is_read(bench):
    bench.fetch.spec = CsiDriverSpec(fs_group_policy="File")
    answer, mounting = await published_without(bench, fs_group=4321)
    target = bench.layout.publish_target(ONE, "pv")
    assert target.stat().st_gid == 0
    answer.may_come.set()
    assert (await mounting).failure is None
    assert target.stat().st_gid == 4321
    await bench.all_goes(ONE)


async def test_a_driver_that_refuses_meanwhile_is_believed_and_the_claim_is_not_waited_for(either):
    answer = Answer(either)
    either.driver.fail("NodePublishVolume", "INVALID_ARGUMENT")
    assert (await either.mount(ONE)).failure is StepFailure.FINAL
    await asyncio.sleep(0)
    assert answer.was_given_up
    assert either.volume.state_of(ONE) is MountState.ABSENT
    await either.all_goes()


async def test_of_a_driver_and_a_claim_that_both_refuse_the_driver_is_told_of_and_the_claim_is_no_surprise(
    bench, monkeypatch
):
    monkeypatch.setattr(driver_calls, "_SOON_S", 0.0)
    answer, surprises = Answer(bench), []
    answer.error = not_its_claim()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: surprises.append(context))
    bench.watch(lambda name, request: answer.may_come.set() if name == "NodePublishVolume" else None)
    bench.driver.fail("NodePublishVolume", "INVALID_ARGUMENT")
    assert (await bench.mount(ONE)).failure is StepFailure.FINAL
    gc.collect()
    assert not answer.was_given_up
    assert surprises == []
    await bench.all_goes()


async def test_a_mount_that_is_given_up_does_not_go_on_reading_its_claim(either):
    answer, mounting = await published_without(either)
    mounting.cancel()
    await asyncio.gather(mounting, return_exceptions=True)
    assert answer.was_given_up
    either.restart()
    await either.all_goes(ONE)


async def test_a_driver_that_does_not_stage_is_asked_to_publish_only(either):
    either.driver.abilities.node = ()
    await either.mount(ONE)
    (request,) = either.driver.requests("NodePublishVolume")
    expected = str(either.layout.block_staging("pv")) if either.source.is_block else ""
    assert request.staging_target_path == expected
    assert not either.layout.staging("scripted.dev", "vol").exists()
    await either.all_goes(ONE)
    assert {name for name, _ in either.driver.calls} == {
        "NodeGetCapabilities", "NodePublishVolume", "NodeUnpublishVolume"
    }  # fmt: skip


async def test_a_driver_that_stopped_staging_is_not_asked_to_unstage(bench):
    await bench.mount(ONE)
    await bench.unmount(ONE)
    mounts.unmount(bench.layout.staging_target("scripted.dev", "vol"))
    bench.driver.abilities.node = ()
    bench.registry.get("scripted.dev")._forget_capabilities()
    await bench.all_goes()
    assert bench.driver.requests("NodeUnstageVolume") == []


async def test_a_driver_that_mounts_nothing_when_it_stages_is_asked_once(bench):
    bench.driver.fail("NodeStageVolume", LIE)
    for uid in (ONE, TWO, TWO):
        assert (await bench.mount(uid)).failure is None
    assert len(bench.driver.requests("NodeStageVolume")) == 1
    await bench.all_goes(ONE, TWO)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_staged_mount_that_was_taken_away_is_made_again(bench, restarted):
    await bench.mount(ONE)
    if restarted:
        bench.restart()
        await bench.mount(ONE)
    asked = len(bench.driver.requests("NodeStageVolume"))
    await bench.mount(TWO)
    assert len(bench.driver.requests("NodeStageVolume")) == asked
    mounts.unmount(bench.layout.staging_target("scripted.dev", "vol"))
    await bench.mount(TWO)
    assert len(bench.driver.requests("NodeStageVolume")) == asked + 1
    assert mountinfo.mount_at(bench.layout.staging_target("scripted.dev", "vol")) is not None
    await bench.all_goes(ONE, TWO)


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_a_driver_was_asked_to_publish_again_is_undone_as_often(bench, restarted):
    bench.driver.counts_publishes = True
    await bench.mount()
    for _ in range(2):
        mounts.unmount(bench.layout.publish_target(ONE, "pv"))
        if restarted:
            bench.restart()
        else:
            bench.volume.pods[ONE].state = MountState.UNCERTAIN  # it is to be published again
        bench.driver.fail("NodePublishVolume", "UNAVAILABLE", "UNAVAILABLE")
        while (await bench.mount()).failure is not None:
            assert bench.driver.requests("NodeUnpublishVolume") == []
    bench.restart()
    await bench.mount()  # what is there is only confirmed
    await bench.mount()
    await bench.all_goes(ONE)  # the driver unstages only what nobody has published
    assert len(bench.driver.requests("NodeUnpublishVolume")) == 3


async def test_an_inline_volume_is_never_staged(bench):
    bench.fetch.spec = CsiDriverSpec(volume_lifecycle_modes=["Ephemeral"])
    source = CsiSource("scripted.dev", "csi-1", "v", is_ephemeral=True)
    outcome = await bench.mount(ONE, source=source)
    assert outcome.failure is None
    assert bench.driver.requests("NodePublishVolume")[0].staging_target_path == ""
    bench.restart()
    (volume,) = bench.world.actual.values()
    assert (volume.name, volume.device, volume.source.is_ephemeral) == (
        f"kubernetes.io/csi/{ONE}-v",
        MountState.ABSENT,
        True,
    )
    assert (await bench.executor.execute(UnmountVolume(volume.name, ONE), volume)).failure is None
    assert bench.driver.requests("NodeStageVolume") == []
    assert bench.driver.requests("NodeUnpublishVolume")[0].volume_id == "csi-1"


async def test_a_driver_that_does_not_serve_this_kind_of_volume_is_not_asked(bench):
    bench.fetch.spec = CsiDriverSpec(volume_lifecycle_modes=["Ephemeral"])
    outcome = await bench.mount()
    assert (outcome.failure, bench.driver.calls) == (StepFailure.TRANSIENT, [])
    assert "not Persistent" in outcome.message


async def test_the_staging_directory_is_ours_and_the_target_is_the_drivers(bench):
    seen = {}

    def look(method, request):
        if method == "NodeStageVolume":
            place = Path(request.staging_target_path)
            seen["staging"] = (stat.S_IMODE(place.stat().st_mode), vol_data.read(place.parent))
        elif method == "NodePublishVolume":
            place = Path(request.target_path)
            seen["target"] = (place.exists(), vol_data.read(place.parent)["specVolID"])

    bench.watch(look)
    await bench.mount()
    assert seen["staging"] == (0o750, {"driverName": "scripted.dev", "volumeHandle": "vol"})
    assert seen["target"] == (False, "pv")
    await bench.all_goes(ONE)


@pytest.mark.parametrize("code", [*FINAL, *UNCERTAIN])
async def test_a_failed_republish_takes_nothing_away(either, code):
    await either.mount()
    before, files = either.mounted(), either.files()
    either.driver.fail("NodePublishVolume", code)
    assert (await either.mount()).failure is not None
    assert either.volume.state_of(ONE) is MountState.MOUNTED
    assert (either.mounted(), either.files()) == (before, files)
    await either.all_goes(ONE)


async def test_a_failed_republish_of_a_driver_that_mounts_nothing_takes_nothing_away_either(bench):
    await bench.mount()
    mounts.unmount(bench.layout.publish_target(ONE, "pv"))
    bench.driver.fail("NodePublishVolume", "INTERNAL")
    assert (await bench.mount()).failure is StepFailure.FINAL
    assert bench.layout.publish_target(ONE, "pv").is_dir()
    assert vol_data.read(bench.layout.csi_volume(ONE, "pv")) is not None
    await bench.all_goes(ONE)
    assert len(bench.driver.requests("NodeUnpublishVolume")) == 1


async def test_a_volume_that_was_lost_and_is_refused_again_stays_with_its_pod(either):
    await either.mount()
    for place in (either.layout.publish_target(ONE, "pv"), either.layout.block_publish("pv", ONE)):
        mounts.unmount_all(place)
    files = either.files()
    either.volume.pods[ONE].state = MountState.UNCERTAIN  # it is to be published again
    either.driver.fail("NodePublishVolume", "INTERNAL")
    assert (await either.mount()).failure is StepFailure.FINAL
    assert either.volume.state_of(ONE) is MountState.UNCERTAIN  # other containers of the pod may still run with it
    assert either.files() == files
    await either.all_goes(ONE)
    assert either.driver.requests("NodeUnpublishVolume")


async def test_a_refused_publish_after_a_restart_takes_no_data_away(bench):
    await bench.mount()
    bench.restart()
    mounts.unmount(bench.layout.publish_target(ONE, "pv"))
    bench.driver.fail("NodePublishVolume", "INTERNAL")
    assert (await bench.mount()).failure is StepFailure.FINAL
    assert bench.volume.state_of(ONE) is MountState.UNCERTAIN
    assert vol_data.read(bench.layout.csi_volume(ONE, "pv")) is not None
    await bench.all_goes(ONE)
    assert bench.driver.requests("NodeUnpublishVolume")


async def test_files_that_fail_on_the_way_to_the_group_leave_the_mount_uncertain(bench, monkeypatch):
    bench.fetch.spec = CsiDriverSpec(fs_group_policy="File")

    def refuse(*_args, **_more):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(ownership, "apply_group", refuse)
        outcome = await bench.mount(fs_group=4321)
    assert (outcome.failure, outcome.step) == (StepFailure.UNCERTAIN, "pod")
    assert bench.volume.state_of(ONE) is MountState.UNCERTAIN
    await bench.all_goes(ONE)
    assert len(bench.driver.requests("NodeUnpublishVolume")) == 1


async def test_a_volume_that_is_read_only_is_used_with_the_group_that_its_files_have(bench):
    bench.fetch.spec = CsiDriverSpec(fs_group_policy="File")
    data = bench.driver.data / "vol"
    data.mkdir()
    mounts.mount("none", data, "tmpfs", ["ro"])
    try:
        assert (await bench.mount(fs_group=4321)).failure is None
        assert bench.volume.state_of(ONE) is MountState.MOUNTED
        await bench.all_goes(ONE)
    finally:
        mounts.unmount(data)


@pytest.mark.parametrize("on_mismatch", [False, True])
async def test_files_are_looked_at_again_only_if_the_pod_wants_that(bench, on_mismatch):
    bench.fetch.spec = CsiDriverSpec(fs_group_policy="File")
    data = bench.driver.data / "vol"
    data.mkdir()
    wanted = {"fs_group": 4321, "fs_group_on_root_mismatch": on_mismatch}
    await bench.mount(ONE, **wanted)
    assert data.stat().st_gid == 4321
    (data / "stray").touch()
    os.chown(data / "stray", 0, 0)
    await bench.mount(TWO, **wanted)
    assert (data / "stray").stat().st_gid == (0 if on_mismatch else 4321)
    await bench.all_goes(ONE, TWO)


async def test_sub_path_mounts_of_a_kubelet_go_before_the_volume(bench):
    await bench.mount()
    data = bench.driver.data / "vol"
    (data / "sub").mkdir()
    (data / "file").write_text("kept")
    places = bench.layout.subpaths_of(ONE) / "pv" / "main"
    (places / "0").mkdir(parents=True)
    (places / "1").touch()
    mounts.bind(data / "sub", places / "0")
    mounts.bind(data / "file", places / "1")
    await bench.all_goes(ONE)
    assert not places.parent.exists()
    assert (data / "file").read_text() == "kept"
    assert (data / "sub").is_dir()
