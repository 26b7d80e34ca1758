"""The one connection to the driver, shared by all roles: what the driver can do, and whether it is there.

Owns: connecting, probing, discovering what the driver can do, and noticing a lost connection. The official sidecars
exit when the connection is lost; here the roles are stopped, and started again with what the driver can do then.
Start reading at: `DriverConnection.wait_for_name`, `DriverConnection.discover`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from moorage.csi import csi_pb2 as pb
from moorage.csi.capabilities import Capabilities, read_capabilities
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.log import get_logger
from moorage.sidecars.errors import SidecarError

log = get_logger(__name__)

T = TypeVar("T")

_CONNECT_TRY_S = 10.0
_DISCOVER_TIMEOUT_S = 10.0
_PROBE_PAUSE_S = 1.0


@dataclass(frozen=True)
class DriverNode:
    """This node, as the driver sees it (only asked for with --node-deployment)."""

    node_id: str = ""
    segments: dict[str, str] = field(default_factory=dict)


class DriverConnection:
    """The driver behind one socket."""

    def __init__(self, address: str, observe: Callable[[str, str, str, float], None] | None = None) -> None:
        self.name = "unknown-driver"
        self.capabilities = Capabilities()
        self.node = DriverNode()
        self._observe = observe
        self._lost = asyncio.Event()
        self.client = CsiClient(address, on_connection_lost=self._lost.set, observe=self._measure)

    async def wait_for_name(self) -> None:
        """Connect and read the driver's name. The registrar needs nothing else."""
        await self._connected()
        self._lost.clear()
        self.name = self.client.calls.driver = await self._retry(self._learn_name)

    async def discover(self, ask_node: bool = False) -> None:
        """Wait until the driver is ready, and read what it can do."""

        async def ask() -> None:
            await self._ready()
            await self._learn(ask_node)

        await self._retry(ask)

    async def wait_lost(self) -> None:
        """Return when the connection has been lost since the last discovery."""
        await self._lost.wait()

    async def close(self) -> None:
        await self.client.close()

    async def _retry(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call `ask` until it succeeds. A driver may hang or fail for a while; each failure is logged."""
        while True:
            try:
                return await ask()
            except CsiError as error:
                log.warning("driver does not answer", address=str(self.client.path), reason=str(error))
            await asyncio.sleep(_PROBE_PAUSE_S)

    async def _connected(self) -> None:
        while True:
            try:
                await self.client.wait_connected(_CONNECT_TRY_S)
                return
            except CsiError:
                log.info("still connecting", address=str(self.client.path))

    async def _ready(self) -> None:
        while True:
            answer = await self.client.Probe(pb.ProbeRequest(), timeout_s=_DISCOVER_TIMEOUT_S)
            if not answer.HasField("ready") or answer.ready.value:
                return
            log.info("driver is not ready yet", address=str(self.client.path))
            await asyncio.sleep(_PROBE_PAUSE_S)

    async def _learn_name(self) -> str:
        info = await self.client.GetPluginInfo(pb.GetPluginInfoRequest(), timeout_s=_DISCOVER_TIMEOUT_S)
        if not info.name:
            raise SidecarError(f"the driver at {self.client.path} has no name: GetPluginInfo returned an empty one")
        log.info("driver found", driver=info.name, version=info.vendor_version)
        return info.name

    async def _learn(self, ask_node: bool) -> None:
        self.capabilities = await read_capabilities(self.client, _DISCOVER_TIMEOUT_S)
        if ask_node:
            answer = await self.client.NodeGetInfo(pb.NodeGetInfoRequest(), timeout_s=_DISCOVER_TIMEOUT_S)
            self.node = DriverNode(answer.node_id, dict(answer.accessible_topology.segments))
        log.info("driver is ready", driver=self.name, capabilities=len(self.capabilities.rpcs))

    def _measure(self, path: str, code: str, seconds: float) -> None:
        if self._observe is not None:
            self._observe(self.name, path, code, seconds)
