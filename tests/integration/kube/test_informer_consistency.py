"""An informer against the embedded API server: under concurrent writers and cut connections it neither misses nor
repeats a change, and the layer's other parts work on the real thing."""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

import pytest

from moorage.kube.api import config
from moorage.kube.api.client import Client, PatchType
from moorage.kube.cache.informer import Informer
from moorage.kube.control.election import ElectionConfig, Elector
from moorage.kube.control.events import Recorder
from moorage.kube.errors import AlreadyExists, Conflict, NotFound
from moorage.kube.objects.core import ConfigMap, Event, Lease
from moorage.testing import serve


@contextlib.asynccontextmanager
async def cluster(tmp_path):
    """A server and a client of it."""
    async with serve(tmp_path) as server, Client(config.from_values(server.insecure_url, server.token)) as client:
        yield server, client


class Cutter:
    """A proxy in front of a server that cuts all connections through it when told to."""

    def __init__(self, port):
        self._port = port
        self._writers = set()
        self._tasks = set()
        self.port = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self):
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        with contextlib.suppress(OSError):
            other_reader, other = await asyncio.open_connection("127.0.0.1", self._port)
            self._writers |= {writer, other}
            await asyncio.gather(self._pump(reader, other), self._pump(other_reader, writer))
            self._writers -= {writer, other}

    async def _pump(self, reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@dataclass
class History:
    """Which versions each object had, as writers were told, and as a handler was told."""

    written: dict[str, list[int]] = field(default_factory=dict)
    told: dict[str, list[int]] = field(default_factory=dict)
    deletions_written: int = 0
    deletions_told: int = 0

    def hear(self, old, new):
        if (new or old).name == "kube-root-ca.crt":
            return  # the server's own doing
        if new is None:
            self.deletions_told += 1
        else:
            self.told.setdefault(new.key, []).append(new.version)


async def _write(client, history, rng, count):
    for _ in range(count):
        name = f"m{rng.randrange(8)}"
        try:
            match rng.choice("cppd"):
                case "c":
                    obj = await client.create(ConfigMap, {"metadata": {"name": name}}, "default")
                    history.written.setdefault(obj.key, []).append(obj.version)
                case "p":
                    patch = {"data": {"n": str(rng.random())}}
                    obj = await client.patch(ConfigMap, name, patch, "default")
                    history.written.setdefault(obj.key, []).append(obj.version)
                case "d":
                    await client.delete(ConfigMap, name, "default")
                    history.deletions_written += 1
        except (NotFound, AlreadyExists, Conflict):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def following(client, history, **scope):
    informer = Informer(client, ConfigMap, namespace="default", **scope)
    informer.subscribe(history.hear)
    task = asyncio.create_task(informer.run())
    try:
        async with asyncio.timeout(60):
            await informer.wait_synced()
        yield informer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def caught_up(client, informer):
    async with asyncio.timeout(60):
        while True:
            server = {obj.key: obj.version for obj in (await client.list(ConfigMap, "default")).items}
            if {obj.key: obj.version for obj in informer} == server:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cuts", [False, True])
async def test_no_change_is_missed_or_told_twice(tmp_path, seed, cuts):
    rng, history = random.Random(seed), History()
    async with cluster(tmp_path) as (server, client):
        port = int(server.insecure_url.rsplit(":", 1)[1])
        async with Cutter(port) as cutter:
            via = Client(config.from_values(f"http://127.0.0.1:{cutter.port}", server.token))
            async with via, following(via, history) as informer:
                await caught_up(client, informer)
                history.told.clear()  # what was there before the writers began
                writers = [_write(client, history, random.Random(rng.random()), 60) for _ in range(4)]
                work = asyncio.gather(*writers)
                while cuts and not work.done():
                    await asyncio.sleep(rng.random() * 0.05)
                    cutter.cut()
                await work
                await caught_up(client, informer)
                assert {k: sorted(v) for k, v in history.written.items()} == history.told
                assert history.deletions_told == history.deletions_written
                assert informer.relists == 1


async def test_two_informers_that_start_at_different_moments_agree(tmp_path):
    async with cluster(tmp_path) as (_, client):
        work = asyncio.gather(*(_write(client, History(), random.Random(seed), 80) for seed in range(3)))
        async with contextlib.AsyncExitStack() as stack:
            informers = []
            for _ in range(5):
                informers.append(await stack.enter_async_context(following(client, History())))
                await asyncio.sleep(0.01)
            await work
            for informer in informers:
                await caught_up(client, informer)
            assert len({tuple(sorted((o.key, o.version) for o in informer)) for informer in informers}) == 1


async def test_an_object_enters_and_leaves_a_selection(tmp_path):
    history = History()
    async with cluster(tmp_path) as (_, client), following(client, history, labels="app=x") as informer:
        await client.create(ConfigMap, {"metadata": {"name": "a", "labels": {"app": "y"}}}, "default")
        for value in ("x", "y", "x", None):
            await client.patch(ConfigMap, "a", {"metadata": {"labels": {"app": value}}}, "default")
        last = await client.create(ConfigMap, {"metadata": {"name": "b", "labels": {"app": "x"}}}, "default")
        async with asyncio.timeout(30):
            while informer.seen_version < last.version:
                await asyncio.sleep(0.01)
        assert [obj.name for obj in informer] == ["b"]
        assert len(history.told["default/a"]) == 2
        assert history.deletions_told == 2


async def test_a_versioned_patch_of_any_kind_conflicts_when_it_is_late(tmp_path):
    async with cluster(tmp_path) as (_, client):
        first = await client.create(ConfigMap, {"metadata": {"name": "a"}, "data": {"k": "v"}}, "default")
        old = first.metadata.resource_version
        second = await client.patch(ConfigMap, "a", {"data": {"k": "w"}}, "default", version=old)
        for how, patch in [
            (PatchType.MERGE, {"data": {"k": "x"}}),
            (PatchType.STRATEGIC, {"data": {"k": "x"}}),
            (PatchType.JSON, [{"op": "replace", "path": "/data/k", "value": "x"}]),
        ]:
            with pytest.raises(Conflict):
                await client.patch(ConfigMap, "a", patch, "default", how=how, version=old)
        current = second.metadata.resource_version
        patch = [{"op": "replace", "path": "/data/k", "value": "x"}]
        third = await client.patch(ConfigMap, "a", patch, "default", how=PatchType.JSON, version=current)
        assert third.data == {"k": "x"}
        with pytest.raises(Conflict):
            await client.delete(ConfigMap, "a", "default", version=current)


async def test_events_and_leases_are_accepted(tmp_path):
    async with cluster(tmp_path) as (_, client):
        about = await client.create(ConfigMap, {"metadata": {"name": "a"}}, "default")
        async with Recorder(client, "test-controller", "host") as recorder:
            for _ in range(3):
                recorder.warning(about, "Failed", "because")
        [event] = (await client.list(Event, "default")).items
        assert (event.count, event.involved_object.uid) == (3, about.uid)
        ran = asyncio.Event()

        async def work():
            ran.set()

        await Elector(client, ElectionConfig("lock", "default", "one")).lead(work)
        assert ran.is_set()
        assert (await client.get(Lease, "lock", "default")).spec.holder_identity in (None, "")
