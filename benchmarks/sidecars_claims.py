"""Claims per second from creation to Bound, and back: API server, binder, driver and sidecars as processes.

Run: python benchmarks/sidecars_claims.py [--claims 1000] [--driver moorage|PATH] [--provisioner moorage|PATH]
PATH of a driver is a hostpathplugin binary, PATH of a provisioner an official csi-provisioner, for comparison.
Prints claims/s, p99, CPU time per claim of each process (which other work on the machine disturbs least), API requests
per claim (counted by a proxy in front of the API server), and memory. Moorage's processes reach the API server as
those of `moorage up` do, through its unix socket; `--tls` makes them use TCP and TLS instead. With `--kubeconfig` a
cluster that is there already is used, with its own binder: a real control plane, for a comparison side by side.
"""

import argparse
import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web
from figures import record

from moorage.kube.api.client import Client
from moorage.kube.api.config import ApiConfig, from_kubeconfig
from moorage.kube.cache.informer import Informer
from moorage.kube.errors import AlreadyExists
from moorage.kube.objects import CSINode, Node, PersistentVolume, PersistentVolumeClaim, StorageClass

MOORAGE = [str(Path(sys.executable).parent / "moorage"), "--log-level", "warning"]


@dataclass
class Run:
    """What one run measured."""

    made_s: float = 0.0
    bound_s: float = 0.0
    p99_s: float = 0.0
    deleted_s: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    idle_mib: float = 0.0
    after_mib: float = 0.0
    idle_cpu: float = 0.0
    pids: dict[str, int] = field(default_factory=dict)
    bound_cpu: dict[str, float] = field(default_factory=dict)
    deleted_cpu: dict[str, float] = field(default_factory=dict)

    def used(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self.pids.items()}


@contextmanager
def process(command: list[str], log: Path, **environment: str) -> Iterator[int]:
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | environment)
        try:
            yield child.pid
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def rss_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def until(what, timeout_s: float = 60.0):
    async with asyncio.timeout(timeout_s):
        while not what():
            await asyncio.sleep(0.02)


async def counting_proxy(
    socket: str, counts: Counter[str], folder: Path, config: ApiConfig
) -> tuple[web.AppRunner, Path]:
    """A proxy that counts requests by verb and kind, and a kubeconfig that leads through it."""
    session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket, limit=0), auto_decompress=False)
    assert config.token is not None
    token = await config.token()

    async def forward(request: web.Request) -> web.StreamResponse:
        kind = [part for part in request.path.split("/") if part]
        watch = "watch" if "watch" in request.query else request.method
        plural = next(
            (p for p in kind if p.endswith("s") and p not in ("apis", "namespaces")), kind[-1] if kind else ""
        )
        counts[f"{watch} {plural}"] += 1
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        headers["Authorization"] = f"Bearer {token}"  # client-go sends none over plain HTTP
        url = f"http://localhost{request.path_qs}"
        body = await request.read()
        async with session.request(
            request.method, url, data=body, headers=headers, timeout=aiohttp.ClientTimeout(total=None)
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in ("transfer-encoding", "content-length")}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{tail:.*}", forward)

    async def close(_: web.Application) -> None:
        await session.close()

    app.on_cleanup.append(close)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    return runner, write_kubeconfig(folder / "proxied.kubeconfig", f"http://127.0.0.1:{port}", token)


def write_kubeconfig(path: Path, server: str, token: str) -> Path:
    path.write_text(
        f"apiVersion: v1\nkind: Config\ncurrent-context: x\nclusters: [{{name: x, cluster: {{server: '{server}'}}}}]\n"
        f"users: [{{name: x, user: {{token: '{token}'}}}}]\ncontexts: [{{name: x, context: {{cluster: x, user: x}}}}]\n"
    )
    return path


def per_claim(before: dict[str, float], after: dict[str, float], claims: int) -> dict[str, float]:
    """CPU milliseconds per claim, by process."""
    return {name: (seconds - before[name]) / claims * 1000 for name, seconds in after.items()}


def spelled(cpu: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {used:.1f}" for name, used in cpu.items())
    return f"{sum(cpu.values()):.1f} ms of CPU per claim ({parts})"


def driver_command(kind: str, folder: Path) -> tuple[list[str], str]:
    endpoint = f"unix://{folder}/csi.sock"
    if kind == "moorage":
        pool = folder / "pool"
        pool.mkdir()
        return [
            *MOORAGE,
            "plugin",
            "--endpoint",
            endpoint,
            "--node-id",
            "n1",
            "--pool",
            str(pool),
            "--overcommit",
            "1000",
        ], "csi.moorage.dev"
    state = folder / "state"
    state.mkdir()
    command = [
        kind,
        f"--endpoint={endpoint}",
        "--nodeid=n1",
        "--drivername=hostpath.csi.k8s.io",
        f"--statedir={state}",
        "--enable-topology=false",
    ]
    return command, "hostpath.csi.k8s.io"


def sidecar_command(kind: str, folder: Path, kubeconfig: Path, roles: list[str]) -> list[str]:
    address = str(folder / "csi.sock")
    if kind == "moorage":
        return [*MOORAGE, "sidecars", *roles, f"--csi-address={address}", f"--kubeconfig={kubeconfig}"]
    limits = ["--kube-api-qps=1000", "--kube-api-burst=2000"]
    return [kind, f"--csi-address={address}", f"--kubeconfig={kubeconfig}", *limits, "--timeout=30s"]


async def measure_there(options: argparse.Namespace, folder: Path) -> Run:
    """Against a cluster that exists: only the driver and the sidecars are ours to start."""
    run = Run()
    kubeconfig = Path(options.kubeconfig)
    plugin, name = driver_command(options.driver, folder)
    sidecars = sidecar_command(options.provisioner, folder, kubeconfig, options.roles) + options.flags
    with process(plugin, folder / "plugin.log") as plugin_pid:
        await until(lambda: (folder / "csi.sock").exists())
        with process(sidecars, folder / "sidecars.log", NODE_NAME="n1", POD_NAMESPACE="default") as pid:
            others = (other.split("=") for other in options.also)
            run.pids = {"driver": plugin_pid, "sidecars": pid} | {name: int(found) for name, found in others}
            async with Client(from_kubeconfig(kubeconfig), identity="benchmark") as client:
                await drive(options, client, name, pid, run)
    return run


async def measure(options: argparse.Namespace, folder: Path) -> Run:
    run = Run()
    (folder / "api").mkdir()
    socket = folder / "api.sock"
    api = [*MOORAGE, "apiserver", "--data-dir", str(folder / "api"), "--port", "0", "--unix-socket", str(socket)]
    plugin, name = driver_command(options.driver, folder)
    with process(api, folder / "api.log") as api_pid, process(plugin, folder / "plugin.log") as plugin_pid:
        await until(lambda: socket.exists() and (folder / "api/kubeconfig").exists() and (folder / "csi.sock").exists())
        base = from_kubeconfig(folder / "api/kubeconfig")
        config = ApiConfig("http://localhost", None, base.token, unix_socket=str(socket))
        kubeconfig, runner = folder / "api/kubeconfig", None
        if not options.tls and options.provisioner == "moorage":
            assert config.token is not None
            kubeconfig = write_kubeconfig(folder / "unix.kubeconfig", f"unix://{socket}", await config.token())
        binder = [*MOORAGE, "controllers", "binder", "protection", "--kubeconfig", str(kubeconfig)]
        if options.count:
            runner, kubeconfig = await counting_proxy(str(socket), run.requests, folder, config)
        sidecars = sidecar_command(options.provisioner, folder, kubeconfig, options.roles) + options.flags
        with (
            process(binder, folder / "binder.log") as binder_pid,
            process(sidecars, folder / "sidecars.log", NODE_NAME="n1") as pid,
        ):
            run.pids = {"api server": api_pid, "driver": plugin_pid, "binder": binder_pid, "sidecars": pid}
            async with Client(config, identity="benchmark") as client:
                await drive(options, client, name, pid, run)
        if runner is not None:
            await runner.cleanup()
    return run


async def preload(client: Client, driver: str, count: int) -> None:
    """Volumes of the driver without a claim: what a cluster with many volumes costs at rest."""
    slots = asyncio.Semaphore(32)

    async def one(number: int) -> None:
        spec = {
            "capacity": {"storage": "8Mi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "old",
            "persistentVolumeReclaimPolicy": "Retain",
            "csi": {"driver": driver, "volumeHandle": f"old-{number}", "volumeAttributes": {"some": "attribute"}},
        }
        async with slots:
            await client.create(PersistentVolume, {"metadata": {"name": f"old-{number}"}, "spec": spec})

    await asyncio.gather(*(one(number) for number in range(count)))


async def set_up(client: Client, driver: str) -> None:
    """The class, and the one node with the driver on it."""
    body = {
        "metadata": {"name": "fast"},
        "provisioner": driver,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
    }
    with suppress(AlreadyExists):  # from an earlier run on the same cluster
        await client.create(StorageClass, body)
        node = await client.create(Node, {"metadata": {"name": "n1", "labels": {"topology.moorage.dev/node": "n1"}}})
        owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": node.uid}
        keys = ["topology.moorage.dev/node"] if driver == "csi.moorage.dev" else []
        spec = {"drivers": [{"name": driver, "nodeID": "n1", "topologyKeys": keys}]}
        await client.create(CSINode, {"metadata": {"name": "n1", "ownerReferences": [owner]}, "spec": spec})


async def make_claim(client: Client, name: str) -> None:
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "8Mi"}},
    }
    body = {"metadata": {"name": name, "namespace": "default"}, "spec": spec}
    await client.create(PersistentVolumeClaim, body, "default")


async def drive(options: argparse.Namespace, client: Client, driver: str, pid: int, run: Run) -> None:
    await set_up(client, driver)
    await preload(client, driver, options.preload)
    claims, volumes = Informer(client, PersistentVolumeClaim), Informer(client, PersistentVolume)
    bound_at: dict[str, float] = {}

    def on_claim(old, new) -> None:
        if new is not None and new.status.phase == "Bound":
            bound_at.setdefault(new.name, time.monotonic())

    made_at: list[float] = []

    def on_volume(old, new) -> None:
        if old is None:
            made_at.append(time.monotonic())

    claims.subscribe(on_claim)
    volumes.subscribe(on_volume)
    following = [asyncio.create_task(informer.run()) for informer in (claims, volumes)]
    await asyncio.sleep(4)  # let the sidecars start and come to rest
    run.idle_mib, before = rss_mib(pid), cpu_s(pid)
    await asyncio.sleep(options.idle)
    run.idle_cpu = (cpu_s(pid) - before) / max(options.idle, 0.001)
    run.requests.clear()
    created_at: dict[str, float] = {}
    slots = asyncio.Semaphore(32)

    async def make(name: str) -> None:
        async with slots:
            created_at[name] = time.monotonic()
            await make_claim(client, name)

    used = run.used()
    start = time.monotonic()
    await asyncio.gather(*(make(f"c{i}") for i in range(options.claims)))
    print(f"  created in {time.monotonic() - start:.1f} s", flush=True)
    await until(lambda: len(bound_at) >= options.claims, options.limit)
    run.made_s = max(made_at) - start
    run.bound_s = max(bound_at.values()) - start
    run.bound_cpu = per_claim(used, run.used(), options.claims)
    delays = sorted(bound_at[name] - created_at[name] for name in bound_at)
    run.p99_s = delays[int(len(delays) * 0.99) - 1]
    await asyncio.sleep(2)
    run.after_mib = rss_mib(pid)
    if options.count:
        print("  requests for binding:", dict(run.requests.most_common(12)))
        print(f"  requests per claim: {sum(run.requests.values()) / options.claims:.2f}")
    run.requests.clear()
    used = run.used()
    start = time.monotonic()

    async def drop(name: str) -> None:
        async with slots:
            await client.delete(PersistentVolumeClaim, name, "default")

    await asyncio.gather(*(drop(f"c{i}") for i in range(options.claims)))
    await until(lambda: len(volumes) == options.preload and len(claims) == 0, options.limit)
    run.deleted_s = time.monotonic() - start
    run.deleted_cpu = per_claim(used, run.used(), options.claims)
    if options.count:
        print("  requests for deleting:", dict(run.requests.most_common(8)))
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--claims", type=int, default=1000)
    parser.add_argument("--driver", default="moorage")
    parser.add_argument("--provisioner", default="moorage")
    parser.add_argument("--roles", nargs="*", default=[])
    parser.add_argument("--idle", type=float, default=10.0)
    parser.add_argument("--preload", type=int, default=0, help="volumes that exist before: shows the growth of cost")
    parser.add_argument("--limit", type=float, default=300.0, help="give up after this many seconds")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--tls", action="store_true", help="let binder and sidecars use TCP and TLS")
    parser.add_argument("--kubeconfig", default="", help="use this cluster instead of the embedded API server")
    parser.add_argument("--also", nargs="*", default=[], help="processes of that cluster to measure too, as etcd=PID")
    parser.add_argument("--flags", nargs="*", default=[], help="more flags for the sidecars, as +worker-threads=200")
    options = parser.parse_args()
    options.flags = [f"--{flag.lstrip('+')}" for flag in options.flags]
    folder = Path(tempfile.mkdtemp(prefix="moorage-sidecars-bench-"))
    try:
        run = asyncio.run((measure_there if options.kubeconfig else measure)(options, folder))
        bound, deleted = options.claims / run.bound_s, options.claims / run.deleted_s
        print(f"{options.claims} claims, driver {options.driver}, provisioner {options.provisioner}")
        record("1,000 claims bound per second", f"{bound:.0f}/s", bound >= 100)
        record("1,000 claims to Bound: p99", f"{run.p99_s:.1f} s", run.p99_s <= 10)
        record("1,000 claims deleted per second", f"{deleted:.0f}/s", deleted >= 100)
        record("memory of the sidecars, idle", f"{run.idle_mib:.0f} MiB", run.idle_mib <= 80)
        record("memory of the sidecars after 1,000 claims", f"{run.after_mib:.0f} MiB", run.after_mib <= 130)
        print(f"  bound:   {bound:.0f} claims/s (target 100, ratio {bound / 100:.2f}), p99 {run.p99_s:.1f} s")
        print(f"  made:    {options.claims / run.made_s:.0f} volumes/s")
        print(f"           {spelled(run.bound_cpu)}")
        print(f"  deleted: {deleted:.0f} claims/s (target 100, ratio {deleted / 100:.2f})")
        print(f"           {spelled(run.deleted_cpu)}")
        print(f"  memory:  {run.idle_mib:.0f} MiB idle (limit 80), {run.after_mib:.0f} MiB after (limit 130)")
        print(f"  idle CPU: {run.idle_cpu * 100:.2f} % of a core (limit 0.5)")
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-1500:]}")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
