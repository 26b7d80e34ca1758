"""Who carries out an action, where one volume of a driver has several PersistentVolumes."""

import pytest

from moorage.kube.volumes import VolumeName
from moorage.node.layout import PodUid
from moorage.node.volumes.execute import VolumeExecutor
from moorage.node.volumes.state import (
    ActualPod,
    ActualVolume,
    CsiSource,
    MountState,
    MountVolume,
    PlainSource,
    PodRef,
    StepFailure,
    StepOutcome,
    UnmountDevice,
    UnmountVolume,
    VolumeUse,
)

NAME = VolumeName("kubernetes.io/csi/d^h")
ONE, TWO = PodUid("uid-1"), PodUid("uid-2")
FILES, DEVICE = CsiSource("d", "h", "pv-files"), CsiSource("d", "h", "pv-device", is_block=True)


class Noting:
    """A mounter that notes what it was asked."""

    def __init__(self):
        self.asked = []

    async def stage(self, use, is_staged, is_reconstructed):
        self.asked.append(("stage", is_staged))

    async def publish(self, use, state, may_be_used):
        self.asked.append("publish")

    async def unpublish(self, volume, uid):
        self.asked.append(uid)

    async def unstage(self, volume):
        self.asked.append("unstage")


class Grower:
    def __init__(self):
        self.forgotten, self.error = [], None

    async def grow_at_mount(self, use, volume):
        if self.error is not None:
            raise self.error
        return StepOutcome()

    def forget(self, name):
        self.forgotten.append(name)


@pytest.fixture
def grower():
    return Grower()


@pytest.fixture
def mounters():
    return Noting(), Noting(), Noting()


@pytest.fixture
def executor(mounters, grower):
    return VolumeExecutor(*mounters, grower)


def volume(source=FILES):
    made = ActualVolume(NAME, source, MountState.MOUNTED)
    made.pods = {ONE: ActualPod(MountState.MOUNTED, source=FILES), TWO: ActualPod(MountState.MOUNTED, source=DEVICE)}
    return made


async def test_what_a_pod_has_is_taken_away_by_who_gave_it(executor, mounters):
    filesystem, block, _ = mounters
    for last in (FILES, DEVICE):
        await executor.execute(UnmountVolume(NAME, TWO), volume(last))
        await executor.execute(UnmountVolume(NAME, ONE), volume(last))
    assert (filesystem.asked, block.asked) == ([ONE, ONE], [TWO, TWO])


@pytest.mark.parametrize(("staged", "wanted"), [(FILES, DEVICE), (DEVICE, FILES)])
async def test_a_volume_staged_in_one_mode_is_not_staged_in_the_other(executor, mounters, staged, wanted):
    use = VolumeUse(NAME, PodRef(TWO, "ns", "p"), wanted, ("data",))
    await executor.execute(MountVolume(use), volume(staged))
    await executor.execute(MountVolume(use), volume(wanted))
    assert mounters[wanted.is_block].asked == [("stage", False), "publish", ("stage", True), "publish"]


async def test_everyone_who_may_have_staged_a_volume_unstages_it(executor, mounters, grower):
    filesystem, block, plain = mounters
    assert (await executor.execute(UnmountDevice(NAME), volume())).failure is None
    assert (filesystem.asked, block.asked, plain.asked) == (["unstage"], ["unstage"], [])
    assert grower.forgotten == [NAME]
    await executor.execute(UnmountDevice(NAME), volume(PlainSource("kubernetes.io/empty-dir", "e", None)))
    assert (len(filesystem.asked), len(block.asked), plain.asked) == (1, 1, ["unstage"])


async def test_a_volume_whose_growth_fails_for_a_reason_of_ours_keeps_its_pod_waiting(executor, grower):
    grower.error = OSError("too many open files")
    outcome = await executor.execute(MountVolume(VolumeUse(NAME, PodRef(ONE, "ns", "p"), FILES, ("data",))), volume())
    assert (outcome.failure, outcome.step, outcome.published) == (StepFailure.UNCERTAIN, "expand", False)
