"""Full disks, read-only pools, and many callers at once."""

import asyncio
import random

import pytest
from tests.support.plugin_caller import MIB, Caller
from tests.support.plugin_process import PluginProcess

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.host import loop, mountinfo, mounts

pytestmark = pytest.mark.root


@pytest.fixture
async def small(small_filesystem, tmp_path):
    """A plugin on a small pool, and the pool."""
    pool, run = small_filesystem / "pool", tmp_path / "run"
    pool.mkdir()
    run.mkdir()
    flags = ["--overcommit=100", "--reserve=0%"]
    async with PluginProcess({"default": pool}, directory=run, flags=flags) as process:
        caller = Caller(process.client, tmp_path)
        yield caller, pool
        await caller.leave()


async def test_a_disk_that_fills_up_in_the_middle_leaves_nothing_behind(small, small_filesystem, refused):
    caller, pool = small
    kept = (await caller.create("kept", size=16 * MIB)).volume_id
    with (small_filesystem / "filler").open("wb") as file:
        file.write(bytes(int(mounts.space_of(small_filesystem).available_bytes * 0.7)))
    with refused("RESOURCE_EXHAUSTED"):
        await caller.create("thick", size=64 * MIB, parameters={"provisioning": "thick"})
    assert [each.name for each in (pool / "volumes").iterdir()] == [kept]
    assert list((pool / "tmp").iterdir()) == []
    (small_filesystem / "filler").unlink()
    await caller.create("thick", size=64 * MIB, parameters={"provisioning": "thick"})


async def test_a_read_only_pool_is_said_so_and_works_again(small, small_filesystem):
    caller, _ = small
    volume = (await caller.create("v", size=16 * MIB)).volume_id
    mounts.remount(small_filesystem, "ext4", ["ro"])
    with pytest.raises(CsiError, match=r"[Rr]ead-only"):
        await caller.create("w", size=16 * MIB)
    with pytest.raises(CsiError, match=r"[Rr]ead-only"):
        await caller.delete(volume)
    health = await caller.client.NodeGetStorageHealth(pb.NodeGetStorageHealthRequest())
    assert [each.reason for each in health.backend_health] == ["PoolReadOnly"]
    listed = await caller.client.ListVolumes(pb.ListVolumesRequest())
    assert [entry.volume.volume_id for entry in listed.entries] == [volume]
    mounts.remount(small_filesystem, "ext4", ["rw"])
    await caller.create("w", size=16 * MIB)
    await caller.delete(volume)


async def patiently(call):
    """Again, while another call on the same volume runs; not all at the same moment, or one gets on each time."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await call()
            except CsiError as error:
                if error.code != "ABORTED":
                    raise
                await asyncio.sleep(random.uniform(0, 0.2))


async def test_sixty_four_callers_on_one_volume_leave_it_as_one_would(node, pool):
    volume = (await node.create()).volume_id
    await asyncio.gather(*(patiently(lambda: node.stage(volume)) for _ in range(64)))
    assert len(loop.attached(pool)) == 1
    pods = [f"pod-{number}" for number in range(64)]
    targets = await asyncio.gather(*(patiently(lambda pod=pod: node.publish(volume, pod=pod)) for pod in pods))
    shown = {mount.target for mount in mountinfo.mounts()}
    assert {str(target) for target in targets} <= shown
    await asyncio.gather(*(patiently(lambda pod=pod: node.unpublish(volume, pod=pod)) for pod in pods))
    await patiently(lambda: node.unstage(volume))
    assert loop.attached(pool) == []


async def test_sixty_four_volumes_go_up_and_down_at_once(node, pool):
    async def life(number):
        volume = (await node.create(f"v{number}", size=16 * MIB)).volume_id
        target = await node.up(volume)
        (target / "file").write_text(str(number))
        await node.down(volume)
        await node.delete(volume)

    await asyncio.gather(*(life(number) for number in range(64)))
    assert loop.attached(pool) == []
    assert not (await node.client.ListVolumes(pb.ListVolumesRequest())).entries
