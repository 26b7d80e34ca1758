"""What an API server takes for the status of a pod: as it comes, and gathered as the agent does while many pods start.

Prints both in processor time per write, at the same rate of writes, and their ratio. The API server is ours, in this
process with its client, or that of `--kubeconfig`, to throw away: then the processor time is that of the processes
given with `--pid`, such as kube-apiserver's and etcd's.
Run: python benchmarks/node_status.py [--pods 200] [--rounds 3] [--kubeconfig FILE --pid PID [--pid PID]]
"""

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from figures import record
from node_lab import api, cpu_s

from moorage.kube.api.client import Client
from moorage.kube.objects.pods import Pod
from moorage.node.pods.status_writer import StatusWriter

_EVERY_S = 0.015  # about as fast as pods come up when 200 start at once
_CONDITIONS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")


def status(now: str) -> dict[str, Any]:
    """Of a pod that has come up, in the shape that the agent writes."""
    told = {"status": "True", "lastProbeTime": None, "lastTransitionTime": now, "observedGeneration": 1}
    container = {"name": "main", "image": "host", "imageID": "", "containerID": "moorage://1", "ready": True,
                 "started": True, "restartCount": 0, "lastState": {},
                 "state": {"running": {"startedAt": now}}}  # fmt: skip
    return {"phase": "Running", "conditions": [{"type": one, **told} for one in _CONDITIONS], "startTime": now,
            "containerStatuses": [container], "qosClass": "BestEffort", "observedGeneration": 1,
            "hostIP": "127.0.0.1", "hostIPs": [{"ip": "127.0.0.1"}],
            "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}  # fmt: skip


async def made(client: Client, count: int) -> list[Pod]:
    spec = {"nodeName": "nowhere", "automountServiceAccountToken": False,
            "containers": [{"name": "main", "image": "host", "command": ["sleep", "1000"]}]}  # fmt: skip
    names = (f"status-{time.time_ns()}" for _ in range(count))
    return [await client.create(Pod, {"metadata": {"name": name}, "spec": spec}, "default") for name in names]


async def write(client: Client, pods: list[Pod], *, is_gathered: bool, used_s: Callable[[], float]) -> float:
    """Milliseconds of processor time for each."""
    left = len(pods)
    writer = StatusWriter(client, lambda: left if is_gathered else 0)
    task = asyncio.create_task(writer.run())
    await asyncio.sleep(0.5)
    before = used_s()
    wanted = status(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    for pod in pods:
        left -= 1
        writer.put(pod, wanted)
        await asyncio.sleep(_EVERY_S)
    await asyncio.gather(*(writer.flush(pod.uid) for pod in pods))
    await asyncio.sleep(0.5)  # the events reach the watchers
    used = used_s() - before
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return used / len(pods) * 1000


async def main(count: int, rounds: int, kubeconfig: str, pids: list[int]) -> None:
    def used_s() -> float:
        return sum(map(cpu_s, pids)) if pids else time.process_time()

    took: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as directory:
        async with api(Path(directory), kubeconfig) as (_, client):
            for _, is_gathered in itertools.product(range(rounds), took):
                pods = await made(client, count)
                took[is_gathered].append(await write(client, pods, is_gathered=is_gathered, used_s=used_s))
    alone, together = (", ".join(f"{one:.1f}" for one in each) for each in took.values())
    print(f"a status as it comes: {alone} ms of processor time")
    ratio = sum(took[True]) / sum(took[False])
    record("processor time of the API server for a batched status over a single one", f"{ratio:.2f}")
    print(f"gathered with others: {together} ms, ratio {sum(took[True]) / sum(took[False]):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pods", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kubeconfig", default="", help="of another API server than ours; it is not cleaned up")
    parser.add_argument(
        "--pid", type=int, action="append", default=[], help="a process of that server; may be repeated"
    )
    options = parser.parse_args()
    if bool(options.kubeconfig) != bool(options.pid):
        parser.error("--kubeconfig and --pid go together")
    uvloop.run(main(options.pods, options.rounds, options.kubeconfig, options.pid))
