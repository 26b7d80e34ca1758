"""A scripted CSI driver for tests: a small driver with behaviour on a real unix socket, and faults on demand.

Owns: volumes, snapshots and attachments in memory that survive its restarts, as a real back end would, and the script
of what goes wrong: any code at any call, before or after the work is done, delays, hanging, restarts.
Start reading at: `ScriptedDriver`, `Fault`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.csi.errors import CsiError
from moorage.csi.server import CsiServer

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
    """An error instead of an answer; with `is_done` the work was done all the same and only the answer is lost."""

    code: str
    is_done: bool = False
    delay_s: float = 0.0


@dataclass
class Abilities:
    """What the driver says that it can do."""

    plugin: tuple[str, ...] = ("CONTROLLER_SERVICE", "GROUP_CONTROLLER_SERVICE")
    rpcs: tuple[str, ...] = _ALL_RPCS
    node: tuple[str, ...] = ("EXPAND_VOLUME",)
    group: tuple[str, ...] = ("CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT",)


@dataclass
class Backend:
    """What exists, whoever serves it."""

    volumes: dict[str, pb.Volume] = field(default_factory=dict)
    ids_by_name: dict[str, str] = field(default_factory=dict)
    published: dict[str, set[str]] = field(default_factory=dict)
    snapshots: dict[str, pb.Snapshot] = field(default_factory=dict)
    groups: dict[str, pb.VolumeGroupSnapshot] = field(default_factory=dict)
    parameters: dict[str, dict[str, str]] = field(default_factory=dict)
    abnormal: dict[str, str] = field(default_factory=dict)


Chooser = Callable[[str, Any], Fault | None]


class ScriptedDriver:
    """A driver on `endpoint`; `async with` serves it, `restart` drops every connection and comes back."""

    def __init__(self, endpoint: str, name: str = "test.csi.moorage.dev", abilities: Abilities | None = None) -> None:
        self.endpoint = endpoint
        self.name = name
        self.abilities = abilities or Abilities()
        self.backend = Backend()
        self.calls: list[tuple[str, Any]] = []
        self.topology: dict[str, str] = {}
        self.capacity_bytes = 1 << 40
        self.publish_context = {"device": "/dev/x"}
        self.node_expansion = False
        self.makes_small_by = 0
        self.ready_after = 0
        self.chooser: Chooser | None = None
        self._faults: dict[str, list[Fault]] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._in_flight: set[str] = set()
        self._server: CsiServer | None = None

    def fail(self, method: str, code: str, times: int = 1, *, is_done: bool = False) -> None:
        """The next calls of a method fail with a code."""
        self._faults.setdefault(method, []).extend([Fault(code, is_done)] * times)

    def hold(self, method: str) -> asyncio.Event:
        """Calls of a method wait until the returned event is set."""
        return self._gates.setdefault(method, asyncio.Event())

    def count(self, method: str) -> int:
        return sum(1 for name, _ in self.calls if name == method)

    def requests(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]

    async def start(self) -> None:
        server = CsiServer(self.endpoint, driver_name=self.name, log_calls=False)
        service = _Service(self)  # type: ignore[abstract]  # the methods are set one by one
        for add in (
            csi_pb2_grpc.add_IdentityServicer_to_server,
            csi_pb2_grpc.add_ControllerServicer_to_server,
            csi_pb2_grpc.add_NodeServicer_to_server,
            csi_pb2_grpc.add_GroupControllerServicer_to_server,
        ):
            add(service, server.grpc)
        await server.start()
        self._server = server

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s=0.0)

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

    async def meet(self, method: str, request: Message, work: Callable[[], Message]) -> Message:
        """Note the call, do what the script says about it, and otherwise the work; one call at a time for a volume."""
        self.calls.append((method, request))
        key = self._key_of(method, request)
        if key in self._in_flight:
            raise CsiError(method, "ABORTED", f"another call for {key} is running")
        if not key:
            return await self._follow_script(method, request, work)
        self._in_flight.add(key)
        try:
            return await self._follow_script(method, request, work)
        finally:
            self._in_flight.discard(key)

    def _key_of(self, method: str, request: Any) -> str:
        """What a call is about: the volume's name, also when the call has only its id."""
        if method == "CreateVolume":
            return str(request.name)
        if method == "DeleteVolume":
            return next((n for n, each in self.backend.ids_by_name.items() if each == request.volume_id), "")
        if method == "CreateSnapshot":
            return f"snap-{request.name}"
        return str(request.snapshot_id) if method == "DeleteSnapshot" else ""

    async def _follow_script(self, method: str, request: Message, work: Callable[[], Message]) -> Message:
        gate = self._gates.get(method)
        if gate is not None:
            await gate.wait()
        if method == "CreateVolume" and "hang" in request.parameters:  # type: ignore[attr-defined]
            await self._gates.setdefault("hanging volumes", asyncio.Event()).wait()
        planned = self._faults.get(method)
        fault = planned.pop(0) if planned else (self.chooser(method, request) if self.chooser else None)
        if fault is None:
            return work()
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.is_done:
            work()
        if fault.code == "OK":
            return work()
        raise CsiError(method, fault.code, "as the script says")


class _Service(
    csi_pb2_grpc.IdentityServicer,
    csi_pb2_grpc.ControllerServicer,
    csi_pb2_grpc.NodeServicer,
    csi_pb2_grpc.GroupControllerServicer,
):
    """Every method goes through the script; the work itself is in `_work`."""

    def __init__(self, driver: ScriptedDriver) -> None:
        self._driver = driver
        for method in _WORK:
            setattr(self, method, self._served(method))

    def _served(self, method: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def serve(request: Any, context: Any) -> Any:
            return await self._driver.meet(method, request, lambda: _WORK[method](self._driver, request))

        return serve


def _plugin_info(driver: ScriptedDriver, request: Any) -> Any:
    return pb.GetPluginInfoResponse(name=driver.name, vendor_version="1")


def _plugin_capabilities(driver: ScriptedDriver, request: Any) -> Any:
    kinds = pb.PluginCapability.Service.Type
    services = [pb.PluginCapability.Service(type=kinds.Value(name)) for name in driver.abilities.plugin]
    return pb.GetPluginCapabilitiesResponse(capabilities=[pb.PluginCapability(service=each) for each in services])


def _controller_capabilities(driver: ScriptedDriver, request: Any) -> Any:
    kind = pb.ControllerServiceCapability
    rpcs = [kind.RPC(type=kind.RPC.Type.Value(name)) for name in driver.abilities.rpcs]
    return pb.ControllerGetCapabilitiesResponse(capabilities=[kind(rpc=rpc) for rpc in rpcs])


def _node_capabilities(driver: ScriptedDriver, request: Any) -> Any:
    kind = pb.NodeServiceCapability
    rpcs = [kind.RPC(type=kind.RPC.Type.Value(name)) for name in driver.abilities.node]
    return pb.NodeGetCapabilitiesResponse(capabilities=[kind(rpc=rpc) for rpc in rpcs])


def _group_capabilities(driver: ScriptedDriver, request: Any) -> Any:
    kind = pb.GroupControllerServiceCapability
    rpcs = [kind.RPC(type=kind.RPC.Type.Value(name)) for name in driver.abilities.group]
    return pb.GroupControllerGetCapabilitiesResponse(capabilities=[kind(rpc=rpc) for rpc in rpcs])


def _node_info(driver: ScriptedDriver, request: Any) -> Any:
    return pb.NodeGetInfoResponse(node_id="node-1", accessible_topology=pb.Topology(segments=driver.topology))


def _create_volume(driver: ScriptedDriver, request: Any) -> Any:
    backend = driver.backend
    if request.name not in backend.ids_by_name:
        volume_id = f"vol-{len(backend.ids_by_name)}-{request.name[-12:]}"
        volume = pb.Volume(volume_id=volume_id, volume_context={"made": "yes"})
        volume.capacity_bytes = request.capacity_range.required_bytes - driver.makes_small_by
        if request.HasField("volume_content_source"):
            volume.content_source.CopyFrom(request.volume_content_source)
        preferred = request.accessibility_requirements.preferred
        if preferred:
            volume.accessible_topology.append(preferred[0])
        elif driver.topology:
            volume.accessible_topology.append(pb.Topology(segments=driver.topology))
        backend.ids_by_name[request.name] = volume_id
        backend.volumes[volume_id] = volume
    return pb.CreateVolumeResponse(volume=backend.volumes[backend.ids_by_name[request.name]])


def _delete_volume(driver: ScriptedDriver, request: Any) -> Any:
    backend = driver.backend
    if backend.published.get(request.volume_id):
        raise CsiError("DeleteVolume", "FAILED_PRECONDITION", "the volume is published")
    backend.volumes.pop(request.volume_id, None)
    for name in [name for name, each in backend.ids_by_name.items() if each == request.volume_id]:
        del backend.ids_by_name[name]
    return pb.DeleteVolumeResponse()


def _publish(driver: ScriptedDriver, request: Any) -> Any:
    _known(driver, request.volume_id)
    driver.backend.published.setdefault(request.volume_id, set()).add(request.node_id)
    return pb.ControllerPublishVolumeResponse(publish_context=driver.publish_context)


def _unpublish(driver: ScriptedDriver, request: Any) -> Any:
    driver.backend.published.get(request.volume_id, set()).discard(request.node_id)
    return pb.ControllerUnpublishVolumeResponse()


def _list_volumes(driver: ScriptedDriver, request: Any) -> Any:
    entry = pb.ListVolumesResponse.Entry
    status = pb.ListVolumesResponse.VolumeStatus
    backend = driver.backend
    entries = []
    for volume in backend.volumes.values():
        condition = pb.VolumeCondition(
            abnormal=volume.volume_id in backend.abnormal, message=backend.abnormal.get(volume.volume_id, "fine")
        )
        nodes = sorted(backend.published.get(volume.volume_id, ()))
        entries.append(entry(volume=volume, status=status(published_node_ids=nodes, volume_condition=condition)))
    start = int(request.starting_token or 0)
    end = start + (request.max_entries or len(entries))
    return pb.ListVolumesResponse(entries=entries[start:end], next_token=str(end) if end < len(entries) else "")


def _get_volume(driver: ScriptedDriver, request: Any) -> Any:
    volume = _known(driver, request.volume_id)
    trouble = driver.backend.abnormal.get(request.volume_id)
    condition = pb.VolumeCondition(abnormal=trouble is not None, message=trouble or "fine")
    status = pb.ControllerGetVolumeResponse.VolumeStatus(volume_condition=condition)
    return pb.ControllerGetVolumeResponse(volume=volume, status=status)


def _health(driver: ScriptedDriver, volume_id: str) -> pb.VolumeHealth:
    health = pb.VolumeHealth(volume_id=volume_id)
    if volume_id in driver.backend.abnormal:
        health.health_statuses.add(
            status=pb.VolumeHealthErrorType.DEGRADED, reason="Scripted", message=driver.backend.abnormal[volume_id]
        )
    return health


def _get_health(driver: ScriptedDriver, request: Any) -> Any:
    _known(driver, request.volume_id)
    return pb.ControllerGetVolumeHealthResponse(volume_health=_health(driver, request.volume_id))


def _list_health(driver: ScriptedDriver, request: Any) -> Any:
    """Only what is not well, one volume to a page, so that callers have to follow the token."""
    sick = sorted(driver.backend.abnormal)
    at = int(request.starting_token or 0)
    entries = [_health(driver, volume_id) for volume_id in sick[at : at + 1]]
    token = str(at + 1) if at + 1 < len(sick) else ""
    return pb.ControllerListVolumeHealthResponse(entries=entries, next_token=token)


def _capacity(driver: ScriptedDriver, request: Any) -> Any:
    used = sum(volume.capacity_bytes for volume in driver.backend.volumes.values())
    return pb.GetCapacityResponse(available_capacity=max(0, driver.capacity_bytes - used))


def _create_snapshot(driver: ScriptedDriver, request: Any) -> Any:
    snapshots = driver.backend.snapshots
    snapshot_id = f"snap-{request.name}"
    if snapshot_id not in snapshots:
        source = _known(driver, request.source_volume_id)
        snapshots[snapshot_id] = pb.Snapshot(
            snapshot_id=snapshot_id,
            source_volume_id=request.source_volume_id,
            size_bytes=source.capacity_bytes,
            creation_time=Timestamp(seconds=1_700_000_000, nanos=5),
        )
    is_ready = driver.count("CreateSnapshot") > driver.ready_after
    snapshots[snapshot_id].ready_to_use = is_ready
    return pb.CreateSnapshotResponse(snapshot=snapshots[snapshot_id])


def _delete_snapshot(driver: ScriptedDriver, request: Any) -> Any:
    driver.backend.snapshots.pop(request.snapshot_id, None)
    return pb.DeleteSnapshotResponse()


def _list_snapshots(driver: ScriptedDriver, request: Any) -> Any:
    entry = pb.ListSnapshotsResponse.Entry
    found = [s for s in driver.backend.snapshots.values() if request.snapshot_id in ("", s.snapshot_id)]
    return pb.ListSnapshotsResponse(entries=[entry(snapshot=snapshot) for snapshot in found])


def _expand(driver: ScriptedDriver, request: Any) -> Any:
    volume = _known(driver, request.volume_id)
    volume.capacity_bytes = max(volume.capacity_bytes, request.capacity_range.required_bytes)
    return pb.ControllerExpandVolumeResponse(
        capacity_bytes=volume.capacity_bytes, node_expansion_required=driver.node_expansion
    )


def _modify(driver: ScriptedDriver, request: Any) -> Any:
    _known(driver, request.volume_id)
    driver.backend.parameters[request.volume_id] = dict(request.mutable_parameters)
    return pb.ControllerModifyVolumeResponse()


def _create_group(driver: ScriptedDriver, request: Any) -> Any:
    group_id = f"group-{request.name}"
    if group_id not in driver.backend.groups:
        group = pb.VolumeGroupSnapshot(
            group_snapshot_id=group_id, creation_time=Timestamp(seconds=1_700_000_000), ready_to_use=True
        )
        for volume_id in request.source_volume_ids:
            volume = _known(driver, volume_id)
            member = pb.Snapshot(
                snapshot_id=f"{group_id}-{volume_id}",
                source_volume_id=volume_id,
                size_bytes=volume.capacity_bytes,
                creation_time=Timestamp(seconds=1_700_000_000),
                ready_to_use=True,
                group_snapshot_id=group_id,
            )
            group.snapshots.append(member)
            driver.backend.snapshots[member.snapshot_id] = member
        driver.backend.groups[group_id] = group
    return pb.CreateVolumeGroupSnapshotResponse(group_snapshot=driver.backend.groups[group_id])


def _get_group(driver: ScriptedDriver, request: Any) -> Any:
    found = driver.backend.groups.get(request.group_snapshot_id)
    if found is None:
        raise CsiError("GetVolumeGroupSnapshot", "NOT_FOUND", request.group_snapshot_id)
    return pb.GetVolumeGroupSnapshotResponse(group_snapshot=found)


def _delete_group(driver: ScriptedDriver, request: Any) -> Any:
    driver.backend.groups.pop(request.group_snapshot_id, None)
    for snapshot_id in request.snapshot_ids:
        driver.backend.snapshots.pop(snapshot_id, None)
    return pb.DeleteVolumeGroupSnapshotResponse()


def _known(driver: ScriptedDriver, volume_id: str) -> pb.Volume:
    found = driver.backend.volumes.get(volume_id)
    if found is None:
        raise CsiError("", "NOT_FOUND", f"there is no volume {volume_id}")
    return found


_WORK: dict[str, Callable[[ScriptedDriver, Any], Any]] = {
    "GetPluginInfo": _plugin_info,
    "GetPluginCapabilities": _plugin_capabilities,
    "Probe": lambda driver, request: pb.ProbeResponse(),
    "ControllerGetCapabilities": _controller_capabilities,
    "NodeGetCapabilities": _node_capabilities,
    "GroupControllerGetCapabilities": _group_capabilities,
    "NodeGetInfo": _node_info,
    "CreateVolume": _create_volume,
    "DeleteVolume": _delete_volume,
    "ControllerPublishVolume": _publish,
    "ControllerUnpublishVolume": _unpublish,
    "ListVolumes": _list_volumes,
    "ControllerGetVolume": _get_volume,
    "ControllerGetVolumeHealth": _get_health,
    "ControllerListVolumeHealth": _list_health,
    "GetCapacity": _capacity,
    "CreateSnapshot": _create_snapshot,
    "DeleteSnapshot": _delete_snapshot,
    "ListSnapshots": _list_snapshots,
    "ControllerExpandVolume": _expand,
    "ControllerModifyVolume": _modify,
    "CreateVolumeGroupSnapshot": _create_group,
    "GetVolumeGroupSnapshot": _get_group,
    "DeleteVolumeGroupSnapshot": _delete_group,
}
