"""Room: what fits, what does not, and that a full disk leaves nothing behind."""

import contextlib
import os
import time

import pytest

from moorage.host import mounts
from moorage.storage import (
    CreateSnapshot,
    CreateVolume,
    OutOfSpace,
    Pool,
    PoolConfig,
    PoolReadOnly,
    SizeOutOfRange,
    Source,
    id_from,
)

MIB = 1 << 20


def open_pool(directory, **more):
    return Pool.open(PoolConfig("small", directory / "pool", background=False, **more))


def image(name, size, **more):
    return CreateVolume(name, size, filesystem="", **more)


@pytest.fixture(params=["ext4", "xfs", "btrfs"])
def small(request, make_filesystem):
    """A filesystem of 640 MiB."""
    return make_filesystem(request.param, 640 * MIB)


def fill(path, size):
    with open(path, "wb") as data:
        while size > 0:
            data.write(b"x" * min(size, MIB))
            size -= MIB
        data.flush()
        os.fsync(data.fileno())


def fill_up(path):
    """Take every block that there is."""
    with open(path, "wb") as data:
        offset = 0
        for step in (MIB, 4096):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(data.fileno(), offset, step)
                    offset += step


def wait_until(is_so):
    """XFS gives the blocks of a removed file back a little later."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.01)


def test_promises_are_limited_by_the_pool(small):
    with open_pool(small) as pool:
        room = pool.capacity()
        assert 0 < room.available_bytes < room.total_bytes
        assert room.reserve_bytes == int(room.total_bytes * 0.05)
        with pytest.raises(SizeOutOfRange, match="can ever give"):
            pool.create_volume(image("huge", 1 << 40))
        first = pool.create_volume(image("first", room.available_bytes // 2))
        with pytest.raises(OutOfSpace, match="do not fit into pool small"):
            pool.create_volume(image("second", room.available_bytes * 3 // 4))
        with pytest.raises(OutOfSpace):
            pool.expand_volume(first.id, room.available_bytes + 50 * MIB)
        assert pool.volumes.get(first.id) == first
        assert pool.capacity().promised_bytes == first.size_bytes
        assert pool.delete_volume(first.id)
        assert pool.capacity().promised_bytes == 0
    with open_pool(small, overcommit=3.0) as pool:
        pool.create_volume(image("a", room.available_bytes * 2))
        assert pool.capacity().available_bytes < room.available_bytes * 2


def test_other_peoples_files_take_room_until_they_go(small):
    with open_pool(small, reserve_fraction=0.0) as pool:
        before = pool.capacity().available_bytes
        fill(small / "stranger", 200 * MIB)
        assert pool.capacity().available_bytes <= before - 190 * MIB
        (small / "stranger").unlink()
        os.sync()
        wait_until(lambda: pool.capacity().available_bytes > before - 50 * MIB)


def test_what_a_volume_writes_is_not_counted_twice(small):
    with open_pool(small) as pool:
        made = pool.create_volume(image("v", 200 * MIB))
        before = pool.capacity().available_bytes
        with open(made.data, "r+b") as data:
            data.write(b"x" * (100 * MIB))
            os.fsync(data.fileno())
        # The promise was made when the volume was; keeping it costs nothing more.
        another = before - 30 * MIB
        pool.create_volume(image("w", another // MIB * MIB))


def test_a_full_disk_in_the_middle_leaves_nothing_behind(small):
    with open_pool(small, overcommit=10.0, reserve_fraction=0.0) as pool:
        free = pool.capacity().free_bytes
        fill(small / "stranger", free - 60 * MIB)
        with pytest.raises(OutOfSpace, match=r"full|fit"):
            pool.create_volume(image("thick", 300 * MIB, thick=True))
        assert pool.volumes.find(id_from("thick")) is None
        assert os.listdir(pool.directory / "tmp") == []
        assert os.listdir(pool.directory / "volumes") == []
        (small / "stranger").unlink()
        os.sync()
        wait_until(lambda: pool.capacity().free_bytes > 400 * MIB)
        pool.create_volume(image("thick", 300 * MIB, thick=True))


def test_changes_on_a_full_disk_fail_whole(make_filesystem):
    small = make_filesystem("ext4", 640 * MIB)
    with open_pool(small, overcommit=10.0, reserve_fraction=0.0, trash_retention_s=0) as pool:
        made = pool.create_volume(image("v", MIB))
        fill_up(small / "stranger")
        for call in (
            lambda: pool.volumes.modify(made.id, {"readIOPS": "5"}),
            lambda: pool.expand_volume(made.id, 2 * MIB),
            lambda: pool.create_volume(image("w", MIB)),
            lambda: pool.create_snapshot(CreateSnapshot("s", made.id)),
        ):
            with pytest.raises(OutOfSpace):
                call()
        assert pool.volumes.get(made.id) == made
        assert sorted(os.listdir(made.data.parent)) == ["data", "lock", "volume.json"]
        assert os.listdir(pool.directory / "tmp") == []
        assert pool.delete_volume(made.id)  # deleting needs no room
        assert pool.sweep() == 1


def test_a_copy_checks_for_room_before_it_starts(make_filesystem):
    small = make_filesystem("ext4", 640 * MIB)
    with open_pool(small, overcommit=10.0) as pool:
        made = pool.create_volume(image("v", 400 * MIB))
        with open(made.data, "r+b") as data:
            data.write(b"x" * (350 * MIB))
        with pytest.raises(OutOfSpace, match="needs"):
            pool.create_snapshot(CreateSnapshot("s", made.id))
        with pytest.raises(OutOfSpace, match="needs"):
            pool.create_volume(image("c", 400 * MIB, source=Source.volume(made.id)))
        assert os.listdir(pool.directory / "tmp") == []


def test_trash_is_reclaimed_oldest_first_when_room_is_needed(make_filesystem):
    small = make_filesystem("ext4", 640 * MIB)
    with open_pool(small, trash_retention_s=3600) as pool:
        for name in ("old", "young"):
            made = pool.create_volume(image(name, 200 * MIB, thick=True))
            pool.delete_volume(made.id)
        room = pool.capacity()
        assert room.reclaimable_bytes >= 390 * MIB
        assert [item.name for item in pool.trash.listed()] == ["old", "young"]
        assert pool.sweep() == 0  # their time is not over
        pool.create_volume(image("new", 300 * MIB, thick=True))
        assert [item.name for item in pool.trash.listed()] == ["young"]
        assert pool.undelete("young") == id_from("young")
        assert pool.trash.listed() == []
        assert pool.volumes.get(id_from("young")).size_bytes == 200 * MIB


def test_a_pod_that_writes_never_meets_a_pool_full_of_deleted_volumes(make_filesystem):
    directory = make_filesystem("xfs", 640 * MIB)
    with Pool.open(PoolConfig("small", directory / "pool")) as pool:  # with its background thread, as the plugin
        for name in ("old", "young"):
            pool.delete_volume(pool.create_volume(image(name, 150 * MIB, thick=True)).id)
        made = pool.create_volume(image("busy", 400 * MIB))
        assert [item.name for item in pool.trash.listed()] == ["old", "young"]  # a promise takes nothing from the trash
        fill(made.data, 400 * MIB)  # more than is free; raises if the disk is full
        assert [item.name for item in pool.trash.listed() if item.name == "old"] == []
    with Pool.open(PoolConfig("small", directory / "pool", background=False)) as pool:
        assert pool.capacity().available_bytes < 200 * MIB


def test_deleted_volumes_count_as_room_and_are_kept_for_a_day(make_filesystem):
    directory = make_filesystem("xfs", 640 * MIB)
    with open_pool(directory) as pool:
        before = pool.capacity().available_bytes
        made = pool.create_volume(image("v", 200 * MIB, thick=True))
        pool.delete_volume(made.id)
        assert pool.capacity().available_bytes >= before - MIB
        (item,) = pool.trash.listed()
        assert item.expires_ns - item.deleted_ns == 24 * 3600 * 10**9
        assert pool.sweep() == 0
        assert pool.undelete("v") == made.id


def test_a_read_only_pool_says_so(small):
    with open_pool(small) as pool:
        made = pool.create_volume(image("v", MIB))
        mounts.remount(small, "", ["ro"])
        try:
            for call in (
                lambda: pool.create_volume(image("w", MIB)),
                lambda: pool.delete_volume(made.id),
                lambda: pool.expand_volume(made.id, 2 * MIB),
                lambda: pool.create_snapshot(CreateSnapshot("s", made.id)),
            ):
                with pytest.raises(PoolReadOnly, match="is read-only"):
                    call()
            assert pool.volumes.get(made.id) == made
            assert pool.health.pool()[0].reason == "PoolReadOnly"
        finally:
            mounts.remount(small, "", ["rw"])
        assert pool.health.pool() == ()
        assert pool.delete_volume(made.id)


def test_a_nearly_full_pool_is_degraded_until_it_is_not(small):
    with open_pool(small) as pool:
        made = pool.create_volume(image("v", MIB))
        assert pool.health.of(made.id) == ()
        fill(small / "stranger", pool.capacity().free_bytes - 10 * MIB)
        assert [entry.reason for entry in pool.health.of(made.id)] == ["PoolNearlyFull"]
        assert [sick.volume_id for sick in pool.health.unhealthy().items] == [made.id]
        (small / "stranger").unlink()
        os.sync()
        wait_until(lambda: pool.health.of(made.id) == ())
