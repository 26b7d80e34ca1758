"""A root directory that is full or cannot be written."""

import contextlib
import errno

import pytest

from moorage.host import mounts
from moorage.node.layout import PodUid
from moorage.node.volumes.mounters import vol_data
from moorage.node.volumes.state import MountState, StepFailure

pytestmark = pytest.mark.root
ONE = PodUid("uid-1")


@contextlib.contextmanager
def unwritable(bench, how):
    """The root directory on a disk that is full, or read-only, for as long as the block lasts."""
    filler = bench.layout.root / "filler"
    if how == "full":
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
    else:
        mounts.remount(bench.layout.root, "tmpfs", ["ro"])
    yield
    if how == "full":
        filler.unlink()
    else:
        mounts.remount(bench.layout.root, "tmpfs", ["rw"])


@pytest.fixture
def small(either):
    """The same with a disk of its own, on which a volume's data and directories take inodes as well as room."""
    either.layout.root.mkdir()
    mounts.mount("small", either.layout.root, "tmpfs", ["size=1m", "nr_inodes=200"])
    yield either
    mounts.unmount(either.layout.root, lazy=True)


@pytest.mark.parametrize(("how", "words"), [("full", "No space left"), ("read-only", "Read-only file system")])
async def test_a_driver_is_not_asked_for_what_could_not_be_written_down(small, how, words):
    with unwritable(small, how):
        outcome = await small.mount()
        assert words in outcome.message
        assert outcome.failure is StepFailure.TRANSIENT
        assert {name for name, _ in small.driver.calls} <= {"NodeGetCapabilities"}
    assert (await small.mount()).failure is None
    assert (await small.unmount()).failure is None
    assert (await small.unstage()).failure is None
    assert small.files() == []


@pytest.mark.parametrize("how", ["full", "read-only"])
async def test_a_pod_leaves_a_full_disk_at_once_and_a_read_only_one_as_soon_as_it_can(small, how):
    await small.mount()
    with unwritable(small, how):
        await small.mount()  # published again: nothing has to be written for that
        assert small.volume.state_of(ONE) is MountState.MOUNTED
        outcome = await small.unmount()
        if how == "read-only":
            assert outcome.failure is not None
            assert small.volume.state_of(ONE) is MountState.UNCERTAIN  # tried again, and the device stays until then
        else:
            assert outcome.failure is None
    if how == "read-only":
        assert (await small.unmount()).failure is None
    assert (await small.unstage()).failure is None
    assert [path for path in small.mounted() if path != str(small.layout.root)] == []
    assert small.files() == []


@pytest.mark.parametrize(("method", "step"), [("NodeStageVolume", "device"), ("NodePublishVolume", "pod")])
async def test_a_refusal_that_cannot_be_cleared_up_after_is_come_back_for(small, method, step):
    """Else nobody would own what is left, and the pod could not go while the agent lives."""

    def look(name, request):
        if name == method:
            mounts.remount(small.layout.root, "tmpfs", ["ro"])

    small.watch(look)
    small.driver.fail(method, "INVALID_ARGUMENT")
    outcome = await small.mount()
    assert (outcome.failure, outcome.step) == (StepFailure.UNCERTAIN, step)
    assert (small.volume.state_of(ONE) if step == "pod" else small.volume.device) is MountState.UNCERTAIN
    mounts.remount(small.layout.root, "tmpfs", ["rw"])
    if step == "pod":
        assert (await small.unmount()).failure is None
    assert (await small.unstage()).failure is None
    assert small.files() == []
    assert not small.layout.csi_volume(ONE, "pv").exists()
    assert not small.layout.devices_of(ONE).exists()


async def refused(bench, monkeypatch, method):
    """Mount with a driver that refuses, and a disk from which no data can be removed meanwhile."""

    def fail(directory):
        raise OSError(errno.EROFS, "Read-only file system", str(directory))

    bench.driver.fail(method, "INVALID_ARGUMENT")
    with monkeypatch.context() as broken:
        broken.setattr(vol_data, "remove", fail)
        return await bench.mount()


async def test_data_of_a_refused_stage_that_cannot_be_removed_is_come_back_for(either, monkeypatch):
    assert (await refused(either, monkeypatch, "NodeStageVolume")).failure is StepFailure.UNCERTAIN
    await either.all_goes()


async def test_data_of_a_refused_publish_that_cannot_be_removed_is_come_back_for(bench, monkeypatch):
    assert (await refused(bench, monkeypatch, "NodePublishVolume")).failure is StepFailure.UNCERTAIN
    await bench.all_goes(ONE)
    assert not bench.layout.csi_volume(ONE, "pv").exists()
