"""Repeated, contradictory and misplaced node calls."""

import os

import pytest
from tests.support.plugin_caller import MIB, Mode, block, mounted

from moorage.csi import csi_pb2 as pb
from moorage.host import loop, mountinfo, mounts

pytestmark = pytest.mark.root


async def test_repeated_calls_are_one_call(node):
    volume = (await node.create()).volume_id
    for _ in range(3):
        await node.stage(volume)
    for _ in range(3):
        target = await node.publish(volume)
    assert len([each for each in mountinfo.mounts() if each.target == str(target)]) == 1
    for _ in range(3):
        await node.unpublish(volume)
    for _ in range(3):
        await node.unstage(volume)
    assert os.listdir(node.staging(volume)) == []


async def test_the_same_target_with_other_arguments_is_refused(node, refused):
    volume = (await node.create()).volume_id
    mounted_at = mountinfo.mount_at(await node.up(volume))
    with refused("ALREADY_EXISTS", "other options"):
        await node.publish(volume, readonly=True)
    with refused("ALREADY_EXISTS", "other options"):
        await node.publish(volume, mounted(flags=["noexec"]))
    with refused("ALREADY_EXISTS", "other options"):
        await node.stage(volume, mounted(flags=["noexec"]))
    other = (await node.create("other")).volume_id
    await node.stage(other)
    with refused("ALREADY_EXISTS", "is mounted there"):
        await node.publish(other, path=node.target(volume))
    assert mountinfo.mount_at(node.target(volume)) == mounted_at


async def test_a_block_target_with_another_read_only_setting_is_refused(node, refused):
    volume = (await node.create("raw", block(), 8 * MIB)).volume_id
    target = await node.up(volume, block())
    with refused("ALREADY_EXISTS", "read-only"):
        await node.publish(volume, block(), readonly=True)
    with target.open("wb") as device:
        assert device.write(b"still writable") == 14


async def test_a_single_writer_has_one_target_and_others_have_many(node, refused):
    single = mounted(mode=Mode.SINGLE_NODE_SINGLE_WRITER)
    volume = (await node.create("single", single)).volume_id
    first = await node.up(volume, single)
    with refused("FAILED_PRECONDITION", str(first)):
        await node.publish(volume, single, pod="second")
    assert await node.publish(volume, single) == first

    many = mounted(mode=Mode.SINGLE_NODE_MULTI_WRITER)
    shared = (await node.create("many", many)).volume_id
    one = await node.up(shared, many, pod="one")
    (one / "file").write_text("from one")
    assert (await node.publish(shared, many, pod="two") / "file").read_text() == "from one"


async def test_a_publish_before_its_stage_is_refused(node, refused):
    volume = (await node.create()).volume_id
    with refused("FAILED_PRECONDITION", "not staged"):
        await node.publish(volume)
    assert not os.path.exists(node.target(volume))
    request = pb.NodePublishVolumeRequest(
        volume_id=volume, target_path=node.target(volume), volume_capability=mounted()
    )
    with refused("FAILED_PRECONDITION", "staging_target_path"):
        await node.client.NodePublishVolume(request)


async def test_a_volume_in_use_is_neither_unstaged_nor_deleted(node, refused):
    volume = (await node.create()).volume_id
    target = await node.up(volume)
    with refused("FAILED_PRECONDITION", str(target)):
        await node.unstage(volume)
    with refused("FAILED_PRECONDITION", volume):
        await node.delete(volume)
    (target / "still").write_text("there")
    assert mountinfo.mount_at(node.staging(volume)) is not None


async def test_a_volume_is_only_used_as_what_it_is(node, refused):
    filesystem = (await node.create("f", mounted("ext4"))).volume_id
    raw = (await node.create("r", block(), 8 * MIB)).volume_id
    with refused("FAILED_PRECONDITION", "cannot be given out as a block device"):
        await node.stage(filesystem, block())
    with refused("FAILED_PRECONDITION", "cannot be mounted"):
        await node.stage(raw, mounted())
    with refused("FAILED_PRECONDITION", "ext4, not xfs"):
        await node.stage(filesystem, mounted("xfs"))
    assert [mountinfo.mount_at(node.staging(volume)) for volume in (filesystem, raw)] == [None, None]


async def test_a_dead_mount_at_the_target_is_replaced_by_a_publish(node, dead_mount):
    volume = (await node.create()).volume_id
    await node.stage(volume)
    target = node.target(volume)
    os.mkdir(target)
    dead_mount(target)
    (await node.publish(volume)).joinpath("file").write_text("alive")
    assert not mounts.is_corrupted(target)
    assert os.path.exists(os.path.join(node.staging(volume), "file"))


async def test_a_dead_mount_at_the_staging_path_is_replaced_by_a_stage(node, dead_mount):
    volume = (await node.create()).volume_id
    dead_mount(node.staging(volume))
    target = await node.up(volume)
    (target / "file").write_text("alive")
    assert os.path.exists(os.path.join(node.staging(volume), "file"))


async def test_a_staging_mount_that_died_is_repaired_by_a_publish(node, dead_mount):
    volume = (await node.create()).volume_id
    staging = await node.stage(volume)
    dead_mount(staging)
    target = await node.publish(volume)
    (target / "file").write_text("alive")
    assert os.path.exists(os.path.join(staging, "file"))


async def test_dead_mounts_can_be_unpublished_and_unstaged(node, dead_mount):
    volume = (await node.create()).volume_id
    target = node.target(volume)
    os.mkdir(target)
    dead_mount(target)
    dead_mount(node.staging(volume))
    await node.unpublish(volume)
    await node.unstage(volume)
    assert not os.path.lexists(target)
    assert mountinfo.mount_at(node.staging(volume)) is None


async def test_a_symbolic_link_at_a_target_is_never_followed(node, refused, tmp_path):
    volume = (await node.create()).volume_id
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    await node.stage(volume)
    os.symlink(elsewhere, node.target(volume))
    with refused("FAILED_PRECONDITION", "symbolic link"):
        await node.publish(volume)
    assert mountinfo.mount_at(elsewhere) is None
    await node.unpublish(volume)
    assert elsewhere.is_dir()
    assert not os.path.lexists(node.target(volume))

    (tmp_path / "link").symlink_to(elsewhere)
    with refused("FAILED_PRECONDITION", "symbolic link"):
        await node.publish(volume, path=str(tmp_path / "link" / "target"))
    assert list(elsewhere.iterdir()) == []

    raw = (await node.create("raw", block(), 8 * MIB)).volume_id
    await node.stage(raw, block())
    precious = tmp_path / "precious"
    precious.write_text("data")
    os.symlink(precious, node.target(raw))
    with refused("FAILED_PRECONDITION", "symbolic link"):
        await node.publish(raw, block())
    assert precious.read_text() == "data"


async def test_a_staging_path_that_is_a_link_is_refused(node, refused, tmp_path):
    volume = (await node.create()).volume_id
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with refused("FAILED_PRECONDITION", "symbolic link"):
        await node.stage(volume, path=str(tmp_path / "link"))
    assert mountinfo.mount_at(tmp_path / "real") is None


async def test_what_is_not_ours_is_never_unmounted_or_removed(node, refused, tmp_path):
    volume = (await node.create()).volume_id
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    mounts.mount("tmpfs", foreign, "tmpfs")
    try:
        for volume_id in (volume, "unknown-volume"):
            with refused("FAILED_PRECONDITION", "left alone"):
                await node.unpublish(volume_id, foreign)
            with refused("FAILED_PRECONDITION", "left alone"):
                await node.unstage(volume_id, str(foreign))
        assert mountinfo.mount_at(foreign) is not None
    finally:
        mounts.unmount(foreign)
    (foreign / "file").write_text("data")
    with refused("FAILED_PRECONDITION", "not empty"):
        await node.unpublish(volume, foreign)
    assert (foreign / "file").read_text() == "data"


async def test_unknown_volumes_are_gone_already(node, pool):
    before = sorted(os.listdir(pool))
    await node.unpublish("no-such-volume")
    await node.unstage("no-such-volume")
    await node.delete("no-such-volume")
    await node.delete("../../etc")
    assert sorted(os.listdir(pool)) == before


async def test_a_device_with_anything_on_it_is_never_formatted(node, refused, pool):
    volume = (await node.create("v", mounted("ext4"))).volume_id
    image = pool / "volumes" / volume / "data"
    with image.open("r+b") as file:
        file.seek(4086)
        file.write(b"SWAPSPACE2")
    before = image.read_bytes()
    with refused("FAILED_PRECONDITION", "holds data"):
        await node.stage(volume)
    assert image.read_bytes() == before
    assert loop.find(image) == []


async def test_another_filesystem_than_the_volumes_own_is_left_alone(node, refused, pool, run_command):
    volume = (await node.create("v", mounted("ext4"), 320 * MIB)).volume_id
    image = pool / "volumes" / volume / "data"
    assert run_command("mkfs.xfs", "-q", str(image))[0] == 0
    with refused("FAILED_PRECONDITION", "holds xfs and not ext4"):
        await node.stage(volume)
    assert loop.find(image) == []


async def test_a_damaged_filesystem_is_an_error_and_stays_as_it_is(node, refused, pool):
    volume = (await node.create("v", mounted("ext4"))).volume_id
    await node.up(volume)
    await node.down(volume)
    image = pool / "volumes" / volume / "data"
    with image.open("r+b") as file:
        file.seek(1024 + 58)
        file.write(b"\x02\x00")  # the kernel noticed errors
        file.seek(4096)
        file.write(os.urandom(8192))  # group descriptors
    with refused("INTERNAL", "damaged"):
        await node.stage(volume)
    assert loop.find(image) == []


async def test_paths_must_be_absolute_and_exist(node, refused, tmp_path):
    volume = (await node.create()).volume_id
    with refused("INVALID_ARGUMENT", "absolute"):
        await node.stage(volume, path="relative/path")
    with refused("INVALID_ARGUMENT", ".."):
        await node.stage(volume, path=f"{tmp_path}/../x")
    with refused("INVALID_ARGUMENT", "root directory"):
        await node.stage(volume, path="///")
    with refused("INVALID_ARGUMENT", "does not exist"):
        await node.stage(volume, path=str(tmp_path / "no" / "parent"))
    await node.stage(volume)
    with refused("INVALID_ARGUMENT", "does not exist"):
        await node.publish(volume, path=str(tmp_path / "no" / "parent"))
    (tmp_path / "file").write_text("data")
    with refused("FAILED_PRECONDITION", "not a directory"):
        await node.publish(volume, path=str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "data"


async def test_statistics_and_growth_need_the_volume_to_be_there(node, refused):
    volume = (await node.create()).volume_id
    for path in ("some/path", "/nowhere", "/"):
        with refused("NOT_FOUND", volume):
            await node.client.NodeGetVolumeStats(pb.NodeGetVolumeStatsRequest(volume_id=volume, volume_path=path))
        with refused("NOT_FOUND", volume):
            await node.expand_on_node(volume, path)
    with refused("NOT_FOUND", "'unknown'"):
        await node.expand_on_node("unknown", "some/path")
    target = await node.up(volume)
    stats = pb.NodeGetVolumeStatsRequest(volume_id=volume, volume_path=str(target))
    assert (await node.client.NodeGetVolumeStats(stats)).usage[0].total > 0
