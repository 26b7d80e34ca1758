"""The command line that every driver has, and the process behind it.

Owns: flags, signals, the order of starting and stopping.
Start reading at: `serve`, `main`.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from moorage import log
from moorage.csi import csi_pb2_grpc
from moorage.csi.http_endpoint import HttpEndpoint
from moorage.csi.inflight import InFlight
from moorage.csi.metrics import CallMetrics
from moorage.csi.server import CsiServer
from moorage.errors import MoorageError, UsageError
from moorage.printable import one_line
from moorage.process import stop_event
from moorage.sdk.controller import ControllerService
from moorage.sdk.driver import Driver, Environment
from moorage.sdk.groups import GroupService, MetadataService
from moorage.sdk.identity import IdentityService
from moorage.sdk.node import NodeService
from moorage.sdk.publications import Publications
from moorage.sdk.records import Records

_log = log.get_logger(__name__)
_SERVICES = ("controller", "node")


@contextlib.asynccontextmanager
async def serve(
    driver: Driver, endpoint: str, environment: Environment, *, http_endpoint: str = "", stop_grace_s: float = 30.0
) -> AsyncIterator[CsiServer]:
    """Serve a driver on a socket for the length of the block. Raises UsageError if the driver is incomplete."""
    _check(driver)
    driver.environment = environment
    metrics, in_flight = CallMetrics(), InFlight()
    identity = IdentityService(driver)
    server = CsiServer(endpoint, driver_name=driver.name, metrics=metrics)
    server.check_free()
    async with contextlib.AsyncExitStack() as stack:
        csi_pb2_grpc.add_IdentityServicer_to_server(identity, server.grpc)
        if environment.serves_controller and driver.defines("create_volume"):
            records = Records(driver, environment.state_dir)
            stack.callback(records.close)
            _add_controller(server, driver, records, in_flight)
        if environment.serves_node and driver.defines("publish"):
            publications = Publications(environment.state_dir)
            stack.callback(publications.close)
            node = NodeService(driver, publications, in_flight)
            csi_pb2_grpc.add_NodeServicer_to_server(node, server.grpc)
        await driver.setup()
        stack.push_async_callback(driver.close)
        await server.start()
        stack.push_async_callback(server.stop, stop_grace_s)
        if http_endpoint:
            http = HttpEndpoint(http_endpoint, metrics.render, lambda: identity.is_started)
            await stack.enter_async_context(http)
        identity.is_started = True
        _log.info("driver serves", driver=driver.name, endpoint=str(server.path), services=sorted(environment.services))
        yield server


def _add_controller(server: CsiServer, driver: Driver, records: Records, in_flight: InFlight) -> None:
    csi_pb2_grpc.add_ControllerServicer_to_server(ControllerService(driver, records, in_flight), server.grpc)
    if driver.defines("create_group", "delete_group"):
        csi_pb2_grpc.add_GroupControllerServicer_to_server(GroupService(driver, records, in_flight), server.grpc)
    if driver.defines("allocated_blocks"):
        csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(MetadataService(driver, records), server.grpc)


_PAIRS = {
    "create_volume": "delete_volume",
    "create_snapshot": "delete_snapshot",
    "create_group": "delete_group",
    "attach": "detach",
}


def _check(driver: Driver) -> None:
    if not driver.name:
        raise UsageError(f'{type(driver).__name__} has no name; set `name = "driver.example.org"`')
    for hook, other in _PAIRS.items():
        if driver.defines(hook) != driver.defines(other):
            given, missing = (hook, other) if driver.defines(hook) else (other, hook)
            raise UsageError(f"{type(driver).__name__} defines {given} but not {missing}")


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
