"""A typed CSI client: every method of every service, with deadlines, reconnect and clear errors.

Owns: the channel to one driver's socket. A driver may hang, crash and come back: every call has
a deadline, a lost connection is made again by itself, and its owner can be told about the loss.
May not touch: the meaning of calls; it never retries a call on its own.
Start reading at: `CsiClient`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from google.protobuf.message import DecodeError, Message

from moorage.csi.channel import CallFailed, Channel
from moorage.csi.endpoint import socket_path_from
from moorage.csi.errors import CsiError
from moorage.csi.generated import csi_pb2 as pb
from moorage.csi.generated import registration_pb2
from moorage.csi.generated.csi_calls import CsiCalls

_Response = TypeVar("_Response", bound=Message)

_BETWEEN_TRIES_S = 0.05


class CsiClient(CsiCalls):
    """`await client.CreateVolume(pb.CreateVolumeRequest(...), timeout_s=30)` and so for each method.

    A failed call raises CsiError. `on_connection_lost` is called in the event loop each time an
    established connection breaks. Use as `async with`, or call `close`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = 60.0,
        on_connection_lost: Callable[[], None] | None = None,
        observe: Callable[[str, str, float], None] | None = None,
    ) -> None:
        self.path = socket_path_from(endpoint)
        self.timeout_s = timeout_s
        self._observe = observe
        self._channel = Channel(str(self.path), on_connection_lost)
        self._is_closed = False

    async def call(self, method: str, request: Message, timeout_s: float | None = None) -> Message:
        """One call by its name, `Node.NodeGetInfo` or `NodeGetInfo`, for a name learnt at run time."""
        descriptor = method_named(method)
        path = f"/{descriptor.containing_service.full_name}/{descriptor.name}"
        return await self._unary(path, request, descriptor.output_type._concrete_class, timeout_s)

    async def registration_info(self, timeout_s: float | None = None) -> registration_pb2.PluginInfo:
        """For a registration socket: what the plugin says about itself."""
        path = "/pluginregistration.Registration/GetInfo"
        return await self._unary(path, registration_pb2.InfoRequest(), registration_pb2.PluginInfo, timeout_s)

    async def notify_registration(
        self, registered: bool, error: str = "", timeout_s: float | None = None
    ) -> registration_pb2.RegistrationStatusResponse:
        """For a registration socket: tell the plugin whether it was taken."""
        return await self._unary(
            "/pluginregistration.Registration/NotifyRegistrationStatus",
            registration_pb2.RegistrationStatus(plugin_registered=registered, error=error),
            registration_pb2.RegistrationStatusResponse,
            timeout_s,
        )

    async def wait_connected(self, timeout_s: float) -> None:
        """Return once connected; CsiError UNAVAILABLE when that takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._begin("connect")
                    try:
                        await self._channel.connected()
                        return
                    except CallFailed:  # nobody listens there yet
                        await asyncio.sleep(_BETWEEN_TRIES_S)
        except TimeoutError:
            raise CsiError("connect", "UNAVAILABLE", f"nothing answered on {self.path} in {timeout_s:g} s") from None

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once the driver's Probe says ready; a Probe that fails is raised as it is.

        A connection that breaks meanwhile is waited for again: it may be that of a driver just gone.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                await self.wait_connected(timeout_s)
                try:
                    answer = await self.Probe(pb.ProbeRequest())
                except CsiError as error:
                    if not error.is_unreachable:
                        raise
                else:
                    if not answer.HasField("ready") or answer.ready.value:
                        return
                await asyncio.sleep(_BETWEEN_TRIES_S)

    async def close(self) -> None:
        self._is_closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _unary(
        self, path: str, request: Message, response: type[_Response], timeout_s: float | None
    ) -> _Response:
        method = path.rpartition("/")[2]
        self._begin(method)
        started = asyncio.get_running_loop().time()
        code = "CANCELLED"  # until it has ended otherwise
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            answer = self._read(response, await self._channel.unary(path, request.SerializeToString(), timeout_s))
            code = "OK"
            return answer
        except CallFailed as error:
            code = error.code
            raise self._error(method, error) from None
        finally:
            if self._observe is not None:
                self._observe(path, code, asyncio.get_running_loop().time() - started)

    async def _stream(
        self, path: str, request: Message, response: type[_Response], timeout_s: float | None
    ) -> AsyncIterator[_Response]:
        method = path.rpartition("/")[2]
        self._begin(method)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        messages = self._channel.stream(path, request.SerializeToString(), timeout_s)
        try:
            async for message in messages:
                yield self._read(response, message)
        except CallFailed as error:
            raise self._error(method, error) from None
        finally:
            await messages.aclose()

    def _read(self, response: type[_Response], message: bytes) -> _Response:
        try:
            return response.FromString(message)
        except DecodeError:
            text = f"the answer from {self.path} is no {response.DESCRIPTOR.name}"
            raise CallFailed("INTERNAL", text) from None

    def _error(self, method: str, error: CallFailed) -> CsiError:
        message = f"no answer from {self.path}: {error.message}" if error.code == "UNAVAILABLE" else error.message
        return CsiError(method, error.code, message)

    def _begin(self, method: str) -> None:
        """Before anything is asked. Whoever holds a client may find it closed: its driver has just gone."""
        if self._is_closed:
            raise CsiError(method, "UNAVAILABLE", f"the connection to {self.path} was closed")


def method_named(name: str) -> Any:
    """The descriptor of a CSI method given as `Service.Method` or `Method`; CsiError when there is none."""
    service_name, _, method_name = name.strip("/").replace("/", ".").rpartition(".")
    service_name = service_name.removeprefix("csi.v1").strip(".")
    for service in pb.DESCRIPTOR.services_by_name.values():
        if service_name in ("", service.name) and method_name in service.methods_by_name:
            return service.methods_by_name[method_name]
    raise CsiError(name, "INVALID_ARGUMENT", "there is no such CSI method")
