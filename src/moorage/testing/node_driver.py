"""A CSI driver for tests that mounts for real and misbehaves on demand.

Owns: `ScriptedDriver`, a driver and its registration socket in this event loop; `until`, to wait for what it does.
May not touch: anything outside the directory it is given.
Start reading at: `ScriptedDriver.misbehave`.
"""

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from moorage.csi import csi_pb2 as pb
from moorage.csi import registration_pb2 as reg
from moorage.csi.runtime import keep_running
from moorage.host import mountinfo, mounts

HANG, GARBAGE, LIE, DIE = "hang", "garbage", "lie", "die"
_CAPABILITY = pb.NodeServiceCapability.RPC.Type


async def until(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "condition") -> Any:
    """Wait for a condition (sync or async) to hold; its last value is the result."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in {timeout_s} s")
        await asyncio.sleep(0.02)


@dataclass(slots=True)
class Misbehaviour:
    """What to do instead of answering well: a gRPC code's name, or HANG, GARBAGE, LIE (OK without effect) or DIE.

    With `after_effect` the work is done first. DIE drops every connection and ends the driver.
    """

    what: str
    after_effect: bool = False


@dataclass(slots=True)
class ScriptedDriver:
    """`async with ScriptedDriver(...)`: volumes are directories below `data`, published by bind mounts."""

    name: str
    data: Path
    socket: Path
    registry: Path | None = None
    node_id: str = "node-1"
    capabilities: tuple[str, ...] = ("STAGE_UNSTAGE_VOLUME", "GET_VOLUME_STATS", "EXPAND_VOLUME")
    topology: dict[str, str] = field(default_factory=dict)
    versions: tuple[str, ...] = ("1.0.0",)
    plugin_type: str = "CSIPlugin"
    max_volumes: int = 0
    endpoint: str | None = None  # what the registration socket says; None for the driver's own socket
    calls: list[tuple[str, Any]] = field(default_factory=list)
    told: list[reg.RegistrationStatus] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    counts: bool = False  # as the official host-path driver does: what is published twice has to be unpublished twice
    published: Counter[str] = field(default_factory=Counter)
    _script: dict[str, deque[Misbehaviour]] = field(default_factory=dict)
    _servers: list[Any] = field(default_factory=list)
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def misbehave(self, method: str, *what: str, after_effect: bool = False) -> None:
        """The next calls of a method go wrong, one after the other; then it behaves again."""
        self._script.setdefault(method, deque()).extend(Misbehaviour(one, after_effect) for one in what)

    def release(self) -> None:
        """Let calls that hang go on (they then fail)."""
        self._released.set()

    def named(self, method: str) -> list[Any]:
        """The requests of a method so far."""
        return [request for name, request in self.calls if name == method]

    @property
    def registration_socket(self) -> Path:
        assert self.registry is not None
        return self.registry / f"{self.name}-reg.sock"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self._released.clear()
        await self._serve(self.socket, [self._handlers("csi.v1.Node"), self._handlers("csi.v1.Identity")])
        if self.registry is not None:
            await self.announce()

    async def announce(self) -> None:
        """Serve only the registration socket; the driver itself may be another process."""
        assert self.registry is not None
        self.registry.mkdir(parents=True, exist_ok=True)
        handlers = [self._registration()]
        if self.endpoint == "":  # the registration socket is the driver's socket
            handlers += [self._handlers("csi.v1.Node"), self._handlers("csi.v1.Identity")]
        await self._serve(self.registration_socket, handlers)

    async def stop(self, *, leave_sockets: bool = False) -> None:
        self._released.set()
        servers = list(self._servers)
        for server in servers:
            await server.stop(0)
        # Only now: a server that is stopping still removes its socket's path, and would take that of the next one.
        self._servers = [server for server in self._servers if server not in servers]
        for path in (self.socket, *((self.registration_socket,) if self.registry else ())):
            if not leave_sockets:
                path.unlink(missing_ok=True)

    async def _serve(self, path: Path, handlers: list[Any]) -> None:
        path.unlink(missing_ok=True)
        keep_running()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(handlers)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._servers.append(server)

    def _handlers(self, service: str) -> Any:
        descriptor = pb.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
        methods = {}
        for method in descriptor.methods:
            work = getattr(self, f"_{method.name}", None)
            if work is not None:
                methods[method.name] = grpc.unary_unary_rpc_method_handler(
                    self._scripted(method.name, work),
                    request_deserializer=getattr(pb, method.input_type.name).FromString,
                    response_serializer=_serialized,
                )
        return grpc.method_handlers_generic_handler(service, methods)

    def _scripted(self, name: str, work: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def handle(request: Any, context: Any) -> Any:
            self.calls.append((name, request))
            script = self._script.get(name)
            if not script:
                return await work(request)
            wrong = script.popleft()
            if wrong.after_effect:
                await work(request)
            if wrong.what == HANG:
                await self._released.wait()
                await context.abort(grpc.StatusCode.INTERNAL, "hung")
            if wrong.what == GARBAGE:
                return b"\xff\xff\xff\xff garbage"
            if wrong.what == LIE:
                return b""
            if wrong.what == DIE:
                task = asyncio.create_task(self.stop(leave_sockets=True))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await asyncio.sleep(3600)
            return await context.abort(grpc.StatusCode[wrong.what], f"scripted {wrong.what}")

        return handle

    def _registration(self) -> Any:
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                self._scripted(name, work),
                request_deserializer=request.FromString,
                response_serializer=_serialized,
            )
            for name, work, request in (
                ("GetInfo", self._GetInfo, reg.InfoRequest),
                ("NotifyRegistrationStatus", self._NotifyRegistrationStatus, reg.RegistrationStatus),
            )
        }
        return grpc.method_handlers_generic_handler("pluginregistration.Registration", methods)

    async def _GetInfo(self, _request: Any) -> reg.PluginInfo:
        endpoint = str(self.socket) if self.endpoint is None else self.endpoint
        return reg.PluginInfo(
            type=self.plugin_type, name=self.name, endpoint=endpoint, supported_versions=self.versions
        )

    async def _NotifyRegistrationStatus(self, request: reg.RegistrationStatus) -> reg.RegistrationStatusResponse:
        self.told.append(request)
        return reg.RegistrationStatusResponse()

    # The driver's real work.

    async def _GetPluginInfo(self, _request: Any) -> pb.GetPluginInfoResponse:
        return pb.GetPluginInfoResponse(name=self.name, vendor_version="1")

    async def _NodeGetInfo(self, _request: Any) -> pb.NodeGetInfoResponse:
        topology = pb.Topology(segments=self.topology) if self.topology else None
        return pb.NodeGetInfoResponse(
            node_id=self.node_id, max_volumes_per_node=self.max_volumes, accessible_topology=topology
        )

    async def _NodeGetCapabilities(self, _request: Any) -> pb.NodeGetCapabilitiesResponse:
        return pb.NodeGetCapabilitiesResponse(
            capabilities=[
                pb.NodeServiceCapability(rpc=pb.NodeServiceCapability.RPC(type=_CAPABILITY.Value(name)))
                for name in self.capabilities
            ]
        )

    async def _NodeStageVolume(self, request: pb.NodeStageVolumeRequest) -> pb.NodeStageVolumeResponse:
        source = self.data / request.volume_id
        source.mkdir(exist_ok=True)
        if not request.volume_capability.HasField("block") and not _is_mount_point(request.staging_target_path):
            mounts.bind(source, request.staging_target_path)
        return pb.NodeStageVolumeResponse()

    async def _NodeUnstageVolume(self, request: pb.NodeUnstageVolumeRequest) -> pb.NodeUnstageVolumeResponse:
        if self.counts and self.published.total():
            raise RuntimeError(f"volume is still published at {sorted(self.published.elements())}")
        mounts.unmount_all(request.staging_target_path)
        return pb.NodeUnstageVolumeResponse()

    async def _NodePublishVolume(self, request: pb.NodePublishVolumeRequest) -> pb.NodePublishVolumeResponse:
        target = Path(request.target_path)
        if request.volume_capability.HasField("block"):
            device = self.data / f"{request.volume_id}.device"
            if mountinfo.mount_at(target) is None:
                target.touch()
                mounts.bind(os.readlink(device), target)
            return pb.NodePublishVolumeResponse()
        source = Path(request.staging_target_path) if request.staging_target_path else self.data / request.volume_id
        if not request.staging_target_path:
            source.mkdir(exist_ok=True)
        if not _is_mount_point(target):
            target.mkdir(exist_ok=True)
            mounts.bind(source, target, ["ro"] if request.readonly else [])
            self.published[str(target)] += 1
        return pb.NodePublishVolumeResponse()

    async def _NodeUnpublishVolume(self, request: pb.NodeUnpublishVolumeRequest) -> pb.NodeUnpublishVolumeResponse:
        target = Path(request.target_path)
        mounts.unmount_all(target)
        self.published -= Counter((str(target),))
        if target.is_dir():
            target.rmdir()
        else:
            target.unlink(missing_ok=True)
        return pb.NodeUnpublishVolumeResponse()

    async def _NodeExpandVolume(self, request: pb.NodeExpandVolumeRequest) -> pb.NodeExpandVolumeResponse:
        self.sizes[request.volume_id] = request.capacity_range.required_bytes
        return pb.NodeExpandVolumeResponse(capacity_bytes=request.capacity_range.required_bytes)

    async def _NodeGetVolumeStats(self, _request: Any) -> pb.NodeGetVolumeStatsResponse:
        usage = [
            pb.VolumeUsage(unit=pb.VolumeUsage.BYTES, total=100, used=40, available=60),
            pb.VolumeUsage(unit=pb.VolumeUsage.INODES, total=10, used=4, available=6),
        ]
        return pb.NodeGetVolumeStatsResponse(usage=usage)


def _serialized(answer: Any) -> bytes:
    return answer if isinstance(answer, bytes) else bytes(answer.SerializeToString())


def _is_mount_point(path: str | Path) -> bool:
    """Asked of the directory itself: reading the whole table for each call would be most of what a test measures."""
    try:
        return _mount_id(path) != _mount_id(Path(path).parent)
    except FileNotFoundError:
        return False


def _mount_id(path: str | Path) -> str:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    finally:
        os.close(fd)
    return next(line for line in lines if line.startswith("mnt_id:"))
