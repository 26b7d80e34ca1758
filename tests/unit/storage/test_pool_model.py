"""Random operations on a pool, compared with a few dictionaries that say what should be there."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from moorage.storage import (
    CreateSnapshot,
    CreateVolume,
    GroupMember,
    NameTaken,
    NotInTrash,
    Pool,
    PoolConfig,
    Source,
    id_from,
)

MIB = 1 << 20
NAMES = st.sampled_from(["a", "b", "c", "d/../e", "Ü"])
SIZES = st.integers(1, 8).map(lambda n: n * MIB)


class PoolMachine(RuleBasedStateMachine):
    """`volumes` and `cuts` map names to (size, first byte); `trash` holds what was deleted last."""

    groups = Bundle("groups")

    def __init__(self):
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="moorage-model-"))
        self.volumes: dict[str, tuple[int, int]] = {}
        self.cuts: dict[str, tuple[str, int, int]] = {}
        self.groups_made: dict[str, list[tuple[int, int]]] = {}
        self.trash: dict[str, tuple[int, int]] = {}

    @initialize()
    def start(self):
        self.config = PoolConfig(
            "model", self.base / "pool", overcommit=10_000.0, trash_retention_s=3600, background=False
        )
        self.pool = Pool.open(self.config)

    def teardown(self):
        self.pool.close()
        shutil.rmtree(self.base)

    @rule(name=NAMES, size=SIZES)
    def create(self, name, size):
        request = CreateVolume(name, size, size, filesystem="")
        if name in self.volumes and self.volumes[name][0] != size:
            with pytest.raises(NameTaken):
                self.pool.create_volume(request)
        elif name not in self.volumes:
            assert self.pool.create_volume(request).size_bytes == size
            self.volumes[name] = (size, 0)

    @rule(name=NAMES, byte=st.integers(1, 255))
    def write(self, name, byte):
        if name in self.volumes:
            with open(self.pool.volumes.get(id_from(name)).data, "r+b") as data:
                data.write(bytes([byte]))
            self.volumes[name] = (self.volumes[name][0], byte)

    @rule(name=NAMES, size=SIZES)
    def expand(self, name, size):
        if name in self.volumes:
            grown = max(size, self.volumes[name][0])
            assert self.pool.expand_volume(id_from(name), size).size_bytes == grown
            self.volumes[name] = (grown, self.volumes[name][1])

    @rule(name=NAMES)
    def delete(self, name):
        assert self.pool.delete_volume(id_from(name)) is (name in self.volumes)
        if name in self.volumes:
            self.trash[name] = self.volumes.pop(name)

    @rule(name=NAMES)
    def undelete(self, name):
        if name in self.trash and name not in self.volumes:
            assert self.pool.undelete(name) == id_from(name)
            self.volumes[name] = self.trash.pop(name)
            # An older one of the same name may lie below it.
            below = [item for item in self.pool.trash.listed() if item.name == name]
            if below:
                while [item for item in self.pool.trash.listed() if item.name == name]:
                    self.pool.trash.reclaim(below.pop().entry)
        elif name not in self.trash:
            with pytest.raises(NotInTrash):
                self.pool.undelete(name)
        else:
            with pytest.raises(NameTaken):
                self.pool.undelete(name)

    @rule(name=NAMES, cut=NAMES)
    def snapshot(self, name, cut):
        if name not in self.volumes:
            return
        request = CreateSnapshot(cut, id_from(name))
        if cut in self.cuts and self.cuts[cut][0] != name:
            with pytest.raises(NameTaken):
                self.pool.create_snapshot(request)
        else:
            found = self.pool.create_snapshot(request)
            self.cuts.setdefault(cut, (name, *self.volumes[name]))
            assert found.size_bytes == self.cuts[cut][1]

    @rule(cut=NAMES)
    def delete_snapshot(self, cut):
        assert self.pool.delete_snapshot(id_from(cut)) is (cut in self.cuts)
        self.cuts.pop(cut, None)

    @rule(cut=NAMES, name=NAMES)
    def restore(self, cut, name):
        if cut in self.cuts and name not in self.volumes:
            _, size, byte = self.cuts[cut]
            self.pool.create_volume(CreateVolume(name, size, filesystem="", source=Source.snapshot(id_from(cut))))
            self.volumes[name] = (size, byte)

    @rule(old=NAMES, new=NAMES)
    def clone(self, old, new):
        if old in self.volumes and new not in self.volumes:
            request = CreateVolume(new, self.volumes[old][0], filesystem="", source=Source.volume(id_from(old)))
            self.pool.create_volume(request)
            self.volumes[new] = self.volumes[old]

    @rule(target=groups, name=st.sampled_from(["g1", "g2"]))
    def group(self, name):
        if self.volumes and name not in self.groups_made:
            made = self.pool.create_group(name, [id_from(volume) for volume in self.volumes])
            by_id = {id_from(volume): state for volume, state in self.volumes.items()}
            self.groups_made[name] = [by_id[volume] for volume in made.volume_ids]
            with pytest.raises(GroupMember):
                self.pool.delete_snapshot(made.snapshots[0].id)
        return name

    @rule(name=consumes(groups))
    def delete_group(self, name):
        assert self.pool.delete_group(id_from(name)) is (name in self.groups_made)
        self.groups_made.pop(name, None)

    @rule()
    def restart(self):
        self.pool.close()
        self.pool = Pool.open(self.config)

    @invariant()
    def the_pool_is_what_the_model_says(self):
        if not hasattr(self, "pool"):
            return
        found = {volume.name: volume for volume in self.pool.volumes.page().items}
        assert set(found) == set(self.volumes)
        for name, (size, byte) in self.volumes.items():
            assert (found[name].size_bytes, _first(found[name].data)) == (size, byte)
        alone = {cut.name: cut for cut in self.pool.snapshots.page().items if cut.group_id is None}
        assert set(alone) == set(self.cuts)
        for name, (volume, size, byte) in self.cuts.items():
            assert (alone[name].volume_id, alone[name].size_bytes) == (id_from(volume), size)
            assert _first(alone[name].data) == byte
        for name, members in self.groups_made.items():
            cuts = self.pool.snapshots.get_group(id_from(name)).snapshots
            assert [(cut.size_bytes, _first(cut.data)) for cut in cuts] == members
        assert {item.name for item in self.pool.trash.listed() if item.what == "volume"} >= set(self.trash)
        assert os.listdir(self.pool.directory / "tmp") == []
        before = self.pool.capacity().promised_bytes
        self.pool._context.ledger.stale()
        assert self.pool.capacity().promised_bytes == before


def _first(path):
    with open(path, "rb") as data:
        return data.read(1)[0]


PoolMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestPool = PoolMachine.TestCase
