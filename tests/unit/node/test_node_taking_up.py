"""The order in which pods are taken up that come at once, and what of the news about them is none."""

import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest

from moorage.kube.objects.pods import Pod
from moorage.node.pods.manager import PodManager
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


def running(version, metadata=None, **more):
    meta = {"name": "p", "namespace": "ns", "uid": "u", "resourceVersion": str(version), **(metadata or {})}
    return msgspec.convert({"metadata": meta, "status": {"phase": "Running"}, **more}, Pod)


@pytest.mark.parametrize(
    ("news", "is_looked_at"),
    [
        pytest.param(running(2), False, id="our own status"),
        pytest.param(running(3), True, id="what somebody else wrote"),
        pytest.param(running(2, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}), True, id="deleted before"),
        pytest.param(running(2, metadata={"labels": {"a": "b"}}), True, id="labelled before"),
        pytest.param(running(2, spec={"activeDeadlineSeconds": 5}), True, id="given a deadline before"),
        pytest.param(running(2, status={"phase": "Failed"}), True, id="over"),
    ],
)
def test_the_echo_of_a_status_is_not_looked_at(monkeypatch, news, is_looked_at):
    looks = []
    monkeypatch.setattr(PodWorker, "wake", lambda worker: looks.append(worker.pod))
    statuses = SimpleNamespace(is_echo=lambda pod: pod.version == 2)
    manager = PodManager(SimpleNamespace(clock=time.time, statuses=statuses))
    manager.pod_changed(None, running(1))
    looks.clear()
    manager.pod_changed(running(1), news)
    assert looks == ([news] if is_looked_at else [])
    assert manager.workers["u"].pod is news
