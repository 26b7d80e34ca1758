"""How fast a provisioner works off claims that wait for it: volumes per second, on a cluster that is there already.

Run: python benchmarks/sidecars_backlog.py --kubeconfig FILE --driver PATH [--provisioner moorage|PATH] [--claims 400]
The claims are made first, with the annotation that the binder would write, and only then is the provisioner started: so
neither the creation of claims nor the binder's single worker is measured with it, which else decide both what is made
and when. Run it against a control plane without a binder. Prints volumes per second from the first to the last one.
"""

import argparse
import asyncio
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from sidecars_claims import cpu_s, driver_command, process, sidecar_command, until

from moorage.kube.api.client import Client
from moorage.kube.api.config import from_kubeconfig
from moorage.kube.cache.informer import Informer
from moorage.kube.errors import ApiError
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, StorageClass


def claim_body(number: int, driver: str) -> dict:
    annotations = {"volume.kubernetes.io/storage-provisioner": driver}
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "backlog",
        "resources": {"requests": {"storage": "8Mi"}},
    }
    return {"metadata": {"name": f"b{number}", "namespace": "default", "annotations": annotations}, "spec": spec}


async def clear(client: Client, kind: type, names: list[str], namespace: str) -> None:
    slots = asyncio.Semaphore(32)

    async def one(name: str) -> None:
        async with slots:
            await client.patch(kind, name, {"metadata": {"finalizers": None}}, namespace)
            with suppress(ApiError):  # nothing held it any more, so taking the finalizer away was enough
                await client.delete(kind, name, namespace)

    await asyncio.gather(*(one(name) for name in names))


async def measure(options: argparse.Namespace, folder: Path) -> None:
    plugin, driver = driver_command(options.driver, folder)
    flags = [f"--{flag.lstrip('+')}" for flag in options.flags]
    sidecars = sidecar_command(options.provisioner, folder, Path(options.kubeconfig), ["provisioner"]) + flags
    async with Client(from_kubeconfig(Path(options.kubeconfig)), identity="benchmark") as client:
        body = {"metadata": {"name": "backlog"}, "provisioner": driver, "reclaimPolicy": "Retain"}
        if await client.find(StorageClass, "backlog") is None:
            await client.create(StorageClass, body)
        slots = asyncio.Semaphore(32)

        async def make(number: int) -> None:
            async with slots:
                await client.create(PersistentVolumeClaim, claim_body(number, driver), "default")

        await asyncio.gather(*(make(number) for number in range(options.claims)))
        made_at: list[float] = []
        volumes = Informer(client, PersistentVolume)
        volumes.subscribe(lambda old, new: made_at.append(time.monotonic()) if old is None else None)
        following = asyncio.create_task(volumes.run())
        await volumes.wait_synced()
        made_at.clear()
        with process(plugin, folder / "plugin.log"):
            await until(lambda: (folder / "csi.sock").exists())
            started = time.monotonic()
            with process(sidecars, folder / "sidecars.log", POD_NAMESPACE="default") as pid:
                await until(lambda: len(made_at) >= options.claims, options.limit)
                used_s = cpu_s(pid)
        took_s = max(made_at) - min(made_at)
        print(
            f"{options.provisioner}: {(options.claims - 1) / took_s:.0f} volumes/s; the first after "
            f"{min(made_at) - started:.1f} s, all after {max(made_at) - started:.1f} s; {used_s:.1f} s of CPU in all"
        )
        await clear(client, PersistentVolume, [volume.name for volume in volumes], "")
        await clear(client, PersistentVolumeClaim, [f"b{number}" for number in range(options.claims)], "default")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--driver", required=True, help="a hostpathplugin binary")
    parser.add_argument("--provisioner", default="moorage", help="moorage, or a csi-provisioner binary")
    parser.add_argument("--claims", type=int, default=400)
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--flags", nargs="*", default=[], help="more flags for the provisioner, as +worker-threads=200")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="moorage-backlog-"))
    try:
        asyncio.run(measure(options, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
