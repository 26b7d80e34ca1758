"""A lying driver and hostile objects: what the sidecars list, multiply or unpack has a bound."""

import base64
import zlib
from types import SimpleNamespace

import msgspec
import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.kube.objects import PersistentVolume
from moorage.kube.objects.storage import TopologyRequirement, TopologyTerm
from moorage.sidecars import listing
from moorage.sidecars.attacher.run import Attacher
from moorage.sidecars.errors import ProvisionError
from moorage.sidecars.provisioner import attempt
from moorage.sidecars.provisioner.topology import allows, flattened
from moorage.sidecars.volume_health import HealthMonitor


class Endless:
    """A driver whose lists never end."""

    def __init__(self, repeats=False):
        self.pages, self._repeats = 0, repeats

    def _token(self):
        self.pages += 1
        return "again" if self._repeats else str(self.pages)

    async def ControllerListVolumeHealth(self, request, timeout_s):
        entries = [pb.VolumeHealth(volume_id=f"v{self.pages}-{n}") for n in range(100)]
        return pb.ControllerListVolumeHealthResponse(entries=entries, next_token=self._token())

    async def ListVolumes(self, request, timeout_s):
        entry = pb.ListVolumesResponse.Entry(volume=pb.Volume(volume_id=f"v{self.pages}"))
        entry.status.volume_condition.abnormal = True
        return pb.ListVolumesResponse(entries=[entry] * 100, next_token=self._token())


def around(client):
    settings = SimpleNamespace(max_entries=0, timeout_for=lambda role: 5.0, workers_for=lambda role: 1)
    driver = SimpleNamespace(client=client, name="d")
    return SimpleNamespace(settings=settings, driver=driver, recorder=lambda name: None)


def bound_volume(handle):
    return msgspec.convert(
        {"metadata": {"name": "v"}, "spec": {"csi": {"driver": "d", "volumeHandle": handle}}}, PersistentVolume
    )


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("method", ["_listed_health", "_listed_conditions"])
async def test_volume_health_without_an_end_is_given_up(monkeypatch, method, repeats):
    monkeypatch.setattr(listing, "MOST_ENTRIES", 2_000)
    client = Endless(repeats)
    monitor = HealthMonitor(around(client))
    with pytest.raises(CsiError, match="no end" if repeats else "has not ended after"):
        await getattr(monitor, method)([bound_volume("mine")])
    assert client.pages <= 22


async def test_what_a_driver_says_of_other_volumes_is_not_kept():
    class Talkative(Endless):
        def _token(self):
            super()._token()
            return "" if self.pages == 50 else str(self.pages)

    trouble = await HealthMonitor(around(Talkative()))._listed_health([bound_volume("mine")])
    assert trouble == {"mine": ""}


@pytest.mark.parametrize("repeats", [True, False])
async def test_attachments_without_an_end_are_given_up(monkeypatch, repeats):
    monkeypatch.setattr(listing, "MOST_PAGES", 20)
    attacher = object.__new__(Attacher)
    client = Endless(repeats)
    attacher._context = around(client)
    with pytest.raises(CsiError):
        await attacher._published()
    assert client.pages <= 22


def test_topologies_that_multiply_are_refused():
    values = [f"v{n}" for n in range(10)]
    term = TopologyTerm(match_label_expressions=[TopologyRequirement(key=f"k{n}", values=values) for n in range(30)])
    with pytest.raises(ProvisionError, match="more than"):
        flattened([term])
    here = tuple((f"k{n}", "v3") for n in range(30))
    assert allows([term], here)
    assert not allows([term], here[1:])
    assert len(flattened([TopologyTerm(match_label_expressions=[TopologyRequirement(key="k", values=values)])])) == 10


def test_a_note_that_unpacks_to_much_is_not_read():
    packer = zlib.compressobj(zdict=attempt._USUAL)
    bomb = packer.compress(b" " * 100_000_000) + packer.flush()
    with pytest.raises(ValueError, match="more than"):
        attempt.from_text(base64.b64encode(bomb).decode())
