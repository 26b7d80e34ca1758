"""The Identity service: who the plugin is, what it offers, whether it is ready.

Owns: three answers. Probe is cheap and never waits for a pool.
Start reading at: `IdentityService`.
"""

from typing import Any

from google.protobuf.wrappers_pb2 import BoolValue

from moorage import __version__
from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.plugin.services.capabilities import plugin_capabilities
from moorage.plugin.settings import PluginSettings


class IdentityService(csi_pb2_grpc.IdentityServicer):
    """Serves in every process. `is_ready` is set once pools are open and old work is swept."""

    def __init__(self, settings: PluginSettings) -> None:
        self._settings = settings
        self.is_ready = False

    async def GetPluginInfo(self, request: pb.GetPluginInfoRequest, context: Any) -> pb.GetPluginInfoResponse:
        manifest = {"scope": self._settings.scope, "csi": self._settings.csi_version}
        return pb.GetPluginInfoResponse(name=self._settings.driver_name, vendor_version=__version__, manifest=manifest)

    async def GetPluginCapabilities(
        self, request: pb.GetPluginCapabilitiesRequest, context: Any
    ) -> pb.GetPluginCapabilitiesResponse:
        return pb.GetPluginCapabilitiesResponse(capabilities=plugin_capabilities(self._settings))

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> pb.ProbeResponse:
        return pb.ProbeResponse(ready=BoolValue(value=self.is_ready))
