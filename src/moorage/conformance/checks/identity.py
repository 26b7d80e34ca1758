"""Who the driver is, and whether it serves what it claims.

Owns: names, versions and capabilities, and the consistency between claims.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Any

from moorage.conformance.bench import Bench
from moorage.conformance.model import NotMet, Stage, check, require
from moorage.csi import csi_pb2 as pb
from moorage.csi.client import method_named
from moorage.csi.errors import CsiError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?/)?[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")

_PROBE_S = 3.0

_CLAIMED_CALLS = {
    "controller:CREATE_DELETE_VOLUME": ("CreateVolume", "DeleteVolume", "ValidateVolumeCapabilities"),
    "controller:PUBLISH_UNPUBLISH_VOLUME": ("ControllerPublishVolume", "ControllerUnpublishVolume"),
    "controller:LIST_VOLUMES": ("ListVolumes",),
    "controller:GET_CAPACITY": ("GetCapacity",),
    "controller:CREATE_DELETE_SNAPSHOT": ("CreateSnapshot", "DeleteSnapshot"),
    "controller:LIST_SNAPSHOTS": ("ListSnapshots",),
    "controller:GET_SNAPSHOT": ("GetSnapshot",),
    "controller:EXPAND_VOLUME": ("ControllerExpandVolume",),
    "controller:GET_VOLUME": ("ControllerGetVolume",),
    "controller:MODIFY_VOLUME": ("ControllerModifyVolume",),
    "controller:GET_VOLUME_HEALTH": ("ControllerGetVolumeHealth",),
    "controller:LIST_VOLUME_HEALTH": ("ControllerListVolumeHealth",),
    "group:CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT": (
        "CreateVolumeGroupSnapshot",
        "DeleteVolumeGroupSnapshot",
        "GetVolumeGroupSnapshot",
    ),
    "node:SERVICE": ("NodePublishVolume", "NodeUnpublishVolume", "NodeGetInfo"),
    "node:STAGE_UNSTAGE_VOLUME": ("NodeStageVolume", "NodeUnstageVolume"),
    "node:GET_VOLUME_STATS": ("NodeGetVolumeStats",),
    "node:EXPAND_VOLUME": ("NodeExpandVolume",),
}
_RELIES_ON = {
    "controller:LIST_VOLUMES_PUBLISHED_NODES": ("controller:PUBLISH_UNPUBLISH_VOLUME",),
    "controller:PUBLISH_READONLY": ("controller:PUBLISH_UNPUBLISH_VOLUME",),
    "controller:CLONE_VOLUME": ("controller:CREATE_DELETE_VOLUME",),
    "controller:VOLUME_CONDITION": ("controller:LIST_VOLUMES", "controller:GET_VOLUME"),
    "expansion:ONLINE": ("controller:EXPAND_VOLUME", "node:EXPAND_VOLUME"),
    "expansion:OFFLINE": ("controller:EXPAND_VOLUME",),
    "group:CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT": ("plugin:GROUP_CONTROLLER_SERVICE",),
}


@check("Identity.name", "GetPluginInfo gives a domain-style name of at most 63 characters.", stage=Stage.QUICK)
async def name(bench: Bench) -> None:
    info = await bench.client.GetPluginInfo(pb.GetPluginInfoRequest())
    good = 2 <= len(info.name) <= 63 and _NAME.fullmatch(info.name) is not None
    require(good, f"the name is {info.name!r}")


@check("Identity.version", "GetPluginInfo gives a vendor_version.", stage=Stage.QUICK)
async def version(bench: Bench) -> None:
    info = await bench.client.GetPluginInfo(pb.GetPluginInfoRequest())
    require(bool(info.vendor_version), "vendor_version is empty")


@check("Identity.capabilities", "GetPluginCapabilities lists only what CSI defines.", stage=Stage.QUICK)
async def plugin_capabilities(bench: Bench) -> None:
    answer = await bench.client.GetPluginCapabilities(pb.GetPluginCapabilitiesRequest())
    for entry in answer.capabilities:
        kind = entry.WhichOneof("type")
        require(kind is not None, "an entry has no type")
        if kind == "volume_expansion":
            _require_known(pb.PluginCapability.VolumeExpansion.Type.DESCRIPTOR, [entry.volume_expansion.type])
        else:
            _require_known(pb.PluginCapability.Service.Type.DESCRIPTOR, [entry.service.type])


@check("Identity.stable", "The capabilities are the same in every answer.", stage=Stage.QUICK)
async def stable(bench: Bench) -> None:
    answers = [
        sorted(
            str(entry)
            for entry in (await bench.client.GetPluginCapabilities(pb.GetPluginCapabilitiesRequest())).capabilities
        )
        for _ in range(3)
    ]
    require(answers[0] == answers[1] == answers[2], "GetPluginCapabilities differs between three answers")


@check("Identity.probe", "Probe answers, and says that the driver is ready.", stage=Stage.QUICK)
async def probe(bench: Bench) -> None:
    answer = await bench.client.Probe(pb.ProbeRequest())
    require(not answer.HasField("ready") or answer.ready.value, "ready is false")


@check(
    "Identity.probe-while-busy",
    "Probe answers within 3 seconds while other calls are running, because a liveness probe waits no longer.",
    "controller:CREATE_DELETE_VOLUME",
)
async def probe_while_busy(bench: Bench) -> None:
    with bench.given("CreateVolume.works"):
        pass
    work = asyncio.gather(*(bench.make(bench.create_request()) for _ in range(4)))
    try:
        for _ in range(10):
            await bench.client.Probe(pb.ProbeRequest(), _PROBE_S)
    finally:
        await asyncio.wait([work])
    work.result()


@check(
    "Claims.controller",
    "ControllerGetCapabilities lists only what CSI defines.",
    "plugin:CONTROLLER_SERVICE",
    stage=Stage.QUICK,
)
async def controller_capabilities(bench: Bench) -> None:
    answer = await bench.client.ControllerGetCapabilities(pb.ControllerGetCapabilitiesRequest())
    types = [entry.rpc.type for entry in answer.capabilities]
    _require_known(pb.ControllerServiceCapability.RPC.Type.DESCRIPTOR, types)


@check("Claims.node", "NodeGetCapabilities lists only what CSI defines.", "node:SERVICE", stage=Stage.QUICK)
async def node_capabilities(bench: Bench) -> None:
    answer = await bench.client.NodeGetCapabilities(pb.NodeGetCapabilitiesRequest())
    _require_known(pb.NodeServiceCapability.RPC.Type.DESCRIPTOR, [entry.rpc.type for entry in answer.capabilities])


@check(
    "Claims.group",
    "GroupControllerGetCapabilities lists at least one capability, and only what CSI defines.",
    "plugin:GROUP_CONTROLLER_SERVICE",
    stage=Stage.QUICK,
)
async def group_capabilities(bench: Bench) -> None:
    answer = await bench.client.GroupControllerGetCapabilities(pb.GroupControllerGetCapabilitiesRequest())
    require(bool(answer.capabilities), "the list is empty")
    types = [entry.rpc.type for entry in answer.capabilities]
    _require_known(pb.GroupControllerServiceCapability.RPC.Type.DESCRIPTOR, types)


@check("Claims.served", "No call that the claimed capabilities stand for is UNIMPLEMENTED.", stage=Stage.QUICK)
async def served(bench: Bench) -> None:
    for claim, methods in _CLAIMED_CALLS.items():
        for method in methods if bench.has(claim) else ():
            descriptor = method_named(method)
            try:
                await getattr(bench.client, descriptor.name)(descriptor.input_type._concrete_class())
            except NotMet:
                continue  # it hangs, so that it is served
            except CsiError as error:
                require(not error.is_unimplemented, f"{claim} is claimed, and {method} is UNIMPLEMENTED")


@check("Claims.complete", "A capability that relies on another one is claimed together with it.", stage=Stage.QUICK)
async def complete(bench: Bench) -> None:
    for claim, others in _RELIES_ON.items():
        holds = not bench.has(claim) or any(bench.has(other) for other in others)
        require(holds, f"{claim} is claimed without {' or '.join(others)}")


@check(
    "NodeGetInfo.works",
    "NodeGetInfo gives the same node_id each time, of at most 256 bytes, and no negative limit.",
    "node:SERVICE",
    stage=Stage.BASIC,
)
async def node_info(bench: Bench) -> None:
    answer = await bench.client.NodeGetInfo(pb.NodeGetInfoRequest())
    require(bool(answer.node_id), "node_id is empty")
    require(len(answer.node_id.encode()) <= 256, f"node_id has {len(answer.node_id.encode())} bytes")
    require(answer.node_id == bench.node.node_id, f"node_id was {bench.node.node_id!r}, now it is {answer.node_id!r}")
    require(answer.max_volumes_per_node >= 0, f"max_volumes_per_node is {answer.max_volumes_per_node}")


@check(
    "NodeGetInfo.topology",
    "A driver with topology says where the node is, in keys and values that can be labels of a node.",
    "node:SERVICE",
    "plugin:VOLUME_ACCESSIBILITY_CONSTRAINTS",
    stage=Stage.QUICK,
)
async def node_topology(bench: Bench) -> None:
    segments = dict(bench.node.accessible_topology.segments)
    require(bool(segments), "accessible_topology is empty")
    for key, value in segments.items():
        require(_KEY.fullmatch(key) is not None, f"the key {key!r} cannot be a label")
        require(_VALUE.fullmatch(value) is not None, f"the value {value!r} cannot be that of a label")
    require(len({key.lower() for key in segments}) == len(segments), "two keys differ only in their case")
    require(len({key.rpartition("/")[0] for key in segments}) == 1, "the keys have different prefixes")


def _require_known(enum: Any, numbers: Iterable[int]) -> None:
    for number in numbers:
        require(number != 0, "an entry is UNKNOWN")
        require(number in enum.values_by_number, f"an entry has the number {number}, which CSI v1.13 does not define")
