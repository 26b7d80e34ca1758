"""`moorage apiserver`: run the embedded API server alone.

Owns: its flags and what it prints. Paths and the port come as text: a conversion by Typer would load pydantic, which
would stay in the server's memory.
May not touch: anything but `moorage.apiserver.run`.
"""

from pathlib import Path
from typing import Annotated

import typer

from moorage.apiserver.run import ApiServer, Config
from moorage.cli.app import App
from moorage.process import stop_event

app = App()


@app.command()
def apiserver(
    data_dir: Annotated[
        str, typer.Option(metavar="PATH", help="Where the state, the keys and the kubeconfig are kept.")
    ],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to serve on.")] = "127.0.0.1",
    port: Annotated[str, typer.Option(metavar="NUMBER", help="The port to serve on; 0 takes a free one.")] = "6443",
    insecure_port: Annotated[
        int | None, typer.Option(help="Also serve plain HTTP on this port of the loopback address; 0 takes a free one.")
    ] = None,
    unix_socket: Annotated[Path | None, typer.Option(help="Also serve plain HTTP on this unix socket.")] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write the kubeconfig. Otherwise DATA_DIR/kubeconfig."),
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Accept an address that other machines can reach.")
    ] = False,
    garbage_collection: Annotated[bool, typer.Option(help="Delete what a deleted owner leaves behind.")] = True,
    rbac: Annotated[bool, typer.Option(help="Hold every user but the administrator to Roles and bindings.")] = True,
) -> None:
    """Serve the Kubernetes API on this machine until interrupted.

    Examples:

      moorage apiserver --data-dir /tmp/api --port 0
    """
    config = Config(
        data_dir=Path(data_dir).absolute(),
        host=host,
        port=_port(port),
        insecure_port=insecure_port,
        unix_socket=unix_socket,
        allow_remote=allow_remote,
        kubeconfig=kubeconfig,
        collects_garbage=garbage_collection,
        enforces_rbac=rbac,
        makes_keys_apart=True,
    )
    import uvloop

    uvloop.run(_serve(config))


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise typer.BadParameter("must be a number from 0 to 65535", param_hint="--port")
    return int(text)


async def _serve(config: Config) -> None:
    stop = stop_event()
    server = ApiServer(config)
    await server.start()
    typer.echo(f"Serving {server.url}")
    if server.insecure_url:
        typer.echo(f"Serving {server.insecure_url}")
    typer.echo(f"kubeconfig: {server.kubeconfig}")
    await stop.wait()
    await server.stop()
