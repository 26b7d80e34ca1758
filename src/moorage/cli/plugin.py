"""`moorage plugin`: run the CSI plugin in the foreground.

Owns: the flags. What they mean is in `moorage.plugin.settings` and docs/reference/csi-support.md.
"""

import logging
import os
import sys
from typing import Annotated

import typer

from moorage.cli.app import App
from moorage.csi.sizes import size_from
from moorage.errors import InvalidRequest, UsageError
from moorage.log import JsonFormat
from moorage.plugin.settings import DRIVER_NAME, PluginSettings, duration_s_from, fraction_from, pools_from

app = App()


@app.command()
def run(
    endpoint: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="The socket to serve, as unix:///path/csi.sock.", envvar="CSI_ENDPOINT"),
    ],
    node_id: Annotated[str, typer.Option(metavar="NAME", help="This node's id. Otherwise this machine's name.")] = "",
    pool: Annotated[list[str] | None, typer.Option(metavar="[NAME=]PATH", help="Directory of a pool.")] = None,
    scope: Annotated[
        str, typer.Option(metavar="SCOPE", help="node: the pool is this node's; shared: all nodes mount it.")
    ] = "node",
    services: Annotated[str, typer.Option(metavar="NAMES", help="controller,node or one of them.")] = "controller,node",
    driver_name: Annotated[str, typer.Option(metavar="NAME", help="Name of the driver.")] = DRIVER_NAME,
    reserve: Annotated[str, typer.Option(metavar="SHARE", help="Share of a pool that is kept free.")] = "5%",
    overcommit: Annotated[float, typer.Option(help="How many times the pool's size its volumes may have.")] = 1.0,
    trash_retention: Annotated[
        str, typer.Option(metavar="DURATION", help="How long deleted volumes can be brought back, if there is room.")
    ] = "24h",
    max_volumes_per_node: Annotated[int, typer.Option(help="How many volumes a node may have; 0 is no limit.")] = 0,
    freeze_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Longest freeze of a volume.")] = 10.0,
    stop_grace: Annotated[
        str, typer.Option(metavar="DURATION", help="How long running operations may take at a stop.")
    ] = "60s",
    csi_version: Annotated[
        str, typer.Option(metavar="VERSION", help="1.13 also announces alpha capabilities.")
    ] = "1.12",
    kubelet_dir: Annotated[
        str, typer.Option(metavar="PATH", help="Refuse mount paths outside of this directory. Otherwise any.")
    ] = "",
    inline_attributes: Annotated[
        str,
        typer.Option(metavar="NAMES", help="What pods may say of inline volumes: size, and keys of a StorageClass."),
    ] = "size,fsType",
    inline_max_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest inline volume. 0: none are made.")
    ] = "10Gi",
    http_endpoint: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address for /metrics and /healthz, as :8080 or 127.0.0.1:8080.")
    ] = "",
) -> None:
    """Run the CSI plugin until SIGTERM. Operations in progress are finished first.

    Examples:

      moorage plugin --endpoint unix:///run/csi.sock --pool /var/lib/moorage
    """
    settings = PluginSettings(
        endpoint=endpoint,
        node_id=node_id or os.uname().nodename,
        pools=pools_from(pool or []),
        scope=scope,
        services=_words(services),
        driver_name=driver_name,
        reserve_fraction=_fraction("--reserve", reserve),
        overcommit=overcommit,
        trash_retention_s=_duration("--trash-retention", trash_retention),
        max_volumes_per_node=max_volumes_per_node,
        largest_freeze_s=freeze_limit,
        stop_grace_s=_duration("--stop-grace", stop_grace),
        kubelet_dir=kubelet_dir,
        inline_attributes=_words(inline_attributes),
        inline_max_bytes=0 if inline_max_size == "0" else _bytes("--inline-max-size", inline_max_size),
        http_endpoint=http_endpoint,
        csi_version=csi_version,
    ).checked()
    become_plugin(settings)


def become_plugin(settings: PluginSettings) -> None:
    """Replace this program by the plugin's own, which has no command line in its memory."""
    root = logging.getLogger("moorage")
    handlers = logging.getLogger().handlers
    style = "json" if handlers and isinstance(handlers[0].formatter, JsonFormat) else "text"
    level = logging.getLevelName(root.getEffectiveLevel()).lower()
    argv = [sys.executable, "-m", "moorage.plugin", level, style, settings.as_json()]
    # Many short-lived threads would otherwise leave the allocator with an arena each.
    environment = {"MALLOC_ARENA_MAX": "2", **os.environ}
    os.execve(sys.executable, argv, environment)


def _words(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(",") if word.strip())


def _bytes(flag: str, text: str) -> int:
    try:
        return size_from(flag, text)
    except InvalidRequest as error:
        raise UsageError(str(error)) from None


def _fraction(flag: str, text: str) -> float:
    try:
        return fraction_from(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def _duration(flag: str, text: str) -> float:
    try:
        return duration_s_from(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
