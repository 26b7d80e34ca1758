"""The controller against a model: whatever is asked, in whatever order, it answers as plain dictionaries would.

`ControllerModel` is a plugin on its node's own pool, `AttachModel` one on a shared pool. Both are stopped and
started again in the middle. HYPOTHESIS_PROFILE=thorough runs 2,000 examples of each.
"""

import asyncio
import itertools
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.examples import examples
from tests.support.plugin_caller import MIB, Caller, Mode, from_snapshot, from_volume, mounted

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.plugin.run import serve
from moorage.plugin.services.values import TOKEN_KEY
from moorage.plugin.settings import PluginSettings
from moorage.storage import Fenced, NameTaken, NotInTrash

EXAMPLES = examples(25)
pytestmark = pytest.mark.timeout(EXAMPLES * 12)
NAMES = st.sampled_from(["a", "b", "c", "d"])
SIZES = st.sampled_from([16 * MIB, 20 * MIB, 33 * MIB])
MUTABLE = st.dictionaries(
    st.sampled_from(["directIO", "readAheadKiB", "trashRetention"]), st.sampled_from(["true", "64", "1h"]), max_size=3
)
GROUPS = st.sampled_from(["g", "h"])
NODES = {"n": 2, "m": 0}  # with the most volumes that each may have
_FITS = {"directIO": {"true"}, "readAheadKiB": {"64"}, "trashRetention": {"1h", "64"}}


@dataclass
class Known:
    ident: str
    size: int
    source: str = ""
    mutable: dict[str, str] = field(default_factory=dict)


@dataclass
class KnownGroup:
    ident: str
    sources: frozenset[str]
    members: dict[str, int]  # snapshot ids and sizes


class Machine(RuleBasedStateMachine):
    """One plugin in this process, one pool in a temporary directory."""

    scope = "node"

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="moo-"))
        self.runner = asyncio.Runner()
        self.config = PluginSettings(
            f"unix://{self.root}/c.sock", "n", {"default": self.root / "pool"},
            reserve_fraction=0, overcommit=1000.0, trash_retention_s=3600, scope=self.scope,
            max_volumes_per_node=NODES["n"],
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        self.serving = serve(self.config)
        self.pool = self.do(self.serving.__aenter__()).pools.named()
        self.client = CsiClient(self.config.endpoint, timeout_s=60)
        self.caller = Caller(self.client, self.root)

    def stop(self) -> None:
        self.do(self.client.close())
        self.do(self.serving.__aexit__(None, None, None))

    def do(self, coroutine):
        return self.runner.run(coroutine)

    def attempt(self, coroutine):
        """The code and the answer; a refusal without words is no code at all."""
        try:
            return "OK", self.do(coroutine)
        except CsiError as error:
            return (error.code if error.message else "refused without a word"), None

    def teardown(self) -> None:
        self.stop()
        self.runner.close()
        shutil.rmtree(self.root)

    @rule()
    def restart(self):
        self.stop()
        self.start()


class ControllerModel(Machine):
    """Volumes, snapshots, groups and the trash; no root is needed, so nothing is mounted."""

    def __init__(self) -> None:
        super().__init__()
        self.volumes: dict[str, Known] = {}
        self.snapshots: dict[str, Known] = {}
        self.groups: dict[str, KnownGroup] = {}
        self.trash: dict[str, list[Known]] = {}  # volumes by name, the youngest last

    @rule(name=NAMES, size=SIZES, mutable=MUTABLE)
    def create(self, name, size, mutable):
        if not fits(mutable):
            code, _ = self.attempt(self.caller.create(name, size=size, mutable=mutable))
            assert code == "INVALID_ARGUMENT"
            return
        self.make(name, size, None, "", mutable=mutable)

    @rule(name=NAMES, size=SIZES, origin=NAMES)
    def clone(self, name, size, origin):
        known = self.volumes.get(origin)
        source = from_volume(known.ident if known else "no-such-volume")
        self.make(name, size, source, f"v:{known.ident}" if known else None, known.size if known else 0)

    @rule(name=NAMES, size=SIZES, origin=NAMES)
    def restore(self, name, size, origin):
        known = self.snapshots.get(origin)
        source = from_snapshot(known.ident if known else "no-such-snapshot")
        self.make(name, size, source, f"s:{known.ident}" if known else None, known.size if known else 0)

    @rule(name=NAMES, group=GROUPS, which=st.integers(0, 3))
    def restore_a_member(self, name, group, which):
        found = self.groups.get(group)
        if found is not None:
            ident, size = sorted(found.members.items())[which % len(found.members)]
            self.make(name, max(size, 16 * MIB), from_snapshot(ident), f"s:{ident}", size)

    def make(self, name, size, source, source_key, source_size=0, mutable=None):
        """Create, and compare with what the model says must come of it."""
        existing = self.volumes.get(name)
        if source_key is None and existing is None:
            expected = "NOT_FOUND"
        elif existing is not None:
            matches = existing.size >= size and existing.source == source_key
            expected = "OK" if matches else "ALREADY_EXISTS"
            if source_key is None:
                expected = "NOT_FOUND|ALREADY_EXISTS"
        else:
            expected = "OUT_OF_RANGE" if size < source_size else "OK"
        code, made = self.attempt(self.caller.create(name, size=size, source=source, mutable=mutable))
        assert code in expected.split("|")
        if made is None:
            return
        assert made.capacity_bytes >= size
        if existing is not None:
            assert made.volume_id == existing.ident
        else:
            self.volumes[name] = Known(made.volume_id, made.capacity_bytes, source_key, dict(mutable or {}))

    @rule(name=NAMES)
    def delete(self, name):
        known = self.volumes.pop(name, None)
        request = pb.DeleteVolumeRequest(volume_id=known.ident if known else "no-such-volume")
        assert self.attempt(self.client.DeleteVolume(request))[0] == "OK"
        if known is not None:
            self.trash.setdefault(name, []).append(known)

    @rule(name=NAMES)
    def undelete(self, name):
        """An internal call, as there is none in CSI: the pool's own."""
        if not self.trash.get(name):
            with pytest.raises(NotInTrash):
                self.pool.undelete(name)
        elif name in self.volumes:
            with pytest.raises(NameTaken):
                self.pool.undelete(name)
        else:
            known = self.trash[name].pop()
            assert self.pool.undelete(name) == known.ident
            self.volumes[name] = known

    @rule(name=NAMES, changes=MUTABLE, stray=st.sampled_from(["", "", "", "colour", "pool"]))
    def modify(self, name, changes, stray):
        known = self.volumes.get(name)
        wanted = changes | ({stray: "blue"} if stray else {})
        request = pb.ControllerModifyVolumeRequest(
            volume_id=known.ident if known else "no-such-volume", mutable_parameters=wanted
        )
        code, _ = self.attempt(self.client.ControllerModifyVolume(request))
        if known is None:
            assert code in ({"NOT_FOUND"} if fits(changes) and not stray else {"NOT_FOUND", "INVALID_ARGUMENT"})
        elif stray or not fits(changes):
            assert code == "INVALID_ARGUMENT"  # and nothing of it was taken, which the invariant sees
        else:
            assert code == "OK"
            known.mutable |= changes

    @rule(name=NAMES, origin=NAMES)
    def snapshot(self, name, origin):
        volume, existing = self.volumes.get(origin), self.snapshots.get(name)
        request = pb.CreateSnapshotRequest(name=name, source_volume_id=volume.ident if volume else "no-such-volume")
        code, answer = self.attempt(self.client.CreateSnapshot(request))
        if volume is None:
            assert code in (("NOT_FOUND",) if existing is None else ("NOT_FOUND", "ALREADY_EXISTS"))
        elif existing is not None and existing.source != volume.ident:
            assert code == "ALREADY_EXISTS"
        else:
            assert code == "OK"
            made = answer.snapshot
            assert made.ready_to_use
            assert existing is None or made.snapshot_id == existing.ident
            self.snapshots[name] = Known(made.snapshot_id, made.size_bytes, volume.ident)

    @rule(name=NAMES)
    def delete_snapshot(self, name):
        known = self.snapshots.pop(name, None)
        request = pb.DeleteSnapshotRequest(snapshot_id=known.ident if known else "no-such-snapshot")
        assert self.attempt(self.client.DeleteSnapshot(request))[0] == "OK"

    @rule(name=GROUPS, origins=st.sets(NAMES, min_size=1, max_size=3))
    def group(self, name, origins):
        known = [self.volumes.get(origin) for origin in sorted(origins)]
        sources = frozenset(each.ident for each in known if each)
        wanted = [each.ident if each else "no-such-volume" for each in known]
        request = pb.CreateVolumeGroupSnapshotRequest(name=name, source_volume_ids=dict.fromkeys(wanted))
        code, answer = self.attempt(self.client.CreateVolumeGroupSnapshot(request))
        existing = self.groups.get(name)
        if None in known:
            assert code in ({"NOT_FOUND", "ALREADY_EXISTS"} if existing else {"NOT_FOUND"})
        elif existing is not None and existing.sources != sources:
            assert code == "ALREADY_EXISTS"
        else:
            assert code == "OK"
            made = answer.group_snapshot
            members = {each.snapshot_id: each.size_bytes for each in made.snapshots}
            assert {each.source_volume_id for each in made.snapshots} == sources
            assert len(members) == len(sources)
            if existing is not None:
                assert (existing.ident, existing.members) == (made.group_snapshot_id, members)
            self.groups[name] = KnownGroup(made.group_snapshot_id, sources, members)

    @rule(name=GROUPS, which=st.integers(0, 3))
    def delete_a_member(self, name, which):
        known = self.groups.get(name)
        if known is not None:
            ident = sorted(known.members)[which % len(known.members)]
            request = pb.DeleteSnapshotRequest(snapshot_id=ident)
            assert self.attempt(self.client.DeleteSnapshot(request))[0] == "INVALID_ARGUMENT"

    @rule(name=GROUPS, told=st.sampled_from(["none", "all", "wrong"]))
    def delete_group(self, name, told):
        known = self.groups.get(name)
        members = {"none": [], "all": sorted(known.members) if known else [], "wrong": ["something"]}[told]
        request = pb.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=known.ident if known else "no-such-group", snapshot_ids=members
        )
        code = self.attempt(self.client.DeleteVolumeGroupSnapshot(request))[0]
        if known is not None and told != "all":
            assert code == "INVALID_ARGUMENT"
            return
        assert code == "OK"
        self.groups.pop(name, None)

    @rule(name=GROUPS, told=st.sampled_from(["none", "all", "wrong"]))
    def get_group(self, name, told):
        known = self.groups.get(name)
        members = {"none": [], "all": sorted(known.members) if known else [], "wrong": ["something"]}[told]
        request = pb.GetVolumeGroupSnapshotRequest(
            group_snapshot_id=known.ident if known else "no-such-group", snapshot_ids=members
        )
        code, answer = self.attempt(self.client.GetVolumeGroupSnapshot(request))
        if known is None:
            assert code == "NOT_FOUND"
        elif told != "all":
            assert code == "INVALID_ARGUMENT"
        else:
            assert {each.snapshot_id for each in answer.group_snapshot.snapshots} == set(known.members)

    @rule(name=NAMES, size=st.sampled_from([16 * MIB, 40 * MIB]))
    def expand(self, name, size):
        known = self.volumes.get(name)
        request = pb.ControllerExpandVolumeRequest(
            volume_id=known.ident if known else "no-such-volume", capacity_range=pb.CapacityRange(required_bytes=size)
        )
        if known is None:
            assert self.attempt(self.client.ControllerExpandVolume(request))[0] == "NOT_FOUND"
            return
        answer = self.do(self.client.ControllerExpandVolume(request))
        assert answer.capacity_bytes == max(known.size, size), "it grows, and never shrinks"
        known.size = answer.capacity_bytes

    @invariant()
    def lists_show_what_the_model_has(self):
        volumes = self.do(self.client.ListVolumes(pb.ListVolumesRequest())).entries
        listed = {entry.volume.volume_id: entry.volume.capacity_bytes for entry in volumes}
        assert listed == {known.ident: known.size for known in self.volumes.values()}
        for known in self.volumes.values():
            assert dict(self.pool.volumes.get(known.ident).mutable) == known.mutable
        snapshots = self.do(self.client.ListSnapshots(pb.ListSnapshotsRequest())).entries
        expected = {known.ident: "" for known in self.snapshots.values()}
        for group in self.groups.values():
            expected |= dict.fromkeys(group.members, group.ident)
        assert {each.snapshot.snapshot_id: each.snapshot.group_snapshot_id for each in snapshots} == expected
        kept = sorted(item.id for item in self.pool.trash.listed() if item.what == "volume")
        assert kept == sorted(known.ident for known in itertools.chain(*self.trash.values()))


def fits(mutable):
    return all(value in _FITS[key] for key, value in mutable.items())


@dataclass
class Shared:
    """A volume of a shared pool: who has it, in which way, and the highest token there ever was."""

    ident: str
    is_directory: bool
    held: dict[str, tuple[str, bool, int]] = field(default_factory=dict)
    highest: int = 0


class AttachModel(Machine):
    """Volumes that go from node to node; `n` is the plugin's own node, `m` another, `x` nobody's."""

    scope = "shared"

    def __init__(self) -> None:
        self.volumes: dict[str, Shared] = {}
        self.trash: dict[str, list[Shared]] = {}
        super().__init__()

    def start(self) -> None:
        super().start()
        self.pool.attachments.register_node("m", NODES["m"])

    @rule(name=NAMES)
    def create(self, name):
        parameters = {"kind": "directory"} if name == "d" else {}
        made = self.do(self.caller.create(name, size=16 * MIB, parameters=parameters))
        known = self.volumes.setdefault(name, Shared(made.volume_id, is_directory=name == "d"))
        assert made.volume_id == known.ident

    @rule(name=NAMES)
    def delete(self, name):
        known = self.volumes.get(name)
        request = pb.DeleteVolumeRequest(volume_id=known.ident if known else "no-such-volume")
        code, _ = self.attempt(self.client.DeleteVolume(request))
        assert code == ("FAILED_PRECONDITION" if known and known.held else "OK")
        if known and not known.held:
            self.trash.setdefault(name, []).append(self.volumes.pop(name))

    @rule(name=NAMES)
    def undelete(self, name):
        if self.trash.get(name) and name not in self.volumes:
            self.volumes[name] = self.trash[name].pop()
            assert self.pool.undelete(name) == self.volumes[name].ident

    @rule(
        name=NAMES,
        node=st.sampled_from(["n", "n", "m", "m", "x"]),
        mode=st.sampled_from(sorted(set(Mode.Mode.keys()) - {"UNKNOWN"})),
        readonly=st.booleans(),
    )
    def attach(self, name, node, mode, readonly):
        known = self.volumes.get(name)
        request = pb.ControllerPublishVolumeRequest(
            volume_id=known.ident if known else "no-such-volume",
            node_id=node,
            volume_capability=mounted(mode=Mode.Mode.Value(mode)),
            readonly=readonly,
        )
        code, answer = self.attempt(self.client.ControllerPublishVolume(request))
        assert code == self.expected(known, node, mode, readonly)
        if code != "OK":
            return
        assert known is not None, "what is not there is not attached"
        token = int(answer.publish_context[TOKEN_KEY])
        if node in known.held:
            assert known.held[node] == (mode, readonly, token), "the same again is the same"
        else:
            assert token > known.highest, "tokens only grow"
            known.held[node] = (mode, readonly, token)
            known.highest = token

    def expected(self, known, node, mode, readonly):
        """What an attach must come to."""
        if known is None:
            return "NOT_FOUND"
        if not known.is_directory and mode in ("MULTI_NODE_SINGLE_WRITER", "MULTI_NODE_MULTI_WRITER"):
            return "INVALID_ARGUMENT"
        if node not in NODES:
            return "NOT_FOUND"
        if node in known.held:
            return "OK" if known.held[node][:2] == (mode, readonly) else "ALREADY_EXISTS"
        taken = sum(node in each.held for each in self.volumes.values())
        if NODES[node] and taken >= NODES[node]:
            return "RESOURCE_EXHAUSTED"
        together = all(may_share((mode, readonly), held[:2]) for held in known.held.values())
        return "OK" if together else "FAILED_PRECONDITION"

    @rule(name=NAMES, node=st.sampled_from(["n", "m", "x", ""]))
    def detach(self, name, node):
        known = self.volumes.get(name)
        request = pb.ControllerUnpublishVolumeRequest(
            volume_id=known.ident if known else "no-such-volume", node_id=node
        )
        for _ in range(2):
            assert self.attempt(self.client.ControllerUnpublishVolume(request))[0] == "OK"
        if known is not None:
            known.held = {each: way for each, way in known.held.items() if node not in ("", each)}

    @rule(name=NAMES, changes=MUTABLE.filter(fits))
    def modify(self, name, changes):
        """Another change of the record, in between: attachments are not part of it."""
        if known := self.volumes.get(name):
            request = pb.ControllerModifyVolumeRequest(volume_id=known.ident, mutable_parameters=changes)
            assert self.attempt(self.client.ControllerModifyVolume(request))[0] == "OK"

    @invariant()
    def everybody_sees_who_has_what(self):
        entries = self.do(self.client.ListVolumes(pb.ListVolumesRequest())).entries
        listed = {entry.volume.volume_id: list(entry.status.published_node_ids) for entry in entries}
        assert listed == {known.ident: sorted(known.held) for known in self.volumes.values()}
        for known in self.volumes.values():
            request = pb.ControllerGetVolumeRequest(volume_id=known.ident)
            got = self.do(self.client.ControllerGetVolume(request)).status
            assert list(got.published_node_ids) == sorted(known.held)

    @invariant()
    def only_the_present_token_is_worth_something(self):
        for known in self.volumes.values():
            for node in NODES:
                token = known.held[node][2] if node in known.held else 0
                if token:
                    assert self.pool.attachments.verify(known.ident, node, token).token == token
                for wrong in {0, token - 1, token + 1, known.highest} - {token}:
                    with pytest.raises(Fenced):
                        self.pool.attachments.verify(known.ident, node, wrong)


def may_share(one, other):
    """Whether two nodes may have a volume in these ways: both for many nodes, and not two writers if one may."""
    modes = {one[0], other[0]}
    if not all(mode.startswith("MULTI_NODE_") for mode in modes):
        return False
    writers = [mode != "MULTI_NODE_READER_ONLY" and not readonly for mode, readonly in (one, other)]
    return not ("MULTI_NODE_SINGLE_WRITER" in modes and all(writers))


for machine in (ControllerModel, AttachModel):
    machine.TestCase.settings = settings(
        max_examples=EXAMPLES, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
TestController = ControllerModel.TestCase
TestAttach = AttachModel.TestCase
