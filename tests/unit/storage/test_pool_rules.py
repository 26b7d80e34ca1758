"""The promises of a pool that need no mount: idempotency, refusals, listing, guests, migration."""

import json
import os

import pytest

from moorage.storage import (
    CreateSnapshot,
    CreateVolume,
    DamagedRecord,
    GroupMember,
    HealthStatus,
    InvalidValue,
    NameTaken,
    Pool,
    PoolConfig,
    PoolLocked,
    PoolNotFound,
    Pools,
    PoolUnusable,
    PoolVanished,
    SnapshotNotFound,
    Source,
    VolumeKind,
    VolumeNotFound,
    id_from,
)
from moorage.storage.layout import PoolLayout

MIB = 1 << 20


@pytest.fixture
def config(tmp_path):
    return PoolConfig("default", tmp_path / "pool", overcommit=1000.0, background=False)


@pytest.fixture
def pool(config):
    with Pool.open(config) as opened:
        yield opened


def image(name, size=MIB, **more):
    return CreateVolume(name, size, filesystem="", **more)


def test_the_same_request_gives_the_same_volume_also_after_a_restart(config):
    with Pool.open(config) as pool:
        made = pool.create_volume(image("v", parameters={"a": "b"}))
        assert pool.create_volume(image("v", parameters={"a": "b"})) == made
    with Pool.open(config) as pool:
        assert pool.create_volume(image("v", parameters={"a": "b"})) == made
        assert len(pool.volumes.page().items) == 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (image("v", 3 * MIB), "size"),
        (CreateVolume("v", MIB, MIB, filesystem="ext4"), "size"),
        (image("v", kind=VolumeKind.DIRECTORY), "kind"),
        (CreateVolume("v", MIB, filesystem="ext4"), "filesystem"),
        (image("v", thick=True), "thin"),
        (image("v", source=Source.volume("x-1")), "made empty"),
        (image("v", parameters={"a": "b"}), "parameters"),
    ],
)
def test_the_same_name_with_another_wish_is_taken(pool, other, why):
    pool.create_volume(image("v", 2 * MIB))
    with pytest.raises(NameTaken, match=why):
        pool.create_volume(other)


def test_a_size_inside_the_range_is_the_same_volume(pool):
    made = pool.create_volume(image("v", 2 * MIB))
    assert pool.create_volume(CreateVolume("v", MIB, 4 * MIB, filesystem="")) == made


@pytest.mark.parametrize("ident", ["", "..", "../../etc", "a/b", "x\0y", "x\ny", "x" * 10_000, "no-such", "A", "ä"])
def test_ids_that_cannot_be_are_not_found_and_deleting_them_is_fine(pool, ident):
    for find in (pool.volumes.find, pool.snapshots.find, pool.snapshots.find_group):
        assert find(ident) is None
    for delete in (pool.delete_volume, pool.delete_snapshot, pool.delete_group):
        assert delete(ident) is False
    with pytest.raises(VolumeNotFound):
        pool.expand_volume(ident, 2 * MIB)
    with pytest.raises(VolumeNotFound):
        pool.volumes.modify(ident, {})
    with pytest.raises(SnapshotNotFound):
        pool.blocks.allocated(ident)
    assert pool.attachments.detach(ident) is False


def test_bad_names_and_parameters_leave_nothing_behind(pool):
    for name in ("", "a\0", "x" * 10_000):
        with pytest.raises(InvalidValue, match=r"^name"):
            pool.create_volume(image(name))
    with pytest.raises(InvalidValue, match="XXX_FakeKey"):
        pool.create_volume(image("v", mutable={"XXX_FakeKey": "1"}))
    with pytest.raises(VolumeNotFound):
        pool.create_volume(image("v", source=Source.volume("no-such")))
    with pytest.raises(SnapshotNotFound):
        pool.create_volume(image("v", source=Source.snapshot("no-such")))
    assert pool.volumes.page().items == ()
    assert os.listdir(pool.directory / "tmp") == []


def test_pages_continue_after_the_last_id_whatever_happens_in_between(pool):
    made = sorted(pool.create_volume(image(f"v{n}")).id for n in range(7))
    first = pool.volumes.page(limit=3)
    assert [volume.id for volume in first.items] == made[:3]
    assert first.next == made[2]
    pool.delete_volume(made[1])
    pool.delete_volume(made[3])
    rest = pool.volumes.page(after=first.next)
    assert [volume.id for volume in rest.items] == made[4:]
    assert rest.next == ""


def test_modify_changes_only_the_given_keys_or_nothing(pool):
    made = pool.create_volume(image("v", mutable={"readIOPS": "5", "directIO": "true"}))
    changed = pool.volumes.modify(made.id, {"readIOPS": "7"})
    assert changed.mutable == {"readIOPS": "7", "directIO": "true"}
    with pytest.raises(InvalidValue):
        pool.volumes.modify(made.id, {"readIOPS": "9", "bad": "1"})
    assert pool.volumes.get(made.id) == changed
    assert pool.volumes.modify(made.id, {}) == changed


def test_expansion_rounds_up_keeps_to_the_limit_and_never_shrinks(pool):
    made = pool.create_volume(image("v", MIB))
    assert pool.expand_volume(made.id, 2 * MIB + 1).size_bytes == 3 * MIB
    assert os.stat(made.data).st_size == 3 * MIB
    assert pool.expand_volume(made.id, MIB).size_bytes == 3 * MIB
    with pytest.raises(Exception, match="do not shrink") as caught:
        pool.expand_volume(made.id, MIB, 2 * MIB)
    assert caught.value.code == "OUT_OF_RANGE"


def test_a_snapshot_name_belongs_to_one_volume(pool):
    first, second = pool.create_volume(image("a")), pool.create_volume(image("b"))
    cut = pool.create_snapshot(CreateSnapshot("s", first.id))
    assert pool.create_snapshot(CreateSnapshot("s", first.id)) == cut
    with pytest.raises(NameTaken, match=first.id):
        pool.create_snapshot(CreateSnapshot("s", second.id))
    assert [found.id for found in pool.snapshots.page(volume_id=first.id).items] == [cut.id]
    assert pool.snapshots.page(volume_id="no-such").items == ()


def test_a_group_is_one_object(pool):
    volumes = [pool.create_volume(image(f"v{n}")).id for n in range(3)]
    group = pool.create_group("g", volumes)
    assert pool.create_group("g", list(reversed(volumes))) == group
    with pytest.raises(NameTaken):
        pool.create_group("g", volumes[:2])
    with pytest.raises(NameTaken, match="parameters"):
        pool.create_group("g", volumes, {"a": "b"})
    assert {found.group_id for found in pool.snapshots.page().items} == {group.id}
    with pytest.raises(GroupMember, match=group.id):
        pool.delete_snapshot(group.snapshots[0].id)
    with pytest.raises(InvalidValue, match="snapshot_ids"):
        pool.delete_group(group.id, ["other"])
    restored = pool.create_volume(image("r", source=Source.snapshot(group.snapshots[1].id)))
    assert restored.source == Source.snapshot(group.snapshots[1].id)
    assert pool.delete_group(group.id, [found.id for found in group.snapshots])
    assert pool.snapshots.page().items == ()


def test_a_group_with_a_missing_volume_is_not_made(pool):
    made = pool.create_volume(image("v"))
    with pytest.raises(VolumeNotFound):
        pool.create_group("g", [made.id, "no-such"])
    with pytest.raises(InvalidValue, match="source_volume_ids"):
        pool.create_group("g", [])
    with pytest.raises(InvalidValue, match="twice"):
        pool.create_group("g", [made.id, made.id])
    assert pool.snapshots.page().items == ()
    assert os.listdir(pool.directory / "tmp") == []


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"null",
        b'{"id": "other", "name": "v", "kind": "image", "size_bytes": 1, "created_ns": 1}',
        b'{"id": 5}',
        b"\xff\xfe",
        b'{"id": "\xff"}',
    ],
)
def test_a_damaged_record_is_told_and_harms_nobody_else(pool, damage):
    broken, whole = pool.create_volume(image("v")), pool.create_volume(image("w"))
    (broken.data.parent / "volume.json").write_bytes(damage)
    with pytest.raises(DamagedRecord, match=r"volume\.json"):
        pool.volumes.get(broken.id)
    with pytest.raises(DamagedRecord):
        pool.create_volume(image("v"))
    assert [volume.id for volume in pool.volumes.page().items] == [whole.id]
    assert pool.health.damaged() == [broken.id]
    assert pool.health.of(broken.id)[0].reason == "RecordDamaged"
    assert pool.health.of(whole.id) == ()
    assert [sick.volume_id for sick in pool.health.unhealthy().items] == [broken.id]
    assert pool.delete_volume(broken.id)  # it can be got rid of
    assert pool.health.damaged() == []


def test_a_negative_size_in_a_record_is_damage(pool):
    made = pool.create_volume(image("v"))
    path = made.data.parent / "volume.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "size_bytes": -5}))
    with pytest.raises(DamagedRecord, match="size_bytes"):
        pool.volumes.get(made.id)


def test_a_planted_symlink_is_not_followed(pool, tmp_path):
    secret = tmp_path / "elsewhere"
    secret.mkdir()
    (secret / "volume.json").write_text("{}")
    ident = id_from("v")
    (pool.directory / "volumes" / ident).symlink_to(secret)
    with pytest.raises(DamagedRecord):
        pool.volumes.get(ident)
    assert list(secret.iterdir()) == [secret / "volume.json"]


def test_health_follows_the_image(pool):
    made = pool.create_volume(image("v", 2 * MIB))
    assert pool.health.of(made.id) == ()
    os.truncate(made.data, MIB)
    (entry,) = pool.health.of(made.id)
    assert (entry.status, entry.reason) == (HealthStatus.DATA_LOSS, "ImageTruncated")
    os.truncate(made.data, 2 * MIB)
    assert pool.health.of(made.id) == ()
    made.data.rename(made.data.parent / "away")
    assert pool.health.of(made.id)[0].reason == "DataMissing"
    (made.data.parent / "away").rename(made.data)
    assert pool.health.of(made.id) == ()
    with pytest.raises(VolumeNotFound):
        pool.health.of("no-such")


def test_a_vanished_pool_is_said_and_recovers(pool):
    made = pool.create_volume(image("v"))
    away = pool.directory.with_name("away")
    pool.directory.rename(away)
    for call in (
        lambda: pool.create_volume(image("w")),
        lambda: pool.volumes.get(made.id),
        lambda: pool.delete_volume(made.id),
        lambda: pool.create_snapshot(CreateSnapshot("s", made.id)),
        lambda: pool.expand_volume(made.id, 2 * MIB),
        pool.volumes.page,
        pool.capacity,
    ):
        with pytest.raises(PoolVanished, match="is gone"):
            call()
    assert pool.health.pool()[0].reason == "PoolGone"
    pool.directory.mkdir()  # the mount point without its filesystem
    with pytest.raises(PoolVanished, match="is it mounted"):
        pool.create_volume(image("w"))
    assert list(pool.directory.iterdir()) == []
    pool.directory.rmdir()
    away.rename(pool.directory)
    assert pool.volumes.get(made.id) == made
    assert pool.health.pool() == ()


def test_a_second_owner_is_refused_and_a_guest_is_not(pool, config):
    with pytest.raises(PoolLocked, match=f"pid {os.getpid()}"):
        Pool.open(config)
    before = pool.capacity()
    with Pool.open(PoolConfig("default", config.directory, owner=False, overcommit=1000.0)) as guest:
        made = guest.create_volume(image("v", 64 * MIB))
        assert pool.volumes.get(made.id) == made
        assert pool.capacity().promised_bytes == before.promised_bytes + 64 * MIB
        assert pool.delete_volume(made.id)
        assert guest.volumes.find(made.id) is None


def test_only_an_empty_directory_becomes_a_pool(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(PoolUnusable, match=r"mine\.txt"):
        Pool.open(PoolConfig("default", tmp_path))
    assert os.listdir(tmp_path) == ["lock", "mine.txt"] or set(os.listdir(tmp_path)) == {"lock", "mine.txt"}


def test_formats_migrate_by_numbered_steps_and_newer_ones_are_refused(tmp_path):
    ran = []
    first = PoolLayout("p", tmp_path)
    first.open("node", owner=True)
    first.close()
    steps = {1: lambda layout: ran.append(1), 2: lambda layout: ran.append(2)}
    for _ in range(2):  # the second opening has nothing left to do
        later = PoolLayout("p", tmp_path)
        assert later.open("node", owner=True, migrations=steps).format == 3
        later.close()
    assert ran == [1, 2]
    with pytest.raises(PoolUnusable, match="use a newer version"):
        PoolLayout("p", tmp_path).open("node", owner=True)


def test_a_pool_keeps_its_scope(pool, config):
    pool.close()
    with pytest.raises(PoolUnusable, match="scope"):
        Pool.open(PoolConfig("default", config.directory, scope="shared"))


def test_pools_are_found_by_what_they_hold(tmp_path):
    one = Pool.open(PoolConfig("one", tmp_path / "1", background=False))
    two = Pool.open(PoolConfig("two", tmp_path / "2", background=False))
    pools = Pools({"two": two, "one": one}, default="two")
    made = two.create_volume(image("v"))
    cut = two.create_snapshot(CreateSnapshot("s", made.id))
    assert pools.named() is two
    assert pools.named("one") is one
    assert pools.of_volume(made.id) is two
    assert pools.of_snapshot(cut.id) is two
    assert pools.of_group("g") is None
    with pytest.raises(PoolNotFound, match="one, two"):
        pools.named("three")
    pools.close()
