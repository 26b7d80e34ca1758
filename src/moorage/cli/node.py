"""`moorage node`: run the node agent.

Owns: flags and signals. The agent is `moorage.node.run`.
Paths come as text: a conversion by Typer would load pydantic, a sixth of what a restart costs with 500 volumes.
"""

import asyncio
import gc
import socket
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from moorage.cli.app import App, Kubeconfig, Port
from moorage.errors import UsageError
from moorage.kube.api import config as kube_config
from moorage.node.config import DRAIN, KEEP, REMOVE, AgentConfig
from moorage.node.run import run
from moorage.process import stop_event

app = App()

# An agent makes many small objects and next to no cycles: Python's own numbers have it look for them all the time.
_YOUNG, _OLDER, _OLD = 20_000, 20, 50


@app.command()
def node(
    node_name: Annotated[
        str, typer.Option(metavar="NAME", help="The name of this node. Otherwise this machine's name.")
    ] = "",
    root_dir: Annotated[
        str, typer.Option(metavar="PATH", help="Where pods, volumes and plugin sockets live.")
    ] = "/var/lib/kubelet",
    kubeconfig: Kubeconfig = "",
    context: Annotated[str, typer.Option(metavar="NAME", help="A context of the kubeconfig.")] = "",
    address: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to serve on.")] = "127.0.0.1",
    port: Port = 0,
    client_ca_file: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Whose client certificates may use it. Otherwise the API server's authority."
        ),
    ] = "",
    node_labels: Annotated[
        str, typer.Option(metavar="LABELS", help="More labels for the node, as key=value,key=value.")
    ] = "",
    hide: Annotated[list[Path] | None, typer.Option(help="Directories that no container may see.")] = None,
    on_stop: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="At a stop: keep (pods go on), drain (pods end, volumes are unmounted) or remove (the node too).",
        ),
    ] = KEEP,
    drain_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long a drain may take.")] = 60.0,
    sync_frequency: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time between republishing, where a driver asks for it.")
    ] = 60.0,
) -> None:
    """Run the node agent. It serves logs, exec and metrics on its port; 0 is the port of the last run, or a free one.

    Examples:

      moorage node --kubeconfig node.kubeconfig --root-dir /var/lib/kubelet
    """
    if on_stop not in (KEEP, DRAIN, REMOVE):
        raise UsageError(f"--on-stop must be {KEEP}, {DRAIN} or {REMOVE}")
    settings = AgentConfig(
        node_name=node_name or socket.gethostname().lower(),
        root=Path(root_dir),
        api=kube_config.load(kubeconfig or None, context or None),
        address=address,
        port=port,
        client_ca=Path(client_ca_file) if client_ca_file else None,
        labels=_labels(node_labels),
        hide=tuple(str(path) for path in hide or ()),
        on_stop=on_stop,
        drain_timeout_s=drain_timeout,
        sync_s=sync_frequency,
    )
    gc.freeze()  # all that was imported stays anyway
    gc.set_threshold(_YOUNG, _OLDER, _OLD)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_signal(settings))


async def _until_signal(settings: AgentConfig) -> None:
    stop = stop_event()
    await run(settings, stop)


def _labels(text: str) -> dict[str, str]:
    labels = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        key, found, value = part.partition("=")
        if not found or not key:
            raise UsageError(f"--node-labels: {part!r} is not key=value")
        labels[key] = value
    return labels
