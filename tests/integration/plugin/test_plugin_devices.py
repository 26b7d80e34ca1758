"""Loop devices that go while a volume is staged: the kernel gives their numbers to others."""

import asyncio
import os
from dataclasses import replace

import pytest
from tests.support.plugin_caller import block, mounted

from moorage.csi import csi_pb2 as pb
from moorage.host import loop, mountinfo
from moorage.plugin.node import staging
from moorage.plugin.node.observe import VolumeOnHost, observe

pytestmark = pytest.mark.root


async def test_a_device_that_was_released_and_is_still_open_is_waited_for(node, pool):
    """Whoever has it open may still write through it, as a mkfs whose plugin was killed."""
    volume = (await node.create()).volume_id
    released = loop.attach(pool / "volumes" / volume / "data")
    with loop.held(released):
        loop.detach(released)
        staging = asyncio.create_task(node.stage(volume))
        await asyncio.wait({staging}, timeout=0.3)
        assert not staging.done()
        assert loop.attached(pool) == [replace(released, autoclear=True)]
    await staging
    assert [each.autoclear for each in loop.attached(pool)] == [False]


async def test_a_device_that_stays_open_after_its_release_is_named(node, pool, refused, monkeypatch):
    volume = (await node.create()).volume_id
    released = loop.attach(pool / "volumes" / volume / "data")
    wait_detached = loop.wait_detached
    monkeypatch.setattr(loop, "wait_detached", lambda device: wait_detached(device, timeout_s=0.05))
    with loop.held(released):
        loop.detach(released)
        with refused("ABORTED", f"{released.path} was released, but a process still has it open"):
            await node.stage(volume)
        assert loop.attached(pool) == [replace(released, autoclear=True)]  # no second one beside it
    await node.stage(volume)
    assert [each.autoclear for each in loop.attached(pool)] == [False]


async def test_a_device_that_goes_between_the_look_and_its_use_is_replaced(node, pool, monkeypatch):
    volume = (await node.create()).volume_id
    going = loop.attach(pool / "volumes" / volume / "data")

    def look(volume):
        seen = observe(volume)
        if loop.detach(going):
            assert loop.wait_detached(going)
        return seen

    monkeypatch.setattr(staging, "observe", look)
    target = await node.up(volume)
    (target / "file").write_bytes(b"kept")
    assert [each.number for each in loop.attached(pool)] == [mountinfo.mount_at(target).device[1]]


@pytest.mark.parametrize("capability", [mounted(), block()], ids=["filesystem", "block"])
async def test_a_number_that_becomes_another_volumes_is_not_used(node, pool, monkeypatch, capability):
    mine, other = [(await node.create(name, capability)).volume_id for name in ("mine", "other")]
    await node.up(other, capability)
    (used,) = loop.attached(pool)

    def look(volume):
        """As it was a moment ago, when the number was this volume's."""
        seen, file = observe(volume), os.stat(volume.data)
        if seen.loops:
            return seen
        return VolumeOnHost((replace(used, file=(file.st_dev, file.st_ino)),), ())

    monkeypatch.setattr(staging, "observe", look)
    await node.stage(mine, capability)
    assert {each.number for each in loop.attached(pool / "volumes" / mine)}.isdisjoint({used.number})
    assert loop.at(used.number) == used
    await node.down(other)


@pytest.mark.parametrize("capability", [mounted(), block()], ids=["filesystem", "block"])
async def test_statistics_are_of_the_volume_that_is_at_the_path(node, refused, capability):
    mine, other = [(await node.create(name, capability)).volume_id for name in ("mine", "other")]
    there, elsewhere = [await node.up(volume, capability) for volume in (mine, other)]

    async def asked(path):
        return await node.client.NodeGetVolumeStats(pb.NodeGetVolumeStatsRequest(volume_id=mine, volume_path=str(path)))

    assert (await asked(there)).usage[0].total > 0
    used = next(each.number for each in loop.attached() if each.backing_file.endswith(f"/{mine}/data"))
    below = there.parent if capability.HasField("block") else there / "lost+found"
    for path in (elsewhere, below, f"/dev/loop{used}"):
        with refused("NOT_FOUND", mine):
            await asked(path)
