"""Stage, publish and their undoing, one call at a time: real mounts, a scripted driver, no API server."""

import asyncio
import contextlib
import os
import stat
from pathlib import Path

import pytest

from moorage.host import loop, mountinfo, mounts
from moorage.kube.objects.storage import CsiDriverSpec
from moorage.node.layout import Layout, PodUid, csi_volume_name
from moorage.node.plugins.registry import Driver, Registry
from moorage.node.testing import GARBAGE, HANG, LIE, ScriptedDriver
from moorage.node.volumes import metadata, ownership, wire
from moorage.node.volumes.block import BlockMounter
from moorage.node.volumes.csi import FilesystemMounter
from moorage.node.volumes.execute import Executor
from moorage.node.volumes.observe import observe
from moorage.node.volumes.rules import StepFailed
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
CALLS = ("NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume")
FINAL = ("INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "PERMISSION_DENIED", GARBAGE)
UNCERTAIN = ("CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED")


class NothingToFetch:
    """An API server that has nothing to say."""

    def __init__(self):
        self.forgotten, self.confirmed = [], []
        self.spec = None

    def driver_spec(self, name):
        return self.spec

    def forget_pod(self, uid):
        self.forgotten.append(uid)

    async def confirm_attached(self, use):
        self.confirmed.append("attached")

    async def confirm_claim(self, source):
        self.confirmed.append("claim")

    async def for_stage(self, use, source):
        return wire.Extras()

    for_publish = for_stage


class NoGrowth:
    def __init__(self):
        self.fails = False

    async def grow_at_mount(self, use, volume):
        if self.fails:
            raise StepFailed(Failure.TRANSIENT, "expand", "cannot grow")
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
        self.grower = NoGrowth()
        self.executor = Executor(FilesystemMounter(*parts), BlockMounter(*parts), None, self.grower)
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
    assert not bench.layout.devices_of(ONE).exists()
    await all_goes(bench)


async def test_a_refusal_is_not_believed_when_something_is_mounted_at_the_target(either):
    bench = either
    bench.driver.misbehave("NodePublishVolume", "INTERNAL", after_effect=True)
    assert (await bench.mount()).failure is Failure.UNCERTAIN
    assert bench.volume.state_of(ONE) is State.UNCERTAIN
    await all_goes(bench, ONE)
    assert len(bench.driver.named("NodeUnpublishVolume")) == 1


async def test_a_block_volume_is_not_unstaged_under_a_device_that_could_not_be_mapped(block):
    place = block.layout.block_map("pv", ONE).parent
    place.parent.mkdir(parents=True)
    place.write_text("in the way")  # as a full or read-only directory would be
    outcome = await block.mount()
    assert outcome.failure is Failure.UNCERTAIN
    assert block.volume.state_of(ONE) is State.UNCERTAIN  # so the driver is told to unpublish before it unstages
    place.unlink()
    await all_goes(block, ONE)


async def test_a_block_volume_that_is_published_after_the_agent_died_is_found_again(block):
    seen = []

    def look(method, request):
        if method == "NodePublishVolume":
            seen.append(set(observe(block.layout).volumes[block.name].pods))

    block.driver.calls = Watched(look)
    await block.mount()
    assert seen == [{ONE}]  # on disk before the driver does anything
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


async def test_a_volume_that_has_not_its_size_yet_keeps_its_pod_waiting_and_is_undone(either):
    either.grower.fails = True
    outcome = await either.mount()
    assert (outcome.failure, outcome.step, outcome.published) == (Failure.UNCERTAIN, "expand", False)
    assert either.volume.state_of(ONE) is State.UNCERTAIN
    either.grower.fails = False
    await either.mount()
    either.grower.fails = True
    assert (await either.mount()).failure is not None
    assert either.volume.state_of(ONE) is State.MOUNTED  # a pod that runs keeps it
    await all_goes(either, ONE)


async def test_a_mount_that_fails_as_nobody_expected_leaves_it_uncertain(bench, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(wire, "publish_request", lambda *_: 1 / 0)
        outcome = await bench.mount()
    assert (outcome.failure, outcome.step) == (Failure.UNCERTAIN, "pod")
    await all_goes(bench, ONE)


@pytest.mark.parametrize("method", CALLS)
async def test_a_driver_that_goes_away_during_a_call_may_have_done_it(either, method):
    """Its socket is replaced: the connection is closed under the call."""
    either.driver.misbehave(method, HANG, after_effect=True)

    async def whole_way():
        outcomes = [await either.mount(), await either.unmount(), await either.unstage()]
        return [outcome.failure for outcome in outcomes if outcome.failure is not None]

    task = asyncio.create_task(whole_way())
    async with asyncio.timeout(30):
        while not either.driver.named(method):
            await asyncio.sleep(0)
    old = either.registry.get("scripted.dev")
    either.registry.add(Driver("scripted.dev", str(either.driver.socket), (1, 0, 0), 5.0))
    await old.close()
    assert Failure.UNCERTAIN in await task
    either.driver.release()
    if either.volume.state_of(ONE) is not State.ABSENT:
        assert (await either.unmount()).failure is None
    await all_goes(either)


# Which steps are made at all.


@pytest.mark.parametrize("stages", [True, False])
async def test_attachment_and_claim_are_confirmed_before_the_driver_is_asked(either, stages):
    either.driver.capabilities = ("STAGE_UNSTAGE_VOLUME",) if stages else ()
    await either.mount(ONE)
    assert sorted(set(either.fetch.confirmed)) == ["attached", "claim"]
    either.fetch.confirmed.clear()
    await either.mount(ONE)  # published again: nothing new is shown to anybody
    assert "claim" not in either.fetch.confirmed
    either.restart()
    either.fetch.confirmed.clear()
    await either.mount(ONE)  # it was shown before the restart
    assert "claim" not in either.fetch.confirmed
    await all_goes(either, ONE)


async def test_a_driver_that_does_not_stage_is_asked_to_publish_only(either):
    either.driver.capabilities = ()
    await either.mount(ONE)
    (request,) = either.driver.named("NodePublishVolume")
    expected = str(either.layout.block_staging("pv")) if either.source.is_block else ""
    assert request.staging_target_path == expected
    assert not either.layout.staging("scripted.dev", "vol").exists()
    await all_goes(either, ONE)
    assert {name for name, _ in either.driver.calls} == {
        "NodeGetCapabilities", "NodePublishVolume", "NodeUnpublishVolume"
    }  # fmt: skip


async def test_a_driver_that_stopped_staging_is_not_asked_to_unstage(bench):
    await bench.mount(ONE)
    await bench.unmount(ONE)
    mounts.unmount(bench.layout.staging_target("scripted.dev", "vol"))
    bench.driver.capabilities = ()
    bench.registry.get("scripted.dev")._forget_capabilities()
    await all_goes(bench)
    assert bench.driver.named("NodeUnstageVolume") == []


async def test_a_driver_that_mounts_nothing_when_it_stages_is_asked_once(bench):
    bench.driver.misbehave("NodeStageVolume", LIE)
    for uid in (ONE, TWO, TWO):
        assert (await bench.mount(uid)).failure is None
    assert len(bench.driver.named("NodeStageVolume")) == 1
    await all_goes(bench, ONE, TWO)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_staged_mount_that_was_taken_away_is_made_again(bench, restarted):
    await bench.mount(ONE)
    if restarted:
        bench.restart()
        await bench.mount(ONE)
    asked = len(bench.driver.named("NodeStageVolume"))
    await bench.mount(TWO)
    assert len(bench.driver.named("NodeStageVolume")) == asked
    mounts.unmount(bench.layout.staging_target("scripted.dev", "vol"))
    await bench.mount(TWO)
    assert len(bench.driver.named("NodeStageVolume")) == asked + 1
    assert mountinfo.mount_at(bench.layout.staging_target("scripted.dev", "vol")) is not None
    await all_goes(bench, ONE, TWO)


async def test_an_inline_volume_is_never_staged(bench):
    bench.fetch.spec = CsiDriverSpec(volume_lifecycle_modes=["Ephemeral"])
    source = CsiSource("scripted.dev", "csi-1", "v", is_ephemeral=True)
    outcome = await bench.mount(ONE, source=source)
    assert outcome.failure is None
    assert bench.driver.named("NodePublishVolume")[0].staging_target_path == ""
    bench.restart()
    (volume,) = bench.world.actual.values()
    assert (volume.name, volume.device, volume.source.is_ephemeral) == (
        f"kubernetes.io/csi/{ONE}-v",
        State.ABSENT,
        True,
    )
    assert (await bench.executor.execute(Unmount(volume.name, ONE), volume)).failure is None
    assert bench.driver.named("NodeStageVolume") == []
    assert bench.driver.named("NodeUnpublishVolume")[0].volume_id == "csi-1"


async def test_a_driver_that_does_not_serve_this_kind_of_volume_is_not_asked(bench):
    bench.fetch.spec = CsiDriverSpec(volume_lifecycle_modes=["Ephemeral"])
    outcome = await bench.mount()
    assert (outcome.failure, bench.driver.calls) == (Failure.TRANSIENT, [])
    assert "not Persistent" in outcome.message


class Watched(list):
    """A driver's calls; each is looked at before it does its work."""

    def __init__(self, look):
        super().__init__()
        self._look = look

    def append(self, call):
        self._look(*call)
        super().append(call)


async def test_the_staging_directory_is_ours_and_the_target_is_the_drivers(bench):
    seen = {}

    def look(method, request):
        if method == "NodeStageVolume":
            place = Path(request.staging_target_path)
            seen["staging"] = (stat.S_IMODE(place.stat().st_mode), metadata.read(place.parent))
        elif method == "NodePublishVolume":
            place = Path(request.target_path)
            seen["target"] = (place.exists(), metadata.read(place.parent)["specVolID"])

    bench.driver.calls = Watched(look)
    await bench.mount()
    assert seen["staging"] == (0o750, {"driverName": "scripted.dev", "volumeHandle": "vol"})
    assert seen["target"] == (False, "pv")
    await all_goes(bench, ONE)


# What a failure may take with it.


@pytest.mark.parametrize("code", [*FINAL, *UNCERTAIN])
async def test_a_failed_republish_takes_nothing_away(either, code):
    await either.mount()
    before, files = either.mounted(), either.files()
    either.driver.misbehave("NodePublishVolume", code)
    assert (await either.mount()).failure is not None
    assert either.volume.state_of(ONE) is State.MOUNTED
    assert (either.mounted(), either.files()) == (before, files)
    await all_goes(either, ONE)


async def test_a_failed_republish_of_a_driver_that_mounts_nothing_takes_nothing_away_either(bench):
    await bench.mount()
    mounts.unmount(bench.layout.publish_target(ONE, "pv"))
    bench.driver.misbehave("NodePublishVolume", "INTERNAL")
    assert (await bench.mount()).failure is Failure.FINAL
    assert bench.layout.publish_target(ONE, "pv").is_dir()
    assert metadata.read(bench.layout.csi_volume(ONE, "pv")) is not None
    await all_goes(bench, ONE)
    assert len(bench.driver.named("NodeUnpublishVolume")) == 1


async def test_a_refused_publish_after_a_restart_takes_no_data_away(bench):
    await bench.mount()
    bench.restart()
    mounts.unmount(bench.layout.publish_target(ONE, "pv"))
    bench.driver.misbehave("NodePublishVolume", "INTERNAL")
    assert (await bench.mount()).failure is Failure.FINAL
    assert bench.volume.state_of(ONE) is State.UNCERTAIN
    assert metadata.read(bench.layout.csi_volume(ONE, "pv")) is not None
    await all_goes(bench, ONE)
    assert len(bench.driver.named("NodeUnpublishVolume")) == 1


async def test_files_that_cannot_be_given_to_the_group_leave_the_mount_uncertain(bench, monkeypatch):
    bench.fetch.spec = CsiDriverSpec(fs_group_policy="File")

    def refuse(*_args, **_more):
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(ownership, "apply_group", refuse)
        outcome = await bench.mount(fs_group=4321)
    assert (outcome.failure, outcome.step) == (Failure.UNCERTAIN, "pod")
    assert bench.volume.state_of(ONE) is State.UNCERTAIN
    await all_goes(bench, ONE)
    assert len(bench.driver.named("NodeUnpublishVolume")) == 1


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
    await all_goes(bench, ONE, TWO)


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
    await all_goes(bench, ONE)
    assert not places.parent.exists()
    assert (data / "file").read_text() == "kept"
    assert (data / "sub").is_dir()


# Block volumes.


async def test_a_block_volume_is_unmapped_before_its_driver_takes_it_away(block):
    await block.mount()
    device, link = block.layout.block_map("pv", ONE), block.layout.block_link(ONE, "pv")
    assert os.stat(link).st_rdev == os.stat(device).st_rdev
    seen = []

    def look(method, request):
        if method == "NodeUnpublishVolume":
            seen.append((device.exists(), link.is_symlink()))

    block.driver.calls = Watched(look)
    await block.unmount()
    assert seen == [(False, True)]  # the link stays to the end, so that a crash here is found again
    assert not link.is_symlink()
    await all_goes(block)


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
        await all_goes(block, ONE)
    finally:
        loop.detach(other.path)


async def test_a_block_volume_is_not_unstaged_while_a_device_file_is_left(block):
    await block.mount()
    outcome = await block.unstage()  # as if the pod's record had been lost
    assert outcome.failure is Failure.TRANSIENT
    assert ONE in outcome.message
    assert block.driver.named("NodeUnstageVolume") == []
    await all_goes(block, ONE)


async def test_a_block_volume_whose_staging_path_is_gone_is_unstaged_without_asking(block):
    await block.mount()
    await block.unmount()
    block.layout.block_staging("pv").rmdir()
    await all_goes(block)
    assert block.driver.named("NodeUnstageVolume") == []


@pytest.mark.parametrize("method", ["NodeUnpublishVolume", "NodeUnstageVolume"])
async def test_a_block_driver_that_claims_to_have_unmounted_is_not_believed(block, method):
    await block.mount()
    staging = block.layout.block_staging("pv")
    mounts.bind(block.driver.data, staging)  # a driver may mount what it likes there
    block.driver.misbehave(method, LIE)
    first = await block.unmount()
    if method == "NodeUnpublishVolume":
        assert (first.failure, block.volume.state_of(ONE)) == (Failure.UNCERTAIN, State.UNCERTAIN)
        await all_goes(block, ONE)
    else:
        assert (await block.unstage()).failure is Failure.UNCERTAIN
        assert metadata.read(block.layout.block_data("pv")) is not None
        await all_goes(block)


async def test_a_refused_stage_leaves_what_another_pods_unpublishing_needs(block):
    await block.mount(ONE)
    block.volume.device = State.UNCERTAIN
    block.driver.misbehave("NodeStageVolume", "INTERNAL")
    assert (await block.mount(TWO)).failure is Failure.FINAL
    assert metadata.read(block.layout.block_data("pv")) is not None
    block.restart()
    await all_goes(block, ONE)


# A root directory that is full or cannot be written.


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
        assert outcome.failure is Failure.TRANSIENT
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
        assert small.volume.state_of(ONE) is State.MOUNTED
        outcome = await small.unmount()
        if how == "read-only":
            assert outcome.failure is not None
            assert small.volume.state_of(ONE) is State.UNCERTAIN  # tried again, and the device stays until then
        else:
            assert outcome.failure is None
    if how == "read-only":
        assert (await small.unmount()).failure is None
    assert (await small.unstage()).failure is None
    assert [path for path in small.mounted() if path != str(small.layout.root)] == []
    assert small.files() == []
