"""The node's part of the contract where steps are repeated, cut short, or only for reading."""

import os

import pytest
from tests.support.plugin_caller import MIB, Caller, Mode, block, mounted

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.host import filesystems, loop, mountinfo, mounts
from moorage.host.errors import CannotGrow
from moorage.plugin.run import serve
from moorage.plugin.settings import PluginSettings

pytestmark = pytest.mark.root


@pytest.fixture
async def shared(pool, tmp_path):
    """A node of a shared pool, where volumes are attached."""
    directory = tmp_path / "shared"
    directory.mkdir()
    settings = PluginSettings(f"unix://{directory}/csi.sock", "node-1", {"default": pool}, scope="shared")
    async with serve(settings), CsiClient(settings.endpoint, timeout_s=120) as client:
        caller = Caller(client, directory)
        yield caller
        await caller.leave()


async def attached(caller, volume, capability, readonly=False):
    request = pb.ControllerPublishVolumeRequest(
        volume_id=volume, node_id="node-1", volume_capability=capability, readonly=readonly
    )
    return dict((await caller.client.ControllerPublishVolume(request)).publish_context)


async def detached(caller, volume):
    await caller.client.ControllerUnpublishVolume(pb.ControllerUnpublishVolumeRequest(volume_id=volume))


# --- for reading only --------------------------------------------------------------------------


async def test_a_volume_attached_for_reading_is_staged_as_often_as_asked(shared):
    """The attachment makes it read-only, whatever the mode of the capability says."""
    volume = (await shared.create()).volume_id
    given = await attached(shared, volume, mounted())
    await shared.stage(volume, context=given)
    ((await shared.publish(volume, context=given)) / "file").write_text("there")
    await shared.down(volume)
    await detached(shared, volume)

    given = await attached(shared, volume, mounted(), readonly=True)
    for _ in range(2):
        await shared.stage(volume, context=given)
    for _ in range(2):
        target = await shared.publish(volume, context=given)
    assert (target / "file").read_text() == "there"
    with pytest.raises(OSError, match="Read-only"):
        (target / "new").write_text("x")


async def test_a_repaired_stage_is_for_reading_as_the_one_that_died(shared, pool, dead_mount):
    """Other nodes read the volume at the same time: not even a journal may be written."""
    volume = (await shared.create()).volume_id
    given = await attached(shared, volume, mounted())
    await shared.stage(volume, context=given)
    await shared.unstage(volume)
    await detached(shared, volume)
    readers = mounted(mode=Mode.MULTI_NODE_READER_ONLY)
    given = await attached(shared, volume, readers)
    dead_mount(shared.staging(volume))
    await shared.publish(volume, readers, context=given)
    assert [device.read_only for device in loop.attached(pool)] == [True]


@pytest.mark.parametrize(("mode", "readonly"), [(Mode.SINGLE_NODE_WRITER, True), (Mode.MULTI_NODE_READER_ONLY, False)])
async def test_a_device_staged_for_reading_serves_one_pod_after_the_other(shared, pool, mode, readonly):
    """kubelet unstages only when no pod wants the volume any more."""
    capability = block(mode)
    volume = (await shared.create("raw", capability, 8 * MIB)).volume_id
    given = await attached(shared, volume, capability, readonly)
    await shared.stage(volume, capability, context=given)
    for pod in ("first", "second"):
        target = await shared.publish(volume, capability, pod, context=given)
        with pytest.raises(PermissionError), target.open("r+b", buffering=0) as device:
            device.write(b"x")
        await shared.unpublish(volume, pod=pod)
    await shared.unstage(volume)
    assert loop.attached(pool) == []


async def test_a_device_for_reading_goes_with_its_last_target_where_the_volume_is_staged_for_writing(node, pool):
    volume = (await node.create("raw", block(), 8 * MIB)).volume_id
    await node.stage(volume, block())
    for pod in ("one", "two"):
        await node.publish(volume, block(), pod, readonly=True)
    assert sorted(device.read_only for device in loop.attached(pool)) == [False, True]
    await node.unpublish(volume, pod="one")
    assert len(loop.attached(pool)) == 2
    await node.unpublish(volume, pod="two")
    assert [device.read_only for device in loop.attached(pool)] == [False]


async def test_a_filesystem_that_is_mounted_for_reading_cannot_grow(node, refused):
    """FAILED_PRECONDITION: asking again does not help as long as it is mounted so."""
    volume = (await node.create("v", mounted("xfs"), 310 * MIB)).volume_id
    await node.up(volume)
    await node.down(volume)
    readers = mounted(mode=Mode.SINGLE_NODE_READER_ONLY)
    target = await node.up(volume, readers)
    before = mounts.space_of(target)
    await node.expand(volume, 400 * MIB)
    with refused("FAILED_PRECONDITION", "read-only"):
        await node.expand_on_node(volume, target)
    assert mounts.space_of(target) == before


async def test_a_second_target_of_a_single_writer_is_refused_also_for_reading(node, refused):
    for capability in (mounted(mode=Mode.SINGLE_NODE_SINGLE_WRITER), block(Mode.SINGLE_NODE_SINGLE_WRITER)):
        kind = capability.WhichOneof("access_type")
        volume = (await node.create(kind, capability)).volume_id
        first = await node.up(volume, capability)
        with refused("FAILED_PRECONDITION", str(first)):
            await node.publish(volume, capability, "second", readonly=True)
        assert not os.path.lexists(node.target(volume, "second"))


# --- a step that was cut short -----------------------------------------------------------------


async def test_a_stage_is_repeated_also_where_its_filesystem_cannot_grow_now(node, monkeypatch):
    """What is staged stays so: that the filesystem waits for its next mount is no reason to refuse."""
    volume = (await node.create("v", mounted("ext4"))).volume_id
    target = await node.up(volume)

    def refuse(device, fstype, mountpoint):
        raise CannotGrow("it cannot be grown while mounted")

    await node.expand(volume, 96 * MIB)
    with monkeypatch.context() as patched:
        patched.setattr(filesystems, "grow_or_postpone", refuse)
        await node.stage(volume)
    (target / "file").write_text("still writable")
    assert "ro" not in mountinfo.mount_at(node.staging(volume)).options


# --- answers -----------------------------------------------------------------------------------


async def test_growth_on_the_node_keeps_to_its_range_and_to_the_volumes_use(node, refused):
    volume = (await node.create("v", mounted("xfs"), 310 * MIB)).volume_id
    target = str(await node.up(volume))

    async def expand(required=0, limit=0, capability=None):
        capacity = pb.CapacityRange(required_bytes=required, limit_bytes=limit)
        request = pb.NodeExpandVolumeRequest(
            volume_id=volume, volume_path=target, capacity_range=capacity, volume_capability=capability
        )
        return (await node.client.NodeExpandVolume(request)).capacity_bytes

    assert await expand() == 310 * MIB
    assert await expand(300 * MIB, 320 * MIB, mounted("xfs")) == 310 * MIB
    with refused("OUT_OF_RANGE"):
        await expand(320 * MIB)
    with refused("OUT_OF_RANGE"):
        await expand(200 * MIB, 300 * MIB)
    with refused("INVALID_ARGUMENT", "negative"):
        await expand(-1)
    with refused("INVALID_ARGUMENT", "volume_capability"):
        await expand(capability=block())


async def test_statistics_are_told_at_the_staging_path_too(node):
    volume = (await node.create()).volume_id
    path = await node.stage(volume)
    answer = await node.client.NodeGetVolumeStats(pb.NodeGetVolumeStatsRequest(volume_id=volume, volume_path=path))
    assert [usage.unit for usage in answer.usage] == [pb.VolumeUsage.BYTES, pb.VolumeUsage.INODES]
    assert answer.HasField("volume_condition")


async def test_every_message_of_changed_blocks_says_its_type_and_the_volumes_size(node, refused):
    volume = (await node.create("raw", block(), 8 * MIB)).volume_id
    empty = (await node.snapshot(volume, "empty")).snapshot_id
    target = await node.up(volume, block())
    with target.open("r+b", buffering=0) as device:
        for offset in range(0, 8 * MIB, MIB):
            device.seek(offset)
            device.write(b"x" * 4096)
        os.fsync(device.fileno())
    await node.down(volume)
    full = (await node.snapshot(volume, "full")).snapshot_id

    async def messages(snapshot_id, **more):
        request = pb.GetMetadataAllocatedRequest(snapshot_id=snapshot_id, **more)
        return [message async for message in node.client.GetMetadataAllocated(request)]

    for found in (await messages(empty), await messages(full, max_results=3), await messages(full)):
        assert {each.volume_capacity_bytes for each in found} == {8 * MIB}
        assert {each.block_metadata_type for each in found} == {pb.VARIABLE_LENGTH}
    assert max(len(each.block_metadata) for each in await messages(full, max_results=3)) == 3
    inside = [each for message in await messages(full, starting_offset=MIB + 100) for each in message.block_metadata]
    assert inside[0].byte_offset <= MIB + 100 < inside[0].byte_offset + inside[0].size_bytes
    assert not [each for message in await messages(full, starting_offset=8 * MIB) for each in message.block_metadata]
    with refused("OUT_OF_RANGE"):
        await messages(full, starting_offset=8 * MIB + 1)
    with refused("INVALID_ARGUMENT", "max_results"):
        await messages(full, max_results=-1)
    with refused("INVALID_ARGUMENT", "snapshot_id"):
        await messages("")
    for field in ("base_snapshot_id", "target_snapshot_id"):
        with refused("INVALID_ARGUMENT", {"base_snapshot_id": "target", "target_snapshot_id": "base"}[field]):
            request = pb.GetMetadataDeltaRequest(**{field: full})
            [message async for message in node.client.GetMetadataDelta(request)]
