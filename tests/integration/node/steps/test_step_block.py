"""Block volumes: devices mapped for pods, and the way back."""

import os

import pytest

from moorage.host import loop, mounts
from moorage.node.layout import PodUid
from moorage.node.volumes.mounters import vol_data
from moorage.node.volumes.observe import observe
from moorage.node.volumes.state import CsiSource, MountState, StepFailure
from moorage.testing import LIE

pytestmark = pytest.mark.root
ONE, TWO = PodUid("uid-1"), PodUid("uid-2")


async def test_a_block_volume_is_not_unstaged_under_a_device_that_could_not_be_mapped(block):
    place = block.layout.block_map("pv", ONE).parent
    place.parent.mkdir(parents=True)
    place.write_text("in the way")  # as a full or read-only directory would be
    outcome = await block.mount()
    assert outcome.failure is StepFailure.UNCERTAIN
    assert block.volume.state_of(ONE) is MountState.UNCERTAIN  # so the driver is told to unpublish before it unstages
    place.unlink()
    await block.all_goes(ONE)


async def test_a_block_volume_that_is_published_after_the_agent_died_is_found_again(block):
    seen = []

    def look(method, request):
        if method == "NodePublishVolume":
            seen.append(set(observe(block.layout).volumes[block.name].pods))

    block.watch(look)
    await block.mount()
    assert seen == [{ONE}]  # on disk before the driver does anything
    await block.all_goes(ONE)


async def test_a_driver_that_publishes_no_device_is_told_to_undo_it(block):
    block.driver.fail("NodePublishVolume", LIE)
    outcome = await block.mount()
    assert outcome.failure is StepFailure.UNCERTAIN
    await block.all_goes(ONE)
    assert len(block.driver.requests("NodeUnpublishVolume")) == 1


async def test_a_block_volume_is_unmapped_before_its_driver_takes_it_away(block):
    await block.mount()
    device, link = block.layout.block_map("pv", ONE), block.layout.block_link(ONE, "pv")
    assert os.stat(link).st_rdev == os.stat(device).st_rdev
    seen = []

    def look(method, request):
        if method == "NodeUnpublishVolume":
            seen.append((device.exists(), link.is_symlink()))

    block.watch(look)
    await block.unmount()
    assert seen == [(False, True)]  # the link stays to the end, so that a crash here is found again
    assert not link.is_symlink()
    await block.all_goes()


async def test_a_block_volume_that_came_back_as_another_device_is_mapped_anew(block):
    await block.mount()
    backing = block.driver.data / "other"
    backing.write_bytes(b"\0" * (1 << 20))
    other = loop.attach(backing, direct_io=False)
    try:
        target = block.layout.block_publish("pv", ONE)
        mounts.unmount(target)
        mounts.bind(other.path, target)
        await block.mount()
        assert os.stat(block.layout.block_link(ONE, "pv")).st_rdev == os.stat(other.path).st_rdev
        await block.all_goes(ONE)
    finally:
        loop.detach(other)


async def test_a_block_volume_is_not_unstaged_while_a_device_file_is_left(block):
    await block.mount()
    outcome = await block.unstage()  # as if the pod's record had been lost
    assert outcome.failure is StepFailure.TRANSIENT
    assert ONE in outcome.message
    assert block.driver.requests("NodeUnstageVolume") == []
    await block.all_goes(ONE)


async def test_a_block_volume_whose_staging_path_is_gone_is_unstaged_without_asking(block):
    await block.mount()
    await block.unmount()
    block.layout.block_staging("pv").rmdir()
    await block.all_goes()
    assert block.driver.requests("NodeUnstageVolume") == []


@pytest.mark.parametrize("method", ["NodeUnpublishVolume", "NodeUnstageVolume"])
async def test_a_block_driver_that_claims_to_have_unmounted_is_not_believed(block, method):
    await block.mount()
    staging = block.layout.block_staging("pv")
    mounts.bind(block.driver.data, staging)  # a driver may mount what it likes there
    block.driver.fail(method, LIE)
    first = await block.unmount()
    if method == "NodeUnpublishVolume":
        assert (first.failure, block.volume.state_of(ONE)) == (StepFailure.UNCERTAIN, MountState.UNCERTAIN)
        await block.all_goes(ONE)
    else:
        assert (await block.unstage()).failure is StepFailure.UNCERTAIN
        assert vol_data.read(block.layout.block_data("pv")) is not None
        await block.all_goes()


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "with a file for it"])
async def test_a_refused_publish_leaves_no_device_of_an_earlier_try(block, monkeypatch, is_mapped):
    device, target = block.layout.block_map("pv", ONE), block.layout.block_publish("pv", ONE)
    bind = mounts.bind

    def full(source, place, *more):
        if place == device:
            raise OSError(28, "No space left on device")  # as many mounts as the kernel allows
        bind(source, place, *more)

    block.grower.fails = True
    with monkeypatch.context() as patch:
        if not is_mapped:
            patch.setattr(mounts, "bind", full)
        assert (await block.mount()).failure is StepFailure.UNCERTAIN
    assert (device.exists(), device.is_block_device()) == (True, is_mapped)
    mounts.unmount_all(target)  # a driver may clear up before it refuses
    target.unlink(missing_ok=True)
    block.driver.fail("NodePublishVolume", "INTERNAL")
    assert (await block.mount()).failure is StepFailure.FINAL
    assert block.volume.state_of(ONE) is MountState.ABSENT
    await block.all_goes()
    assert len(block.driver.requests("NodeUnstageVolume")) == 1


async def test_a_refused_stage_leaves_what_another_pods_unpublishing_needs(block):
    await block.mount(ONE)
    block.volume.device = MountState.UNCERTAIN
    block.driver.fail("NodeStageVolume", "INTERNAL")
    assert (await block.mount(TWO)).failure is StepFailure.FINAL
    assert vol_data.read(block.layout.block_data("pv")) is not None
    block.restart()
    await block.all_goes(ONE)


TOO = CsiSource("scripted.dev", "vol", "pv-too", is_block=True)


@pytest.mark.parametrize("restarted", [False, True])
async def test_two_persistent_volumes_of_one_handle_are_staged_and_unstaged_each_at_its_place(block, restarted):
    await block.mount(ONE)
    assert (await block.mount(TWO, source=TOO)).failure is None
    await block.mount(TWO, source=TOO)  # published again
    places = [str(block.layout.block_staging(name)) for name in ("pv", "pv-too")]
    assert [one.staging_target_path for one in block.driver.requests("NodeStageVolume")] == places
    if restarted:
        block.restart()
    assert set(block.volume.pods) == {ONE, TWO}
    await block.all_goes(ONE, TWO)
    assert [one.staging_target_path for one in block.driver.requests("NodeUnstageVolume")] == places
    assert [place.name for place in block.layout.block_devices.iterdir() if place.name.startswith("pv")] == []


async def test_the_second_of_two_is_staged_again_when_it_is_not_known_whether_it_was(block):
    await block.mount(ONE)
    block.driver.fail("NodeStageVolume", "UNAVAILABLE")
    assert (await block.mount(TWO, source=TOO)).failure is StepFailure.UNCERTAIN
    assert (await block.mount(TWO, source=TOO)).failure is None
    assert len(block.driver.requests("NodeStageVolume")) == 3
    await block.all_goes(ONE, TWO)


async def test_one_volume_as_files_and_as_a_device_leaves_nothing(block):
    files = CsiSource("scripted.dev", "vol", "pv-files")
    await block.mount(ONE)
    assert (await block.mount(TWO, source=files)).failure is None
    assert len(block.driver.requests("NodeStageVolume")) == 2
    await block.all_goes(ONE, TWO)
    assert len(block.driver.requests("NodeUnstageVolume")) == 2
