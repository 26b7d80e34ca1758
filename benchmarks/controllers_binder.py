"""How the time to bind n claims to n volumes grows with n: printed for 1,000 and 10,000, with the factor.

    benchmarks/controllers_binder.py [--small 1000] [--large 10000] [--through-api]

By default the binder's own work is measured: its real world, plans, writes and queues, over a client that keeps the
objects in memory and answers at once. With --through-api the same runs against the embedded API server over HTTP.
Time is that of the processor, the best of three runs, so that what else runs on the machine counts little.
Limit: ten times the claims in at most 14 times the time (n log n gives 13.3).
"""

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from figures import record

from moorage import log
from moorage.controllers.binder.run import run
from moorage.controllers.context import Activity, ControllerContext, ControllerOptions, Recorders
from moorage.kube.api.client import Client, ObjectList, WatchEvent
from moorage.kube.api.config import ApiConfig
from moorage.kube.cache.informers import Informers
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim
from moorage.kube.objects.meta import as_document
from moorage.testing import serve

LIMIT = 14.0


def volume(number: int) -> dict[str, Any]:
    """Sizes are scattered, so that the smallest fit is worth looking for."""
    spec = {
        "capacity": {"storage": f"{1 + number * 7919 % 997}Mi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "csi": {"driver": "csi.example.com", "volumeHandle": f"h{number}"},
    }
    return {"metadata": {"name": f"volume-{number:05}"}, "spec": spec, "status": {"phase": "Pending"}}


def claim(number: int) -> dict[str, Any]:
    """Every volume fits every claim: whichever are free first, all find one in the end."""
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Mi"}},
        "storageClassName": "",
    }
    meta = {"name": f"claim-{number:05}", "namespace": "default"}
    return {"metadata": meta, "spec": spec, "status": {"phase": "Pending"}}


class Memory(Client):
    """An API in a dictionary: versions, merge patches with preconditions, and watches that tell everything."""

    def __init__(self) -> None:
        super().__init__(ApiConfig("http://memory.invalid"))
        self._revision = 0
        self._objects: dict[str, dict[str, dict[str, Any]]] = {}
        self._watchers: dict[str, list[asyncio.Queue[WatchEvent[Any]]]] = {}

    def put(self, kind: type[Any], document: dict[str, Any], event: str) -> Any:
        self._revision += 1
        meta = document["metadata"]
        meta.setdefault("uid", f"uid-{self._revision}")
        meta["resourceVersion"] = str(self._revision)
        obj = msgspec.convert(document, kind)
        self._objects.setdefault(kind.resource.plural, {})[obj.key] = document
        for watcher in self._watchers.get(kind.resource.plural, []):
            watcher.put_nowait(WatchEvent(event, obj))
        return obj

    async def list(self, kind: type[Any], namespace: str = "", **_: Any) -> ObjectList[Any]:
        found = [msgspec.convert(one, kind) for one in self._objects.get(kind.resource.plural, {}).values()]
        return ObjectList(found, str(self._revision))

    async def watch(self, kind: type[Any], namespace: str = "", **options: Any) -> AsyncIterator[WatchEvent[Any]]:
        queue: asyncio.Queue[WatchEvent[Any]] = asyncio.Queue()
        self._watchers.setdefault(kind.resource.plural, []).append(queue)
        if options.get("initial"):
            for one in (await self.list(kind)).items:
                yield WatchEvent("ADDED", one)
            end = {"annotations": {"k8s.io/initial-events-end": "true"}, "resourceVersion": str(self._revision)}
            yield WatchEvent("BOOKMARK", msgspec.convert({"metadata": end}, kind))
        while True:
            yield await queue.get()

    async def create(self, kind: type[Any], body: Any, namespace: str = "", **_: Any) -> Any:
        await asyncio.sleep(0)
        return self.put(kind, as_document(body), "ADDED")

    async def patch(self, kind: type[Any], name: str, patch: Any, namespace: str = "", **options: Any) -> Any:
        await asyncio.sleep(0)
        known = self._objects[kind.resource.plural][f"{namespace}/{name}" if namespace else name]
        assert options.get("version", "") in ("", known["metadata"]["resourceVersion"]), "the binder raced itself"
        return self.put(kind, merged(known, patch), "MODIFIED")


def merged(old: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping):
        return patch
    out = dict(old) if isinstance(old, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merged(out.get(key), value)
    return out


@asynccontextmanager
async def clients(through_api: bool) -> AsyncIterator[Client]:
    if not through_api:
        yield Memory()
        return
    with tempfile.TemporaryDirectory(prefix="bench-binder-") as folder:
        async with serve(Path(folder)) as server:

            async def token() -> str:
                return str(server.token)

            async with Client(ApiConfig(server.insecure_url, None, token)) as client:
                yield client


async def measure(count: int, through_api: bool) -> float:
    """Processor seconds from the start of the binder until every claim is bound."""
    async with clients(through_api) as client:
        for number in range(count):
            await client.create(PersistentVolume, volume(number))
            await client.create(PersistentVolumeClaim, claim(number), "default")
        gc.collect()
        activity = Activity()
        async with Recorders(client, activity) as recorders, Informers(client) as informers:
            context = ControllerContext(client, informers, recorders, activity, ControllerOptions())
            claims = informers.of(PersistentVolumeClaim)
            bound, done = set[str](), asyncio.Event()

            def see(_: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
                if new is not None and new.status.phase == "Bound":
                    bound.add(new.spec.volume_name)
                    if len(bound) == count:
                        done.set()

            claims.subscribe(see)
            start = time.process_time()
            binder = asyncio.create_task(run(context), name="binder")
            await done.wait()
            seconds = time.process_time() - start
            binder.cancel()
            await asyncio.gather(binder, return_exceptions=True)
        return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", type=int, default=1000)
    parser.add_argument("--large", type=int, default=10000)
    parser.add_argument("--through-api", action="store_true")
    options = parser.parse_args()
    log.configure("error")
    small = min(asyncio.run(measure(options.small, options.through_api)) for _ in range(3))
    large = min(asyncio.run(measure(options.large, options.through_api)) for _ in range(3))
    factor = large / small
    print(f"{options.small} claims: {small:.2f} s, {options.large} claims: {large:.2f} s")
    record("binding 10,000 claims over binding 1,000", f"{factor:.1f}", factor <= LIMIT)
    print(f"growth factor: {factor:.1f} (limit {LIMIT:.0f} for ten times as many)")
    return 0 if factor <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
