"""A volume's life on each filesystem: data written through a real mount survives every copy."""

import os

import pytest

from moorage.host import filesystems, loop, mounts
from moorage.storage import (
    CopyPath,
    CreateSnapshot,
    CreateVolume,
    InUse,
    InUseCopyRefused,
    Pool,
    PoolConfig,
    Source,
    VolumeInUse,
    VolumeKind,
)

MIB = 1 << 20


@pytest.fixture
def pool(any_pool_dir):
    with Pool.open(PoolConfig("default", any_pool_dir / "pool", background=False)) as opened:
        yield opened


@pytest.mark.parametrize("filesystem", ["ext4", "xfs", "btrfs"])
def test_a_snapshot_restores_what_was_written_before_it(pool, tmp_path, filesystem, mounted):
    volume = pool.create_volume(CreateVolume("v", 320 * MIB, filesystem=filesystem))
    with mounted(pool, volume, tmp_path / "a") as place:
        (place / "ledger").write_text("before")
        os.sync()
        if pool.copies_by_reflink:
            cut = pool.create_snapshot(CreateSnapshot("s", volume.id))
            assert cut.copy_path is CopyPath.REFLINK
        else:
            with pytest.raises(InUseCopyRefused, match="snapshotInUse: freeze"):
                pool.create_snapshot(CreateSnapshot("s", volume.id))
            cut = pool.create_snapshot(CreateSnapshot("s", volume.id, in_use=InUse.FREEZE))
            assert cut.copy_path is CopyPath.SPARSE_COPY
        (place / "ledger").write_text("after")

    request = CreateVolume("r", 640 * MIB, filesystem=filesystem, source=Source.snapshot(cut.id))
    restored = pool.create_volume(request)
    assert restored.copy_path in (CopyPath.REFLINK, CopyPath.SPARSE_COPY)
    with mounted(pool, volume, tmp_path / "a") as old, mounted(pool, restored, tmp_path / "b") as new:
        assert (new / "ledger").read_text() == "before"
        assert (old / "ledger").read_text() == "after"
        assert mounts.space_of(new).total_bytes > 480 * MIB  # grown on its first mount
    assert pool.delete_volume(volume.id)
    with mounted(pool, restored, tmp_path / "b") as new:  # outlives its source
        assert (new / "ledger").read_text() == "before"


def test_a_chain_of_clones_can_be_deleted_in_any_order(pool, tmp_path, mounted):
    first = pool.create_volume(CreateVolume("v0", 64 * MIB))
    with mounted(pool, first, tmp_path / "m") as place:
        (place / "n").write_text("0")
    volumes = [first]
    for n in range(1, 5):
        request = CreateVolume(f"v{n}", 64 * MIB, source=Source.volume(volumes[-1].id))
        volumes.append(pool.create_volume(request))
    for gone in (volumes[2], volumes[0], volumes[3]):
        assert pool.delete_volume(gone.id)
    pool.sweep()
    with mounted(pool, volumes[4], tmp_path / "m") as place:
        assert (place / "n").read_text() == "0"


def test_a_volume_in_use_is_not_deleted(pool, tmp_path, mounted):
    volume = pool.create_volume(CreateVolume("v", 64 * MIB))
    with mounted(pool, volume, tmp_path / "m"), pytest.raises(VolumeInUse, match="/dev/loop"):
        pool.delete_volume(volume.id)
    assert pool.volumes.get(volume.id) == volume
    with mounted(pool, volume, tmp_path / "m"):
        (volume.data.parent / "volume.json").write_text("damaged")
        with pytest.raises(VolumeInUse):  # whatever its record says
            pool.delete_volume(volume.id)
    assert pool.delete_volume(volume.id)


@pytest.mark.parametrize("filesystem", ["xfs", "btrfs"])
def test_a_mounted_volume_grows_online(pool, tmp_path, filesystem, mounted):
    volume = pool.create_volume(CreateVolume("v", 320 * MIB, filesystem=filesystem))
    with mounted(pool, volume, tmp_path / "m") as place:
        grown = pool.expand_volume(volume.id, 700 * MIB)
        assert grown.size_bytes == 700 * MIB
        device = loop.find(volume.data)[0]
        loop.grow(device, 700 * MIB)
        assert filesystems.grow(device.path, filesystem, place)
        assert mounts.space_of(place).total_bytes > 600 * MIB
        assert pool.expand_volume(volume.id, 700 * MIB) == grown  # again is fine
        assert pool.expand_volume(volume.id, 100 * MIB) == grown  # and nothing shrinks


def test_an_unmounted_ext4_grows_before_its_next_mount(pool, tmp_path, mounted):
    volume = pool.create_volume(CreateVolume("v", 64 * MIB))
    with mounted(pool, volume, tmp_path / "m") as place:
        (place / "f").write_text("kept")
    pool.expand_volume(volume.id, 256 * MIB)
    with mounted(pool, volume, tmp_path / "m") as place:
        assert (place / "f").read_text() == "kept"
        assert mounts.space_of(place).total_bytes > 200 * MIB


def test_a_thick_image_owns_its_blocks_also_as_a_clone(pool, tmp_path, mounted):
    volume = pool.create_volume(CreateVolume("v", 64 * MIB, thick=True))
    assert os.stat(volume.data).st_blocks * 512 >= 64 * MIB
    with mounted(pool, volume, tmp_path / "m") as place:
        (place / "f").write_text("x")
    assert os.stat(volume.data).st_blocks * 512 >= 64 * MIB  # mkfs discarded nothing
    clone = pool.create_volume(CreateVolume("c", 64 * MIB, thick=True, source=Source.volume(volume.id)))
    assert os.stat(clone.data).st_blocks * 512 >= 64 * MIB
    with mounted(pool, clone, tmp_path / "m") as place:
        assert (place / "f").read_text() == "x"


def test_a_block_volume_in_use_is_copied_where_the_pool_has_reflinks(pool):
    volume = pool.create_volume(CreateVolume("v", 8 * MIB, filesystem=""))
    device = loop.attach(volume.data)
    try:
        with open(device.path, "r+b") as block:
            block.write(b"A" * 4096)
        if not pool.copies_by_reflink:
            with pytest.raises(InUseCopyRefused, match="block device in use"):
                pool.create_snapshot(CreateSnapshot("s", volume.id, in_use=InUse.FREEZE))
        else:
            cut = pool.create_snapshot(CreateSnapshot("s", volume.id))
            assert cut.data.read_bytes()[:4096] == b"A" * 4096
    finally:
        loop.detach(device)
        assert loop.wait_detached(device)


def test_a_copy_of_a_half_formatted_volume_is_blank(pool):
    volume = pool.create_volume(CreateVolume("v", 8 * MIB))
    pool.volumes.format_begin(volume.id)
    with open(volume.data, "r+b") as image:
        image.write(b"half of a filesystem")
    cut = pool.create_snapshot(CreateSnapshot("s", volume.id))
    assert pool.volumes.is_half_formatted(volume.id)
    assert cut.data.read_bytes() == bytes(8 * MIB)
    assert cut.kind is VolumeKind.IMAGE
