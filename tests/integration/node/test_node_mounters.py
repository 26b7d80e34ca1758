"""Stage, publish and their undoing, one call at a time: real mounts, a scripted driver, no API server."""

import os
from pathlib import Path

import pytest

from moorage.host import loop, mountinfo, mounts
from moorage.node.layout import Layout, PodUid, csi_volume_name
from moorage.node.plugins.registry import Driver, Registry
from moorage.node.testing import GARBAGE, LIE, ScriptedDriver
from moorage.node.volumes import metadata, wire
from moorage.node.volumes.block import BlockMounter
from moorage.node.volumes.csi import FilesystemMounter
from moorage.node.volumes.execute import Executor
from moorage.node.volumes.observe import observe
from moorage.node.volumes.world import (
    ActualPod,
    ActualVolume,
    CsiSource,
    Failure,
    Mount,
    Outcome,
    PodRef,
    State,
    Unmount,
    UnmountDevice,
    Use,
    World,
    settle,
)

pytestmark = pytest.mark.root
ONE, TWO = PodUid("uid-1"), PodUid("uid-2")
FINAL = ("INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "PERMISSION_DENIED", GARBAGE)
UNCERTAIN = ("CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED")


class NothingToFetch:
    """An API server that has nothing to say."""

    def __init__(self):
        self.forgotten = []

    def driver_spec(self, name):
        return None

    def forget_pod(self, uid):
        self.forgotten.append(uid)

    async def confirm_attached(self, use):
        return None

    async def confirm_claim(self, source):
        return None

    async def for_stage(self, use, source):
        return wire.Extras()

    for_publish = for_stage


class NoGrowth:
    async def grow_at_mount(self, use, volume):
        return Outcome()


class Bench:
    """One volume, the parts that act on it, and what the world knows."""

    def __init__(self, base: Path, driver: ScriptedDriver, *, block=False):
        self.layout = Layout(base / "r")
        self.driver = driver
        registry = Registry()
        registry.add(Driver(driver.name, str(driver.socket), (1, 0, 0), 5.0))
        self.registry = registry
        self.fetch = NothingToFetch()
        parts = (self.layout, "n1", registry, self.fetch)
        self.executor = Executor(FilesystemMounter(*parts), BlockMounter(*parts), None, NoGrowth())
        self.source = CsiSource(driver.name, "vol", "pv", is_block=block)
        self.name = csi_volume_name(driver.name, "vol")
        self.world = World(is_ready=True)

    @property
    def volume(self):
        return self.world.actual.setdefault(self.name, ActualVolume(self.name, self.source))

    def use(self, uid=ONE, **fields):
        return Use(self.name, PodRef(uid, "ns", uid), fields.pop("source", self.source), ("data",), **fields)

    async def do(self, action):
        outcome = await self.executor.execute(action, self.volume)
        settle(self.world, action, outcome, now=0.0)
        return outcome

    async def mount(self, uid=ONE, **fields):
        return await self.do(Mount(self.use(uid, **fields)))

    async def unmount(self, uid=ONE):
        return await self.do(Unmount(self.name, uid))

    async def unstage(self):
        return await self.do(UnmountDevice(self.name))

    def restart(self):
        """Forget everything and read the disk, as a new agent does."""
        self.world = World(is_ready=True, actual=observe(self.layout).volumes)

    def mounted(self):
        return [one.target for one in mountinfo.mounts_below(self.layout.root)]

    def files(self):
        return [str(path.relative_to(self.layout.root)) for path in self.layout.plugins.rglob("*") if path.is_file()]


@pytest.fixture
async def driver(tmp_path):
    base = Path("/tmp") / f"moorage-bench-{os.getpid()}-{tmp_path.name[-30:]}"
    base.mkdir()
    async with ScriptedDriver("scripted.dev", base / "d", base / "csi.sock") as made:
        yield made
    left = mountinfo.mounts_below(base)
    for one in reversed(left):
        mounts.unmount(one.target, lazy=True)
    from moorage.node.removal import remove_tree

    remove_tree(base)
    assert [one.target for one in left] == []


@pytest.fixture
def device(driver):
    backing = driver.data / "backing"
    backing.write_bytes(b"\0" * (1 << 20))
    made = loop.attach(backing, direct_io=False)
    (driver.data / "vol.device").symlink_to(made.path)
    yield made
    loop.detach(made.path)


@pytest.fixture
async def bench(driver):
    made = Bench(driver.data.parent, driver)
    yield made
    await made.registry.close()


@pytest.fixture
async def block(driver, device):
    made = Bench(driver.data.parent, driver, block=True)
    yield made
    await made.registry.close()


@pytest.fixture(params=[False, True], ids=["filesystem", "block"])
async def either(request, driver, device):
    made = Bench(driver.data.parent, driver, block=request.param)
    yield made
    await made.registry.close()


async def all_goes(bench, *uids):
    for uid in uids:
        assert (await bench.unmount(uid)).failure is None
    assert (await bench.unstage()).failure is None
    assert bench.mounted() == []
    assert bench.files() == []


@pytest.mark.parametrize("code", UNCERTAIN)
async def test_a_code_that_says_nothing_leaves_both_states_uncertain(either, code):
    bench = either
    bench.driver.misbehave("NodeStageVolume", code)
    assert (await bench.mount()).failure is Failure.UNCERTAIN
    assert (bench.volume.device, bench.volume.state_of(ONE)) == (State.UNCERTAIN, State.ABSENT)
    bench.driver.misbehave("NodePublishVolume", code, after_effect=True)
    assert (await bench.mount()).failure is Failure.UNCERTAIN
    assert (bench.volume.device, bench.volume.state_of(ONE)) == (State.MOUNTED, State.UNCERTAIN)
    await all_goes(bench, ONE)
    assert len(bench.driver.named("NodeUnpublishVolume")) == len(bench.driver.named("NodeUnstageVolume")) == 1


@pytest.mark.parametrize("code", FINAL)
async def test_a_refusal_leaves_nothing_on_disk(either, code):
    bench = either
    bench.driver.misbehave("NodeStageVolume", code)
    assert (await bench.mount()).failure is Failure.FINAL
    assert (bench.volume.device, bench.mounted(), bench.files()) == (State.ABSENT, [], [])
    bench.driver.misbehave("NodePublishVolume", code)
    assert (await bench.mount()).failure is Failure.FINAL
    assert bench.volume.state_of(ONE) is State.ABSENT
    assert not bench.layout.publish_target(ONE, "pv").parent.exists()
    assert not bench.layout.block_publish("pv", ONE).exists()
    await all_goes(bench)


async def test_a_refusal_is_not_believed_when_something_is_mounted_at_the_target(either):
    bench = either
    bench.driver.misbehave("NodePublishVolume", "INTERNAL", after_effect=True)
    assert (await bench.mount()).failure is Failure.UNCERTAIN
    assert bench.volume.state_of(ONE) is State.UNCERTAIN
    await all_goes(bench, ONE)
    assert len(bench.driver.named("NodeUnpublishVolume")) == 1


async def test_a_block_volume_is_not_unstaged_under_a_device_that_could_not_be_mapped(block):
    link = block.layout.block_link(ONE, "pv")
    link.parent.parent.mkdir(parents=True)
    link.parent.write_text("in the way")  # as a full or read-only directory would be
    outcome = await block.mount()
    assert outcome.failure is Failure.UNCERTAIN
    assert block.volume.state_of(ONE) is State.UNCERTAIN  # so the driver is told to unpublish before it unstages
    link.parent.unlink()
    await all_goes(block, ONE)


async def test_a_driver_that_publishes_no_device_is_told_to_undo_it(block):
    block.driver.misbehave("NodePublishVolume", LIE)
    outcome = await block.mount()
    assert outcome.failure is Failure.UNCERTAIN
    await all_goes(block, ONE)
    assert len(block.driver.named("NodeUnpublishVolume")) == 1


async def test_what_was_found_on_disk_is_given_back_to_the_driver_even_after_a_refusal(bench):
    await bench.mount()
    bench.restart()
    bench.driver.misbehave("NodeStageVolume", "INTERNAL")
    mounts.unmount(bench.layout.staging_target("scripted.dev", "vol"))  # a driver need not mount there at all
    assert (await bench.mount()).failure is Failure.FINAL
    assert bench.volume.device is State.UNCERTAIN
    await all_goes(bench, ONE)
    assert len(bench.driver.named("NodeUnstageVolume")) == 1


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
    await all_goes(bench, TWO)


@pytest.mark.parametrize("damage", ["missing", "{", '{"driverName": "x"}'], ids=["missing", "cut", "incomplete"])
async def test_a_volume_whose_data_was_lost_is_given_back_by_what_else_is_known(bench, damage):
    await bench.mount()
    for directory in (bench.layout.csi_volume(ONE, "pv"), bench.layout.staging("scripted.dev", "vol")):
        if damage == "missing":
            metadata.remove(directory)
        else:
            (directory / metadata.NAME).write_text(damage)
    await all_goes(bench, ONE)
    assert len(bench.driver.named("NodeUnpublishVolume")) == len(bench.driver.named("NodeUnstageVolume")) == 1


async def test_without_data_and_without_a_mount_no_driver_is_asked(bench):
    volume = bench.volume
    volume.device, volume.pods[ONE] = State.UNCERTAIN, ActualPod(State.UNCERTAIN)
    await all_goes(bench, ONE)
    assert bench.driver.calls == []


async def test_the_device_stays_while_a_pod_shows_it(bench):
    await bench.mount()
    outcome = await bench.unstage()  # as if the pod's record had been lost
    assert outcome.failure is Failure.TRANSIENT
    assert str(bench.layout.publish_target(ONE, "pv")) in outcome.message
    assert bench.driver.named("NodeUnstageVolume") == []
    await all_goes(bench, ONE)


async def test_a_pods_tokens_are_forgotten_with_its_volume(bench):
    await bench.mount()
    await all_goes(bench, ONE)
    assert bench.fetch.forgotten == [ONE]


async def test_a_step_that_fails_as_nobody_expected_is_a_failure_like_any_other(bench, monkeypatch):
    await bench.mount()
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "read", lambda directory: 1 / 0)
        outcome = await bench.unmount()
    assert outcome.failure is Failure.UNCERTAIN
    await all_goes(bench, ONE)
