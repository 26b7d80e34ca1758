"""An import that dies at any of its steps ends in the same place when it is repeated."""

import os

import pytest

from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig, failpoints
from moorage.storage.transfer.export import export_to_file, subject_of
from moorage.storage.transfer.import_ import ImportRequest, import_stream
from moorage.storage.transfer.unfinished import unfinished

MIB = 1 << 20


class Died(BaseException):
    """Like a kill: no handler of ours catches it."""


@pytest.fixture
def streams(tmp_path):
    """A full export and a delta onto it, and what each should give."""
    with Pool.open(PoolConfig("here", tmp_path / "here", background=False)) as pool:
        volume = pool.create_volume(CreateVolume("v", 8 * MIB, filesystem=""))
        wanted, base = [], None
        for number, name in enumerate(("full", "delta")):
            with open(volume.data, "r+b") as file:
                file.seek(number * MIB)
                file.write(os.urandom(2 * MIB))
            if number:
                pool.expand_volume(volume.id, 10 * MIB)
            cut = pool.create_snapshot(CreateSnapshot(name, volume.id))
            export_to_file(subject_of(pool, cut, base), tmp_path / name)
            wanted.append(cut.data.read_bytes())
            base = cut
    return tmp_path, wanted


def die_at(wanted):
    steps = iter(range(1000))

    def hook(step):
        if next(steps) == wanted:
            raise Died(step)

    return hook


def run(pool, path, onto=""):
    with open(path, "rb") as file:
        return import_stream(pool, file.fileno(), ImportRequest(onto=onto, checkpoint_bytes=1))


@pytest.mark.parametrize("name", ["full", "delta"])
def test_a_crash_at_any_step_loses_nothing(streams, name):
    tmp_path, wanted = streams
    step, finished = 0, False
    while not finished:
        with Pool.open(PoolConfig("p", tmp_path / f"pool-{step}", background=False)) as pool:
            onto = run(pool, tmp_path / "full").volume.id if name == "delta" else ""
            failpoints.install(die_at(step))
            try:
                run(pool, tmp_path / name, onto)
                finished = True
            except Died:
                failpoints.install(None)
                for volume in pool.volumes.page().items:  # whole at every moment: the old state or the new
                    assert volume.data.read_bytes()[: len(wanted[0])] in [each[: len(wanted[0])] for each in wanted]
            finally:
                failpoints.install(None)
        with Pool.open(PoolConfig("p", tmp_path / f"pool-{step}", background=False)) as pool:
            done = run(pool, tmp_path / name, onto)
            assert done.volume.data.read_bytes() == wanted[name == "delta"]
            assert done.volume.size_bytes == len(wanted[name == "delta"])
            assert unfinished(pool) == []
        step += 1
    assert step > 8
