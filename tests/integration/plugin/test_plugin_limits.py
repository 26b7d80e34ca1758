"""I/O limits on real cgroups: their effect measured, and put back at publish, after a restart, on new containers."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.plugin_caller import MIB, block, mounted

from moorage.csi import csi_pb2 as pb
from moorage.host import loop, mountinfo
from moorage.plugin.io_limits import IoCgroups

pytestmark = pytest.mark.root

V1_FILES = {
    "readIOPS": "blkio.throttle.read_iops_device",
    "writeIOPS": "blkio.throttle.write_iops_device",
    "readBytesPerSecond": "blkio.throttle.read_bps_device",
    "writeBytesPerSecond": "blkio.throttle.write_bps_device",
}
V2_WORDS = dict(zip(V1_FILES, ("riops", "wiops", "rbps", "wbps"), strict=True))


@dataclass(frozen=True)
class PodCgroup:
    """A pod's cgroup in the hierarchy that the plugin found, as kubelet would have made it."""

    uid: str
    path: Path
    version: int

    def container(self, name: str = "container") -> Path:
        made = self.path / name
        made.mkdir(parents=True, exist_ok=True)
        return made

    def limit(self, cgroup: Path, key: str, device: tuple[int, int]) -> int:
        """What the kernel holds for a device; 0 is no limit. With v2 the pod's own is what counts."""
        number = f"{device[0]}:{device[1]}"
        file = self.path / "io.max" if self.version == 2 else cgroup / V1_FILES[key]
        for line in file.read_text().splitlines():
            words = line.split()
            if words[0] == number and self.version == 1:
                return int(words[1])
            if words[0] == number:
                found = dict(word.split("=") for word in words[1:])[V2_WORDS[key]]
                return 0 if found == "max" else int(found)
        return 0

    def forget(self, cgroup: Path, key: str, device: tuple[int, int]) -> None:
        number = f"{device[0]}:{device[1]}"
        if self.version == 2:
            (self.path / "io.max").write_text(f"{number} {V2_WORDS[key]}=max")
        else:
            (cgroup / V1_FILES[key]).write_text(f"{number} 0")
        assert self.limit(cgroup, key, device) == 0

    def remove(self) -> None:
        for child in [*self.path.iterdir(), self.path]:
            if child.is_dir():
                with contextlib.suppress(OSError):
                    child.rmdir()


@pytest.fixture
def pods(cannot_run) -> Iterator[list[PodCgroup]]:
    found = IoCgroups()
    if found.why_unsupported():
        cannot_run(found.why_unsupported())
    made = []
    for number in range(2):
        uid = f"22222222-3333-4444-{number:04d}-{os.getpid():012d}"
        made.append(PodCgroup(uid, found.root / f"moorage-test-pod{uid}", found.version))
        made[-1].container()
    yield made
    for pod in made:
        pod.remove()


async def modify(node, volume, **changes):
    await node.client.ControllerModifyVolume(
        pb.ControllerModifyVolumeRequest(volume_id=volume, mutable_parameters=changes)
    )


def device_at(target: Path) -> tuple[int, int]:
    mount = mountinfo.mount_at(target)
    number = mount.root if mount.root.startswith("/loop") else mount.source
    return loop.at(loop.number_of(f"/dev/{os.path.basename(number)}")).device


async def until_limited(pod: PodCgroup, cgroup: Path, key: str, device: tuple[int, int], value: int) -> None:
    async with asyncio.timeout(60):
        while pod.limit(cgroup, key, device) != value:
            await asyncio.sleep(0.05)


def fio(cgroup: Path, target: Path, way: str, block_bytes: int, runtime: str) -> tuple[float, float]:
    """Direct I/O by a process in the cgroup: operations and bytes in a second."""
    script = (
        "import os,sys\n"
        "open(sys.argv[1]+'/cgroup.procs','w').write(str(os.getpid()))\n"
        "os.execvp('fio',['fio',*sys.argv[2:]])"
    )
    file = f"--filename={target}/f" if target.is_dir() else f"--filename={target}"
    flags = [
        "--name=x", file, "--size=8M", f"--rw={way}", f"--bs={block_bytes}", "--direct=1", "--time_based",
        f"--runtime={runtime}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script, str(cgroup), *flags], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][way.removeprefix("rand")]
    return found["iops"], found["bw_bytes"]


@pytest.mark.parametrize(
    ("key", "value", "way", "block_bytes"),
    [
        ("readIOPS", 100, "randread", 4096),
        ("writeIOPS", 100, "randwrite", 4096),
        ("readBytesPerSecond", 4 * MIB, "randread", 65536),
        ("writeBytesPerSecond", 4 * MIB, "randwrite", 65536),
    ],
)
async def test_each_limit_holds_a_pod_back_and_can_be_lifted(node, pods, key, value, way, block_bytes):
    pod = pods[0]
    raw = (await node.create("raw", block(), 16 * MIB, mutable={key: str(value)})).volume_id
    target = await node.up(raw, block(), pod=pod.uid)
    assert pod.limit(pod.container(), key, device_at(target)) == value

    def measured(runtime: str) -> float:
        iops, bandwidth = fio(pod.container(), target, way, block_bytes, runtime)
        return iops if key.endswith("IOPS") else bandwidth

    limited = await asyncio.to_thread(measured, "2")
    assert value * 0.4 < limited < value * 1.6
    await modify(node, raw, **{key: "0"})
    assert pod.limit(pod.container(), key, device_at(target)) == 0
    assert await asyncio.to_thread(measured, "1") > 2 * limited


async def test_a_limit_comes_with_every_publish_and_every_new_container(node, pods):
    volume = (await node.create("v", mounted("ext4"))).volume_id
    targets = [await node.up(volume, pod=pod.uid) for pod in pods]
    device = device_at(targets[0])
    assert [pod.limit(pod.container(), "writeIOPS", device) for pod in pods] == [0, 0]
    await modify(node, volume, writeIOPS="300")
    assert [pod.limit(pod.container(), "writeIOPS", device) for pod in pods] == [300, 300]

    await node.unpublish(volume, pod=pods[1].uid)
    pods[1].forget(pods[1].container(), "writeIOPS", device)
    await node.publish(volume, pod=pods[1].uid)
    assert pods[1].limit(pods[1].container(), "writeIOPS", device) == 300
    late = pods[0].container("late")  # containers start after their volumes are there
    await until_limited(pods[0], late, "writeIOPS", device, 300)

    for pod in pods:
        await node.unpublish(volume, pod=pod.uid)
    await node.unstage(volume)
    for pod in pods:
        pod.forget(pod.container(), "writeIOPS", device)
    target = await node.up(volume, pod=pods[0].uid)
    assert pods[0].limit(pods[0].container(), "writeIOPS", device_at(target)) == 300


@pytest.mark.parametrize("in_own_process", [True])
async def test_limits_are_found_again_after_a_kill(plugin, node, pods):
    pod = pods[0]
    volume = (await node.create("v", mutable={"readBytesPerSecond": "1048576"})).volume_id
    target = await node.up(volume, pod=pod.uid)
    device = device_at(target)
    assert pod.limit(pod.container(), "readBytesPerSecond", device) == 1048576
    await plugin.kill()
    pod.forget(pod.container(), "readBytesPerSecond", device)  # as when the pod's container is another by now
    await plugin.start()
    await until_limited(pod, pod.container(), "readBytesPerSecond", device, 1048576)
    await modify(node, volume, readBytesPerSecond="2097152")
    assert pod.limit(pod.container(), "readBytesPerSecond", device) == 2097152


@pytest.mark.parametrize("inline_attributes", [frozenset({"size", "readIOPS"})])
async def test_an_inline_volume_is_limited_as_well(node, pods):
    pod = pods[0]
    target = Path(node.target("inline", pod.uid))
    request = pb.NodePublishVolumeRequest(
        volume_id="csi-limited",
        target_path=str(target),
        volume_capability=mounted(),
        volume_context={"csi.storage.k8s.io/ephemeral": "true", "size": "32Mi", "readIOPS": "50"},
    )
    await node.client.NodePublishVolume(request)
    try:
        assert pod.limit(pod.container(), "readIOPS", device_at(target)) == 50
    finally:
        await node.unpublish("csi-limited", target)


@pytest.mark.parametrize("inline_attributes", [frozenset({"kind", "readIOPS"})])
async def test_where_nothing_can_be_limited_the_call_says_so(node, pods, refused):
    directory = {"kind": "directory"}
    volume = (await node.create("d", parameters=directory)).volume_id
    await modify(node, volume, trashRetention="1h")
    with refused("FAILED_PRECONDITION", "no device of its own"):
        await modify(node, volume, readIOPS="50", trashRetention="2h")
    with refused("FAILED_PRECONDITION", "no device of its own"):
        await node.create("e", parameters=directory, mutable={"readIOPS": "50"})
    await modify(node, volume, readIOPS="0")  # no limit is no request for one
    target = Path(node.target("inline", pods[0].uid))
    context = {"csi.storage.k8s.io/ephemeral": "true", "readIOPS": "50", **directory}
    with refused("FAILED_PRECONDITION", "no device of its own"):
        await node.client.NodePublishVolume(
            pb.NodePublishVolumeRequest(
                volume_id="csi-d", target_path=str(target), volume_capability=mounted(), volume_context=context
            )
        )
    assert not target.exists()
    assert len((await node.client.ListVolumes(pb.ListVolumesRequest())).entries) == 1
