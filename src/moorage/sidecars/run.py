"""Runs the sidecars of one driver: connects, asks what it can do, and starts the roles. Repeats that after a loss.

Owns: the life of the process: shared connection, shared informers, leader election per role, endpoints.
Start reading at: `run`.
"""

import asyncio
import functools
import traceback
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from moorage.csi.pending import in_flight_text
from moorage.errors import MoorageError, UsageError
from moorage.kube.api import config as kube_config
from moorage.kube.api.client import Client
from moorage.kube.cache.informers import Informers
from moorage.kube.control import probes as http
from moorage.kube.control.election import ElectionConfig, Elector, LeadershipLost
from moorage.kube.errors import ApiError, Forbidden
from moorage.kube.names import lease_name
from moorage.kube.objects import CSIDriver
from moorage.log import get_logger
from moorage.process import first_of
from moorage.sidecars.attacher.run import Attacher
from moorage.sidecars.capacity.run import CapacityPublisher
from moorage.sidecars.context import RoleContext, RoleTask
from moorage.sidecars.driver import DriverConnection
from moorage.sidecars.liveness import LivenessProbe
from moorage.sidecars.metrics import Metrics
from moorage.sidecars.provisioner.run import Provisioner
from moorage.sidecars.registrar import Registrar
from moorage.sidecars.resizer.run import Resizer
from moorage.sidecars.role_health import RoleHealth
from moorage.sidecars.roles import Role, needs_api, roles_for
from moorage.sidecars.settings import SidecarEnvironment, SidecarSettings, pairs_from
from moorage.sidecars.snapshotter.run import Snapshotter
from moorage.sidecars.volume_health import HealthMonitor

log = get_logger(__name__)

_RESTART_START_S = 1.0
_RESTART_MAX_S = 30.0
_LIVENESS_PORT = 9808


@dataclass(frozen=True)
class WantedRoles:
    """What a process is to run. Without roles: every role that the driver's capabilities call for."""

    settings: SidecarSettings
    around: SidecarEnvironment
    roles: frozenset[Role] = frozenset()

    @property
    def health_port(self) -> int:
        """Return the port for /healthz alone: as given, or livenessprobe's if only that role is named."""
        is_needed = Role.LIVENESS in self.roles and not self.settings.endpoint
        return self.settings.health_port or (_LIVENESS_PORT if is_needed else 0)


def check(wanted: WantedRoles) -> None:
    """Raise UsageError for settings that cannot work, before anything is started."""
    wanted.settings.check()
    if wanted.settings.node_deployment and not wanted.around.node_name:
        raise UsageError(
            "--node-deployment needs the environment variable NODE_NAME: the node that this process is for"
        )


async def run(wanted: WantedRoles, api: kube_config.ApiConfig | None = None) -> None:
    """Run until cancelled, and wait for a driver that goes away. Raises UsageError if the set-up cannot work."""
    check(wanted)
    process = _Process(wanted, api)
    await process.run()


class _Process:
    """All that outlives one connection to the driver."""

    def __init__(self, wanted: WantedRoles, api: kube_config.ApiConfig | None) -> None:
        self._wanted = wanted
        self._settings = wanted.settings
        self._api = api
        self._metrics = Metrics()
        self._driver = DriverConnection(self._settings.csi_address, self._metrics.observe_call)
        self._electors: dict[str, Elector] = {}
        self._checks: dict[str, http.ProbeCheck] = {}
        self._role_health = RoleHealth()
        self._context: RoleContext | None = None
        self._parts: dict[Role, RoleTask] = {}
        self._parts_of = ""

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._driver.close)
            await self._listen(stack)
            while True:
                await self._driver.wait_for_name()
                await self._run_until_lost(stack)
                self._role_health.expect_nothing()
                log.warning("connection to the driver is lost; waiting for it", driver=self._driver.name)

    async def _run_until_lost(self, stack: AsyncExitStack) -> None:
        """The registrar needs no more than the driver's name, so it does not wait for the driver to be ready."""
        if self._parts_of != self._driver.name:  # another driver answers on the socket now
            self._parts, self._parts_of = {}, self._driver.name
        tasks = [asyncio.create_task(self._driver.wait_lost(), name="driver-lost")]
        if self._registers:
            tasks.append(asyncio.create_task(self._keep_running((Role.REGISTRAR,)), name=Role.REGISTRAR))
        if not self._wanted.roles or needs_api(self._wanted.roles):
            tasks.append(asyncio.create_task(self._discover_and_run(stack), name="roles"))
        await first_of(tasks)

    async def _discover_and_run(self, stack: AsyncExitStack) -> None:
        await self._driver.discover(ask_node=self._settings.node_deployment)
        roles = await self._roles(stack)
        log.info("running", driver=self._driver.name, roles=",".join(sorted(roles)))
        roles -= {Role.REGISTRAR, Role.LIVENESS}
        self._role_health.expect(roles)
        groups = _sharing_leases(roles) if self._settings.leader_election else [(role,) for role in sorted(roles)]
        if groups:
            await first_of([asyncio.create_task(self._keep_running(group), name=group[0]) for group in groups])
        else:
            await self._driver.wait_lost()

    @property
    def _registers(self) -> bool:
        if self._wanted.roles:
            return Role.REGISTRAR in self._wanted.roles
        return bool(self._settings.kubelet_registration_path)

    async def _listen(self, stack: AsyncExitStack) -> None:
        settings, checks = self._settings, {"/healthz": self._healthy, "/healthz/leader-election": self._leading_well}
        checks |= {f"/healthz/{role}": functools.partial(self._role_healthy, role) for role in Role}
        if Role.LIVENESS in self._wanted.roles or not self._wanted.roles:
            self._checks["driver"] = LivenessProbe(settings.csi_address, settings.probe_timeout_s).check
        if self._registers:
            self._checks["registration"] = _not_registering
        if settings.endpoint:
            host, port = http.address_from(settings.endpoint)
            served = http.serve(host, port, checks, self._metrics_page, settings.metrics_path)
            await stack.enter_async_context(served)
        if self._wanted.health_port:
            await stack.enter_async_context(http.serve("0.0.0.0", self._wanted.health_port, checks))

    def _metrics_page(self) -> bytes:
        return self._metrics.page() + in_flight_text([*self._driver.client.calls.pending]).encode()

    async def _roles(self, stack: AsyncExitStack) -> frozenset[Role]:
        asked = self._wanted.roles
        context = await self._connected(stack)
        if asked:
            more = {Role.CAPACITY} if self._settings.enable_capacity and Role.PROVISIONER in asked else set()
            return asked | more
        return roles_for(self._driver.capabilities, self._settings, await self._registered(context.client))

    async def _registered(self, client: Client) -> CSIDriver | None:
        """Return the CSIDriver object, None if there is none or we may not read it. Wait for the API server."""
        while True:
            try:
                return await client.find(CSIDriver, self._driver.name)
            except Forbidden as error:
                log.warning("CSIDriver cannot be read; taken as absent", driver=self._driver.name, reason=str(error))
                return None
            except ApiError as error:
                log.warning("API server does not answer", reason=str(error))
                await asyncio.sleep(_RESTART_START_S)

    async def _connected(self, stack: AsyncExitStack) -> RoleContext:
        if self._context is None:
            settings = self._settings
            api = self._api or kube_config.load(settings.kubeconfig or None)
            client = Client(api, qps=settings.kube_api_qps, burst=settings.kube_api_burst, identity="moorage-sidecars")
            await stack.enter_async_context(client)
            informers = await stack.enter_async_context(Informers(client, resync_s=settings.resync_s))
            around = self._wanted.around
            around = replace(around, namespace=around.namespace or client.namespace)
            self._context = RoleContext(settings, around, self._driver, client, informers, self._metrics, api)
        return self._context

    async def _keep_running(self, group: tuple[Role, ...]) -> None:
        """Run roles for ever. After a failure or a lost lease they start again, after a growing pause."""
        pause_s, role = _RESTART_START_S, group[0]
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await self._run_group(group)
            except Exception as error:  # a failure of one role must not end the others
                cause = _first_cause(error)
                self._report(role, cause)
                self._role_health.note(group, "" if isinstance(cause, LeadershipLost) else str(cause) or repr(cause))
            if asyncio.get_running_loop().time() - started > _RESTART_MAX_S:
                pause_s = _RESTART_START_S
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _RESTART_MAX_S)

    @staticmethod
    def _report(role: Role, cause: BaseException) -> None:
        """Log why a role failed; it is started again. Raises UsageError: a wrong set-up ends the process."""
        if isinstance(cause, UsageError):
            raise cause
        if isinstance(cause, LeadershipLost):
            log.warning("stepped down", role=role, reason=str(cause))
        elif isinstance(cause, MoorageError):
            log.warning("role failed", role=role, reason=str(cause))
        else:
            trace = "".join(traceback.format_exception(cause))
            log.error("role failed unexpectedly", role=role, reason=repr(cause), trace=trace)

    async def _run_group(self, group: tuple[Role, ...]) -> None:
        async def work() -> None:
            self._role_health.note(group)
            async with asyncio.TaskGroup() as tasks:
                for role in group:
                    tasks.create_task(self._part(role).run(), name=role)

        lease = lease_name(group[0], self._driver.name)
        if not self._settings.leader_election or not lease:
            await work()
        else:
            await self._elector(lease).lead(work)

    def _part(self, role: Role) -> RoleTask:
        if role not in self._parts:
            self._parts[role] = self._new_part(role)
        return self._parts[role]

    def _new_part(self, role: Role) -> RoleTask:
        settings = self._settings
        if role is Role.REGISTRAR:
            folder = settings.plugin_registration_path
            registrar = Registrar(self._driver.name, settings.kubelet_registration_path, folder)
            self._checks["registration"] = registrar.check
            return registrar
        if self._context is None:
            raise UsageError(f"role {role} needs the API server")
        return _MAKERS[role](self._context)

    def _elector(self, lease: str) -> Elector:
        settings, context = self._settings, self._context
        if lease not in self._electors:
            assert context is not None  # only roles that use the API have a lease
            self._electors[lease] = Elector(
                context.client,
                ElectionConfig(
                    name=lease,
                    namespace=settings.leader_election_namespace or self._wanted.around.namespace,
                    identity=self._wanted.around.identity or self._wanted.around.hostname,
                    lease_s=settings.leader_election_lease_duration_s,
                    renew_s=settings.leader_election_renew_deadline_s,
                    retry_s=settings.leader_election_retry_period_s,
                    labels=pairs_from(settings.leader_election_labels, ":"),
                ),
            )
        return self._electors[lease]

    async def _healthy(self) -> tuple[int, str]:
        return await http.all_healthy(self._checks)

    async def _role_healthy(self, role: Role) -> tuple[int, str]:
        own = {Role.LIVENESS: "driver", Role.REGISTRAR: "registration"}.get(role)
        if own is not None:
            check = self._checks.get(own)
            return await check() if check is not None else (404, f"role {role} is not run here")
        elector = self._electors.get(lease_name(role, self._driver.name))
        if elector is not None and not elector.is_healthy():
            return 500, "the lease was not renewed in time"
        return self._role_health.check(role)

    async def _leading_well(self) -> tuple[int, str]:
        late = [name for name, elector in self._electors.items() if not elector.is_healthy()]
        return (500, f"lease {late[0]} was not renewed in time") if late else (200, "ok")


async def _not_registering() -> tuple[int, str]:
    return 500, "the driver has not said its name yet, so it is not registered"


def _sharing_leases(roles: frozenset[Role]) -> list[tuple[Role, ...]]:
    """Group the roles that lead together: officially the capacity publisher is a part of the provisioner."""
    together = (Role.PROVISIONER, Role.CAPACITY)
    if not roles.issuperset(together):
        return [(role,) for role in sorted(roles)]
    return [together, *((role,) for role in sorted(roles.difference(together)))]


def _first_cause(error: BaseException) -> BaseException:
    """Return the first error inside task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


Maker = Callable[[RoleContext], RoleTask]
_MAKERS: Mapping[Role, Maker] = {
    Role.PROVISIONER: Provisioner,
    Role.ATTACHER: Attacher,
    Role.RESIZER: Resizer,
    Role.SNAPSHOTTER: Snapshotter,
    Role.CAPACITY: CapacityPublisher,
    Role.HEALTH: HealthMonitor,
}
