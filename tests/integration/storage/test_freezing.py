"""Freezes: short, bounded, and always undone, whoever dies."""

import json
import os
import signal
import threading
import time

import pytest

from moorage.host import freeze
from moorage.host.errors import FreezeBroken
from moorage.storage import CreateSnapshot, CreateVolume, InUse, Pool, PoolConfig, failpoints, id_from

MIB = 1 << 20


@pytest.fixture
def config(xfs_pool_dir):
    return PoolConfig("default", xfs_pool_dir / "pool", background=False)


@pytest.fixture
def failpoint():
    yield failpoints.install
    failpoints.install(None)


def is_frozen(place):
    """Whether a write stands still; it goes through as soon as the filesystem is thawed."""
    done = threading.Event()

    def write():
        (place / "probe").write_text("x")
        done.set()

    threading.Thread(target=write, daemon=True).start()
    return not done.wait(0.3)


def wait_thawed(place):
    deadline = time.monotonic() + 30
    while is_frozen(place):
        assert time.monotonic() < deadline, f"{place} is still frozen"


def in_child(act):
    """Run something in a child process that is expected to die of SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_writers_stand_still_inside_and_go_on_after(config, mounted, tmp_path):
    with Pool.open(config) as pool:
        volume = pool.create_volume(CreateVolume("v", 64 * MIB))
        with mounted(pool, volume, tmp_path / "m") as place:
            with freeze.frozen([place], bound_s=30):
                assert is_frozen(place)
            wait_thawed(place)
            with pytest.raises(ZeroDivisionError), freeze.frozen([place], bound_s=30):
                raise ZeroDivisionError
            assert freeze.thaw(place) is False


@pytest.mark.parametrize("filesystem", ["ext4", "xfs", "btrfs"])
def test_a_mounted_volume_stands_still_while_it_is_copied(config, mounted, tmp_path, failpoint, filesystem):
    seen = []
    with Pool.open(config) as pool:
        volume = pool.create_volume(CreateVolume("v", 320 * MIB, filesystem=filesystem))
        with mounted(pool, volume, tmp_path / "m") as place:
            failpoint(lambda step: seen.append(is_frozen(place)) if step == "cut.frozen" else None)
            pool.create_snapshot(CreateSnapshot("s", volume.id))
            assert seen == [True]
            wait_thawed(place)


def test_the_guard_thaws_when_the_bound_is_over(config, mounted, tmp_path):
    with Pool.open(config) as pool:
        volume = pool.create_volume(CreateVolume("v", 64 * MIB))
        with mounted(pool, volume, tmp_path / "m") as place:
            with pytest.raises(FreezeBroken, match="thawed after"), freeze.frozen([place], bound_s=0.2):
                wait_thawed(place)
            assert freeze.thaw(place) is False


def test_a_copy_longer_than_its_bound_is_no_snapshot(ext4_pool_dir, mounted, tmp_path, failpoint):
    config = PoolConfig("default", ext4_pool_dir / "pool", background=False, copy_freeze_bound_s=0.2)
    with Pool.open(config) as pool:
        volume = pool.create_volume(CreateVolume("v", 64 * MIB))
        with mounted(pool, volume, tmp_path / "m") as place:
            failpoint(lambda step: wait_thawed(place) if step == "cut.copied" else None)
            with pytest.raises(FreezeBroken):
                pool.create_snapshot(CreateSnapshot("s", volume.id, in_use=InUse.FREEZE))
        assert pool.snapshots.find(id_from("s")) is None
        assert os.listdir(pool.directory / "tmp") == []
        assert os.listdir(pool.directory / "frozen") == []


@pytest.mark.parametrize("guard_dies_too", [False, True])
def test_a_killed_plugin_leaves_nothing_frozen(config, mounted, tmp_path, guard_dies_too):
    with Pool.open(config) as pool:
        volume = pool.create_volume(CreateVolume("v", 64 * MIB))
        with mounted(pool, volume, tmp_path / "m") as place:
            (place / "before").write_text("x")
            pool.close()

            def die(step):
                if step == "cut.copied":
                    if guard_dies_too:
                        os.kill(freeze.guard_pid(), signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)

            def snapshot():
                failpoints.install(die)
                Pool.open(config).create_snapshot(CreateSnapshot("s", volume.id))

            in_child(snapshot)
            if guard_dies_too:
                assert is_frozen(place)  # nobody is left to thaw it: the next start does
                assert len(os.listdir(pool.directory / "frozen")) == 1
            else:
                wait_thawed(place)
            with Pool.open(config) as again:
                wait_thawed(place)
                assert os.listdir(again.directory / "frozen") == []
                assert os.listdir(again.directory / "tmp") == []
                assert again.snapshots.find(id_from("s")) is None
                again.create_snapshot(CreateSnapshot("s", volume.id))


def test_records_of_other_machines_are_left_to_them(config, mounted, tmp_path):
    with Pool.open(config) as pool:
        volume = pool.create_volume(CreateVolume("v", 64 * MIB))
        with mounted(pool, volume, tmp_path / "m") as place:
            pool.close()
            device = os.stat(place).st_dev
            record = {"devices": [[os.major(device), os.minor(device)]], "boot": "another-machine"}
            path = pool.directory / "frozen" / "foreign"
            path.write_text(json.dumps(record))
            with freeze.frozen([place], bound_s=30):
                Pool.open(config).close()
                assert is_frozen(place)
                assert path.exists()
                os.utime(path, (0, 0))  # from long ago: nobody needs it any more
                Pool.open(config).close()
                assert not path.exists()
            wait_thawed(place)
