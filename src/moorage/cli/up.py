"""`moorage up`: the whole stack on this machine, in the foreground."""

import asyncio
import contextlib
import shlex
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from moorage import log
from moorage.cli import show
from moorage.cli.app import App, Port, Verbose
from moorage.cli.sizes import bytes_from
from moorage.cluster.run import Cluster, StartReport
from moorage.cluster.settings import UpSettings
from moorage.kube.cache.informers import Informers
from moorage.kube.objects import PersistentVolumeClaim, Pod
from moorage.process import StopEvent, cancel_all, run_unless, stop_event

app = App()

TO_TRY = (
    "kubectl get nodes,storageclasses",
    "kubectl apply -f examples/claim-and-pod.yaml && kubectl get pods -w",
)


@app.command()
def up(
    data_dir: Annotated[Path, typer.Option(help="Where everything is kept. A later start continues with it.")] = Path(
        "/var/lib/moorage"
    ),
    nodes: Annotated[int, typer.Option(help="How many nodes. Several share the pool and attach volumes.")] = 1,
    pool: Annotated[
        Path | None, typer.Option(help="Directory for volumes. Otherwise below the data directory.")
    ] = None,
    pool_size: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Make an XFS pool of this size in a file, such as 20Gi, if the filesystem cannot reflink.",
        ),
    ] = "",
    driver: Annotated[
        str, typer.Option(help="Another CSI driver: unix:///path/csi.sock, or a command with {endpoint}.")
    ] = "",
    port: Port = 0,
    page: Annotated[bool, typer.Option(help="Serve the live page for volumes (moorage ui).")] = True,
    page_port: Annotated[
        int, typer.Option(metavar="PORT", help="Port of the live page; 0 takes 8465 or a free one.")
    ] = 0,
    verbose: Verbose = False,
) -> None:
    """Run the whole stack on this machine: API server, controllers, scheduler, sidecars, node agents and plugin.

    It stays in the foreground. Ctrl-C stops everything and keeps the data. Ctrl-C again kills the pods.

    Examples:

      moorage up --data-dir /tmp/moor

      moorage up --nodes 3

      moorage up --driver unix:///run/my-driver/csi.sock
    """
    settings = UpSettings(
        data_dir=data_dir.absolute(),
        nodes=nodes,
        pool=pool.absolute() if pool else None,
        pool_size_bytes=bytes_from("--pool-size", pool_size),
        driver=driver,
        port=port,
        page_port=page_port if page else None,
    ).checked()
    log.configure("info" if verbose else "warning")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_up(settings))


async def _up(settings: UpSettings) -> None:
    stop = stop_event()
    cluster = Cluster(settings)
    try:
        starting = asyncio.create_task(cluster.start(), name="start")
        if await run_unless(stop, asyncio.wait([starting])):
            _print_report(settings, await starting)
            await _status_until(stop, cluster)
        else:
            await cancel_all([starting])
    finally:
        if cluster.owns_data:
            show.say("Stopping: pods end, volumes are unmounted. Ctrl-C again kills the pods …")
            hurrying = asyncio.create_task(_hurry(stop, cluster), name="hurry")
            await cluster.stop()
            hurrying.cancel()
            show.say(f"Stopped. Everything is kept in {settings.data_dir}; the same command carries on.")


async def _hurry(stop: StopEvent, cluster: Cluster) -> None:
    await stop.hurry.wait()
    show.say("Killing the pods. Ctrl-C again ends this at once; pods and mounts then wait for the next start …")
    cluster.supervisor.hurry()


def _print_report(settings: UpSettings, report: StartReport) -> None:
    count = f"{len(report.nodes)} node{'' if len(report.nodes) == 1 else 's'}"
    show.say(("bold", "Moorage is up"), f" after {report.seconds:.1f} s: {count}, driver {report.driver}")
    show.say(f"  API server   {report.url}")
    show.say(f"  nodes        {', '.join(report.nodes)}")
    if report.pool is not None:
        how = "instant snapshots and clones (reflink)" if report.pool.can_reflink else "full copies for snapshots"
        show.say(f"  pool         {report.pool.path}: {how}")
        if report.pool.advice:
            show.paragraph(report.pool.advice, style="yellow", indent=" " * 15)
    show.say(f"  logs         {settings.layout.logs}")
    if report.page:
        show.say(f"  live page    {report.page}")
    show.heading("Try it:")
    show.say(f"  export KUBECONFIG={shlex.quote(str(report.kubeconfig))}")
    for line in TO_TRY:
        show.say(f"  {line}")
    show.heading("Ctrl-C stops everything; the data stays.")
    show.say()


async def _status_until(stop: asyncio.Event, cluster: Cluster) -> None:
    """Keep a status line current if stdout is a terminal."""
    if not show.is_terminal():
        await stop.wait()
        return
    async with cluster.client() as client, Informers(client) as informers:
        pods, claims = informers.of(Pod), informers.of(PersistentVolumeClaim)
        while not stop.is_set():
            running = sum(pod.status.phase == "Running" for pod in pods)
            bound = sum(claim.status.phase == "Bound" for claim in claims)
            parts = cluster.supervisor.parts.values()
            ill = [f"{part.name} {part.state} ({part.last_failure})" for part in parts if part.state != "running"]
            line = f"pods {running}/{len(pods)} running · claims {bound}/{len(claims)} bound · " + (
                "; ".join(ill) if ill else f"{len(parts)} parts running"
            )
            show.status(line)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 1.0)
    show.status("")
