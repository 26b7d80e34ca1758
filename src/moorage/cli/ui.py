"""`moorage ui`: the live page for volumes."""

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer

from moorage.cli import show
from moorage.cli.app import App, Kubeconfig, Port
from moorage.kube.api import config
from moorage.kube.api.client import TRIES_FOR_A_PERSON, Client
from moorage.process import run_until_signal
from moorage.ui.run import PREFERRED_PORT, UiSettings, default_token_file, serve

app = App()


@app.command()
def ui(
    address: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to serve on.")] = "127.0.0.1",
    port: Port = PREFERRED_PORT,
    kubeconfig: Kubeconfig = "",
    logs: Annotated[
        Path | None,
        typer.Option(help="Directory of the components' logs. Otherwise `logs` beside the kubeconfig."),
    ] = None,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Offer snapshot, clone, restore, grow, recover and delete.")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate (PEM), for addresses beyond loopback.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key of the certificate.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without TLS: anyone on the way can read along.")
    ] = False,
    listen_fd: Annotated[
        int, typer.Option(hidden=True, help="A socket that listens already, inherited from `moorage up`.")
    ] = -1,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the key to the page; made if it is missing.")
    ] = None,
) -> None:
    """Serve a web page that shows where every volume is, what is stuck and why. It only reads the cluster.

    Examples:

      moorage ui

      moorage ui --kubeconfig /tmp/moor/kubeconfig --allow-actions
    """
    beside = Path(kubeconfig).parent / "logs" if kubeconfig else None
    settings = UiSettings(
        address=address,
        port=port,
        token_file=token_file or default_token_file(),
        logs=logs or (beside if beside is not None and beside.is_dir() else None),
        allow_actions=allow_actions,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        listen_fd=listen_fd,
    ).checked()
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(run_until_signal(_serve(settings, kubeconfig)))


async def _serve(settings: UiSettings, kubeconfig: str) -> None:
    async with Client(config.load(kubeconfig or None), identity="moorage-ui", tries=TRIES_FOR_A_PERSON) as client:
        await serve(client, settings, _print_link)


def _print_link(link: str) -> None:
    show.say("The page is ready. Open this link; it carries the key, so do not pass it on:")
    show.command(f"  {link}")
    show.say("Ctrl-C stops the page.")
