"""One volume through its whole life, on every kind of pool, and what a workload sees of it."""

import os
import stat

import pytest
from tests.support.plugin_caller import MIB, Mode, block, from_snapshot, from_volume, mounted
from tests.support.plugin_walk import Walk, walk

from moorage.csi import csi_pb2 as pb
from moorage.host import block_devices, loop, mountinfo

pytestmark = pytest.mark.root

KINDS = [("image", "ext4"), ("image", "xfs"), ("image", "btrfs"), ("image", "block"), ("directory", "none")]


@pytest.mark.parametrize("pool_filesystem", ["ext4", "xfs", "btrfs"])
@pytest.mark.parametrize(("kind", "filesystem"), KINDS)
async def test_a_volume_walks_through_its_life(plugin, tmp_path, kind, filesystem):
    steps = []
    plan = Walk(plugin.client, tmp_path / "walk", kind, filesystem, show=lambda name, *_: steps.append(name))
    await walk(plan)
    assert steps[-1] == "delete"
    assert "restore" in steps


async def test_a_published_volume_keeps_what_a_pod_wrote(node, write_synced):
    volume = (await node.create()).volume_id
    target = await node.up(volume, pod="old")
    write_synced(target / "ledger", b"42")
    await node.down(volume, pod="old")
    assert not target.exists()

    target = await node.up(volume, pod="new")
    assert (target / "ledger").read_bytes() == b"42"


async def test_a_volume_has_the_size_that_was_asked_and_no_more(node):
    volume = (await node.create(size=32 * MIB)).volume_id
    target = await node.up(volume)
    with (target / "big").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        os.posix_fallocate(file.fileno(), 0, 64 * MIB)


async def test_a_clone_of_a_volume_in_use_has_its_files_and_goes_its_own_way(node, write_synced):
    source = (await node.create("source")).volume_id
    target = await node.up(source)
    write_synced(target / "file", b"one")
    clone = await node.create("clone", source=from_volume(source))
    assert clone.content_source.volume.volume_id == source
    assert clone.volume_context["copyPath"] == "reflink"
    write_synced(target / "file", b"two")
    cloned = await node.up(clone.volume_id, pod="other")
    assert (cloned / "file").read_bytes() == b"one"
    write_synced(cloned / "file", b"six")
    assert (target / "file").read_bytes() == b"two"


@pytest.mark.parametrize("filesystem", ["ext4", "xfs", "btrfs"])
async def test_a_larger_restore_shows_its_size_and_both_are_mounted_at_once(node, write_synced, filesystem):
    size = 320 * MIB
    source = (await node.create("source", mounted(filesystem), size)).volume_id
    target = await node.up(source)
    write_synced(target / "file", b"kept")
    snapshot = await node.snapshot(source)
    large = (await node.create("large", mounted(), 2 * size, source=from_snapshot(snapshot.snapshot_id))).volume_id
    restored = await node.up(large, pod="other")
    assert (restored / "file").read_bytes() == b"kept"
    found = os.statvfs(restored)
    assert found.f_blocks * found.f_frsize > 1.7 * size


async def test_snapshots_outlive_their_volume_and_are_deleted_in_any_order(node, write_synced):
    volume = (await node.create()).volume_id
    target = await node.up(volume)
    ids = []
    for number in range(3):
        write_synced(target / "file", b"%d" % number)
        ids.append((await node.snapshot(volume, f"s{number}")).snapshot_id)
    await node.down(volume)
    await node.delete(volume)
    await node.client.DeleteSnapshot(pb.DeleteSnapshotRequest(snapshot_id=ids[1]))
    listed = await node.client.ListSnapshots(pb.ListSnapshotsRequest(source_volume_id=volume))
    assert {entry.snapshot.snapshot_id for entry in listed.entries} == {ids[0], ids[2]}
    restored = (await node.create("r", source=from_snapshot(ids[2]))).volume_id
    assert ((await node.up(restored)) / "file").read_bytes() == b"2"


async def test_a_block_volume_is_a_device_that_grows_in_place(node):
    volume = (await node.create("raw", block(), 8 * MIB)).volume_id
    target = await node.up(volume, block())
    assert stat.S_ISBLK(target.stat().st_mode)
    assert block_devices.size_of(target) == 8 * MIB
    answer = await node.expand(volume, 16 * MIB)
    assert answer.capacity_bytes == 16 * MIB
    assert not answer.node_expansion_required
    assert block_devices.size_of(target) == 16 * MIB


async def test_a_read_only_block_volume_refuses_writes(node, pool):
    volume = (await node.create("raw", block(), 8 * MIB)).volume_id
    await node.stage(volume, block())
    target = await node.publish(volume, block(), readonly=True)
    with pytest.raises(OSError, match=r"not permitted|Read-only|Permission"), target.open("r+b", buffering=0) as device:
        device.write(b"x")
    await node.unpublish(volume)
    assert [each.read_only for each in loop.find(pool / "volumes" / volume / "data")] == [False]


@pytest.mark.parametrize("filesystem", ["xfs", "btrfs"])
async def test_a_filesystem_grows_while_it_is_used(node, filesystem):
    volume = (await node.create("v", mounted(filesystem), 320 * MIB)).volume_id
    target = await node.up(volume)
    answer = await node.expand(volume, 640 * MIB)
    assert answer.node_expansion_required
    await node.expand_on_node(volume, target)
    await node.expand_on_node(volume, target)
    found = os.statvfs(target)
    assert found.f_blocks * found.f_frsize > 550 * MIB


async def test_a_volume_that_grew_while_unused_shows_it_at_the_next_stage(node):
    volume = (await node.create("v", mounted("ext4"), 64 * MIB)).volume_id
    await node.up(volume)
    await node.down(volume)
    await node.expand(volume, 256 * MIB)
    found = os.statvfs(await node.up(volume))
    assert found.f_blocks * found.f_frsize > 200 * MIB


async def test_a_shrink_changes_nothing(node):
    volume = (await node.create(size=64 * MIB)).volume_id
    assert (await node.expand(volume, 32 * MIB)).capacity_bytes == 64 * MIB


async def test_mount_flags_and_read_only_reach_the_mount(node):
    capability = mounted(flags=["noatime", "nosuid"])
    volume = (await node.create("v", capability)).volume_id
    await node.stage(volume, capability)
    target = await node.publish(volume, capability)
    mount = mountinfo.mount_at(target)
    assert {"noatime", "nosuid", "rw"} <= set(mount.options)

    second = await node.publish(volume, capability, pod="reader", readonly=True)
    with pytest.raises(OSError, match="Read-only"):
        (second / "x").write_text("x")
    (target / "still").write_text("writable")


async def test_statistics_tell_bytes_and_inodes_or_the_size_of_a_device(node):
    volume = (await node.create()).volume_id
    target = await node.up(volume)
    stats = await node.client.NodeGetVolumeStats(
        pb.NodeGetVolumeStatsRequest(volume_id=volume, volume_path=str(target))
    )
    assert [usage.unit for usage in stats.usage] == [pb.VolumeUsage.BYTES, pb.VolumeUsage.INODES]
    assert stats.usage[0].total == stats.usage[0].used + os.statvfs(target).f_bfree * os.statvfs(target).f_frsize
    assert not stats.volume_condition.abnormal

    raw = (await node.create("raw", block(), 8 * MIB)).volume_id
    device = await node.up(raw, block())
    stats = await node.client.NodeGetVolumeStats(pb.NodeGetVolumeStatsRequest(volume_id=raw, volume_path=str(device)))
    assert [(usage.unit, usage.total) for usage in stats.usage] == [(pb.VolumeUsage.BYTES, 8 * MIB)]


async def test_a_directory_is_shared_by_many_writers(node):
    capability = mounted(mode=Mode.MULTI_NODE_MULTI_WRITER)
    volume = (await node.create("d", capability, parameters={"kind": "directory"})).volume_id
    first = await node.up(volume, capability, pod="one")
    second = await node.publish(volume, capability, pod="two")
    (first / "file").write_text("seen by both")
    assert (second / "file").read_text() == "seen by both"
