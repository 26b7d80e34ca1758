"""The process of one driver: its hooks behind the services, with records in the state directory.

Owns: what a driver announces, and the order of starting and stopping.
Start reading at: `serve`.
"""

import contextlib
from collections.abc import AsyncIterator

from moorage import log
from moorage.csi.inflight import InFlight
from moorage.csi.metrics import CallMetrics
from moorage.csi.server import CsiServer
from moorage.errors import UsageError
from moorage.sdk.controller_hooks import ControllerHooks
from moorage.sdk.driver import Driver, Environment
from moorage.sdk.identity import Identity
from moorage.sdk.node_hooks import NodeHooks
from moorage.sdk.operations import BlockingCalls
from moorage.sdk.publications import Publications
from moorage.sdk.records import Records
from moorage.sdk.serving import serving

_log = log.get_logger(__name__)

_PAIRS = {
    "create_volume": "delete_volume",
    "create_snapshot": "delete_snapshot",
    "create_group": "delete_group",
    "attach": "detach",
}


@contextlib.asynccontextmanager
async def serve(
    driver: Driver, endpoint: str, environment: Environment, *, http_endpoint: str = "", stop_grace_s: float = 30.0
) -> AsyncIterator[CsiServer]:
    """Serve a driver on a socket for the length of the block. Raises UsageError if the driver is incomplete."""
    _check(driver)
    driver.environment = environment
    metrics, work = CallMetrics(), BlockingCalls()
    server = CsiServer(endpoint, driver_name=driver.name, metrics=metrics)
    server.check_free()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(work.close)
        controller, node = None, None
        if environment.serves_controller and driver.defines("create_volume"):
            records = Records(driver, environment.state_dir, work)
            stack.callback(records.close)
            controller = ControllerHooks(driver, records, work)
        if environment.serves_node and driver.defines("publish"):
            publications = Publications(environment.state_dir)
            stack.callback(publications.close)
            node = NodeHooks(driver, publications, work)
        await work.run(driver.setup)
        stack.push_async_callback(work.run, driver.close)
        started = serving(
            server,
            _identity(driver, work),
            controller,
            node,
            in_flight=InFlight(),
            work=work,
            metrics=metrics.render,
            http_endpoint=http_endpoint,
            stop_grace_s=stop_grace_s,
        )
        identity = await stack.enter_async_context(started)
        identity.is_started = True
        _log.info("driver serves", driver=driver.name, endpoint=str(server.path), services=sorted(environment.services))
        yield server


def _identity(driver: Driver, work: BlockingCalls) -> Identity:
    """Every process of a driver announces all of its services, also those that another process serves."""
    has_places = type(driver).topology is not Driver.topology
    needs = {
        "CONTROLLER_SERVICE": driver.defines("create_volume"),
        "GROUP_CONTROLLER_SERVICE": driver.defines("create_volume", "create_group"),
        "SNAPSHOT_METADATA_SERVICE": driver.defines("create_volume", "allocated_blocks"),
        "VOLUME_ACCESSIBILITY_CONSTRAINTS": has_places,
        "SNAPSHOT_ACCESSIBILITY_CONSTRAINTS": has_places
        and driver.defines("create_snapshot")
        and driver.announces_alpha,
    }
    return Identity(
        name=driver.name,
        version=driver.version,
        services=[name for name, is_offered in needs.items() if is_offered],
        expands=driver.defines("expand_volume") or driver.defines("expand_on_node"),
        is_ready=lambda: work.run(driver.is_ready),
    )


def _check(driver: Driver) -> None:
    if not driver.name:
        raise UsageError(f'{type(driver).__name__} has no name; set `name = "driver.example.org"`')
    for hook, other in _PAIRS.items():
        if driver.defines(hook) != driver.defines(other):
            given, missing = (hook, other) if driver.defines(hook) else (other, hook)
            raise UsageError(f"{type(driver).__name__} defines {given} but not {missing}")
