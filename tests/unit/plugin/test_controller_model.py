"""The controller against a model: whatever is asked, in whatever order, it answers as plain dictionaries would."""

import asyncio
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.plugin.caller import MIB, Caller, from_snapshot, from_volume
from moorage.plugin.run import serve
from moorage.plugin.settings import Settings

NAMES = st.sampled_from(["a", "b", "c", "d"])
SIZES = st.sampled_from([16 * MIB, 20 * MIB, 33 * MIB])


@dataclass
class Known:
    ident: str
    size: int
    source: str = ""


class ControllerModel(RuleBasedStateMachine):
    """One plugin in this process, one pool in a temporary directory."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="moo-"))
        self.runner = asyncio.Runner()
        config = Settings(f"unix://{self.root}/c.sock", "n", {"default": self.root / "pool"}, reserve_fraction=0)
        self.serving = serve(config)
        self.do(self.serving.__aenter__())
        self.client = CsiClient(config.endpoint, timeout_s=60)
        self.caller = Caller(self.client, self.root)
        self.volumes: dict[str, Known] = {}
        self.snapshots: dict[str, Known] = {}

    def do(self, coroutine):
        return self.runner.run(coroutine)

    def attempt(self, coroutine):
        """The code and the answer; a refusal without words is no code at all."""
        try:
            return "OK", self.do(coroutine)
        except CsiError as error:
            return (error.code if error.message else "refused without a word"), None

    def teardown(self) -> None:
        self.do(self.client.close())
        self.do(self.serving.__aexit__(None, None, None))
        self.runner.close()
        shutil.rmtree(self.root)

    @rule(name=NAMES, size=SIZES)
    def create(self, name, size):
        self.make(name, size, None, "")

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

    def make(self, name, size, source, source_key, source_size=0):
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
        code, made = self.attempt(self.caller.create(name, size=size, source=source))
        assert code in expected.split("|")
        if made is None:
            return
        assert made.capacity_bytes >= size
        if existing is not None:
            assert made.volume_id == existing.ident
        else:
            self.volumes[name] = Known(made.volume_id, made.capacity_bytes, source_key)

    @rule(name=NAMES)
    def delete(self, name):
        known = self.volumes.pop(name, None)
        request = pb.DeleteVolumeRequest(volume_id=known.ident if known else "no-such-volume")
        assert self.attempt(self.client.DeleteVolume(request))[0] == "OK"

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
        snapshots = self.do(self.client.ListSnapshots(pb.ListSnapshotsRequest())).entries
        assert {entry.snapshot.snapshot_id for entry in snapshots} == {k.ident for k in self.snapshots.values()}


ControllerModel.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestController = ControllerModel.TestCase
