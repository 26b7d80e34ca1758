"""The registrar: tells the kubelet of this node where the driver's socket is.

Owns: the registration socket. It never talks to the API server; the kubelet asks the driver and writes CSINode.
Start reading at: `Registrar.run`.
"""

import asyncio
import os
import stat
from pathlib import Path
from typing import Any

from moorage.csi import registration_pb2, registration_pb2_grpc
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.csi.server import CsiServer
from moorage.errors import UsageError
from moorage.log import get_logger
from moorage.sidecars.errors import SidecarError

log = get_logger(__name__)

_CHECK_TIMEOUT_S = 2.0


class RegistrationRefused(SidecarError):
    """The kubelet refused the driver. Registration starts again."""


class _Service(registration_pb2_grpc.RegistrationServicer):
    """The service pluginregistration.Registration: names the driver, and receives the kubelet's decision."""

    def __init__(self, driver: str, endpoint: str) -> None:
        self._driver = driver
        self._endpoint = endpoint
        self.refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def GetInfo(self, request: Any, context: Any) -> registration_pb2.PluginInfo:
        return registration_pb2.PluginInfo(
            type="CSIPlugin", name=self._driver, endpoint=self._endpoint, supported_versions=["1.0.0"]
        )

    async def NotifyRegistrationStatus(self, request: Any, context: Any) -> registration_pb2.RegistrationStatusResponse:
        if request.plugin_registered:
            log.info("kubelet registered the driver", driver=self._driver)
        elif not self.refused.done():
            self.refused.set_result(request.error or "no reason given")
        return registration_pb2.RegistrationStatusResponse()


class Registrar:
    """Stands for node-driver-registrar."""

    def __init__(self, driver: str, kubelet_path: str, folder: str) -> None:
        if not kubelet_path:
            raise UsageError(
                "the registrar needs --kubelet-registration-path: the driver's socket as the kubelet sees it"
            )
        self._driver = driver
        self._kubelet_path = kubelet_path
        self.socket = Path(folder) / f"{driver}-reg.sock"

    async def run(self) -> None:
        """Serve until cancelled, then remove the socket. Raises RegistrationRefused if the kubelet says so."""
        self._clear_socket()
        service = _Service(self._driver, self._kubelet_path)
        server = CsiServer(f"unix://{self.socket}", driver_name=self._driver, log_calls=False)
        registration_pb2_grpc.add_RegistrationServicer_to_server(service, server.grpc)
        await server.start()
        log.info("registering", socket=str(self.socket), endpoint=self._kubelet_path)
        try:
            reason = await service.refused
            raise RegistrationRefused(f"the kubelet refused driver {self._driver}: {reason}")
        finally:
            await server.stop(grace_s=1.0)

    async def check(self) -> tuple[int, str]:
        """Return 200 if the socket answers with our name, 404 if it does not exist, 500 otherwise."""
        if not self.socket.exists():
            return 404, f"{self.socket} does not exist"
        try:
            async with CsiClient(f"unix://{self.socket}", timeout_s=_CHECK_TIMEOUT_S) as client:
                info = await client.registration_info(timeout_s=_CHECK_TIMEOUT_S)
        except CsiError as error:
            return 500, str(error)
        return (200, "ok") if info.name == self._driver else (500, f"{self.socket} belongs to {info.name}")

    def _clear_socket(self) -> None:
        """Remove the socket of an earlier process. Raises SidecarError if something else is in its place."""
        try:
            mode = os.lstat(self.socket).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise SidecarError(f"{self.socket} exists and is not a socket; remove it, then start again")
        self.socket.unlink()
