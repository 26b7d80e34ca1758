"""How full volumes are: what drivers are asked, how long an answer counts, and what becomes of bad ones."""

import asyncio
from types import SimpleNamespace

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.kube.volumes import csi_volume_name
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.plugins.registry import DriverMissing
from moorage.node.serve import metrics
from moorage.node.volumes.state import CsiSource, MountState, PlainSource, PodRef, VolumeUse
from moorage.node.volumes.stats import VolumeStats

BYTES, INODES = pb.VolumeUsage.BYTES, pb.VolumeUsage.INODES
METRICS = ["capacity_bytes", "available_bytes", "used_bytes", "inodes", "inodes_free", "inodes_used"]


class Driver:
    """Answers for its volumes, unless it is told to hang or to fail."""

    def __init__(self, can=("GET_VOLUME_STATS", "STAGE_UNSTAGE_VOLUME")):
        self.can, self.requests, self.hangs, self.error = frozenset(can), [], False, None
        self.usage = [
            pb.VolumeUsage(unit=BYTES, total=100, used=40, available=60),
            pb.VolumeUsage(unit=INODES, total=10, used=4, available=6),
        ]
        self.client = self

    async def capabilities(self):
        return self.can

    async def NodeGetVolumeStats(self, request, timeout_s):
        self.requests.append(request)
        if self.hangs:
            await asyncio.Event().wait()
        if self.error:
            raise CsiError("NodeGetVolumeStats", self.error, "scripted")
        return pb.NodeGetVolumeStatsResponse(usage=self.usage)


class Machine:
    """A node with mounted volumes and drivers that are what a test makes of them."""

    def __init__(self, root):
        self.drivers, self.desired, self.actual, self.now = {}, {}, {}, 1000.0
        self.layout = NodeLayout(root)
        volumes = SimpleNamespace(world=SimpleNamespace(desired=self.desired, actual=self.actual))
        self.stats = VolumeStats(
            self.layout, self, volumes, patience_s=0.2, clock=lambda: self.now, wall=lambda: self.now
        )

    def get(self, name):
        if name not in self.drivers:
            raise DriverMissing(name)
        return self.drivers[name]

    def mount(self, handle, driver="a.dev", pod="p1", names=("data",), state=MountState.MOUNTED, source=None, **fields):
        source = source or CsiSource(driver, handle, f"pv-{handle}", **fields)
        name = csi_volume_name(driver, handle)
        use = VolumeUse(name, PodRef(PodUid(f"uid-{pod}"), "ns", pod), source, names)
        self.desired.setdefault(name, {})[use.pod.uid] = use
        states = self.actual.setdefault(name, SimpleNamespace(states={}))
        states.states[use.pod.uid] = state
        states.state_of = states.states.get
        return use


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path)
    made.drivers["a.dev"] = Driver()
    return made


async def test_a_driver_is_asked_for_the_volume_at_the_pods_path(machine):
    machine.mount("v1", claim="ns/c1")
    machine.mount("v2", claim="ns/c2", is_block=True)
    machine.mount("v3", is_ephemeral=True)
    await machine.stats.read()
    asked = {one.volume_id: one for one in machine.drivers["a.dev"].requests}
    assert asked["v1"].volume_path == f"{machine.layout.root}/pods/uid-p1/volumes/kubernetes.io~csi/pv-v1/mount"
    devices = f"{machine.layout.root}/plugins/kubernetes.io/csi/volumeDevices"
    assert asked["v2"].volume_path == f"{devices}/pv-v2/dev/uid-p1"
    assert {one.staging_target_path for one in asked.values()} == {""}  # kubelet gives none, and some have none


async def test_only_mounted_csi_volumes_of_drivers_that_can_are_asked_for(machine):
    machine.drivers["blind.dev"] = Driver(can=())
    machine.mount("v1", state=MountState.UNCERTAIN)
    machine.mount("v2", driver="blind.dev")
    machine.mount("v3", driver="not.registered")
    machine.mount("v4", source=PlainSource("kubernetes.io/empty-dir", "tmp", {}))
    assert await machine.stats.read() == []
    assert [one.requests for one in machine.drivers.values()] == [[], []]


async def test_an_answer_counts_for_a_minute_and_carries_its_time(machine):
    machine.mount("v1", claim="ns/c1")
    await machine.stats.read()
    machine.now += 59
    (usage,) = await machine.stats.read()
    body = metrics.summary("n1", [usage])
    assert body["pods"][0]["volume"][0]["time"] == "1970-01-01T00:16:40Z"  # when it was asked, not when it is told
    assert len(machine.drivers["a.dev"].requests) == 1
    machine.now += 1
    (usage,) = await machine.stats.read()
    assert len(machine.drivers["a.dev"].requests) == 2
    assert usage.taken_at == 1060.0


async def test_bytes_and_inodes_go_where_kubelet_puts_them(machine):
    machine.mount("v1", claim="ns/c1", names=("data", "same"))
    (usage,) = await machine.stats.read()
    assert (usage.capacity, usage.available, usage.used) == (100, 60, 40)
    assert (usage.inodes, usage.inodes_free, usage.inodes_used) == (10, 6, 4)
    lines = metrics.prometheus([usage]).splitlines()
    values = dict(zip(METRICS, (100, 60, 40, 10, 6, 4), strict=True))
    for name, value in values.items():
        assert f"# TYPE kubelet_volume_stats_{name} gauge" in lines
        assert any(line.startswith(f"# HELP kubelet_volume_stats_{name} ") for line in lines)
        assert f'kubelet_volume_stats_{name}{{namespace="ns",persistentvolumeclaim="c1"}} {value}' in lines
    (pod,) = metrics.summary("n1", [usage])["pods"]
    assert pod["podRef"] == {"name": "p1", "namespace": "ns", "uid": "uid-p1"}
    assert [one.pop("name") for one in pod["volume"]] == ["data", "same"]
    assert pod["volume"][1] == {
        "time": "1970-01-01T00:16:40Z", "pvcRef": {"name": "c1", "namespace": "ns"},
        "capacityBytes": 100, "availableBytes": 60, "usedBytes": 40, "inodes": 10, "inodesFree": 6, "inodesUsed": 4,
    }  # fmt: skip


async def test_a_volume_without_a_claim_is_in_the_summary_only(machine):
    machine.mount("v1", is_ephemeral=True)
    usages = await machine.stats.read()
    assert "pvcRef" not in metrics.summary("n1", usages)["pods"][0]["volume"][0]
    assert "{" not in metrics.prometheus(usages)


@pytest.mark.parametrize("error", ["INTERNAL", "no usage"])
async def test_a_bad_answer_takes_the_figures_away_until_there_is_a_good_one(machine, error):
    driver = machine.drivers["a.dev"]
    machine.mount("v1")
    assert len(await machine.stats.read()) == 1
    machine.now += 60
    usage = driver.usage
    driver.error, driver.usage = (error, usage) if error == "INTERNAL" else (None, [])
    assert await machine.stats.read() == []
    driver.error, driver.usage = None, usage
    assert len(await machine.stats.read()) == 1


async def test_a_volume_that_is_gone_has_no_figures(machine):
    use = machine.mount("v1")
    assert len(await machine.stats.read()) == 1
    machine.actual[use.volume].states[use.pod.uid] = MountState.ABSENT
    assert await machine.stats.read() == []


async def test_a_driver_that_hangs_keeps_no_other_volume_from_being_counted(machine):
    machine.drivers["stuck.dev"] = stuck = Driver()
    stuck.hangs = True
    for number in range(40):  # more than are asked at once
        machine.mount(f"s{number}", driver="stuck.dev", pod="p0")
    machine.mount("v1", claim="ns/c1")
    (usage,) = await asyncio.wait_for(machine.stats.read(), 30)
    assert usage.claim == "c1"
    stuck.hangs = False
    assert len(await machine.stats.read()) == 41
    stuck.hangs = True
    machine.now += 60
    assert [one.claim for one in await machine.stats.read()] == ["c1"]  # old figures are not told as new ones
