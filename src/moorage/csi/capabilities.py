"""What a driver offers, by the names that the protocol has for it.

Owns: reading the capabilities of each service, and the questions that callers ask about them.
Start reading at: `read_capabilities`, `Capabilities`.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.csi.generated import csi_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True)
class Capabilities:
    """What one driver process says that it can do. `rpcs` are those of the controller service."""

    plugin: frozenset[str] = frozenset()
    expansion: frozenset[str] = frozenset()
    rpcs: frozenset[str] = frozenset()
    group: frozenset[str] = frozenset()
    node: frozenset[str] = frozenset()
    serves_node: bool = False

    def controller(self, name: str) -> bool:
        """Whether the controller service exists and has this capability."""
        return "CONTROLLER_SERVICE" in self.plugin and name in self.rpcs

    @property
    def has_topology(self) -> bool:
        return "VOLUME_ACCESSIBILITY_CONSTRAINTS" in self.plugin

    @property
    def single_node_multi_writer(self) -> bool:
        return self.controller("SINGLE_NODE_MULTI_WRITER")

    @property
    def attaches(self) -> bool:
        return self.controller("PUBLISH_UNPUBLISH_VOLUME")

    @property
    def resizes(self) -> bool:
        expands_on_node = "CONTROLLER_SERVICE" in self.plugin and "EXPAND_VOLUME" in self.node
        return self.controller("EXPAND_VOLUME") or expands_on_node

    @property
    def groups(self) -> bool:
        return "CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT" in self.group

    @property
    def reports_health(self) -> bool:
        by_condition = self.controller("VOLUME_CONDITION") and (
            self.controller("LIST_VOLUMES") or self.controller("GET_VOLUME")
        )
        return by_condition or self.controller("GET_VOLUME_HEALTH") or self.controller("LIST_VOLUME_HEALTH")

    def names(self) -> frozenset[str]:
        """Return all of them as `plugin:X`, `expansion:X`, `controller:X`, `group:X`, `node:X` and `node:SERVICE`."""
        by_service = {
            "plugin": self.plugin,
            "expansion": self.expansion,
            "controller": self.rpcs,
            "group": self.group,
            "node": self.node | ({"SERVICE"} if self.serves_node else frozenset()),
        }
        return frozenset(f"{service}:{name}" for service, names in by_service.items() for name in names)


async def read_capabilities(client: CsiClient, timeout_s: float | None = None) -> Capabilities:
    """Ask each service of the driver. Raises CsiError if one fails otherwise than with UNIMPLEMENTED."""
    answer = await client.GetPluginCapabilities(pb.GetPluginCapabilitiesRequest(), timeout_s)
    services, expansion = pb.PluginCapability.Service.Type, pb.PluginCapability.VolumeExpansion.Type
    plugin = frozenset(_name(services, one.service.type) for one in answer.capabilities if one.HasField("service"))
    expansions = (one.volume_expansion for one in answer.capabilities if one.HasField("volume_expansion"))
    rpcs: frozenset[str] | None = None
    group: frozenset[str] | None = None
    if "CONTROLLER_SERVICE" in plugin:
        rpcs = await _if_served(_controller_capabilities(client, timeout_s))
    if "GROUP_CONTROLLER_SERVICE" in plugin:
        group = await _if_served(_group_capabilities(client, timeout_s))
    node = await _if_served(node_capabilities(client, timeout_s))
    return Capabilities(
        plugin,
        frozenset(_name(expansion, each.type) for each in expansions),
        rpcs or frozenset(),
        group or frozenset(),
        node or frozenset(),
        serves_node=node is not None,
    )


async def node_capabilities(client: CsiClient, timeout_s: float | None = None) -> frozenset[str]:
    """Return the names of what the node service offers, such as STAGE_UNSTAGE_VOLUME."""
    answer = await client.NodeGetCapabilities(pb.NodeGetCapabilitiesRequest(), timeout_s)
    return frozenset(_name(pb.NodeServiceCapability.RPC.Type, one.rpc.type) for one in answer.capabilities)


async def _controller_capabilities(client: CsiClient, timeout_s: float | None) -> frozenset[str]:
    answer = await client.ControllerGetCapabilities(pb.ControllerGetCapabilitiesRequest(), timeout_s)
    return frozenset(_name(pb.ControllerServiceCapability.RPC.Type, one.rpc.type) for one in answer.capabilities)


async def _group_capabilities(client: CsiClient, timeout_s: float | None) -> frozenset[str]:
    answer = await client.GroupControllerGetCapabilities(pb.GroupControllerGetCapabilitiesRequest(), timeout_s)
    return frozenset(_name(pb.GroupControllerServiceCapability.RPC.Type, one.rpc.type) for one in answer.capabilities)


async def _if_served(call: Awaitable[T]) -> T | None:
    """Return the answer, or None if this process does not serve the method.

    Every process of a driver announces all of its services. A controller process may serve no node calls, and
    a node process no controller calls.
    """
    try:
        return await call
    except CsiError as error:
        if not error.is_unimplemented:
            raise
        return None


def _name(enum: Any, number: int) -> str:
    """Return the enum value's name, or its number if a newer protocol defines one that we do not know."""
    try:
        return str(enum.Name(number))
    except ValueError:
        return str(number)
