"""Claim and pod created together until the process runs with its volume mounted: one after another, and all at once.

Prints p50 and p99 over 50 in sequence (bounds 400 ms and 1 s), the time for 200 at once (bound 30 s), the memory of
all processes (bound 220 MiB), and the CPU used at rest (bound 2 % of a core).
"""

import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from figures import record

from moorage import log
from moorage.cluster.demo import claim, pod
from moorage.cluster.run import Cluster
from moorage.cluster.settings import UpSettings
from moorage.kube.api.client import Client
from moorage.kube.cache.informers import Informers
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod

SCRIPT = "trap 'exit 0' TERM; sleep infinity & wait"
IDLE_S = 20.0


async def main(in_sequence: int, at_once: int) -> None:
    log.configure("error")
    root = Path(tempfile.mkdtemp(prefix="moo-bench-"))
    cluster = Cluster(UpSettings(data_dir=root, pool_size_bytes=40 << 30))
    try:
        report = await cluster.start()
        record("`moorage up` is ready", f"{report.seconds:.1f} s", report.seconds <= 3)
        print(f"ready after {report.seconds:.2f} s (bound 3 s)")
        print(f"resident memory at rest {sum(memory_of(cluster).values()):.0f} MiB (bound 220): {memory_of(cluster)}")
        resident = sum(memory_of(cluster).values())
        record("memory of all processes at rest", f"{resident:.0f} MiB", resident <= 220)
        used = await cpu_at_rest(cluster)
        record("processor use of all processes at rest", f"{used * 100:.2f} %", used <= 0.02)
        print(f"CPU at rest {used:.2%} of a core (bound 2 %)")
        async with cluster.client() as client, Informers(client) as informers:
            watch = Watch(informers)
            await informers.wait_synced()
            times = [await one(client, watch, f"seq-{number}") for number in range(in_sequence)]
            times.sort()
            p50, p99 = times[len(times) // 2], times[min(len(times) - 1, int(len(times) * 0.99))]
            way = "claim and pod until the process runs, one after another"
            record(f"{way}: p50", f"{p50 * 1000:.0f} ms", p50 <= 0.4)
            record(f"{way}: p99", f"{p99 * 1000:.0f} ms", p99 <= 1)
            print(
                f"{in_sequence} in sequence: p50 {p50 * 1000:.0f} ms (bound 400), p99 {p99 * 1000:.0f} ms (bound 1000)"
            )
            await removed(client, watch)
            began = time.monotonic()
            await asyncio.gather(*(one(client, watch, f"par-{number}") for number in range(at_once)))
            together = time.monotonic() - began
            record("200 claims and pods at once", f"{together:.1f} s", together <= 30)
            print(f"{at_once} at once: all running after {time.monotonic() - began:.1f} s (bound 30)")
            print(f"resident memory then {sum(memory_of(cluster).values()):.0f} MiB: {memory_of(cluster)}")
            began = time.monotonic()
            await removed(client, watch)
            print(f"{at_once} removed, their volumes deleted, after {time.monotonic() - began:.1f} s")
    finally:
        await cluster.stop()
        shutil.rmtree(root)


class Watch:
    """Wakes who waits for a pod to run, and knows what is left."""

    def __init__(self, informers: Informers) -> None:
        self.pods = informers.of(Pod)
        self.claims = informers.of(PersistentVolumeClaim)
        self.volumes = informers.of(PersistentVolume)
        self._waiting: dict[str, asyncio.Event] = {}
        self.pods.subscribe(self._changed)

    async def running(self, name: str) -> None:
        await self._waiting.setdefault(name, asyncio.Event()).wait()

    def _changed(self, _old: Pod | None, new: Pod | None) -> None:
        if new is not None and new.status.phase == "Running":
            self._waiting.setdefault(new.name, asyncio.Event()).set()


async def one(client: Client, watch: Watch, name: str) -> float:
    began = time.monotonic()
    await asyncio.gather(
        client.create(PersistentVolumeClaim, claim(name, "32Mi"), "default"),
        client.create(Pod, pod(name, {"data": name}, SCRIPT), "default"),
    )
    await watch.running(name)
    return time.monotonic() - began


async def removed(client: Client, watch: Watch) -> None:
    await asyncio.gather(*(client.delete(Pod, one.name, "default") for one in watch.pods))
    await asyncio.gather(*(client.delete(PersistentVolumeClaim, one.name, "default") for one in watch.claims))
    while len(watch.pods) or len(watch.claims) or len(watch.volumes):
        await asyncio.sleep(0.05)


def processes(cluster: Cluster) -> dict[str, int]:
    found = {"api and controllers": 0}
    found |= {part.name: part.pid for part in cluster.supervisor.parts.values() if part.pid}
    return found


def memory_of(cluster: Cluster) -> dict[str, int]:
    sizes = {}
    for name, pid in processes(cluster).items():
        status = Path(f"/proc/{pid or 'self'}/status").read_text()
        sizes[name] = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) >> 10
    return sizes


async def cpu_at_rest(cluster: Cluster) -> float:
    before = sum(ticks(pid) for pid in processes(cluster).values())
    await asyncio.sleep(IDLE_S)
    return (sum(ticks(pid) for pid in processes(cluster).values()) - before) / 100 / IDLE_S


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid or 'self'}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


if __name__ == "__main__":
    quick = "--quick" in sys.argv
    asyncio.run(main(10 if quick else 50, 20 if quick else 200))
