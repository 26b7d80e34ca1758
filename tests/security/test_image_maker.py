"""A tenant writes any bytes to its raw block volume, and the plugin reads the first blocks of it as root."""

import os
import random
import struct
import tracemalloc

import pytest
from tests.support.plugin_caller import MIB, Caller, block, from_snapshot, from_volume, mounted

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.errors import MoorageError
from moorage.host import CommandFailed, commands, filesystems, probe
from moorage.plugin.run import serve
from moorage.plugin.settings import PluginSettings
from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig

BTRFS_AT = 0x10000
SIGNATURES = {"ext4": (1024 + 56, b"\x53\xef"), "xfs": (0, b"XFSB"), "btrfs": (BTRFS_AT + 0x40, b"_BHRfS_M")}
ADDED = BTRFS_AT + 4096
EXTREME = (b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff")


def superblock(fstype, fields=()):
    """The first blocks of an image with a signature and the fields (offset, bytes) in its superblock."""
    image = bytearray(ADDED)
    at, magic = SIGNATURES[fstype]
    image[at : at + len(magic)] = magic
    for offset, value in fields:
        image[offset : offset + len(value)] = value
    return bytes(image)


def found_in(image):
    return probe.content_in(
        image[:4096].ljust(4096, b"\0"), lambda: image[BTRFS_AT : BTRFS_AT + 4096].ljust(4096, b"\0")
    )


BOMBS = {
    "ext4-blocks-of-2^4294967295": ("ext4", [(1024 + 4, b"\xff" * 4), (1024 + 24, b"\xff" * 4), (1024 + 96, b"\x80")]),
    "ext4-no-blocks": ("ext4", []),
    "ext4-2^64-blocks": ("ext4", [(1024 + 4, b"\xff" * 4), (1024 + 96, b"\x80"), (1024 + 336, b"\xff" * 4)]),
    "xfs-2^64-blocks": ("xfs", [(4, struct.pack(">IQ", 4096, (1 << 64) - 1)), (102, struct.pack(">H", 512))]),
    "xfs-odd-blocks": ("xfs", [(4, struct.pack(">IQ", 4095, 1000)), (102, struct.pack(">H", 512))]),
    "xfs-sectors-of-nothing": ("xfs", [(4, struct.pack(">IQ", 4096, 1000))]),
    "btrfs-2^64-bytes": ("btrfs", [(BTRFS_AT + 0x70, b"\xff" * 8), (BTRFS_AT + 0x90, struct.pack("<I", 4096))]),
    "btrfs-large-sectors": (
        "btrfs",
        [(BTRFS_AT + 0x70, struct.pack("<QQ", 1 << 30, 0)), (BTRFS_AT + 0x90, b"\xff" * 4)],
    ),
}


@pytest.mark.parametrize(("fstype", "fields"), BOMBS.values(), ids=BOMBS.keys())
def test_impossible_numbers_of_a_superblock_mean_damage_and_take_no_memory(tmp_path, fstype, fields):
    image = tmp_path / "image"
    image.write_bytes(superblock(fstype, fields))
    tracemalloc.start()
    try:
        found = probe.probe_known(image)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found is not None  # it is no empty device, and is never formatted
    assert found.has_errors
    assert found.size_bytes <= 1 << 63
    assert found.unit_bytes in probe._UNITS
    assert peak < MIB


def test_random_superblocks_give_numbers_within_bounds():
    chance = random.Random(8)
    for _ in range(20_000):
        fstype = chance.choice(list(SIGNATURES))
        at, magic = SIGNATURES[fstype]
        base = {"ext4": 1024, "xfs": 0, "btrfs": BTRFS_AT}[fstype]
        image = bytearray(superblock(fstype))
        for _ in range(chance.randrange(12)):
            offset, size = base + chance.randrange(400), chance.choice((1, 2, 4, 8))
            image[offset : offset + size] = chance.choice((chance.randbytes(size), chance.choice(EXTREME) * size))
        image[at : at + len(magic)] = magic
        found = found_in(bytes(image[: chance.choice((len(image), at + len(magic), base + chance.randrange(500)))]))
        if found is not None:
            assert 0 <= found.size_bytes <= 1 << 63
            assert found.unit_bytes in probe._UNITS
            assert found.size_bytes or found.has_errors
            assert len(found.uuid) == 36


@pytest.mark.parametrize("fstype", SIGNATURES)
def test_an_image_that_ends_in_its_superblock_is_read(tmp_path, fstype):
    at, magic = SIGNATURES[fstype]
    image = tmp_path / "image"
    image.write_bytes(superblock(fstype)[: at + len(magic)])
    found = probe.probe_known(image)
    assert found is not None
    assert found.has_errors
    with pytest.raises(MoorageError, match=f"holds {found.fstype}"):
        filesystems.format_blank(image, "ext4")
    with pytest.raises(MoorageError, match=r"damaged|needing repair"):
        filesystems.check(image, found.fstype)


@pytest.mark.root
@pytest.mark.parametrize("bomb", ["ext4-blocks-of-2^4294967295", "xfs-2^64-blocks", "btrfs-2^64-bytes"])
async def test_what_a_pod_writes_to_its_device_stops_no_call_of_the_plugin(tmp_path, bomb):
    """The pod writes a superblock; the volume is then staged again, measured, grown, copied and deleted."""
    settings = PluginSettings(
        f"unix://{tmp_path}/csi.sock", "node-1", {"default": tmp_path / "pool"}, overcommit=1000.0
    )
    async with serve(settings), CsiClient(settings.endpoint, timeout_s=60) as client:
        caller = Caller(client, tmp_path)
        raw = (await caller.create("raw", block(), 8 * MIB)).volume_id
        try:
            target = await caller.up(raw, block())
            fd = os.open(target, os.O_RDWR)
            os.pwrite(fd, superblock(*BOMBS[bomb]), 0)
            os.fsync(fd)
            os.close(fd)
            tracemalloc.start()
            await client.NodeGetVolumeHealth(
                pb.NodeGetVolumeHealthRequest(volume_id=raw, volume_publish_path=str(target))
            )
            await client.NodeGetVolumeStats(pb.NodeGetVolumeStatsRequest(volume_id=raw, volume_path=str(target)))
            await caller.down(raw)
            await caller.snapshot(raw)
            await client.ControllerExpandVolume(
                pb.ControllerExpandVolumeRequest(
                    volume_id=raw, capacity_range=pb.CapacityRange(required_bytes=16 * MIB), volume_capability=block()
                )
            )
            await caller.up(raw, block())
            await client.NodeExpandVolume(pb.NodeExpandVolumeRequest(volume_id=raw, volume_path=str(target)))
            await caller.down(raw)
            assert tracemalloc.get_traced_memory()[1] < 20 * MIB
        finally:
            tracemalloc.stop()
            await caller.leave()


def test_such_an_image_is_checked_and_copied_like_any_other(tmp_path):
    with Pool.open(PoolConfig("default", tmp_path / "pool", background=False, overcommit=1000.0)) as pool:
        volume = pool.create_volume(CreateVolume("v", required_bytes=8 * MIB, filesystem="ext4"))
        with open(volume.data, "r+b") as data:
            data.write(superblock(*BOMBS["ext4-blocks-of-2^4294967295"]))
        pool.create_snapshot(CreateSnapshot("s", volume.id))
        assert not filesystems.is_full_size(volume.data, "ext4")


@pytest.mark.root
async def test_no_image_that_a_pod_wrote_is_mounted_as_a_filesystem(tmp_path):
    """The kernel's filesystems trust their images; these bytes could be any."""
    pools = {"default": tmp_path / "pool"}
    settings = PluginSettings(f"unix://{tmp_path}/csi.sock", "node-1", pools, overcommit=1000.0)
    async with serve(settings) as parts, CsiClient(settings.endpoint, timeout_s=60) as client:
        caller = Caller(client, tmp_path)
        raw = (await caller.create("raw", block(), 8 * MIB)).volume_id
        filesystems.mkfs(parts.pools.named().volumes.get(raw).data, "ext4")  # as a pod would on its device
        cut = await caller.snapshot(raw)
        with pytest.raises(CsiError) as caught:
            await caller.stage(raw, mounted())
        assert caught.value.code == "FAILED_PRECONDITION"
        for number, source in enumerate((from_volume(raw), from_snapshot(cut.snapshot_id))):
            with pytest.raises(CsiError) as caught:
                await caller.create(f"copy{number}", mounted(), 8 * MIB, source=source)
            assert caught.value.code == "INVALID_ARGUMENT"
        await caller.leave()


def test_a_tool_that_prints_without_end_takes_little_memory_and_ends():
    """What e2fsck prints about an image is up to the maker of the image."""
    tracemalloc.start()
    try:
        done = commands.run(["sh", "-c", "echo first; head -c 50000000 /dev/zero | tr '\\0' x; echo; echo last"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MIB
    assert done.stdout.startswith("first\n")
    assert done.stdout.endswith("x\nlast\n")
    assert "bytes are left out" in done.stdout
    with pytest.raises(CommandFailed, match="no result after"):
        commands.run(["yes"], timeout_s=0.2)
