"""The command line that every driver has, and the process behind it.

Owns: flags and signals.
Start reading at: `main`.
"""

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from moorage import log
from moorage.errors import MoorageError, UsageError
from moorage.printable import one_line
from moorage.process import stop_event
from moorage.sdk.driver import Driver, Environment
from moorage.sdk.process import serve

_SERVICES = ("controller", "node")


def main(driver: Driver, argv: Sequence[str] | None = None) -> None:
    """Run a driver until SIGTERM or SIGINT. Exits with 1 on failure, 2 on a wrong command line."""
    given = _parser(driver).parse_args(argv)
    log.configure(given.log_level, given.log_format)
    try:
        environment = Environment(
            given.node_id, Path(given.state_dir).absolute(), _services(given.services), _options(given.option)
        )
        asyncio.run(_run(driver, given, environment))
    except UsageError as error:
        sys.exit(_fail(error, 2))
    except (MoorageError, OSError) as error:
        sys.exit(_fail(error, 1))


async def _run(driver: Driver, given: argparse.Namespace, environment: Environment) -> None:
    stop = stop_event()
    async with serve(driver, given.endpoint, environment, http_endpoint=given.http_endpoint):
        await stop.wait()


def _parser(driver: Driver) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(type(driver).__doc__ or f"The CSI driver {driver.name}.").strip())
    add = parser.add_argument
    add("--endpoint", default=os.environ.get("CSI_ENDPOINT", ""), help="socket to serve, unix:///path (CSI_ENDPOINT)")
    add("--node-id", default=os.environ.get("NODE_ID", socket.gethostname()), help="this node's name (NODE_ID)")
    add("--state-dir", default=f"/var/lib/{driver.name}", help="where records are kept (%(default)s)")
    add("--services", default="controller,node", help="which services to serve (%(default)s)")
    add("--http-endpoint", default="", metavar="HOST:PORT", help="serve /metrics and /healthz there")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of this driver; repeatable")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add("--log-format", default="text", choices=["text", "json"])
    add("--version", action="version", version=f"{driver.name} {driver.version}")
    return parser


def _services(text: str) -> frozenset[str]:
    found = frozenset(word.strip() for word in text.split(",") if word.strip())
    if not found or not found <= set(_SERVICES):
        raise UsageError(f"--services {text}: choose from {', '.join(_SERVICES)}")
    return found


def _options(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--option {text}: must be KEY=VALUE")
        found[key] = value
    return found


def _fail(error: BaseException, code: int) -> int:
    print(one_line(f"Error: {error}"), file=sys.stderr)  # noqa: T201  # the command line of other people's programs
    return code
