"""The cluster-side controllers, by name: which there are, and running some of them until asked to stop.

Owns: the table of names, and the informers, recorders, lease and endpoint that the chosen controllers share.
May not touch: what a controller decides.
Start reading at: `run`.
"""

import asyncio
import importlib
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import cast

from moorage.controllers.context import Activity, ControllerContext, ControllerOptions, Recorders
from moorage.errors import UsageError
from moorage.kube.api.client import Client
from moorage.kube.cache.informers import Informers
from moorage.kube.control import probes as endpoint
from moorage.kube.control.election import ElectionConfig, Elector
from moorage.log import get_logger

log = get_logger(__name__)

StartController = Callable[[ControllerContext], Awaitable[None]]

CONTROLLERS: dict[str, str] = {
    "binder": "moorage.controllers.binder.run",
    "attachdetach": "moorage.controllers.attachdetach.run",
    "protection": "moorage.controllers.protection.run",
    "expansion": "moorage.controllers.expansion",
    "scheduler": "moorage.controllers.scheduler.run",
    "snapshots": "moorage.controllers.snapshots.run",
    "ephemeral": "moorage.controllers.ephemeral",
    "nodelifecycle": "moorage.controllers.nodelifecycle.run",
}
BY_NAME_ONLY = {"nodelifecycle"}  # every real cluster runs it already


@dataclass(frozen=True)
class LeaseOptions:
    """Where and whether to elect a leader among several processes of controllers."""

    enabled: bool = False
    namespace: str = ""
    name: str = "moorage-controllers"
    lease_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 5.0


@dataclass(frozen=True)
class ControllerSettings:
    """What `moorage controllers` was asked for."""

    names: tuple[str, ...] = ()
    options: ControllerOptions = field(default_factory=ControllerOptions)
    lease: LeaseOptions = field(default_factory=LeaseOptions)
    http_endpoint: str = ""
    metrics_path: str = "/metrics"


def chosen(names: Sequence[str]) -> dict[str, StartController]:
    """Return the controllers of these names, in the order of the table; without names, all but `BY_NAME_ONLY`."""
    unknown = [name for name in names if name not in CONTROLLERS]
    if unknown:
        raise UsageError(f"no controller is called {', '.join(unknown)}; there are {', '.join(CONTROLLERS)}")
    wanted = [name for name in CONTROLLERS if name in (names or CONTROLLERS.keys() - BY_NAME_ONLY)]
    return {name: cast(StartController, importlib.import_module(CONTROLLERS[name]).run) for name in wanted}


async def run(client: Client, settings: ControllerSettings, activity: Activity | None = None) -> None:
    """Run the chosen controllers until cancelled; with a lease, only while leading: LeadershipLost when it slips."""
    controllers = chosen(settings.names)

    async def work() -> None:
        await run_together(client, controllers, settings.options, activity or Activity())

    async with AsyncExitStack() as stack:
        elector = Elector(client, _election(client, settings.lease)) if settings.lease.enabled else None
        if settings.http_endpoint:
            host, port = endpoint.address_from(settings.http_endpoint)
            served = endpoint.serve(host, port, checks(elector), endpoint.shared_page, settings.metrics_path)
            await stack.enter_async_context(served)
        await (elector.lead(work) if elector is not None else work())


def checks(elector: Elector | None) -> Mapping[str, endpoint.ProbeCheck]:
    """What probes are answered. A process that waits for the lease is as ready as the one that leads.

    Nothing is said of informers: a kind that the cluster does not have is waited for, and the others are served.
    """

    async def leading_well() -> tuple[int, str]:
        if elector is not None and not elector.is_healthy():
            return 500, "the lease was not renewed in time"
        return 200, "ok"

    async def ready() -> tuple[int, str]:
        if elector is not None and not elector.has_looked:
            return 503, "the lease could not be read yet"
        return await leading_well()

    return {"/healthz": ready, "/healthz/leader-election": leading_well}


async def run_together(
    client: Client, controllers: dict[str, StartController], options: ControllerOptions, activity: Activity
) -> None:
    """Run controllers over one set of informers; the first that fails ends them all."""
    async with Recorders(client, activity) as recorders, Informers(client) as informers:
        context = ControllerContext(client, informers, recorders, activity, options)
        log.info("controllers start", names=",".join(controllers))
        async with asyncio.TaskGroup() as tasks:
            for name, controller in controllers.items():
                tasks.create_task(_named(name, controller, context), name=f"controller-{name}")


async def _named(name: str, controller: StartController, context: ControllerContext) -> None:
    await controller(context)
    log.error("controller ended by itself", name=name)


def _election(client: Client, lease: LeaseOptions) -> ElectionConfig:
    identity = f"{socket.gethostname()}_{os.getpid()}_{uuid.uuid4()}"
    namespace = lease.namespace or client.namespace
    return ElectionConfig(lease.name, namespace, identity, lease.lease_s, lease.renew_s, lease.retry_s)
