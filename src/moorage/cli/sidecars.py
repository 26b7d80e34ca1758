"""`moorage sidecars [ROLE…]`: the sidecars of a CSI driver, in one process, with the official flags."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from moorage import __version__
from moorage.cli import show
from moorage.cli.app import App
from moorage.kube.api.client import Client
from moorage.kube.api.config import load
from moorage.log import get_logger
from moorage.process import run_until_signal
from moorage.sidecars.driver import DriverConnection
from moorage.sidecars.flags import help_text, parse
from moorage.sidecars.lost_node import carry_out, plan
from moorage.sidecars.roles import Role, role_named
from moorage.sidecars.run import WantedRoles, check, run
from moorage.sidecars.settings import SidecarEnvironment, SidecarSettings

log = get_logger(__name__)
app = App()

_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_HELP = (
    "Run the sidecars that a CSI driver needs, in one process, until interrupted.\n\n"
    f"Roles: {', '.join(Role)}, or the names of the official sidecars; by default every role that the driver's "
    "capabilities call for.\n\nFlags, written as --flag value, --flag=value or as Go programs take them:\n\n\b\n"
)


@app.command(
    help=_HELP + help_text(),
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def sidecars(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ROLE]... [FLAG]...", show_default=False)] = None,
) -> None:
    settings, roles = parse(arguments or [])
    if settings.version:
        show.say(f"moorage sidecars {__version__}")
        return
    if settings.mode == "kubelet-registration-probe":
        return
    if settings.take_over_node:
        asyncio.run(_take_over(settings, _surroundings()))
        return
    wanted = WantedRoles(settings, _surroundings(), frozenset(role_named(role) for role in roles))
    check(wanted)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_stopped(wanted))


def _surroundings() -> SidecarEnvironment:
    account = _ACCOUNT_NAMESPACE.read_text().strip() if _ACCOUNT_NAMESPACE.exists() else ""
    return SidecarEnvironment.of(os.environ, socket.gethostname(), os.getpid(), account)


async def _take_over(settings: SidecarSettings, around: SidecarEnvironment) -> None:
    node, driver_name = settings.take_over_node, settings.driver_name
    if not driver_name:
        driver = DriverConnection(settings.csi_address)
        try:
            await driver.wait_for_name()
        finally:
            await driver.close()
        driver_name = driver.name
    async with Client(load(settings.kubeconfig or None), identity="moorage-take-over") as client:
        steps = await plan(client, driver_name, node, settings.leader_election_namespace or around.namespace)
        show.say(f"WARNING: this gives up everything that only node {node} holds for driver {driver_name}.")
        show.say("If the node comes back, volumes forgotten here stay on its disk and must be removed by hand.")
        for step in steps:
            name = f"{step.namespace}/{step.name}" if step.namespace else step.name
            show.say(f"  {step.what}: {step.kind.resource.kind} {name}: {step.why}")
            if settings.yes:
                await carry_out(client, step)
        show.say("Done." if settings.yes else "Nothing was changed; add --yes to do it.")


async def _until_stopped(wanted: WantedRoles) -> None:
    try:
        await run_until_signal(run(wanted))
    except asyncio.CancelledError:
        log.info("sidecars stopped", reason="signal")
