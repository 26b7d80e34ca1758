"""The order in which pods are taken up that come at once."""

import asyncio
import time
from types import SimpleNamespace

import msgspec

from moorage.kube.objects.core import Pod
from moorage.node.pods.run import PodManager
from moorage.node.pods.worker import PodWorker


def pod(number):
    return msgspec.convert({"metadata": {"name": f"p{number}", "namespace": "ns", "uid": f"u{number}"}}, Pod)


async def test_the_first_of_many_pods_get_on_before_the_last_are_looked_at(monkeypatch):
    """The driver is asked for the first volume at once, however many pods have come."""
    steps, all_done = [], asyncio.Event()

    async def work(worker):
        for step in range(3):
            steps.append((worker.uid, step))
            await asyncio.sleep(0)
        if worker.uid == "u49":
            all_done.set()

    monkeypatch.setattr(PodWorker, "run", work)
    manager = PodManager(SimpleNamespace(clock=time.time))
    manager.begin()
    for number in range(50):
        manager.pod_changed(None, pod(number))
    running = asyncio.create_task(manager.run())
    async with asyncio.timeout(30):
        await all_done.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [uid for uid, step in steps if step == 0] == [f"u{number}" for number in range(50)]
    assert steps.index(("u0", 2)) < steps.index(("u5", 0))
