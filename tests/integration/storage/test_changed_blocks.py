"""Changed blocks: a delta applied to the old copy gives the new one, byte for byte."""

import os
import random

import pytest

from moorage.storage import (
    CreateSnapshot,
    CreateVolume,
    InvalidValue,
    Pool,
    PoolConfig,
    SizeOutOfRange,
    SnapshotNotFound,
    VolumeKind,
)

MIB = 1 << 20


@pytest.fixture
def pool(any_pool_dir):
    with Pool.open(PoolConfig("default", any_pool_dir / "pool", background=False)) as opened:
        yield opened


def scribble(path, chance, size):
    """Random writes, holes and rewrites, some of them not aligned to anything."""
    with open(path, "r+b") as data:
        for _ in range(40):
            offset = chance.randrange(0, size - 1)
            length = min(chance.choice([1, 511, 4096, 5000, 65536]), size - offset)
            data.seek(offset)
            data.write(chance.randbytes(length) if chance.random() < 0.8 else bytes(length))
        os.fsync(data.fileno())


def apply(old, new, ranges, size):
    """What a backup tool does: copy only the told ranges."""
    result = bytearray(old.ljust(size, b"\0")[:size])
    last = 0
    for piece in ranges:
        assert piece.offset >= last, "ranges must be in order and apart"
        assert piece.length > 0
        last = piece.end
        result[piece.offset : piece.end] = new[piece.offset : piece.end]
    assert last <= size
    return bytes(result)


@pytest.mark.parametrize("seed", range(4))
def test_a_delta_turns_the_old_copy_into_the_new(pool, seed):
    chance = random.Random(seed)
    volume = pool.create_volume(CreateVolume("v", 16 * MIB, filesystem=""))
    scribble(volume.data, chance, 16 * MIB)
    cuts = [pool.create_snapshot(CreateSnapshot("s0", volume.id))]
    for n in range(1, 4):
        scribble(volume.data, chance, 16 * MIB)
        if n == 2:
            pool.expand_volume(volume.id, 20 * MIB)
            with open(volume.data, "r+b") as data:
                data.seek(20 * MIB - 100)
                data.write(b"at the very end")
        cuts.append(pool.create_snapshot(CreateSnapshot(f"s{n}", volume.id)))
    for base, target in [(0, 1), (0, 3), (1, 2), (2, 3)]:
        old, new = cuts[base].data.read_bytes(), cuts[target].data.read_bytes()
        diff = pool.blocks.changed(cuts[base].id, cuts[target].id)
        assert diff.size_bytes == len(new)
        assert diff.method == ("extents" if pool.copies_by_reflink else "content")
        told = list(diff.ranges)
        assert apply(old, new, told, len(new)) == new
        assert sum(piece.length for piece in told) < len(new)
    full = pool.blocks.allocated(cuts[3].id)
    new = cuts[3].data.read_bytes()
    assert apply(b"", new, full.ranges, len(new)) == new


def test_a_stream_resumes_where_it_stopped(pool):
    volume = pool.create_volume(CreateVolume("v", 16 * MIB, filesystem=""))
    first = pool.create_snapshot(CreateSnapshot("a", volume.id))
    scribble(volume.data, random.Random(1), 16 * MIB)
    second = pool.create_snapshot(CreateSnapshot("b", volume.id))
    whole = list(pool.blocks.changed(first.id, second.id).ranges)
    for start in (0, 1, whole[2].offset, whole[2].offset + 5, whole[2].end, 16 * MIB - 1, 16 * MIB):
        again = list(pool.blocks.changed(first.id, second.id, start).ranges)
        assert all(piece.end > start for piece in again)
        covered = {(piece.offset, piece.end) for piece in whole if piece.end > start}
        assert [piece.end for piece in again] == sorted(end for _, end in covered)
        allocated = list(pool.blocks.allocated(second.id, start).ranges)
        assert all(piece.end > start for piece in allocated)


def test_nothing_changed_is_nothing_told(pool):
    volume = pool.create_volume(CreateVolume("v", 16 * MIB, filesystem=""))
    scribble(volume.data, random.Random(7), 16 * MIB)
    first = pool.create_snapshot(CreateSnapshot("a", volume.id))
    second = pool.create_snapshot(CreateSnapshot("b", volume.id))
    assert list(pool.blocks.changed(first.id, second.id).ranges) == []


def test_what_cannot_be_compared_is_refused_by_name(pool):
    one = pool.create_volume(CreateVolume("v", MIB, filesystem=""))
    other = pool.create_volume(CreateVolume("w", MIB, filesystem=""))
    tree = pool.create_volume(CreateVolume("d", MIB, kind=VolumeKind.DIRECTORY))
    first = pool.create_snapshot(CreateSnapshot("a", one.id))
    second = pool.create_snapshot(CreateSnapshot("b", other.id))
    third = pool.create_snapshot(CreateSnapshot("c", tree.id))
    with pytest.raises(InvalidValue, match="base_snapshot_id"):
        pool.blocks.changed(first.id, second.id)
    with pytest.raises(InvalidValue, match="directory"):
        pool.blocks.allocated(third.id)
    with pytest.raises(SnapshotNotFound):
        pool.blocks.changed(first.id, "no-such")
    for start in (-1, MIB + 1):
        with pytest.raises(SizeOutOfRange, match="starting_offset"):
            pool.blocks.allocated(first.id, start)
