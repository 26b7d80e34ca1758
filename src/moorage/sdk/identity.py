"""The Identity service, and the capabilities that follow from what is served.

Owns: the derivation. Nothing keeps a list of capabilities of its own.
Start reading at: `controller_capabilities`.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.wrappers_pb2 import BoolValue

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.sdk.operations import ControllerOperations, NodeOperations

_Controller = pb.ControllerServiceCapability.RPC
_Node = pb.NodeServiceCapability.RPC
_Group = pb.GroupControllerServiceCapability.RPC
_Service = pb.PluginCapability.Service
_Expansion = pb.PluginCapability.VolumeExpansion

_CONTROLLER = {
    "CREATE_DELETE_VOLUME": ("create_volume", "delete_volume"),
    "LIST_VOLUMES": ("list_volumes",),
    "GET_VOLUME": ("get_volume",),
    "SINGLE_NODE_MULTI_WRITER": ("create_volume",),
    "GET_CAPACITY": ("capacity",),
    "EXPAND_VOLUME": ("expand_volume",),
    "MODIFY_VOLUME": ("modify_volume",),
    "CLONE_VOLUME": ("clones",),
    "CREATE_DELETE_SNAPSHOT": ("create_snapshot", "delete_snapshot"),
    "LIST_SNAPSHOTS": ("list_snapshots",),
    "GET_SNAPSHOT": ("get_snapshot",),
    "PUBLISH_UNPUBLISH_VOLUME": ("attach", "detach"),
    "PUBLISH_READONLY": ("attach", "detach"),
    "LIST_VOLUMES_PUBLISHED_NODES": ("attach", "detach", "list_volumes"),
    "VOLUME_CONDITION": ("volume_health",),
    "GET_VOLUME_HEALTH": ("volume_health",),
    "LIST_VOLUME_HEALTH": ("list_health",),
}
_NODE = {
    "STAGE_UNSTAGE_VOLUME": ("stage", "unstage"),
    "GET_VOLUME_STATS": ("stats",),
    "EXPAND_VOLUME": ("expand",),
    "SINGLE_NODE_MULTI_WRITER": ("publish",),
    "VOLUME_MOUNT_GROUP": ("mount_group",),
    "VOLUME_CONDITION": ("health",),
    "GET_VOLUME_HEALTH": ("health",),
    "GET_STORAGE_HEALTH": ("storage_health",),
}


@dataclass(frozen=True)
class Identity:
    """Who a driver is. `services` are names of plugin capabilities."""

    name: str
    version: str
    services: Sequence[str]
    expands: bool = False
    manifest: Mapping[str, str] = field(default_factory=dict)
    is_ready: Callable[[], Awaitable[bool]] | None = None  # asked once it has started; None: it is


class IdentityService(csi_pb2_grpc.IdentityServicer):
    """Served by every process. `is_started` is set once the driver is prepared."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.is_started = False

    async def GetPluginInfo(self, request: pb.GetPluginInfoRequest, context: Any) -> pb.GetPluginInfoResponse:
        who = self._identity
        return pb.GetPluginInfoResponse(name=who.name, vendor_version=who.version, manifest=who.manifest)

    async def GetPluginCapabilities(
        self, request: pb.GetPluginCapabilitiesRequest, context: Any
    ) -> pb.GetPluginCapabilitiesResponse:
        services = [_Service(type=_Service.Type.Value(name)) for name in self._identity.services]
        found = [pb.PluginCapability(service=each) for each in services]
        if self._identity.expands:
            found.append(pb.PluginCapability(volume_expansion=_Expansion(type=_Expansion.ONLINE)))
        return pb.GetPluginCapabilitiesResponse(capabilities=found)

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> pb.ProbeResponse:
        is_ready = self.is_started and (self._identity.is_ready is None or await self._identity.is_ready())
        return pb.ProbeResponse(ready=BoolValue(value=is_ready))


def controller_capabilities(operations: ControllerOperations) -> list[pb.ControllerServiceCapability]:
    kinds = [_Controller(type=_Controller.Type.Value(name)) for name in _announced(operations, _CONTROLLER)]
    return [pb.ControllerServiceCapability(rpc=kind) for kind in kinds]


def node_capabilities(operations: NodeOperations) -> list[pb.NodeServiceCapability]:
    kinds = [_Node(type=_Node.Type.Value(name)) for name in _announced(operations, _NODE)]
    return [pb.NodeServiceCapability(rpc=kind) for kind in kinds]


def group_capabilities() -> list[pb.GroupControllerServiceCapability]:
    kind = _Group.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT
    return [pb.GroupControllerServiceCapability(rpc=_Group(type=kind))]


def _announced(operations: ControllerOperations | NodeOperations, needs: Mapping[str, Sequence[str]]) -> Iterable[str]:
    return (name for name, calls in needs.items() if name not in operations.hidden and operations.serves(*calls))
