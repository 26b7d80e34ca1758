"""`moorage sidecars [ROLE…]`: the sidecars of a CSI driver, in one process, with the official flags."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer

from moorage.log import get_logger
from moorage.sidecars.flags import help_text, parse
from moorage.sidecars.roles import Role, role_named
from moorage.sidecars.run import Wanted, check, run
from moorage.sidecars.settings import Surroundings

log = get_logger(__name__)
app = typer.Typer(rich_markup_mode=None)

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
    wanted = Wanted(settings, _surroundings(), frozenset(role_named(role) for role in roles))
    check(wanted)
    asyncio.run(_until_stopped(wanted))


def _surroundings() -> Surroundings:
    account = _ACCOUNT_NAMESPACE.read_text().strip() if _ACCOUNT_NAMESPACE.exists() else ""
    return Surroundings.of(os.environ, socket.gethostname(), account)


async def _until_stopped(wanted: Wanted) -> None:
    working = asyncio.create_task(run(wanted), name="sidecars")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        log.info("sidecars stopped", reason="signal")
