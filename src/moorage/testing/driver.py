"""A CSI driver for tests: a small driver with behaviour on a real unix socket, and faults on demand.

Owns: serving the driver and its registration socket, and the script of what goes wrong: any code at any call, before or
after the work is done, delays, hanging, wrong bytes, lies, restarts.
Start reading at: `ScriptedDriver`, `Fault`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from moorage.csi import csi_pb2 as pb
from moorage.csi import registration_pb2 as reg
from moorage.csi.endpoint import socket_path_from
from moorage.csi.errors import CsiError
from moorage.csi.server import CsiServer
from moorage.testing.controller_service import ControllerService
from moorage.testing.node_service import NodeService

HANG, GARBAGE, LIE, DIE = "hang", "garbage", "lie", "die"
_SERVICES = ("Identity", "Controller", "GroupController", "Node")
_ALL_RPCS = (
    "CREATE_DELETE_VOLUME",
    "PUBLISH_UNPUBLISH_VOLUME",
    "LIST_VOLUMES",
    "LIST_VOLUMES_PUBLISHED_NODES",
    "GET_CAPACITY",
    "CREATE_DELETE_SNAPSHOT",
    "LIST_SNAPSHOTS",
    "CLONE_VOLUME",
    "EXPAND_VOLUME",
    "MODIFY_VOLUME",
    "SINGLE_NODE_MULTI_WRITER",
    "GET_VOLUME",
    "VOLUME_CONDITION",
)


@dataclass(frozen=True)
class Fault:
    """What to do instead of a good answer.

    `code` is a gRPC code's name, OK, or one of HANG (until `release`), GARBAGE (bytes that are no message), LIE (OK
    without effect) and DIE (drop every connection and end the driver). With `is_done` the work is done first.
    """

    code: str
    is_done: bool = False
    delay_s: float = 0.0


@dataclass
class Abilities:
    """What the driver says that it can do."""

    plugin: tuple[str, ...] = ("CONTROLLER_SERVICE", "GROUP_CONTROLLER_SERVICE")
    rpcs: tuple[str, ...] = _ALL_RPCS
    node: tuple[str, ...] = ("STAGE_UNSTAGE_VOLUME", "GET_VOLUME_STATS", "EXPAND_VOLUME")
    group: tuple[str, ...] = ("CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT",)


Chooser = Callable[[str, Any], Fault | None]


class ScriptedDriver(ControllerService, NodeService):
    """A driver on one socket; `async with` serves it, `restart` drops every connection and comes back.

    `data` is where its volumes live; without it, node calls are UNIMPLEMENTED. `registry` is a kubelet's directory of
    registration sockets. Its public methods are the script and one method per CSI call, which a test may override.
    """

    def __init__(
        self,
        socket: Path | str,
        name: str = "test.csi.moorage.dev",
        abilities: Abilities | None = None,
        *,
        data: Path | None = None,
        registry: Path | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are attributes of the instance, such as `topology`, `node_id` or `capacity_bytes`."""
        ControllerService.__init__(self)
        NodeService.__init__(self, data)
        self.socket = socket_path_from(str(socket))
        self.name = name
        self.abilities = abilities or Abilities()
        self.registry = registry
        self.versions: tuple[str, ...] = ("1.0.0",)
        self.plugin_type = "CSIPlugin"
        self.registered_endpoint: str | None = None  # what the registration socket says; None for `socket`
        self.statuses: list[reg.RegistrationStatus] = []  # what the kubelet answered to the registration
        self.calls: list[tuple[str, Any]] = []
        self.chooser: Chooser | None = None  # decides about a call for which `fail` has scripted nothing
        for key, value in settings.items():
            if not hasattr(self, key):
                raise TypeError(f"a scripted driver has no {key!r}")
            setattr(self, key, value)
        self._faults: dict[str, list[Fault]] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._in_flight: set[str] = set()
        self._servers: list[CsiServer] = []
        self._released, self._stopped = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        """The address that a client connects to."""
        return f"unix://{self.socket}"

    @property
    def registration_socket(self) -> Path:
        assert self.registry is not None
        return self.registry / f"{self.name}-reg.sock"

    # The script.

    def fail(self, method: str, *codes: str, times: int = 1, is_done: bool = False) -> None:
        """Let the next calls of a method go wrong, one code after the other; then it behaves again."""
        faults = [Fault(code, is_done) for code in codes] * times
        self._faults.setdefault(method, []).extend(faults)

    def hold(self, method: str) -> asyncio.Event:
        """Let calls of a method wait until the returned event is set."""
        return self._gates.setdefault(method, asyncio.Event())

    def recover(self) -> None:
        """Forget the faults that are still scripted."""
        self._faults.clear()

    def release(self) -> None:
        """Let calls that HANG go on. They then fail with INTERNAL."""
        self._released.set()

    def count(self, method: str) -> int:
        """Return how many calls of a method have arrived."""
        return len(self.requests(method))

    def requests(self, method: str) -> list[Any]:
        """Return the requests of a method so far."""
        return [request for name, request in self.calls if name == method]

    # Serving.

    async def start(self) -> None:
        if self.data is not None:
            self.data.mkdir(parents=True, exist_ok=True)
        self._released.clear()
        self._stopped.clear()
        await self._serve(self.socket, [self._handlers(name) for name in _SERVICES])
        if self.registry is not None:
            await self.announce()

    async def announce(self) -> None:
        """Serve only the registration socket; the driver itself may be another process."""
        assert self.registry is not None
        self.registry.mkdir(parents=True, exist_ok=True)
        handlers = [self._registration()]
        if self.registered_endpoint == "":  # the registration socket is the driver's socket
            handlers += [self._handlers(name) for name in _SERVICES]
        await self._serve(self.registration_socket, handlers)

    async def stop(self, *, leave_sockets: bool = False) -> None:
        """Drop every connection. With `leave_sockets` the socket files stay, as after a crash."""
        self._released.set()
        servers = list(self._servers)
        for server in servers:
            await (server.grpc.stop(0) if leave_sockets else server.stop(grace_s=0.0))
        # Only now: a server that stops removes its socket's path, and would remove that of its successor.
        self._servers = [server for server in self._servers if server not in servers]
        self._stopped.set()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for gate in self._gates.values():
            gate.set()
        await self.stop()

    async def _serve(self, path: Path, handlers: list[Any]) -> None:
        path.unlink(missing_ok=True)
        server = CsiServer(str(path), driver_name=self.name, log_calls=False)
        server.grpc.add_generic_rpc_handlers(handlers)
        await server.start()
        self._servers.append(server)

    def _handlers(self, service: str) -> Any:
        methods = {
            method.name: self._handler(method.name, getattr(pb, method.input_type.name))
            for method in pb.DESCRIPTOR.services_by_name[service].methods
            if hasattr(self, method.name)
        }
        return grpc.method_handlers_generic_handler(f"csi.v1.{service}", methods)

    def _registration(self) -> Any:
        kinds = {"GetInfo": reg.InfoRequest, "NotifyRegistrationStatus": reg.RegistrationStatus}
        methods = {name: self._handler(name, kind) for name, kind in kinds.items()}
        return grpc.method_handlers_generic_handler("pluginregistration.Registration", methods)

    def _handler(self, method: str, kind: Any) -> Any:
        async def handle(request: Any, _context: Any) -> Any:
            return await self._answer(method, request)

        return grpc.unary_unary_rpc_method_handler(
            handle, request_deserializer=kind.FromString, response_serializer=_serialized
        )

    async def _answer(self, method: str, request: Any) -> Any:
        """Note the call, do what the script says about it, and otherwise the work; one call at a time for a volume."""
        self.calls.append((method, request))
        key = self._key_of(method, request)
        if not key:
            return await self._follow_script(method, request)
        if key in self._in_flight:
            raise CsiError(method, "ABORTED", f"another call for {key} is running")
        self._in_flight.add(key)
        try:
            return await self._follow_script(method, request)
        finally:
            self._in_flight.discard(key)

    def _key_of(self, method: str, request: Any) -> str:
        """Return what a call is about: the volume's name, also if the call has only its id."""
        if method == "CreateVolume":
            return str(request.name)
        if method == "DeleteVolume":
            return next((n for n, each in self.backend.ids_by_name.items() if each == request.volume_id), "")
        if method == "CreateSnapshot":
            return f"snap-{request.name}"
        return str(request.snapshot_id) if method == "DeleteSnapshot" else ""

    async def _follow_script(self, method: str, request: Any) -> Any:
        work: Callable[[Any], Awaitable[Any]] = getattr(self, method)
        gate = self._gates.get(method)
        if gate is not None:
            await gate.wait()
        if method == "CreateVolume" and "hang" in request.parameters:
            await self._gates.setdefault("hanging volumes", asyncio.Event()).wait()
        planned = self._faults.get(method)
        fault = planned.pop(0) if planned else (self.chooser(method, request) if self.chooser else None)
        if fault is None:
            return await work(request)
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.is_done:
            await work(request)
        return await self._misbehave(fault, method, request)

    async def _misbehave(self, fault: Fault, method: str, request: Any) -> Any:
        match fault.code:
            case "OK":
                return await getattr(self, method)(request)
            case "hang":
                await self._released.wait()
                raise CsiError(method, "INTERNAL", "hung")
            case "garbage":
                return b"\xff\xff\xff\xff garbage"
            case "lie":
                return b""
            case "die":
                task = asyncio.create_task(self.stop(leave_sockets=True), name="scripted driver dies")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await self._stopped.wait()
                raise CsiError(method, "UNAVAILABLE", "died")
        raise CsiError(method, fault.code, "as the script says")

    # Identity and registration.

    async def GetPluginInfo(self, _request: Any) -> Any:
        return pb.GetPluginInfoResponse(name=self.name, vendor_version="1")

    async def GetPluginCapabilities(self, _request: Any) -> Any:
        kind = pb.PluginCapability
        services = [kind.Service(type=kind.Service.Type.Value(name)) for name in self.abilities.plugin]
        return pb.GetPluginCapabilitiesResponse(capabilities=[kind(service=each) for each in services])

    async def Probe(self, _request: Any) -> Any:
        return pb.ProbeResponse()

    async def ControllerGetCapabilities(self, _request: Any) -> Any:
        kind = pb.ControllerServiceCapability
        rpcs = [kind.RPC(type=kind.RPC.Type.Value(name)) for name in self.abilities.rpcs]
        return pb.ControllerGetCapabilitiesResponse(capabilities=[kind(rpc=rpc) for rpc in rpcs])

    async def GroupControllerGetCapabilities(self, _request: Any) -> Any:
        kind = pb.GroupControllerServiceCapability
        rpcs = [kind.RPC(type=kind.RPC.Type.Value(name)) for name in self.abilities.group]
        return pb.GroupControllerGetCapabilitiesResponse(capabilities=[kind(rpc=rpc) for rpc in rpcs])

    async def NodeGetCapabilities(self, _request: Any) -> Any:
        kind = pb.NodeServiceCapability
        rpcs = [kind.RPC(type=kind.RPC.Type.Value(name)) for name in self.abilities.node]
        return pb.NodeGetCapabilitiesResponse(capabilities=[kind(rpc=rpc) for rpc in rpcs])

    async def NodeGetInfo(self, _request: Any) -> Any:
        topology = pb.Topology(segments=self.topology) if self.topology else None
        return pb.NodeGetInfoResponse(
            node_id=self.node_id, max_volumes_per_node=self.max_volumes, accessible_topology=topology
        )

    async def GetInfo(self, _request: Any) -> Any:
        endpoint = str(self.socket) if self.registered_endpoint is None else self.registered_endpoint
        return reg.PluginInfo(
            type=self.plugin_type, name=self.name, endpoint=endpoint, supported_versions=self.versions
        )

    async def NotifyRegistrationStatus(self, request: Any) -> Any:
        self.statuses.append(request)
        return reg.RegistrationStatusResponse()


def _serialized(answer: Any) -> bytes:
    return answer if isinstance(answer, bytes) else bytes(answer.SerializeToString())
