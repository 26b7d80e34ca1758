"""What this plugin says it can do, by scope and by announced CSI version.

Owns: the capability lists of the four services that have one.
Start reading at: `controller_capabilities`.
"""

from moorage.csi import csi_pb2 as pb
from moorage.plugin.settings import PluginSettings

_Controller = pb.ControllerServiceCapability.RPC
_Node = pb.NodeServiceCapability.RPC
_Group = pb.GroupControllerServiceCapability.RPC
_Service = pb.PluginCapability.Service
_Expansion = pb.PluginCapability.VolumeExpansion


def plugin_capabilities(settings: PluginSettings) -> list[pb.PluginCapability]:
    services = [
        _Service.CONTROLLER_SERVICE,
        _Service.GROUP_CONTROLLER_SERVICE,
        _Service.SNAPSHOT_METADATA_SERVICE,
    ]
    if not settings.is_shared:
        services.append(_Service.VOLUME_ACCESSIBILITY_CONSTRAINTS)
        if settings.shows_alpha:
            services.append(_Service.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS)
    expansion = pb.PluginCapability(volume_expansion=_Expansion(type=_Expansion.ONLINE))
    return [*(pb.PluginCapability(service=_Service(type=each)) for each in services), expansion]


def controller_capabilities(settings: PluginSettings) -> list[pb.ControllerServiceCapability]:
    kinds = [
        _Controller.CREATE_DELETE_VOLUME,
        _Controller.LIST_VOLUMES,
        _Controller.GET_CAPACITY,
        _Controller.CREATE_DELETE_SNAPSHOT,
        _Controller.LIST_SNAPSHOTS,
        _Controller.GET_SNAPSHOT,
        _Controller.CLONE_VOLUME,
        _Controller.EXPAND_VOLUME,
        _Controller.GET_VOLUME,
        _Controller.VOLUME_CONDITION,
        _Controller.SINGLE_NODE_MULTI_WRITER,
        _Controller.MODIFY_VOLUME,
    ]
    if settings.is_shared:
        kinds += [
            _Controller.PUBLISH_UNPUBLISH_VOLUME,
            _Controller.PUBLISH_READONLY,
            _Controller.LIST_VOLUMES_PUBLISHED_NODES,
        ]
    if settings.shows_alpha:
        kinds += [_Controller.GET_VOLUME_HEALTH, _Controller.LIST_VOLUME_HEALTH]
    return [pb.ControllerServiceCapability(rpc=_Controller(type=each)) for each in kinds]


def node_capabilities(settings: PluginSettings) -> list[pb.NodeServiceCapability]:
    kinds = [
        _Node.STAGE_UNSTAGE_VOLUME,
        _Node.GET_VOLUME_STATS,
        _Node.EXPAND_VOLUME,
        _Node.VOLUME_CONDITION,
        _Node.SINGLE_NODE_MULTI_WRITER,
    ]
    if settings.shows_alpha:
        kinds += [_Node.GET_VOLUME_HEALTH, _Node.GET_STORAGE_HEALTH]
    return [pb.NodeServiceCapability(rpc=_Node(type=each)) for each in kinds]


def group_capabilities() -> list[pb.GroupControllerServiceCapability]:
    kind = _Group.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT
    return [pb.GroupControllerServiceCapability(rpc=_Group(type=kind))]
