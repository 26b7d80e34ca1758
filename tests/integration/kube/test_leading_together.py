"""Our elector and the official Python client's on one Lease: whoever renews keeps it, whoever stops loses it."""

import asyncio
import threading

import pytest
from kubernetes import client as official
from kubernetes.leaderelection import electionconfig, leaderelection
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

from moorage.kube.api import config
from moorage.kube.api.client import Client
from moorage.kube.control.election import ElectionConfig, Elector
from moorage.kube.objects.core import Lease
from moorage.testing import serve


class Stopped(Exception):
    pass


class Official:
    """A candidate of the official package, in its own thread; it ends when told to while it leads."""

    def __init__(self, identity):
        self.leads = threading.Event()
        self._stop = threading.Event()
        lock = LeaseLock("shared", "default", identity)
        settings = electionconfig.Config(lock, 3, 2, 1, self._work, lambda: None)
        self._thread = threading.Thread(target=leaderelection.LeaderElection(settings).run, daemon=True)
        self._thread.start()

    def _work(self):
        self.leads.set()
        self._stop.wait(60)
        raise Stopped

    async def stop(self):
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 30)
        assert not self._thread.is_alive()


@pytest.fixture
async def client(tmp_path):
    async with serve(tmp_path) as server, Client(config.from_values(server.insecure_url, server.token)) as client:
        settings = official.Configuration()
        settings.host = server.insecure_url
        settings.api_key = {"authorization": f"Bearer {server.token}"}
        official.Configuration.set_default(settings)
        yield client
        official.Configuration.set_default(None)


async def until(condition, timeout_s=40):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)


async def renewals(client, count):
    """Return when the lease has been renewed so many times."""
    seen: set[tuple[object, object]] = set()
    async with asyncio.timeout(40):
        while len(seen) <= count:
            lease = await client.get(Lease, "shared", "default")
            seen.add((lease.spec.holder_identity, lease.spec.renew_time))
            await asyncio.sleep(0.05)
    assert len({holder for holder, _ in seen}) == 1


async def test_neither_takes_what_the_other_renews(client):
    async def forever():
        await asyncio.Event().wait()

    first = Official("official-1")
    await until(first.leads.is_set)
    ours = Elector(client, ElectionConfig("shared", "default", "ours", lease_s=3, renew_s=2, retry_s=1))
    task = asyncio.create_task(ours.lead(forever))
    await renewals(client, 4)  # longer than a lease
    assert not ours.is_leader

    await first.stop()
    await until(lambda: ours.is_leader)
    second = Official("official-2")
    await renewals(client, 4)
    assert not second.leads.is_set()
    assert ours.is_leader

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(second.leads.is_set)
    await second.stop()
