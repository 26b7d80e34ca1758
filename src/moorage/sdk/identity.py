"""The Identity service, and the capabilities that follow from what a driver defines.

Owns: the derivation. A driver keeps no list of capabilities.
Start reading at: `controller_capabilities`.
"""

from typing import Any

from google.protobuf.wrappers_pb2 import BoolValue

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.sdk.driver import Driver

_Controller = pb.ControllerServiceCapability.RPC
_Node = pb.NodeServiceCapability.RPC
_Group = pb.GroupControllerServiceCapability.RPC
_Service = pb.PluginCapability.Service
_Expansion = pb.PluginCapability.VolumeExpansion


class IdentityService(csi_pb2_grpc.IdentityServicer):
    """Who the driver is. `is_started` is set once `setup` has returned."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.is_started = False

    async def GetPluginInfo(self, request: pb.GetPluginInfoRequest, context: Any) -> pb.GetPluginInfoResponse:
        return pb.GetPluginInfoResponse(name=self._driver.name, vendor_version=self._driver.version)

    async def GetPluginCapabilities(
        self, request: pb.GetPluginCapabilitiesRequest, context: Any
    ) -> pb.GetPluginCapabilitiesResponse:
        return pb.GetPluginCapabilitiesResponse(capabilities=plugin_capabilities(self._driver))

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> pb.ProbeResponse:
        return pb.ProbeResponse(ready=BoolValue(value=self.is_started and await self._driver.is_ready()))


def plugin_capabilities(driver: Driver) -> list[pb.PluginCapability]:
    services = []
    if driver.environment.serves_controller and driver.defines("create_volume"):
        services.append(_Service.CONTROLLER_SERVICE)
        if driver.defines("create_group"):
            services.append(_Service.GROUP_CONTROLLER_SERVICE)
        if driver.defines("allocated_blocks"):
            services.append(_Service.SNAPSHOT_METADATA_SERVICE)
    if type(driver).topology is not Driver.topology:
        services.append(_Service.VOLUME_ACCESSIBILITY_CONSTRAINTS)
    found = [pb.PluginCapability(service=_Service(type=each)) for each in services]
    if driver.defines("expand_volume") or driver.defines("expand_on_node"):
        found.append(pb.PluginCapability(volume_expansion=_Expansion(type=_Expansion.ONLINE)))
    return found


def controller_capabilities(driver: Driver) -> list[pb.ControllerServiceCapability]:
    offered = {
        _Controller.CREATE_DELETE_VOLUME: driver.defines("create_volume", "delete_volume"),
        _Controller.LIST_VOLUMES: driver.defines("create_volume"),
        _Controller.GET_VOLUME: driver.defines("create_volume"),
        _Controller.SINGLE_NODE_MULTI_WRITER: driver.defines("create_volume"),
        _Controller.GET_CAPACITY: driver.defines("capacity"),
        _Controller.EXPAND_VOLUME: driver.defines("expand_volume"),
        _Controller.MODIFY_VOLUME: driver.defines("modify_volume"),
        _Controller.VOLUME_CONDITION: driver.defines("volume_health"),
        _Controller.GET_VOLUME_HEALTH: driver.defines("volume_health"),
        _Controller.LIST_VOLUME_HEALTH: driver.defines("volume_health"),
        _Controller.CLONE_VOLUME: driver.defines("copy_volume"),
        _Controller.CREATE_DELETE_SNAPSHOT: driver.defines("create_snapshot", "delete_snapshot"),
        _Controller.LIST_SNAPSHOTS: driver.defines("create_snapshot"),
        _Controller.GET_SNAPSHOT: driver.defines("create_snapshot"),
        _Controller.PUBLISH_UNPUBLISH_VOLUME: driver.defines("attach", "detach"),
        _Controller.PUBLISH_READONLY: driver.defines("attach", "detach"),
        _Controller.LIST_VOLUMES_PUBLISHED_NODES: driver.defines("attach", "detach"),
    }
    kinds = [kind for kind, is_offered in offered.items() if is_offered]
    return [pb.ControllerServiceCapability(rpc=_Controller(type=kind)) for kind in kinds]


def node_capabilities(driver: Driver) -> list[pb.NodeServiceCapability]:
    offered = {
        _Node.STAGE_UNSTAGE_VOLUME: driver.defines("stage"),
        _Node.GET_VOLUME_STATS: driver.defines("publish"),
        _Node.EXPAND_VOLUME: driver.defines("expand_on_node"),
        _Node.SINGLE_NODE_MULTI_WRITER: driver.defines("publish"),
    }
    kinds = [kind for kind, is_offered in offered.items() if is_offered]
    return [pb.NodeServiceCapability(rpc=_Node(type=kind)) for kind in kinds]


def group_capabilities() -> list[pb.GroupControllerServiceCapability]:
    kind = _Group.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT
    return [pb.GroupControllerServiceCapability(rpc=_Group(type=kind))]
