"""One volume and the parts that act on it, without an agent and without an API server."""

import os
from pathlib import Path

import pytest

from moorage.host import loop, mountinfo, mounts
from moorage.host.safe_remove import remove_tree
from moorage.kube.volumes import csi_volume_name
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.plugins.registry import DriverRegistry, RegisteredDriver
from moorage.node.volumes import wire
from moorage.node.volumes.execute import VolumeExecutor
from moorage.node.volumes.mounters.csi_block import BlockMounter
from moorage.node.volumes.mounters.csi_filesystem import FilesystemMounter
from moorage.node.volumes.observe import observe
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import (
    ActualVolume,
    CsiSource,
    MountVolume,
    PodRef,
    StepFailure,
    StepOutcome,
    UnmountDevice,
    UnmountVolume,
    VolumeState,
    VolumeUse,
    settle,
)
from moorage.testing import ScriptedDriver

ONE = PodUid("uid-1")


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

    async def confirm_claim(self, pod, source):
        self.confirmed.append("claim")

    async def for_stage(self, use, source):
        return wire.Extras()

    for_publish = for_stage


class NoGrowth:
    def __init__(self):
        self.fails = False

    async def grow_at_mount(self, use, volume):
        if self.fails:
            raise StepFailed(StepFailure.TRANSIENT, "expand", "cannot grow")
        return StepOutcome()

    def forget(self, name):
        """There is nothing to forget."""


class Watched(list):
    """A driver's calls; each is looked at before it does its work."""

    def __init__(self, look):
        super().__init__()
        self._look = look

    def append(self, call):
        self._look(*call)
        super().append(call)


class Bench:
    """One volume, the parts that act on it, and what the world knows."""

    def __init__(self, base: Path, driver: ScriptedDriver, *, block=False):
        self.layout = NodeLayout(base / "r")
        self.driver = driver
        registry = DriverRegistry()
        registry.add(RegisteredDriver(driver.name, str(driver.socket), (1, 0, 0), 5.0))
        self.registry = registry
        self.fetch = NothingToFetch()
        parts = (self.layout, "n1", registry, self.fetch)
        self.grower = NoGrowth()
        self.executor = VolumeExecutor(FilesystemMounter(*parts), BlockMounter(*parts), None, self.grower)
        self.source = CsiSource(driver.name, "vol", "pv", is_block=block)
        self.name = csi_volume_name(driver.name, "vol")
        self.world = VolumeState(is_ready=True)

    @property
    def volume(self):
        return self.world.actual.setdefault(self.name, ActualVolume(self.name, self.source))

    def watch(self, look):
        """Have each call of the driver looked at before it does its work."""
        self.driver.calls = Watched(look)

    def use(self, uid=ONE, **fields):
        return VolumeUse(self.name, PodRef(uid, "ns", uid), fields.pop("source", self.source), ("data",), **fields)

    async def do(self, action):
        outcome = await self.executor.execute(action, self.volume)
        settle(self.world, action, outcome, now=1.0)
        return outcome

    async def mount(self, uid=ONE, **fields):
        return await self.do(MountVolume(self.use(uid, **fields)))

    async def unmount(self, uid=ONE):
        return await self.do(UnmountVolume(self.name, uid))

    async def unstage(self):
        return await self.do(UnmountDevice(self.name))

    def restart(self):
        """Forget everything and read the disk, as a new agent does."""
        self.world = VolumeState(is_ready=True, actual=observe(self.layout).volumes)

    def mounted(self):
        return [one.target for one in mountinfo.mounts_below(self.layout.root)]

    def mounted_for(self, uid):
        """What the driver has published for a pod."""
        targets = {self.layout.publish_target(uid, "pv"), self.layout.block_publish("pv", uid)}
        return targets.intersection(map(Path, self.mounted()))

    async def all_goes(self, *uids):
        """What these pods have, then the device: every step succeeds and nothing is left."""
        for uid in uids:
            assert (await self.unmount(uid)).failure is None
        assert (await self.unstage()).failure is None
        assert self.mounted() == []
        assert self.files() == []

    def files(self):
        return [str(path.relative_to(self.layout.root)) for path in self.layout.plugins.rglob("*") if path.is_file()]


@pytest.fixture
async def driver(tmp_path):
    base = Path("/tmp") / f"moorage-bench-{os.getpid()}-{tmp_path.name[-30:]}"
    base.mkdir()
    async with ScriptedDriver(base / "csi.sock", "scripted.dev", data=base / "d") as made:
        yield made
    left = mountinfo.mounts_below(base)
    for one in reversed(left):
        mounts.unmount(one.target, lazy=True)
    remove_tree(base)
    assert [one.target for one in left] == []


@pytest.fixture
def device(driver):
    backing = driver.data / "backing"
    backing.write_bytes(b"\0" * (1 << 20))
    made = loop.attach(backing, direct_io=False)
    (driver.data / "vol.device").symlink_to(made.path)
    yield made
    loop.detach(made)


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
