"""Which pods a drain ends, and which are not begun any more."""

import asyncio
import contextlib
from types import SimpleNamespace

import msgspec
import pytest

from moorage.kube.objects.pods import Pod
from moorage.node.pods.manager import PodManager
from moorage.node.pods.worker import PodWorker


def pod(name):
    return msgspec.convert({"metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}"}}, Pod)


@pytest.fixture
def begun(monkeypatch):
    """Workers that were begun; each ends when it is told to drain."""
    names = []

    async def run(worker):
        names.append(worker.pod.name)
        while not worker.is_draining:
            await worker._wake.wait()
            worker._wake.clear()

    monkeypatch.setattr(PodWorker, "run", run)
    return names


@pytest.fixture
async def manager(tmp_path):
    return PodManager(SimpleNamespace(clock=lambda: 0.0))


@contextlib.asynccontextmanager
async def running(manager):
    task = asyncio.create_task(manager.run())
    await asyncio.sleep(0)
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_pod_whose_turn_had_not_come_is_ended_like_the_others(manager, begun):
    for name in ("a", "b", "c"):
        manager.pod_changed(None, pod(name))
    manager.begin()  # all three are waiting, and maybe they were running before this agent was there
    async with running(manager):
        assert len(begun) < 3
        assert await manager.drain(5.0)
        assert sorted(begun) == ["a", "b", "c"]


async def test_a_pod_that_comes_during_the_drain_is_not_begun(manager, begun):
    manager.pod_changed(None, pod("a"))
    manager.begin()
    async with running(manager):
        assert await manager.drain(5.0)
        manager.pod_changed(None, pod("late"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert begun == ["a"]
        assert manager.find("ns", "late") is None
