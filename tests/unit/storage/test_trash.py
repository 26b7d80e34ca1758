"""The trash: kept as long as asked, reclaimed when over, and given back whole."""

import os

import pytest

from moorage.storage import (
    CreateSnapshot,
    CreateVolume,
    InUseCopyRefused,
    InvalidValue,
    NameTaken,
    NotInTrash,
    Pool,
    PoolConfig,
    PoolScope,
    VolumeKind,
    id_from,
    is_ephemeral,
)

MIB = 1 << 20
HOUR_NS = 3600 * 10**9


class Clock:
    def __init__(self):
        self.now = 10**18

    def __call__(self):
        self.now += 1
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pool(tmp_path, clock):
    config = PoolConfig("default", tmp_path / "pool", overcommit=1000.0, trash_retention_s=3600, background=False)
    with Pool.open(config) as opened:
        opened._context.now_ns = clock
        yield opened


def image(name, **more):
    return CreateVolume(name, MIB, filesystem="", **more)


def test_a_deleted_volume_comes_back_whole_under_its_name(pool):
    made = pool.create_volume(image("v", mutable={"readIOPS": "3"}))
    made.data.write_bytes(b"precious" + bytes(MIB - 8))
    pool.delete_volume(made.id)
    (item,) = pool.trash.listed()
    assert (item.what, item.id, item.name) == ("volume", made.id, "v")
    assert item.expires_ns - item.deleted_ns == HOUR_NS
    assert pool.capacity().promised_bytes == 0
    assert pool.undelete("v") == made.id
    assert pool.volumes.get(made.id) == made
    assert made.data.read_bytes()[:8] == b"precious"
    assert pool.capacity().promised_bytes == MIB
    with pytest.raises(NotInTrash):
        pool.undelete("v")


def test_time_runs_out_for_each_by_its_own_retention(pool, clock):
    pool.create_volume(image("default"))
    pool.create_volume(image("short", mutable={"trashRetention": "1m"}))
    pool.create_volume(image("none", mutable={"trashRetention": "0"}))
    pool.create_volume(image("pod", ephemeral="/pods/1"))
    for volume in pool.volumes.page().items:
        assert pool.delete_volume(volume.id)
    assert pool.sweep() == 2  # at once: the one without retention, and the pod's
    clock.now += 61 * 10**9
    assert pool.sweep() == 1
    assert [item.name for item in pool.trash.listed()] == ["default"]
    clock.now += HOUR_NS
    assert pool.sweep() == 1
    assert pool.trash.listed() == []
    assert os.listdir(pool.directory / "tmp") == []


def test_the_youngest_of_a_name_comes_back_and_never_over_a_living_one(pool):
    for content in (b"1", b"2"):
        made = pool.create_volume(image("v"))
        made.data.write_bytes(content)
        pool.delete_volume(made.id)
    pool.create_volume(image("v"))
    with pytest.raises(NameTaken, match="created again"):
        pool.undelete("v")
    assert len(pool.trash.listed()) == 2
    pool.delete_volume(made.id)
    pool.trash.reclaim(pool.trash.listed()[-1].entry)
    pool.undelete(made.id)
    assert made.data.read_bytes() == b"2"


def test_snapshots_and_groups_come_back_too(pool):
    made = pool.create_volume(image("v"))
    cut = pool.create_snapshot(CreateSnapshot("s", made.id))
    group = pool.create_group("g", [made.id])
    pool.delete_snapshot(cut.id)
    pool.delete_group(group.id)
    assert pool.undelete("s", "snapshot") == cut.id
    assert pool.undelete("g", "group") == group.id
    assert pool.snapshots.get(cut.id) == cut
    assert pool.snapshots.get_group(group.id) == group
    with pytest.raises(InvalidValue, match="what"):
        pool.undelete("s", "thing")


def test_the_background_thread_reclaims_what_has_no_retention(tmp_path):
    with Pool.open(PoolConfig("default", tmp_path / "pool", overcommit=1000.0, trash_retention_s=0)) as pool:
        made = pool.create_volume(image("v"))
        pool.delete_volume(made.id)
        pool.close()  # ends the thread after its round
        pool.sweep()
        assert pool.trash.listed() == []


def test_a_pods_volumes_are_found_and_never_mistaken(pool):
    pod = pool.create_volume(image("csi-1", ephemeral="/pods/1"))
    kept = pool.create_volume(image("csi-1"))
    assert pod.id != kept.id
    assert is_ephemeral(pod.id)
    assert not is_ephemeral(kept.id)
    assert pool.volumes.ephemerals() == [pod]
    with pytest.raises(NameTaken, match="another pod"):
        pool.create_volume(image("csi-1", ephemeral="/pods/2"))


def test_a_volume_of_another_node_is_not_copied_without_reflink(tmp_path):
    config = PoolConfig("shared", tmp_path / "pool", scope=PoolScope.SHARED, overcommit=1000.0, background=False)
    with Pool.open(config) as pool:
        pool._context.copies_by_reflink = False
        made = pool.create_volume(image("v"))
        tree = pool.create_volume(CreateVolume("d", MIB, kind=VolumeKind.DIRECTORY))
        pool.attachments.register_node("n1")
        pool.attachments.attach(made.id, "n1", "SINGLE_NODE_WRITER")
        with pytest.raises(InUseCopyRefused, match="attached to n1"):
            pool.create_snapshot(CreateSnapshot("s", made.id))
        with pytest.raises(InUseCopyRefused):
            pool.create_group("g", [made.id, tree.id])
        pool.attachments.detach(made.id)
        assert pool.create_snapshot(CreateSnapshot("s", made.id)).volume_id == made.id
        assert pool.snapshots.find_group(id_from("g")) is None
