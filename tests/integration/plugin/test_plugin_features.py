"""Groups at one point in time, changed blocks, live modification, inline volumes, fenced attachments."""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.support.plugin_caller import MIB, Caller, Mode, block, from_snapshot, mounted
from tests.support.plugin_process import PluginProcess

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.host import loop, mountinfo, mounts
from moorage.plugin.io_limits import IoCgroups
from moorage.plugin.run import serve
from moorage.plugin.services.values import TOKEN_KEY
from moorage.plugin.settings import PluginSettings

pytestmark = pytest.mark.root

INLINE = {"csi.storage.k8s.io/ephemeral": "true"}


# --- group snapshots ---------------------------------------------------------------------------


async def test_a_group_snapshot_never_contradicts_the_order_of_writes(node):
    """A writer appends 1, 2, 3, … round-robin; a later number is never there without an earlier one."""
    volumes = [(await node.create(f"v{n}")).volume_id for n in range(3)]
    paths = await asyncio.gather(*(node.up(volume, pod=volume) for volume in volumes))
    stop = threading.Event()
    writer = threading.Thread(target=append_numbers, args=(paths, stop))
    writer.start()
    try:
        groups = []
        for number in range(4):
            request = pb.CreateVolumeGroupSnapshotRequest(name=f"g{number}", source_volume_ids=volumes)
            groups.append((await node.client.CreateVolumeGroupSnapshot(request)).group_snapshot)
            await asyncio.sleep(0.05)
    finally:
        stop.set()
        await asyncio.to_thread(writer.join)
    seen_sizes = set()
    for group in groups:
        by_volume = {member.source_volume_id: member.snapshot_id for member in group.snapshots}
        last = await asyncio.gather(*(last_number(node, by_volume[volume]) for volume in volumes))
        seen_sizes.add(max(last))
        # Written round-robin and synced one by one: the last numbers span at most one round.
        assert max(last) - min(last) <= len(volumes), last
    assert len(seen_sizes) > 1, "the writer was not running"


def append_numbers(paths, stop):
    number = 0
    files = [os.open(path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for path in paths]
    while not stop.is_set():
        fd = files[number % len(files)]
        number += 1
        os.write(fd, b"%d\n" % number)
        os.fsync(fd)
    for fd in files:
        os.close(fd)


async def last_number(node, snapshot_id):
    volume = (await node.create(f"r-{snapshot_id}"[:60], source=from_snapshot(snapshot_id))).volume_id
    path = await node.up(volume, pod=volume)
    lines = (path / "log").read_text().split() if (path / "log").exists() else []
    await node.down(volume, pod=volume)
    await node.delete(volume)
    return int(lines[-1]) if lines else 0


async def test_a_group_is_all_or_nothing_and_its_members_stay_together(node, refused):
    volumes = [(await node.create(f"v{n}")).volume_id for n in range(3)]
    request = pb.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=volumes)
    with refused("NOT_FOUND", "unknown"):
        await node.client.CreateVolumeGroupSnapshot(
            pb.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=[*volumes, "unknown"])
        )
    assert not (await node.client.ListSnapshots(pb.ListSnapshotsRequest())).entries
    group = (await node.client.CreateVolumeGroupSnapshot(request)).group_snapshot
    assert group == (await node.client.CreateVolumeGroupSnapshot(request)).group_snapshot
    with refused("ALREADY_EXISTS"):
        await node.client.CreateVolumeGroupSnapshot(
            pb.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=volumes[:2])
        )
    listed = (await node.client.ListSnapshots(pb.ListSnapshotsRequest())).entries
    assert {entry.snapshot.group_snapshot_id for entry in listed} == {group.group_snapshot_id}
    members = [member.snapshot_id for member in group.snapshots]
    with refused("INVALID_ARGUMENT", "group"):
        await node.client.DeleteSnapshot(pb.DeleteSnapshotRequest(snapshot_id=members[0]))
    get = pb.GetVolumeGroupSnapshotRequest(group_snapshot_id=group.group_snapshot_id, snapshot_ids=members[::-1])
    assert (await node.client.GetVolumeGroupSnapshot(get)).group_snapshot == group
    for wrong in (pb.GetVolumeGroupSnapshotRequest, pb.DeleteVolumeGroupSnapshotRequest):
        method = wrong.DESCRIPTOR.name.removesuffix("Request")
        with refused("INVALID_ARGUMENT"):
            await node.client.call(method, wrong(group_snapshot_id=group.group_snapshot_id, snapshot_ids=["something"]))
    await node.client.DeleteVolumeGroupSnapshot(
        pb.DeleteVolumeGroupSnapshotRequest(group_snapshot_id=group.group_snapshot_id, snapshot_ids=members)
    )
    assert not (await node.client.ListSnapshots(pb.ListSnapshotsRequest())).entries


# --- changed blocks ----------------------------------------------------------------------------


async def ranges_of(stream):
    messages = [message async for message in stream]
    assert {message.block_metadata_type for message in messages} == {pb.VARIABLE_LENGTH}
    found = [(each.byte_offset, each.size_bytes) for message in messages for each in message.block_metadata]
    assert found == sorted(found)
    assert all(size > 0 for _, size in found)
    assert all(a + s <= b for (a, s), (b, _) in itertools.pairwise(found))
    return messages, found


@pytest.mark.parametrize("pool_filesystem", ["xfs", "btrfs", "ext4"])
async def test_a_delta_turns_the_old_copy_into_the_new_one(node, refused):
    size = 16 * MIB
    volume = (await node.create("raw", block(), size)).volume_id

    async def cut(name, writes):
        target = await node.up(volume, block())
        with target.open("r+b", buffering=0) as device:
            for offset, data in writes:
                device.seek(offset)
                device.write(data)
            os.fsync(device.fileno())
        await node.down(volume)
        return (await node.snapshot(volume, name)).snapshot_id

    async def content(snapshot_id):
        restored = (await node.create(f"c-{snapshot_id}"[:60], block(), source=from_snapshot(snapshot_id))).volume_id
        data = (await node.up(restored, block())).read_bytes()
        await node.down(restored)
        return data

    old = await cut("old", [(0, b"a" * 4096), (5 * MIB + 512, b"b" * 70_000), (size - 512, b"z" * 512)])
    new = await cut("new", [(4096, b"c" * 512), (5 * MIB, b"d" * 8192), (9 * MIB, b"e" * 12_345)])
    before, after = await content(old), await content(new)

    delta = pb.GetMetadataDeltaRequest(base_snapshot_id=old, target_snapshot_id=new)
    _, changed = await ranges_of(node.client.GetMetadataDelta(delta))
    patched = bytearray(before)
    for offset, length in changed:
        patched[offset : offset + length] = after[offset : offset + length]
    assert bytes(patched) == after
    assert sum(length for _, length in changed) < size // 4

    _, allocated = await ranges_of(node.client.GetMetadataAllocated(pb.GetMetadataAllocatedRequest(snapshot_id=new)))
    rebuilt = bytearray(len(after))
    for offset, length in allocated:
        rebuilt[offset : offset + length] = after[offset : offset + length]
    assert bytes(rebuilt) == after

    delta.max_results = 1
    messages, one_by_one = await ranges_of(node.client.GetMetadataDelta(delta))
    assert one_by_one == changed
    assert all(len(message.block_metadata) <= 1 for message in messages)
    delta.starting_offset = changed[0][0] + changed[0][1]
    _, rest = await ranges_of(node.client.GetMetadataDelta(delta))
    assert rest == changed[1:]
    for offset in (-1, size + 1):
        delta.starting_offset = offset
        with refused("OUT_OF_RANGE"):
            await ranges_of(node.client.GetMetadataDelta(delta))
    with refused("NOT_FOUND"):
        await ranges_of(node.client.GetMetadataAllocated(pb.GetMetadataAllocatedRequest(snapshot_id="x")))


async def test_changed_blocks_are_for_block_volumes_of_one_volume(node, refused):
    files = (await node.create("files")).volume_id
    raws = [(await node.create(name, block(), 8 * MIB)).volume_id for name in ("one", "two")]
    of_files = (await node.snapshot(files, "f")).snapshot_id
    one, two = [(await node.snapshot(raw, f"s-{raw}")).snapshot_id for raw in raws]
    with refused("INVALID_ARGUMENT", "filesystem volume"):
        await ranges_of(node.client.GetMetadataAllocated(pb.GetMetadataAllocatedRequest(snapshot_id=of_files)))
    with refused("INVALID_ARGUMENT", "target_snapshot_id"):
        request = pb.GetMetadataDeltaRequest(base_snapshot_id=one, target_snapshot_id=two)
        await ranges_of(node.client.GetMetadataDelta(request))
    same = pb.GetMetadataDeltaRequest(base_snapshot_id=one, target_snapshot_id=one)
    assert (await ranges_of(node.client.GetMetadataDelta(same)))[1] == []


# --- live modification -------------------------------------------------------------------------


async def modify(node, volume, **changes):
    await node.client.ControllerModifyVolume(
        pb.ControllerModifyVolumeRequest(volume_id=volume, mutable_parameters=changes)
    )


async def test_device_settings_change_on_a_living_volume_and_come_back_at_stage(node, pool):
    volume = (await node.create("v", mutable={"readAheadKiB": "512"})).volume_id
    await node.up(volume)

    def device():
        return next(each for each in loop.attached(below=pool) if f"/{volume}/" in each.backing_file)

    def read_ahead():
        return int(Path(f"/sys/block/loop{device().number}/queue/read_ahead_kb").read_text())

    assert (device().direct_io, read_ahead()) == (True, 512)
    await modify(node, volume, directIO="false", readAheadKiB="64")
    assert (device().direct_io, read_ahead()) == (False, 64)
    await node.down(volume)
    await node.up(volume)
    assert (device().direct_io, read_ahead()) == (False, 64)
    await modify(node, volume, directIO="true")
    assert device().direct_io


@pytest.fixture
def pod_cgroup(cannot_run):
    """A pod's cgroup with one container in it, as kubelet makes them."""
    found = IoCgroups()
    if found.why_unsupported():
        cannot_run(found.why_unsupported())
    uid = f"11111111-2222-3333-4444-{os.getpid():012d}"
    pod = found.root / f"moorage-test-pod{uid}"
    container = pod / "container"
    container.mkdir(parents=True)
    yield uid, container
    for each in (container, pod):
        with contextlib.suppress(OSError):
            each.rmdir()


def measured_iops(directory, cgroup, seconds=2):
    """Random direct reads by a process in the cgroup."""
    script = (
        "import os,sys\n"
        "open(sys.argv[1]+'/cgroup.procs','w').write(str(os.getpid()))\n"
        "os.execvp('fio',['fio','--name=x','--filename='+sys.argv[2]+'/f','--size=8M','--rw=randread','--bs=4k',"
        "'--direct=1','--time_based','--runtime='+sys.argv[3],'--output-format=json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(cgroup), str(directory), str(seconds)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["iops"]


async def test_io_limits_hold_a_pod_back_and_can_be_lifted(node, pod_cgroup):
    uid, cgroup = pod_cgroup
    volume = (await node.create("v", mutable={"readIOPS": "100"})).volume_id
    target = await node.up(volume, pod=uid)
    limited = await asyncio.to_thread(measured_iops, target, cgroup)
    assert 50 < limited < 150
    await modify(node, volume, readIOPS="0")
    free = await asyncio.to_thread(measured_iops, target, cgroup)
    assert free > 3 * limited


# --- inline volumes ----------------------------------------------------------------------------


async def test_an_inline_volume_lives_and_dies_with_its_pod(node, refused, pool, tmp_path):
    target = Path(node.target("inline"))
    request = pb.NodePublishVolumeRequest(
        volume_id="csi-123",
        target_path=str(target),
        volume_capability=mounted(),
        volume_context={**INLINE, "size": "320Mi", "fsType": "xfs"},
    )
    for _ in range(2):
        await node.client.NodePublishVolume(request)
    assert mountinfo.mount_at(target).fstype == "xfs"
    (target / "file").write_text("short-lived")
    assert not (await node.client.ListVolumes(pb.ListVolumesRequest())).entries
    inside = [each.name for each in (pool / "volumes").iterdir()]
    await node.delete(inside[0])  # a controller cannot reach it
    assert (target / "file").read_text() == "short-lived"
    stats = pb.NodeGetVolumeStatsRequest(volume_id="csi-123", volume_path=str(target))
    assert (await node.client.NodeGetVolumeStats(stats)).usage[0].total > 200 * MIB
    for _ in range(2):
        await node.unpublish("csi-123", target)
    assert not target.exists()
    assert list((pool / "volumes").iterdir()) == []
    for bad in ({"size": "big"}, {"fsType": "ntfs"}, {"colour": "blue"}):
        request.volume_context.clear()
        request.volume_context.update({**INLINE, **bad})
        with refused("INVALID_ARGUMENT", next(iter(bad))):
            await node.client.NodePublishVolume(request)
    assert list((pool / "volumes").iterdir()) == []


@pytest.mark.parametrize("in_own_process", [True])
async def test_inline_volumes_of_pods_that_are_gone_are_swept_at_start(plugin, node, pool):
    kept, gone = Path(node.target("kept", "a")), Path(node.target("gone", "b"))
    for name, target in (("kept", kept), ("gone", gone)):
        await node.client.NodePublishVolume(
            pb.NodePublishVolumeRequest(
                volume_id=name, target_path=str(target), volume_capability=mounted(), volume_context=INLINE
            )
        )
    await plugin.kill()
    loop_number = loop.number_of(mountinfo.mount_at(gone).source)
    mounts.unmount(gone)
    gone.rmdir()
    gone.parent.rmdir()
    await plugin.start()
    assert [each.name for each in (pool / "volumes").iterdir()] != []
    assert len(list((pool / "volumes").iterdir())) == 1
    assert loop_number not in {each.number for each in loop.attached(pool)}
    await node.unpublish("kept", kept)


# --- shared scope ------------------------------------------------------------------------------


@pytest.fixture
async def two_nodes(pool, tmp_path):
    """Two plugins on one shared pool, each a controller and a node; one in a process of its own."""
    one, two = tmp_path / "node-a", tmp_path / "node-b"
    for directory in (one, two):
        directory.mkdir()
    flags = ["--scope=shared", "--max-volumes-per-node=3"]
    settings = PluginSettings(
        f"unix://{two}/csi.sock", "node-b", {"default": pool}, scope="shared", max_volumes_per_node=3
    )
    async with (
        PluginProcess({"default": pool}, directory=one, node_id="node-a", flags=flags) as process,
        serve(settings),
        CsiClient(settings.endpoint, timeout_s=120) as client,
    ):
        callers = [Caller(process.client, one), Caller(client, two)]
        yield callers
        for caller in callers:
            await caller.leave()


async def attach(caller, volume, node, mode=Mode.SINGLE_NODE_WRITER, readonly=False):
    request = pb.ControllerPublishVolumeRequest(
        volume_id=volume, node_id=node, volume_capability=mounted(mode=mode), readonly=readonly
    )
    return dict((await caller.client.ControllerPublishVolume(request)).publish_context)


async def detach(caller, volume, node=""):
    await caller.client.ControllerUnpublishVolume(pb.ControllerUnpublishVolumeRequest(volume_id=volume, node_id=node))


async def test_a_volume_moves_between_nodes_and_the_old_token_is_worth_nothing(two_nodes, refused, write_synced):
    a, b = two_nodes
    volume = (await a.create()).volume_id
    with refused("FAILED_PRECONDITION"):
        await a.stage(volume)
    old = await attach(a, volume, "node-a")
    assert await attach(b, volume, "node-a") == old
    await a.stage(volume, context=old)
    target = await a.publish(volume, context=old)
    write_synced(target / "file", b"from a")
    with refused("FAILED_PRECONDITION", "node-a"):
        await attach(b, volume, "node-b")
    with refused("FAILED_PRECONDITION"):
        await b.stage(volume, context=old)
    await a.down(volume)
    await detach(b, volume, "node-a")
    new = await attach(b, volume, "node-b")
    assert int(new[TOKEN_KEY]) > int(old[TOKEN_KEY])
    with refused("FAILED_PRECONDITION"):
        await a.stage(volume, context=old)
    await b.stage(volume, context=new)
    assert ((await b.publish(volume, context=new)) / "file").read_bytes() == b"from a"
    listed = await a.client.ListVolumes(pb.ListVolumesRequest())
    assert list(listed.entries[0].status.published_node_ids) == ["node-b"]
    with refused("FAILED_PRECONDITION"):
        await a.delete(volume)


async def test_a_fenced_node_that_still_holds_a_mount_is_refused(two_nodes, refused):
    a, b = two_nodes
    volume = (await a.create()).volume_id
    old = await attach(a, volume, "node-a")
    await a.stage(volume, context=old)
    await detach(b, volume)  # the node was given up
    new = await attach(b, volume, "node-b")
    assert new != old
    with refused("FAILED_PRECONDITION"):
        await a.stage(volume, context=old)
    with refused("FAILED_PRECONDITION"):
        await a.publish(volume, context=old)


async def test_attaching_knows_nodes_limits_modes_and_repeats(two_nodes, refused):
    a, _ = two_nodes
    volume = (await a.create()).volume_id
    with refused("NOT_FOUND", "node-x"):
        await attach(a, volume, "node-x")
    with refused("NOT_FOUND"):
        await attach(a, "unknown", "node-a")
    await attach(a, volume, "node-a")
    with refused("ALREADY_EXISTS"):
        await attach(a, volume, "node-a", readonly=True)
    for _ in range(2):
        await detach(a, volume, "node-a")
        await detach(a, "unknown", "node-a")
        await detach(a, volume)
    readers = Mode.MULTI_NODE_READER_ONLY
    await attach(a, volume, "node-a", readers)
    await attach(a, volume, "node-b", readers)
    answer = await a.client.ControllerGetVolume(pb.ControllerGetVolumeRequest(volume_id=volume))
    assert list(answer.status.published_node_ids) == ["node-a", "node-b"]
    for number in range(2):
        await attach(a, (await a.create(f"x{number}")).volume_id, "node-a")
    with refused("RESOURCE_EXHAUSTED"):
        await attach(a, (await a.create("x3")).volume_id, "node-a")


async def test_readers_and_directories_are_on_two_nodes_at_once(two_nodes, write_synced):
    a, b = two_nodes
    image = (await a.create()).volume_id
    given = await attach(a, image, "node-a")
    await a.stage(image, context=given)
    write_synced((await a.publish(image, context=given)) / "file", b"read by both")
    await a.down(image)
    await detach(a, image, "node-a")

    readers, writers = mounted(mode=Mode.MULTI_NODE_READER_ONLY), mounted(mode=Mode.MULTI_NODE_MULTI_WRITER)
    folder = (await a.create("d", writers, parameters={"kind": "directory"})).volume_id
    for volume, capability in ((image, readers), (folder, writers)):
        targets = []
        for caller, node in ((a, "node-a"), (b, "node-b")):
            given = await attach(caller, volume, node, capability.access_mode.mode)
            await caller.stage(volume, capability, context=given)
            targets.append(await caller.publish(volume, capability, context=given))
        if volume == folder:
            (targets[0] / "file").write_bytes(b"read by both")
        await a.down(volume)  # the other node is not disturbed
        assert (targets[1] / "file").read_bytes() == b"read by both"
        await b.down(volume)
        await detach(a, volume)
        await a.delete(volume)


async def test_two_controllers_never_both_hand_out_an_image(two_nodes):
    volume = (await two_nodes[0].create()).volume_id

    async def try_attach(number):
        caller, node = two_nodes[number % 2], ("node-a", "node-b")[number // 2 % 2]
        try:
            return node, await attach(caller, volume, node)
        except Exception:
            return None

    for _ in range(5):
        got = [each for each in await asyncio.gather(*(try_attach(n) for n in range(32))) if each]
        assert len({node for node, _ in got}) == 1
        assert len({context[TOKEN_KEY] for _, context in got}) == 1
        await detach(two_nodes[0], volume)


# --- health ------------------------------------------------------------------------------------


async def health_of(node, volume, target=""):
    answer = await node.client.NodeGetVolumeHealth(
        pb.NodeGetVolumeHealthRequest(volume_id=volume, volume_publish_path=str(target))
    )
    return [each.reason for each in answer.volume_health.health_statuses]


async def test_a_truncated_image_is_seen_and_goes_away_when_mended(node, pool):
    volume = (await node.create()).volume_id
    image = pool / "volumes" / volume / "data"
    os.truncate(image, MIB)
    health = await node.client.ControllerListVolumeHealth(pb.ControllerListVolumeHealthRequest())
    assert [each.volume_id for each in health.entries] == [volume]
    assert health.entries[0].health_statuses[0].reason == "ImageTruncated"
    assert health.entries[0].health_statuses[0].status == pb.DATA_LOSS
    listed = await node.client.ListVolumes(pb.ListVolumesRequest())
    assert listed.entries[0].status.volume_condition.abnormal
    os.truncate(image, 64 * MIB)
    assert not (await node.client.ControllerListVolumeHealth(pb.ControllerListVolumeHealthRequest())).entries


async def test_lost_direct_io_and_a_deleted_image_are_seen(node, pool):
    volume = (await node.create()).volume_id
    target = await node.up(volume)
    assert await health_of(node, volume, target) == []
    image = pool / "volumes" / volume / "data"
    device = loop.find(image)[0]
    loop.set_direct_io(device.number, False)
    assert await health_of(node, volume, target) == ["DirectIOLost"]
    stats = await node.client.NodeGetVolumeStats(
        pb.NodeGetVolumeStatsRequest(volume_id=volume, volume_path=str(target))
    )
    assert stats.volume_condition.abnormal
    loop.set_direct_io(device.number, True)
    assert await health_of(node, volume, target) == []
    image.rename(image.with_name("moved"))
    try:
        assert "DataMissing" in await health_of(node, volume, target)
    finally:
        image.with_name("moved").rename(image)


async def test_a_filesystem_that_turned_read_only_is_seen(node):
    volume = (await node.create("v", mounted("ext4"))).volume_id
    target = await node.up(volume)
    device = mountinfo.mount_at(target).source
    Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("1")
    async with asyncio.timeout(20):
        while "RemountedReadOnly" not in await health_of(node, volume, target):
            await asyncio.sleep(0.05)
    assert "FilesystemErrors" in await health_of(node, volume, target)
    assert not mounts.is_corrupted(target)


@pytest.mark.parametrize("pool_filesystem", ["ext4"])
async def test_a_directory_without_a_quota_says_so(node):
    volume = (await node.create("d", parameters={"kind": "directory"})).volume_id
    assert await health_of(node, volume) == ["SizeNotEnforced"]


@pytest.mark.parametrize("pool_filesystem", ["btrfs"])
async def test_a_directory_with_a_quota_has_its_own_size(node, write_synced):
    capability = mounted()
    volume = (await node.create("d", capability, 64 * MIB, parameters={"kind": "directory"})).volume_id
    target = await node.up(volume)
    assert await health_of(node, volume) == []
    stats = pb.NodeGetVolumeStatsRequest(volume_id=volume, volume_path=str(target))
    assert (await node.client.NodeGetVolumeStats(stats)).usage[0].total == 64 * MIB
    with (target / "big").open("wb") as file, pytest.raises(OSError, match="quota"):
        os.posix_fallocate(file.fileno(), 0, 128 * MIB)


async def test_no_health_for_unknown_volumes(node, refused):
    volume = (await node.create()).volume_id
    assert await health_of(node, volume) == []
    with refused("NOT_FOUND", "unknown"):
        await health_of(node, "unknown")
    with refused("INVALID_ARGUMENT", "volume_publish_path"):
        await health_of(node, "unknown", "relative")
