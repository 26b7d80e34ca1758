"""A group snapshot is one moment: restored members never contradict the order of writes."""

import contextlib
import errno
import os
import threading

import pytest

from moorage.host.errors import HostError
from moorage.storage import CreateVolume, Pool, PoolConfig, Source, failpoints, id_from

MIB = 1 << 20
FILESYSTEMS = ("ext4", "xfs", "btrfs", "ext4")
MEMBERS = len(FILESYSTEMS)


@pytest.mark.parametrize("fstype", ["xfs", "btrfs"])
def test_every_group_holds_a_prefix_of_what_was_written(request, fstype, mounted, tmp_path):
    directory = request.getfixturevalue(f"{fstype}_pool_dir")
    with Pool.open(PoolConfig("default", directory / "pool", background=False)) as pool:
        volumes = [
            pool.create_volume(CreateVolume(f"v{n}", 320 * MIB, filesystem=inner))
            for n, inner in enumerate(FILESYSTEMS)
        ]
        with contextlib.ExitStack() as stack:
            places = [
                stack.enter_context(mounted(pool, volume, tmp_path / f"m{n}")) for n, volume in enumerate(volumes)
            ]
            groups = _groups_under_load(pool, volumes, places)
        for group in groups:
            _check_prefix(pool, group, mounted, tmp_path)
            assert group.held_ms < 5000


def _groups_under_load(pool, volumes, places):
    """Take groups while a writer appends increasing numbers, one file after the other."""
    stop, counted = threading.Event(), threading.Semaphore(0)

    def write():
        files = [open(place / "log", "ab", buffering=0) for place in places]  # noqa: SIM115
        number = 0
        while not stop.is_set():
            files[number % MEMBERS].write(b"%d\n" % number)
            number += 1
            counted.release()
        for file in files:
            file.close()

    writer = threading.Thread(target=write)
    writer.start()
    groups = []
    try:
        for n in range(4):
            for _ in range(50):  # the writer is truly at it
                assert counted.acquire(timeout=30)
            groups.append(pool.create_group(f"g{n}", [volume.id for volume in volumes]))
    finally:
        stop.set()
        writer.join()
    return groups


def _check_prefix(pool, group, mounted, tmp_path):
    found = []
    for cut in group.snapshots:
        request = CreateVolume(f"r-{cut.id}", 320 * MIB, filesystem=cut.filesystem, source=Source.snapshot(cut.id))
        restored = pool.create_volume(request)
        with mounted(pool, restored, tmp_path / "restored") as place:
            found += [int(line) for line in (place / "log").read_text().split()]
        pool.delete_volume(restored.id)
    assert sorted(found) == list(range(len(found)))
    assert len(found) >= 50
    assert os.listdir(pool.directory / "frozen") == []


def test_a_group_that_fails_at_any_step_is_none_and_lets_its_members_go(xfs_pool_dir, mounted, tmp_path):
    """An error at every step in turn: nothing is left of the group, nobody stands still, and the next try succeeds."""
    with Pool.open(PoolConfig("default", xfs_pool_dir / "pool", background=False)) as pool:
        volumes = [pool.create_volume(CreateVolume(f"v{n}", 64 * MIB, filesystem="ext4")) for n in range(2)]
        ids = [volume.id for volume in volumes]
        with contextlib.ExitStack() as stack:
            stack.callback(failpoints.install, None)
            places = [
                stack.enter_context(mounted(pool, volume, tmp_path / f"m{n}")) for n, volume in enumerate(volumes)
            ]
            promised = pool.capacity().promised_bytes
            steps: list[str] = []
            while True:
                wanted = len(steps)
                failpoints.install(_failing_at(wanted, steps))
                made = None
                with contextlib.suppress(HostError):
                    made = pool.create_group("g", ids)
                failpoints.install(None)
                if len(steps) == wanted:
                    break
                assert made is None, f"the failure of {steps[-1]} was swallowed"
                for place in places:  # a frozen filesystem would hold this for ever
                    (place / "file").write_text(str(wanted))
                assert os.listdir(pool.directory / "frozen") == []
                assert os.listdir(pool.directory / "tmp") == []
                if pool.snapshots.find_group(id_from("g")) is None:
                    assert pool.snapshots.page().items == ()
                    assert pool.capacity().promised_bytes == promised
            assert {"cut.frozen", "cut.copied", "group.member", "group.record"} <= set(steps)
            assert made is not None
            assert [cut.volume_id for cut in made.snapshots] == sorted(ids)
            assert len(pool.snapshots.page().items) == 2


def _failing_at(number, steps):
    """A hook that fails at the n-th step and writes down its name."""
    left = number

    def hook(step):
        nonlocal left
        if left == 0:
            left = -1
            steps.append(step)
            raise OSError(errno.EIO, os.strerror(errno.EIO), step)
        left -= 1

    return hook
