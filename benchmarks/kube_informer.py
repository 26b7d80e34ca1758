"""What an informer of many claims costs: memory against the structs alone, time to sync, changes a second.

Run: python benchmarks/kube_informer.py [COUNT]
The server is a replay of one list from memory in a process of its own, so the figures are the informer's.
"""

import asyncio
import gc
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web
from figures import record

from moorage.kube.api.client import Client
from moorage.kube.api.config import from_values
from moorage.kube.cache.informer import Informer
from moorage.kube.objects import PersistentVolumeClaim

_CHANGES = 20_000


def claim(number: int, version: int) -> dict[str, Any]:
    """A bound claim as a real server sends it, managedFields and all."""
    manager = {
        "manager": "kube-controller-manager",
        "operation": "Update",
        "apiVersion": "v1",
        "fieldsType": "FieldsV1",
    }
    fields = {
        "f:metadata": {"f:annotations": {".": {}, "f:pv.kubernetes.io/bind-completed": {}}},
        "f:spec": {"f:volumeName": {}},
    }
    return {
        "kind": "PersistentVolumeClaim",
        "apiVersion": "v1",
        "metadata": {
            "name": f"data-{number}",
            "namespace": f"team-{number % 50}",
            "uid": f"7b3a5c1e-0000-4000-8000-{number:012d}",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app": f"app-{number % 100}"},
            "annotations": {"pv.kubernetes.io/bind-completed": "yes", "pv.kubernetes.io/bound-by-controller": "yes"},
            "finalizers": ["kubernetes.io/pvc-protection"],
            "managedFields": [{**manager, "time": "2026-01-01T00:00:00Z", "fieldsV1": fields}],
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "volumeName": f"pvc-7b3a5c1e-0000-4000-8000-{number:012d}",
            "storageClassName": "moorage",
            "volumeMode": "Filesystem",
        },
        "status": {"phase": "Bound", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}},
    }


def serve(count: int, pipe: Connection) -> None:
    lines = [json.dumps({"type": "ADDED", "object": claim(n, n + 1)}).encode() + b"\n" for n in range(count)]
    mark = {"resourceVersion": str(count), "annotations": {"k8s.io/initial-events-end": "true"}}
    lines.append(json.dumps({"type": "BOOKMARK", "object": {"metadata": mark}}).encode() + b"\n")
    initial = b"".join(lines)
    pieces = [
        json.dumps({"type": "MODIFIED", "object": claim(n % count, count + 1 + n)}).encode() + b"\n"
        for n in range(_CHANGES)
    ]
    changes = b"".join(pieces)

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(initial)
        await asyncio.to_thread(pipe.recv)
        await response.write(changes)
        await asyncio.sleep(3600)
        return response

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send((runner.addresses[0][1], len(initial)))
        await asyncio.sleep(3600)

    asyncio.run(main())


def rss() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure(count: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(count, theirs), daemon=True)
    server.start()
    port, wire_bytes = ours.recv()
    gc.collect()
    before = rss()
    async with Client(from_values(f"http://127.0.0.1:{port}")) as client:
        informer = Informer(client, PersistentVolumeClaim)
        began = time.perf_counter()
        task = asyncio.create_task(informer.run())
        await informer.wait_synced()
        synced_s = time.perf_counter() - began
        gc.collect()
        held = rss() - before
        structs = _size_of(list(informer))
        ours.send("go")
        began = time.perf_counter()
        while informer.seen_version < count + _CHANGES:
            await asyncio.sleep(0.005)
        changes_s = time.perf_counter() - began
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    server.terminate()
    server.join()
    print(f"{count} claims, {wire_bytes / count:.0f} bytes each on the wire")
    print(f"synced in {synced_s:.2f} s ({count / synced_s:.0f} objects/s)")
    print(f"memory: {held / count:.0f} bytes an object resident, {structs / count:.0f} in its structs")
    record("memory of an informer of 10,000 claims over its structs", f"{held / structs:.2f}")
    print(f"resident over structs: {held / structs:.2f}; resident over wire: {held / wire_bytes:.2f}")
    print(f"changes: {_CHANGES / changes_s:.0f}/s")


def _size_of(roots: list[Any]) -> int:
    """The bytes of all objects reachable from the roots, each counted once; constants of the process not at all."""
    seen: set[int] = set()
    total, stack = 0, list(roots)
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, type | bool | None.__class__):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, dict):
            stack += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            stack += one
        elif hasattr(one, "__struct_fields__"):
            stack += [getattr(one, name) for name in one.__struct_fields__]
    return total


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
