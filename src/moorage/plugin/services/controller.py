"""The Controller service: volumes, snapshots, attaching and health, put together.

Owns: the composition, and the list of what it can do.
Start reading at: `controller_volumes`, `controller_snapshots`, `controller_attach`, `controller_health`.
"""

from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.plugin.context import PluginContext
from moorage.plugin.services.capabilities import controller_capabilities
from moorage.plugin.services.controller_attach import AttachCalls
from moorage.plugin.services.controller_health import HealthCalls
from moorage.plugin.services.controller_snapshots import SnapshotCalls
from moorage.plugin.services.controller_volumes import VolumeCalls


class ControllerService(VolumeCalls, SnapshotCalls, AttachCalls, HealthCalls, csi_pb2_grpc.ControllerServicer):
    """CSI messages in, domain calls out."""

    def __init__(self, parts: PluginContext) -> None:
        self._parts = parts

    async def ControllerGetCapabilities(
        self, request: pb.ControllerGetCapabilitiesRequest, context: Any
    ) -> pb.ControllerGetCapabilitiesResponse:
        capabilities = controller_capabilities(self._parts.settings)
        return pb.ControllerGetCapabilitiesResponse(capabilities=capabilities)
