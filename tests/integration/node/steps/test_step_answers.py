"""What may be concluded from a driver's answer, and what is left on disk after it."""

import asyncio
import errno

import pytest

from moorage.errors import MoorageError
from moorage.host import mounts
from moorage.node.layout import PodUid
from moorage.node.plugins.registry import RegisteredDriver
from moorage.node.volumes import wire
from moorage.node.volumes.mounters import csi_filesystem, vol_data
from moorage.node.volumes.state import ActualPod, CsiSource, MountState, StepFailure
from moorage.testing import GARBAGE, HANG, LIE

pytestmark = pytest.mark.root
ONE, TWO = PodUid("uid-1"), PodUid("uid-2")
FINAL = ("INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "PERMISSION_DENIED", GARBAGE)
UNCERTAIN = ("CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED")
CALLS = ("NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume")


@pytest.mark.parametrize("code", UNCERTAIN)
async def test_a_code_that_says_nothing_leaves_both_states_uncertain(either, code):
    bench = either
    bench.driver.fail("NodeStageVolume", code)
    assert (await bench.mount()).failure is StepFailure.UNCERTAIN
    assert (bench.volume.device, bench.volume.state_of(ONE)) == (MountState.UNCERTAIN, MountState.ABSENT)
    bench.driver.fail("NodePublishVolume", code, is_done=True)
    assert (await bench.mount()).failure is StepFailure.UNCERTAIN
    assert (bench.volume.device, bench.volume.state_of(ONE)) == (MountState.MOUNTED, MountState.UNCERTAIN)
    await bench.all_goes(ONE)
    assert len(bench.driver.requests("NodeUnpublishVolume")) == len(bench.driver.requests("NodeUnstageVolume")) == 1


@pytest.mark.parametrize("code", FINAL)
async def test_a_refusal_leaves_nothing_on_disk(either, code):
    bench = either
    bench.driver.fail("NodeStageVolume", code)
    assert (await bench.mount()).failure is StepFailure.FINAL
    assert (bench.volume.device, bench.mounted(), bench.files()) == (MountState.ABSENT, [], [])
    bench.driver.fail("NodePublishVolume", code)
    assert (await bench.mount()).failure is StepFailure.FINAL
    assert bench.volume.state_of(ONE) is MountState.ABSENT
    assert not bench.layout.publish_target(ONE, "pv").parent.exists()
    assert not bench.layout.block_publish("pv", ONE).exists()
    assert not bench.layout.devices_of(ONE).exists()
    await bench.all_goes()


async def test_a_refusal_is_not_believed_when_something_is_mounted_at_the_target(either):
    bench = either
    bench.driver.fail("NodePublishVolume", "INTERNAL", is_done=True)
    assert (await bench.mount()).failure is StepFailure.UNCERTAIN
    assert bench.volume.state_of(ONE) is MountState.UNCERTAIN
    await bench.all_goes(ONE)
    assert len(bench.driver.requests("NodeUnpublishVolume")) == 1


async def test_what_was_found_on_disk_is_given_back_to_the_driver_even_after_a_refusal(bench):
    await bench.mount()
    bench.restart()
    bench.driver.fail("NodeStageVolume", "INTERNAL")
    mounts.unmount(bench.layout.staging_target("scripted.dev", "vol"))  # a driver need not mount there at all
    assert (await bench.mount()).failure is StepFailure.FINAL
    assert bench.volume.device is MountState.UNCERTAIN
    await bench.all_goes(ONE)
    assert len(bench.driver.requests("NodeUnstageVolume")) == 1


async def test_two_persistent_volumes_of_one_handle_are_two_directories(bench):
    """Each pod's directory bears the name of its own PersistentVolume, whichever was mounted last."""
    other = CsiSource("scripted.dev", "vol", "pv-too")
    await bench.mount(ONE)
    await bench.mount(TWO, source=other)
    assert bench.mounted()[1:] == [
        str(bench.layout.publish_target(ONE, "pv")),
        str(bench.layout.publish_target(TWO, "pv-too")),
    ]
    assert (await bench.unmount(ONE)).failure is None
    assert len(bench.mounted()) == 2
    bench.restart()
    assert bench.volume.source_of(TWO).spec_name == "pv-too"
    await bench.all_goes(TWO)


@pytest.mark.parametrize("damage", ["missing", "{", '{"driverName": "x"}'], ids=["missing", "cut", "incomplete"])
async def test_a_volume_whose_data_was_lost_is_given_back_by_what_else_is_known(bench, damage):
    await bench.mount()
    for directory in (bench.layout.csi_volume(ONE, "pv"), bench.layout.staging("scripted.dev", "vol")):
        if damage == "missing":
            vol_data.remove(directory)
        else:
            (directory / vol_data.NAME).write_text(damage)
    await bench.all_goes(ONE)
    assert len(bench.driver.requests("NodeUnpublishVolume")) == len(bench.driver.requests("NodeUnstageVolume")) == 1


async def test_without_data_and_without_a_mount_no_driver_is_asked(bench):
    volume = bench.volume
    volume.device, volume.pods[ONE] = MountState.UNCERTAIN, ActualPod(MountState.UNCERTAIN)
    await bench.all_goes(ONE)
    assert bench.driver.calls == []


async def test_the_device_stays_while_a_pod_shows_it(bench):
    await bench.mount()
    outcome = await bench.unstage()  # as if the pod's record had been lost
    assert outcome.failure is StepFailure.TRANSIENT
    assert str(bench.layout.publish_target(ONE, "pv")) in outcome.message
    assert bench.driver.requests("NodeUnstageVolume") == []
    await bench.all_goes(ONE)


async def test_a_pods_tokens_are_forgotten_with_its_volume(bench):
    await bench.mount()
    await bench.all_goes(ONE)
    assert bench.fetch.forgotten == [ONE]


async def test_a_step_that_fails_as_nobody_expected_is_a_failure_like_any_other(bench, monkeypatch):
    await bench.mount()
    with monkeypatch.context() as patch:
        patch.setattr(vol_data, "read", lambda directory: 1 / 0)
        outcome = await bench.unmount()
    assert outcome.failure is StepFailure.UNCERTAIN
    await bench.all_goes(ONE)


async def test_a_volume_that_has_not_its_size_yet_keeps_its_pod_waiting_and_is_undone(either):
    either.grower.fails = True
    outcome = await either.mount()
    assert (outcome.failure, outcome.step, outcome.published) == (StepFailure.UNCERTAIN, "expand", False)
    assert either.volume.state_of(ONE) is MountState.UNCERTAIN
    either.grower.fails = False
    await either.mount()
    either.grower.fails = True
    assert (await either.mount()).failure is not None
    assert either.volume.state_of(ONE) is MountState.MOUNTED  # a pod that runs keeps it
    await either.all_goes(ONE)


async def test_a_mount_that_fails_as_nobody_expected_leaves_it_uncertain(bench, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(wire, "publish_request", lambda *_: 1 / 0)
        outcome = await bench.mount()
    assert (outcome.failure, outcome.step) == (StepFailure.UNCERTAIN, "pod")
    await bench.all_goes(ONE)


@pytest.mark.parametrize("method", CALLS)
async def test_a_driver_that_goes_away_during_a_call_may_have_done_it(either, method):
    """Its socket is replaced: the connection is closed under the call."""
    either.driver.fail(method, HANG, is_done=True)

    async def whole_way():
        outcomes = [await either.mount(), await either.unmount(), await either.unstage()]
        return [outcome.failure for outcome in outcomes if outcome.failure is not None]

    task = asyncio.create_task(whole_way())
    async with asyncio.timeout(30):
        while not either.driver.requests(method):
            await asyncio.sleep(0)
    old = either.registry.get("scripted.dev")
    either.registry.add(RegisteredDriver("scripted.dev", str(either.driver.socket), (1, 0, 0), 5.0))
    await old.close()
    assert StepFailure.UNCERTAIN in await task
    either.driver.release()
    if either.volume.state_of(ONE) is not MountState.ABSENT:
        assert (await either.unmount()).failure is None
    await either.all_goes()


async def test_a_driver_that_forgot_what_it_published_is_asked_twice_and_then_done_without(either):
    bench = either
    await bench.mount()
    if not bench.source.is_block:
        (bench.driver.data / "vol" / "kept").write_text("data")
    for _ in range(2):
        bench.driver.fail("NodeUnpublishVolume", LIE)
    first = await bench.unmount()
    assert (first.failure, len(bench.mounted_for(ONE))) == (StepFailure.UNCERTAIN, 1)
    assert "is still mounted; it is asked again" in first.message
    assert (await bench.unmount()).failure is None
    assert len(bench.driver.requests("NodeUnpublishVolume")) == 2
    await bench.all_goes()
    assert bench.source.is_block or (bench.driver.data / "vol" / "kept").read_text() == "data"


async def test_a_driver_that_forgot_what_it_staged_is_asked_twice_and_then_done_without(either):
    bench = either
    await bench.mount()
    if bench.source.is_block:
        mounts.bind(bench.driver.data, bench.layout.block_staging("pv"))  # a driver may mount what it likes there
    await bench.unmount()
    for _ in range(2):
        bench.driver.fail("NodeUnstageVolume", LIE)
    assert ((await bench.unstage()).failure, len(bench.mounted())) == (StepFailure.UNCERTAIN, 1)
    await bench.all_goes()
    assert len(bench.driver.requests("NodeUnstageVolume")) == 2


async def test_what_a_driver_unmounts_late_is_not_held_against_it_the_next_time(bench):
    for _ in range(2):
        await bench.mount()
        bench.driver.fail("NodeUnpublishVolume", LIE)
        assert (await bench.unmount()).failure is StepFailure.UNCERTAIN
        assert (await bench.unmount()).failure is None
    await bench.all_goes()
    assert len(bench.driver.requests("NodeUnpublishVolume")) == 4


async def test_what_a_driver_has_staged_is_not_forgotten_when_we_cannot_look_at_it(bench, monkeypatch):
    def fail(path):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(csi_filesystem.mountinfo, "is_mounted", fail)
        outcome = await bench.mount()
    assert (outcome.failure, outcome.step) == (StepFailure.UNCERTAIN, "device")
    assert bench.volume.device is MountState.UNCERTAIN
    await bench.all_goes()
    assert len(bench.driver.requests("NodeUnstageVolume")) == 1


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MoorageError("not read")])
async def test_what_a_driver_has_published_is_not_forgotten_when_we_fail_after_it(bench, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(bench.executor._filesystem, "_apply_group", fail)
    monkeypatch.setattr(csi_filesystem.rules, "agent_applies_fs_group", lambda *_: True)
    assert (await bench.mount()).failure is StepFailure.UNCERTAIN
    assert bench.volume.state_of(ONE) is MountState.UNCERTAIN
    await bench.all_goes(ONE)


@pytest.mark.parametrize("method", ["NodeStageVolume", "NodePublishVolume"])
async def test_a_call_that_fails_on_our_side_may_have_been_heard(either, monkeypatch, method):
    client = either.registry.get("scripted.dev").client
    call = getattr(client, method)

    async def broken(request):
        await call(request)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(client, method, broken)
    assert (await either.mount()).failure is StepFailure.UNCERTAIN
    assert (either.volume.device, either.volume.state_of(ONE)) != (MountState.ABSENT, MountState.ABSENT)
    await either.all_goes(*([ONE] if method == "NodePublishVolume" else []))
