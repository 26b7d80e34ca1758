"""`moorage controllers`: the cluster-side controllers, by name or all of them, against any Kubernetes API."""

import asyncio
from typing import Annotated

import typer
import uvloop

from moorage.cli.app import App, Kubeconfig
from moorage.controllers.context import ControllerOptions
from moorage.controllers.run import CONTROLLERS, ControllerSettings, LeaseOptions, chosen, run
from moorage.kube.api.client import Client
from moorage.kube.api.config import load
from moorage.kube.control.probes import address_from
from moorage.log import get_logger
from moorage.process import run_until_signal

log = get_logger(__name__)
app = App()


@app.command()
def controllers(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help=f"Any of {', '.join(CONTROLLERS)}; all by default.")
    ] = None,
    kubeconfig: Kubeconfig = "",
    leader_election: Annotated[
        bool, typer.Option("--leader-election", help="Work only while holding a lease, so that several may run.")
    ] = False,
    leader_election_namespace: Annotated[
        str, typer.Option(metavar="NAME", help="Where the lease is. Otherwise our own namespace.")
    ] = "",
    leader_election_lease_duration: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a lease lasts.")
    ] = 15.0,
    leader_election_renew_deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to try to renew it.")
    ] = 10.0,
    leader_election_retry_period: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time between attempts.")
    ] = 5.0,
    worker_threads: Annotated[int, typer.Option(help="Objects of one kind worked on at a time.", min=1)] = 32,
    kube_api_qps: Annotated[float, typer.Option(help="Requests a second; 0 for no limit.", min=0)] = 0.0,
    kube_api_burst: Annotated[int, typer.Option(help="Requests above that rate at once.", min=0)] = 0,
    pvclaimbinder_sync_period: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Time between checks of claims and volumes that are not at rest.", min=0.1
        ),
    ] = 15.0,
    disable_force_detach_on_timeout: Annotated[
        bool,
        typer.Option(
            "--disable-force-detach-on-timeout",
            help="Wait for ever, not six minutes, for a node that is not ready to unmount a volume.",
        ),
    ] = False,
    http_endpoint: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address for /metrics and /healthz, as :8080 or 127.0.0.1:8080.")
    ] = "",
    metrics_path: Annotated[str, typer.Option(metavar="PATH", help="Path of the metrics.")] = "/metrics",
    enable_distributed_snapshotting: Annotated[
        bool,
        typer.Option(
            "--enable-distributed-snapshotting", help="Leave each snapshot to the sidecars of its volume's node."
        ),
    ] = False,
) -> None:
    """Run the cluster-side controllers until interrupted.

    Examples:

      moorage controllers --leader-election

      moorage controllers binder attachdetach --kubeconfig admin.conf
    """
    chosen(names or [])  # refuse a wrong name before the first request
    options = ControllerOptions(
        binder_resync_s=pvclaimbinder_sync_period,
        workers=worker_threads,
        force_detach_on_timeout=not disable_force_detach_on_timeout,
        distributed_snapshotting=enable_distributed_snapshotting,
    )
    lease = LeaseOptions(
        leader_election,
        leader_election_namespace,
        lease_s=leader_election_lease_duration,
        renew_s=leader_election_renew_deadline,
        retry_s=leader_election_retry_period,
    )
    if http_endpoint:
        address_from(http_endpoint)
    settings = ControllerSettings(tuple(names or ()), options, lease, http_endpoint, metrics_path)
    uvloop.run(_until_stopped(kubeconfig, kube_api_qps, kube_api_burst, settings))


async def _until_stopped(kubeconfig: str, qps: float, burst: int, settings: ControllerSettings) -> None:
    async with Client(load(kubeconfig or None), qps=qps, burst=burst, identity="moorage-controllers") as client:
        try:
            await run_until_signal(run(client, settings))
        except asyncio.CancelledError:
            log.info("controllers stopped", reason="signal")
