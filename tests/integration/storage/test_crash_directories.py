"""Directory volumes on btrfs, killed at every step: subvolumes and their limits are whole or not there."""

import os

import pytest
from tests.support.crash import killed_at

from moorage.host import subvolumes
from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig, Source, VolumeKind, id_from

MIB = 1 << 20
KEPT, NEW = id_from("kept"), id_from("new")


def directory(name, size=16 * MIB, **more):
    return CreateVolume(name, size, kind=VolumeKind.DIRECTORY, **more)


def prepare(pool):
    kept = pool.create_volume(directory("kept"))
    (kept.data / "file").write_text("acknowledged")
    pool.create_snapshot(CreateSnapshot("snap", kept.id))
    pool.create_group("group", [kept.id])
    for name in ("doomed", "gone"):
        (pool.create_volume(directory(name)).data / "file").write_text(name)
    pool.delete_volume(id_from("gone"))


STORIES = {
    "create": lambda p: p.create_volume(directory("new")),
    "clone": lambda p: p.create_volume(directory("new", source=Source.volume(KEPT))),
    "restore": lambda p: p.create_volume(directory("new", source=Source.snapshot(id_from("snap")))),
    "expand": lambda p: p.expand_volume(KEPT, 32 * MIB),
    "snapshot": lambda p: p.create_snapshot(CreateSnapshot("new", KEPT)),
    "delete snapshot": lambda p: p.delete_snapshot(id_from("snap")),
    "group": lambda p: p.create_group("new", [KEPT, id_from("doomed")]),
    "delete group": lambda p: p.delete_group(id_from("group")),
    "delete": lambda p: p.delete_volume(id_from("doomed")),
    "undelete": lambda p: p.volumes.find(id_from("gone")) or p.undelete("gone"),
}


def told(pool):
    """Everything that can be seen of the pool: trees, sizes, and whether each is held to its size."""
    volumes = {
        volume.name: (
            volume.size_bytes,
            subvolumes.is_subvolume(os.fspath(volume.data)),
            volume.size_enforced,
            subvolumes.has_lost_limit(os.fspath(volume.data)),
            pool.health.of(volume.id),
            _files(volume.data),
        )
        for volume in pool.volumes.page().items
    }
    cuts = {cut.name: (cut.size_bytes, _files(cut.data)) for cut in pool.snapshots.page().items}
    return volumes, cuts, sorted(item.name for item in pool.trash.listed()), os.listdir(pool.directory / "tmp")


def _files(place):
    return {each.name: each.read_text() for each in place.iterdir()}


@pytest.mark.parametrize("name", STORIES)
def test_a_directory_killed_at_any_step_and_repeated_ends_the_same(name, btrfs_pool_dir):
    act = STORIES[name]

    def config_for(number):
        place = btrfs_pool_dir / str(number)
        return PoolConfig("default", place, overcommit=1000.0, trash_retention_s=3600, background=False)

    with Pool.open(config_for("calm")) as calm:
        prepare(calm)
        act(calm)
        expected = told(calm)
        assert all(enforced and not lost for _, _, enforced, lost, _, _ in expected[0].values())
    step, is_over = 0, False
    while not is_over:
        config = config_for(step)
        with Pool.open(config) as pool:
            prepare(pool)
        is_over = killed_at(config, act, step)
        with Pool.open(config) as pool:
            act(pool)
            assert told(pool) == expected
        step += 1
    assert step > 2, "the operation has no steps to be killed at"
