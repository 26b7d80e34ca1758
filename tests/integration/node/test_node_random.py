"""Random pods, answers and crashes: the real executor, real mounts, and a disk that is all an agent remembers.

The plan decides, a scripted driver does or refuses, and a crash is the loss of everything but what is on disk, at any
point of any step. Whatever happened, no volume is unstaged under a pod, nothing mounted is forgotten, and in the end
there is exactly what pods want.
"""

import asyncio
import os
import random
import shutil
from pathlib import Path

import pytest

from moorage.host import loop, mountinfo, mounts, threads
from moorage.kube.volumes import csi_volume_name
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.plugins.registry import DriverRegistry, RegisteredDriver
from moorage.node.volumes import wire
from moorage.node.volumes.execute import VolumeExecutor
from moorage.node.volumes.mounters.csi_block import BlockMounter
from moorage.node.volumes.mounters.csi_filesystem import FilesystemMounter
from moorage.node.volumes.observe import observe
from moorage.node.volumes.plan import plan_volume
from moorage.node.volumes.state import (
    ActualVolume,
    CsiSource,
    MountState,
    PodRef,
    StepOutcome,
    VolumeState,
    VolumeUse,
    settle,
)
from moorage.testing import GARBAGE, LIE, ScriptedDriver

pytestmark = pytest.mark.root
PODS = [PodUid(f"uid-{number}") for number in range(3)]
CALLS = ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"]
ANSWERS = ["INTERNAL", "UNAVAILABLE", "ABORTED", "NOT_FOUND", "DEADLINE_EXCEEDED", GARBAGE]


class NothingToFetch:
    """An API server that has nothing to say."""

    def driver_spec(self, name):
        return None

    def forget_pod(self, uid):
        """It has no tokens either."""

    async def confirm_attached(self, use):
        """Everything is attached."""

    async def confirm_claim(self, pod, source):
        """Every claim is what it was."""

    async def for_stage(self, use, source):
        await asyncio.sleep(0)
        return wire.Extras()

    for_publish = for_stage

    async def grow_at_mount(self, use, volume):
        return StepOutcome()

    def forget(self, name):
        """Nothing ever grew."""


class Calls(list):
    """A driver's calls; a rule that one of them breaks is noted before it does any harm."""

    def __init__(self, layout: NodeLayout):
        super().__init__()
        self._layout = layout
        self.broken = []

    def append(self, call):
        method, request = call
        if method == "NodeUnstageVolume":
            shown = [
                one.target for one in mountinfo.mounts_below(self._layout.root) if request.volume_id in holder(one)
            ]
            if shown:
                self.broken.append(f"{request.volume_id} unstaged although mounted at {shown}")
        super().append(call)


def holder(mount):
    """The volume that a pod's mount belongs to, from its path."""
    parts = Path(mount.target).parts
    if "pods" in parts:
        return parts[-2].replace("pv-", "vol-")
    return parts[-2].replace("pv-", "vol-") if "publish" in parts else ""


class Threads:
    """The agent's calls in threads: a process that is gone has none, but a task that is cancelled leaves them."""

    def __init__(self, monkeypatch):
        self._running = set()
        self._hand_over = threads._hand_over
        monkeypatch.setattr(threads, "_hand_over", self._counted)

    def _counted(self, call):
        def run():
            try:
                call()
            finally:
                self._running.discard(run)

        self._running.add(run)
        self._hand_over(run)

    async def ended(self):
        while self._running:
            await asyncio.sleep(0.001)


class Story:
    def __init__(self, base: Path, driver: ScriptedDriver, seed: int, calls: Threads):
        self.threads = calls
        self.random = random.Random(seed)
        self.layout = NodeLayout(base / "r")
        self.driver = driver
        driver.calls = self.calls = Calls(self.layout)
        self.registry = DriverRegistry()
        self.registry.add(RegisteredDriver(driver.name, str(driver.socket), (1, 0, 0), 5.0))
        parts = (self.layout, "n1", self.registry, NothingToFetch())
        self.executor = VolumeExecutor(FilesystemMounter(*parts), BlockMounter(*parts), None, NothingToFetch())
        self.sources = [
            CsiSource(driver.name, "vol-fs", "pv-fs"),
            CsiSource(driver.name, "vol-dev", "pv-dev", is_block=True),
        ]
        self.world = VolumeState(is_ready=True)
        self.now = 0.0

    @property
    def names(self):
        return [csi_volume_name(source.driver, source.handle) for source in self.sources]

    def change_a_wish(self):
        source, uid = self.random.choice(self.sources), self.random.choice(PODS)
        name = csi_volume_name(source.driver, source.handle)
        uses = self.world.desired.setdefault(name, {})
        if uses.pop(uid, None) is None:
            uses[uid] = VolumeUse(name, PodRef(uid, "ns", uid), source, ("data",))
        if not uses:
            del self.world.desired[name]

    def let_it_misbehave(self):
        method = self.random.choice(CALLS)
        kinds = ANSWERS if "Un" not in method else [*ANSWERS, LIE]
        self.driver.fail(method, self.random.choice(kinds), is_done=self.random.random() < 0.5)

    async def step(self, *, may_crash: bool):
        """One action for each volume; a crash ends them all wherever they are."""
        running = [task for name in self.names if (task := self._start(name)) is not None]
        if may_crash and running and self.random.random() < 0.3:
            for _ in range(self.random.randrange(40)):
                await asyncio.sleep(0)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self.threads.ended()
            await self._let_the_driver_finish()
            self.restart()
            return
        await asyncio.gather(*running)

    def _start(self, name):
        plan = plan_volume(self.world, name, self.now)
        if plan.forget:
            del self.world.actual[name]
        if plan.action is None:
            return None
        source = next(one for one in self.sources if one.handle == name.partition("^")[2])
        volume = self.world.actual.setdefault(name, ActualVolume(name, source))
        volume.pending = plan.action
        return asyncio.create_task(self._carry_out(plan.action, volume))

    async def _carry_out(self, action, volume):
        settle(self.world, action, await self.executor.execute(action, volume), self.now)

    async def _let_the_driver_finish(self):
        """What it was asked before the crash it may still do, with nobody to hear the answer."""
        for _ in range(self.random.randrange(20)):
            await asyncio.sleep(0)

    def restart(self):
        self.world = VolumeState(desired=self.world.desired, is_ready=True, actual=observe(self.layout).volumes)

    def mounted(self):
        """(volume, pod) of all that is shown to pods."""
        found = set()
        for one in mountinfo.mounts_below(self.layout.root):
            parts = Path(one.target).relative_to(self.layout.root).parts
            if parts[0] == "pods":
                found.add(("vol-fs", parts[1]))
            elif "publish" in parts:
                found.add(("vol-dev", parts[-1]))
        return found

    def check(self):
        assert self.calls.broken == []
        for handle, uid in self.mounted():
            known = self.world.actual.get(csi_volume_name(self.driver.name, handle))
            assert known is not None, f"{handle} is forgotten"
            assert known.state_of(uid) is not MountState.ABSENT, f"{handle} of {uid} is forgotten"

    async def come_to_rest(self):
        self.driver.recover()
        for _ in range(40):
            self.now += 200.0
            await self.step(may_crash=False)
            self.check()


@pytest.fixture
async def driver(tmp_path):
    base = Path("/tmp") / f"moorage-random-{os.getpid()}-{tmp_path.name[-20:]}"
    base.mkdir()
    async with ScriptedDriver(base / "csi.sock", "scripted.dev", data=base / "d") as made:
        backing = base / "disk"
        backing.write_bytes(bytes(1 << 20))
        device = loop.attach(backing, direct_io=False)
        (made.data / "vol-dev.device").symlink_to(device.path)
        yield made
        left = mountinfo.mounts_below(base)
        for one in reversed(left):
            mounts.unmount(one.target, lazy=True)
        loop.detach(device)
    shutil.rmtree(base)
    assert [one.target for one in left] == []


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_there_is_in_the_end_what_pods_want(driver, seed, monkeypatch):
    story = Story(driver.data.parent, driver, seed, Threads(monkeypatch))
    for _ in range(60):
        chance = story.random.random()
        if chance < 0.35:
            story.change_a_wish()
        elif chance < 0.5:
            story.let_it_misbehave()
        elif chance < 0.6:
            story.now += story.random.uniform(0.1, 200.0)
        else:
            await story.step(may_crash=True)
        story.check()
    await story.come_to_rest()
    wanted = {(name.partition("^")[2], uid) for name, uses in story.world.desired.items() for uid in uses}
    assert story.mounted() == wanted
    story.world.desired.clear()
    await story.come_to_rest()
    assert story.mounted() == set()
    assert story.world.actual == {}
    left = [path for path in story.layout.plugins.rglob("*") if not path.is_dir()]
    left += [path for path in story.layout.pods.rglob("*") if not path.is_dir()]
    assert left == []
    await story.registry.close()
