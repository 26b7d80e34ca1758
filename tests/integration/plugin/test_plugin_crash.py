"""SIGKILL at every step and at random moments: what was acknowledged is there, nothing is leaked."""

import asyncio
import os
import random
import re
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Self

import pytest
from tests.support.plugin_caller import MIB, Caller, block, from_snapshot, from_volume, mounted
from tests.support.plugin_process import PluginProcess

import moorage
from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.host import loop, mountinfo
from moorage.plugin.services.values import TOKEN_KEY
from moorage.plugin.settings import PluginSettings

pytestmark = pytest.mark.root

# For each line of steps a plugin that kills itself at the first of them that it reaches. It is a copy of a process that
# has loaded everything, so that a hundred of them cost little.
CRASHING = """
import asyncio, os, sys
from moorage.plugin.run import run
from moorage.plugin.settings import PluginSettings
from moorage.storage import failpoints
settings, note = PluginSettings.from_json(sys.argv[1]), sys.argv[2]
def live(steps):
    def hook(step):
        if step in steps:
            with open(note, "w") as file:
                file.write(step)
            os.kill(os.getpid(), 9)
    failpoints.install(hook)
    asyncio.run(run(settings))
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)
        live(set(line.split()))
        sys.exit()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
# Steps of other scopes and of upgrades; their own tests are elsewhere.
ELSEWHERE = {"attach.linked", "attach.prepared", "migrate.done"}


# What a volume without data and copies goes through in a shared pool, besides attaching. What is unfinished there
# is swept when it is a day old, as it may be another node's, and reclaiming is not part of any call.
SHARED = ("create.", "stage.", "format.", "unstage.", "building.", "publish.", "move.", "write.")


@pytest.fixture
def in_own_process():
    return True


def all_steps() -> set[str]:
    root = Path(moorage.__file__).parent
    text = "".join(file.read_text() for part in ("storage", "plugin") for file in (root / part).glob("*.py"))
    steps = set(re.findall(r'reached\("([^"]+)"\)', text))
    return {step for step in steps if not step.startswith("import.")}  # no call of the plugin imports


class Mortal:
    """A plugin that dies where it is told to, and is started again by whoever meets its absence."""

    def __init__(self, pool: Path, base: Path, steps: set[str], scope: str = "node") -> None:
        self.steps = set(steps)
        self.died_at: list[str] = []
        self._note, self._log = base / "note", base / "log"
        self._settings = PluginSettings(
            f"unix://{base}/csi.sock", "node-1", {"default": pool}, scope=scope, trash_retention_s=0
        )
        self.client = CsiClient(self._settings.endpoint, timeout_s=120)

    async def __aenter__(self) -> Self:
        argv = (sys.executable, "-c", CRASHING, self._settings.as_json(), self._note)
        with self._log.open("wb") as log:
            self._origin = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=log)
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._ended.done():
            os.kill(self._pid, signal.SIGTERM)
        await self._ended
        self._origin.stdin.close()
        await self._origin.wait()
        await self.client.close()

    async def start(self) -> None:
        """Start again until it stays up: opening a pool has steps as well."""
        while not await self._stays_up():
            assert self._note.exists(), self._log.read_text()[-2000:]

    async def _stays_up(self) -> bool:
        self.collect()
        self._origin.stdin.write(f"{' '.join(self.steps)}\n".encode())
        self._pid = int(await self._origin.stdout.readline())
        self._ended = asyncio.create_task(self._origin.stdout.readline())
        ready = asyncio.create_task(self.client.wait_ready(60))
        await asyncio.wait({self._ended, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not self._ended.done():
            await ready
            return True
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        return False

    async def arm(self, steps: set[str]) -> None:
        """Let it die at these steps, though it may have done so before."""
        self.collect()
        self.steps |= steps
        if not self._ended.done():
            os.kill(self._pid, signal.SIGKILL)
        await self._ended
        await self.start()

    def collect(self) -> None:
        if self._note.exists():
            step = self._note.read_text()
            self._note.unlink()
            self.steps.discard(step)
            self.died_at.append(step)

    async def insist(self, call):
        """Repeat a call until it is answered, starting the plugin again when it died."""
        for _ in range(20):
            try:
                return await call()
            except CsiError as error:
                if error.code != "UNAVAILABLE":
                    raise
                await asyncio.wait_for(self._ended, 60)
                await self.start()
        raise AssertionError("the plugin dies again and again")


@pytest.fixture
async def mortal(pool, tmp_path):
    async with Mortal(pool, tmp_path, all_steps() - ELSEWHERE) as plugin:
        yield plugin


def leftovers(pool: Path) -> list[str]:
    return [str(each) for each in (*(pool / "tmp").iterdir(), *(pool / "trash").iterdir())]


async def until_reclaimed(pool: Path) -> None:
    async with asyncio.timeout(60):
        while leftovers(pool):
            await asyncio.sleep(0.05)


async def test_every_step_can_be_the_last(mortal, pool, tmp_path, write_synced):
    """One story in which each step of each operation is interrupted once, and every call is repeated."""
    caller = Caller(mortal.client, tmp_path)
    insist = mortal.insist

    volume = (await insist(lambda: caller.create("v"))).volume_id
    await insist(lambda: caller.stage(volume))
    target = await insist(lambda: caller.publish(volume))
    write_synced(target / "file", b"acknowledged")
    snapshot = (await insist(lambda: caller.snapshot(volume))).snapshot_id
    restored = (await insist(lambda: caller.create("r", source=from_snapshot(snapshot)))).volume_id
    clone = (await insist(lambda: caller.create("c", source=from_volume(volume)))).volume_id
    group_request = pb.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=[volume, clone])
    group = (await insist(lambda: caller.client.CreateVolumeGroupSnapshot(group_request))).group_snapshot
    assert len(group.snapshots) == 2
    assert (await insist(lambda: caller.expand(clone, 128 * MIB))).capacity_bytes == 128 * MIB
    modify = pb.ControllerModifyVolumeRequest(volume_id=volume, mutable_parameters={"readAheadKiB": "64"})
    await insist(lambda: caller.client.ControllerModifyVolume(modify))
    for each in (restored, clone):
        path = await insist(lambda each=each: caller.up(each, pod=each))
        assert (path / "file").read_bytes() == b"acknowledged"
        await insist(lambda each=each: caller.down(each, pod=each))
    assert (target / "file").read_bytes() == b"acknowledged"

    inline = tmp_path / "pods" / "inline" / "volumes" / "i" / "mount"
    inline.parent.mkdir(parents=True)
    publish = pb.NodePublishVolumeRequest(
        volume_id="inline",
        target_path=str(inline),
        volume_capability=mounted(),
        volume_context={"csi.storage.k8s.io/ephemeral": "true", "size": "32Mi"},
    )
    await insist(lambda: caller.client.NodePublishVolume(publish))
    assert mountinfo.mount_at(inline) is not None
    await insist(lambda: caller.unpublish("inline", inline))

    await insist(lambda: caller.unpublish(volume))
    await insist(lambda: caller.unstage(volume))
    members = [member.snapshot_id for member in group.snapshots]
    await insist(
        lambda: caller.client.DeleteVolumeGroupSnapshot(
            pb.DeleteVolumeGroupSnapshotRequest(group_snapshot_id=group.group_snapshot_id, snapshot_ids=members)
        )
    )
    await insist(lambda: caller.client.DeleteSnapshot(pb.DeleteSnapshotRequest(snapshot_id=snapshot)))
    for each in (volume, restored, clone):
        await insist(lambda each=each: caller.delete(each))
    assert not (await insist(lambda: caller.client.ListVolumes(pb.ListVolumesRequest()))).entries
    await until_reclaimed(pool)
    assert loop.attached(pool) == []
    mortal.collect()
    assert mortal.steps == set(), "these steps were never reached"


async def test_every_step_of_attaching_can_be_the_last(pool, tmp_path):
    """The steps of an attachment come in the attach, in the detach and in the deletion; the plugin dies in each."""
    steps = {"attach.linked", "attach.prepared", *(step for step in all_steps() if step.startswith(SHARED))}
    async with Mortal(pool, tmp_path, steps, scope="shared") as mortal:
        caller = Caller(mortal.client, tmp_path)
        volume = (await mortal.insist(lambda: caller.create("v"))).volume_id
        attach = pb.ControllerPublishVolumeRequest(volume_id=volume, node_id="node-1", volume_capability=mounted())
        detach = pb.ControllerUnpublishVolumeRequest(volume_id=volume, node_id="node-1")
        tokens = []
        for _ in range(3):
            answer = await mortal.insist(lambda: caller.client.ControllerPublishVolume(attach))
            again = await mortal.insist(lambda: caller.client.ControllerPublishVolume(attach))
            assert answer == again
            tokens.append(int(answer.publish_context[TOKEN_KEY]))
            given = dict(answer.publish_context)
            await mortal.insist(lambda given=given: caller.stage(volume, context=given))
            await mortal.insist(lambda: caller.unstage(volume))
            await mortal.arm({"attach.linked", "attach.prepared"})
            await mortal.insist(lambda: caller.client.ControllerUnpublishVolume(detach))
        assert tokens == sorted(set(tokens)), "a token was given out twice"
        await mortal.arm({"attach.linked", "attach.prepared"})
        await mortal.insist(lambda: caller.delete(volume))
        mortal.collect()
        assert mortal.steps == set(), "these steps were never reached"
        assert mortal.died_at.count("attach.linked") == 5  # one attach, three detaches, one deletion


@pytest.mark.parametrize("pool_filesystem", ["btrfs"])
async def test_every_step_of_a_directory_can_be_the_last(mortal, pool, tmp_path, write_synced):
    """On btrfs, where a directory is a subvolume held to its size by a qgroup."""
    insist, caller = mortal.insist, Caller(mortal.client, tmp_path)
    kind = {"kind": "directory"}
    volume = (await insist(lambda: caller.create("d", parameters=kind))).volume_id
    await insist(lambda: caller.stage(volume))
    target = await insist(lambda: caller.publish(volume))
    write_synced(target / "file", b"acknowledged")
    snapshot = (await insist(lambda: caller.snapshot(volume))).snapshot_id
    source = from_snapshot(snapshot)
    restored = (await insist(lambda: caller.create("r", source=source, parameters=kind))).volume_id
    clone = (await insist(lambda: caller.create("c", source=from_volume(volume), parameters=kind))).volume_id
    group_request = pb.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=[volume, clone])
    group = (await insist(lambda: caller.client.CreateVolumeGroupSnapshot(group_request))).group_snapshot
    await insist(lambda: caller.expand(clone, 128 * MIB))
    modify = pb.ControllerModifyVolumeRequest(volume_id=volume, mutable_parameters={"trashRetention": "0s"})
    await insist(lambda: caller.client.ControllerModifyVolume(modify))
    for each, size in ((volume, 64), (restored, 64), (clone, 128)):
        path = await insist(lambda each=each: caller.up(each, pod=each))
        assert (path / "file").read_bytes() == b"acknowledged"
        with (path / "big").open("wb") as file, pytest.raises(OSError, match="quota"):
            os.posix_fallocate(file.fileno(), 0, (size + 8) * MIB)
        (path / "big").unlink()
        await insist(lambda each=each: caller.unpublish(each, pod=each))
    await insist(lambda: caller.unpublish(volume))
    for each in (volume, restored, clone):
        await insist(lambda each=each: caller.unstage(each))
        await insist(lambda each=each: caller.delete(each))
    members = [member.snapshot_id for member in group.snapshots]
    delete_group = pb.DeleteVolumeGroupSnapshotRequest(group_snapshot_id=group.group_snapshot_id, snapshot_ids=members)
    await insist(lambda: caller.client.DeleteVolumeGroupSnapshot(delete_group))
    await insist(lambda: caller.client.DeleteSnapshot(pb.DeleteSnapshotRequest(snapshot_id=snapshot)))
    await until_reclaimed(pool)
    mortal.collect()
    of_images = {"ephemeral.", "format.", "stage.", "cut."}
    assert {step for step in mortal.steps if not any(step.startswith(each) for each in of_images)} == set()


async def test_a_device_whose_stage_never_comes_again_is_released_at_start(plugin, node, pool):
    volume, raw = (await node.create("v")).volume_id, (await node.create("raw", block(), 8 * MIB)).volume_id
    used = (await node.create("used")).volume_id
    await node.up(used)
    await node.stage(raw, block())
    orphan = loop.attach(pool / "volumes" / volume / "data")
    await plugin.kill()
    await plugin.start()
    left = {each.backing_file.split("/")[-2] for each in loop.attached(pool)}
    assert left == {used, raw}
    assert orphan.number not in {each.number for each in loop.attached(pool)}


async def test_random_kills_under_load_lose_nothing(pool, tmp_path, write_synced):
    directory = tmp_path / "p"
    directory.mkdir()
    plugin = PluginProcess({"default": pool}, directory=directory, flags=["--trash-retention=0s"])
    await plugin.start()
    chance = random.Random(20261115)
    done = asyncio.Event()
    kills = 0

    async def insist(call):
        """What kubelet and the sidecars do: the same call again, until the driver has answered it."""
        async with asyncio.timeout(120):
            while True:
                try:
                    return await call()
                except CsiError as error:
                    if error.code not in ("UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED"):
                        raise
                    await asyncio.sleep(0.02)

    async def life(caller: Caller, name: str) -> None:
        volume = (await insist(lambda: caller.create(name, size=16 * MIB))).volume_id
        path = await insist(lambda: caller.up(volume))
        write_synced(path / "file", name.encode())
        snapshot = (await insist(lambda: caller.snapshot(volume, f"s-{name}"))).snapshot_id
        write_synced(path / "file", b"changed")
        await insist(lambda: caller.down(volume))
        source = from_snapshot(snapshot)
        restored = (await insist(lambda: caller.create(f"r-{name}", size=16 * MIB, source=source))).volume_id
        path = await insist(lambda: caller.up(restored))
        assert (path / "file").read_bytes() == name.encode()
        await insist(lambda: caller.down(restored))
        for each in (volume, restored):
            await insist(lambda each=each: caller.delete(each))
        await insist(lambda: caller.client.DeleteSnapshot(pb.DeleteSnapshotRequest(snapshot_id=snapshot)))

    async def work(worker: int) -> int:
        caller = Caller(plugin.client, tmp_path)
        rounds = 0
        while not done.is_set():
            await life(caller, f"w{worker}-{rounds}")
            rounds += 1
        return rounds

    async def kill() -> None:
        nonlocal kills
        for _ in range(8):
            await asyncio.sleep(chance.uniform(0.1, 0.7))
            await plugin.kill()
            kills += 1
            await plugin.start()
        done.set()

    try:
        *rounds, _ = await asyncio.gather(*(work(number) for number in range(4)), kill())
        assert kills == 8
        assert sum(rounds) >= 4
        assert not (await plugin.client.ListVolumes(pb.ListVolumesRequest())).entries
        assert not (await plugin.client.ListSnapshots(pb.ListSnapshotsRequest())).entries
        await until_reclaimed(pool)
        assert loop.attached(pool) == []
        assert [each.target for each in mountinfo.mounts() if each.target.startswith(f"{tmp_path}/")] == []
    finally:
        await plugin.close()


async def test_a_stop_lets_operations_finish_and_a_restart_disturbs_no_pod(plugin, node, write_synced):
    volume = (await node.create()).volume_id
    target = await node.up(volume)
    calls = [asyncio.create_task(node.snapshot(volume, f"s{number}")) for number in range(8)]
    await asyncio.sleep(0)
    assert await plugin.stop() == 0
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    taken = {each.snapshot_id for each in outcomes if isinstance(each, pb.Snapshot)}
    write_synced(target / "file", b"while no plugin runs")
    await plugin.start()
    listed = await node.client.ListSnapshots(pb.ListSnapshotsRequest())
    assert taken <= {entry.snapshot.snapshot_id for entry in listed.entries}
    await node.publish(volume)
    assert (target / "file").read_bytes() == b"while no plugin runs"
    assert os.path.exists(plugin.directory / "csi.sock")
