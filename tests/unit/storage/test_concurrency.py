"""Many callers at once, in threads and in processes."""

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from moorage.storage import CreateSnapshot, CreateVolume, NameTaken, Pool, PoolConfig, VolumeNotFound, id_from, layout

MIB = 1 << 20
CALLERS = 64


@pytest.fixture
def pool(tmp_path):
    with Pool.open(PoolConfig("default", tmp_path / "pool", overcommit=1000.0)) as opened:
        yield opened


def together(call, count=CALLERS):
    """The results or errors of `count` calls that run at the same time."""

    def safely(n):
        try:
            return call(n)
        except Exception as failed:
            return failed

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(safely, range(count)))


def test_one_name_at_once_is_one_volume(pool):
    results = together(lambda n: pool.create_volume(CreateVolume("v", MIB, filesystem="")))
    assert set(map(str, results)) == {str(pool.volumes.get(id_from("v")))}
    assert pool.capacity().promised_bytes == MIB


def test_one_name_with_different_wishes_has_one_winner(pool):
    def wish(n):
        size = (n % 4 + 1) * MIB
        return pool.create_volume(CreateVolume("v", size, size, filesystem=""))

    results = together(wish)
    won = {volume.size_bytes for volume in results if not isinstance(volume, Exception)}
    assert len(won) == 1
    assert sum(isinstance(failed, NameTaken) for failed in results) == CALLERS * 3 // 4


def test_one_volume_is_deleted_once(pool):
    made = pool.create_volume(CreateVolume("v", MIB, filesystem=""))
    results = together(lambda n: pool.delete_volume(made.id))
    assert sorted(results) == [False] * (CALLERS - 1) + [True]
    assert pool.capacity().promised_bytes == 0


def test_snapshots_growth_and_deletion_of_one_volume_do_not_disturb_each_other(pool):
    made = pool.create_volume(CreateVolume("v", MIB, filesystem=""))

    def mixed(n):
        if n == CALLERS - 1:
            return pool.delete_volume(made.id)
        if n % 3 == 0:
            return pool.create_snapshot(CreateSnapshot(f"s{n}", made.id))
        if n % 3 == 1:
            return pool.expand_volume(made.id, (n + 1) * MIB)
        return pool.volumes.modify(made.id, {"readIOPS": str(n)})

    for result in together(mixed):
        assert not isinstance(result, Exception) or isinstance(result, VolumeNotFound), result
    for cut in pool.snapshots.page().items:
        assert os.stat(cut.data).st_size == cut.size_bytes
    assert os.listdir(pool.directory / "tmp") == []


def test_all_of_many_modifications_are_kept(pool):
    made = pool.create_volume(CreateVolume("v", MIB, filesystem=""))
    keys = ["readIOPS", "writeIOPS", "readBytesPerSecond", "writeBytesPerSecond", "readAheadKiB"]
    results = together(lambda n: pool.volumes.modify(made.id, {keys[n % 5]: "7"}))
    assert not [failed for failed in results if isinstance(failed, Exception)]
    assert pool.volumes.get(made.id).mutable == dict.fromkeys(keys, "7")


def _guest(directory, n, answers):
    with Pool.open(PoolConfig("default", directory, owner=False, overcommit=1000.0)) as guest:
        for k in range(20):
            made = guest.create_volume(CreateVolume(f"v{k}", MIB, filesystem=""))
            guest.volumes.modify(made.id, {"readIOPS": str(n)})
        answers.put(sorted(volume.id for volume in guest.volumes.page().items))


def test_processes_share_a_pool_without_losing_anything(pool):
    processes = multiprocessing.get_context("fork")
    answers = processes.Queue()
    guests = [processes.Process(target=_guest, args=(pool.directory, n, answers)) for n in range(6)]
    for guest in guests:
        guest.start()
    seen = [answers.get(timeout=60) for _ in guests]
    for guest in guests:
        guest.join(timeout=60)
        assert guest.exitcode == 0
    assert seen[-1] == [volume.id for volume in pool.volumes.page().items]
    assert len(seen[-1]) == 20
    assert pool.capacity().promised_bytes == 20 * MIB
    assert os.listdir(pool.directory / "tmp") == []


def test_a_volume_that_appears_while_it_is_looked_for_is_not_damaged(pool, monkeypatch):
    made = pool.create_volume(CreateVolume("v", MIB, filesystem=""))
    real, looks = layout.read_record, []

    def late(directory, name):
        looks.append(name)
        if len(looks) == 1:  # another process renames it into place between our two looks
            raise FileNotFoundError(directory)
        return real(directory, name)

    monkeypatch.setattr(layout, "read_record", late)
    assert pool.volumes.find(made.id) == made


def test_nodes_that_start_together_make_one_shared_pool(tmp_path):
    for attempt in range(20):
        layouts = [layout.PoolLayout("shared", tmp_path / str(attempt)) for _ in range(8)]
        with ThreadPoolExecutor(8) as threads:
            records = list(threads.map(lambda one: one.open("shared", owner=True), layouts))
        assert len({record.id for record in records}) == 1
        assert not [name for name in os.listdir(tmp_path / str(attempt)) if name.startswith("pool.json.")]
