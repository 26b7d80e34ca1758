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

import grpc
import grpc.aio
from google.protobuf.message import Message

from moorage.csi.endpoint import grpc_target, socket_path_from
from moorage.csi.errors import CsiError
from moorage.csi.generated import csi_pb2 as pb
from moorage.csi.generated import registration_pb2
from moorage.csi.generated.csi_calls import CsiCalls
from moorage.csi.runtime import keep_running

_Response = TypeVar("_Response", bound=Message)

_OPTIONS = [
    # grpc would percent-encode the socket's path here, which some servers refuse.
    ("grpc.default_authority", "localhost"),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name this is how long a connection may take to be made: a busy driver needs more than a moment
    # for its first frame, and one that is not there refuses at once.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),  # an idle connection would look like a lost one
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
]


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
        self._on_lost = on_connection_lost
        self._observe = observe
        keep_running()
        self._channel: Any = grpc.aio.insecure_channel(grpc_target(self.path), options=_OPTIONS)
        self._watcher: asyncio.Task[None] | None = None
        self._is_closed = False
        self._methods: dict[str, Any] = {}

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
        self._begin("connect")
        try:
            async with asyncio.timeout(timeout_s):  # wait_for loses a cancellation that comes as the channel is ready
                await self._channel.channel_ready()
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
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        self._is_closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
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
        code = "OK"
        if path not in self._methods:
            self._methods[path] = self._channel.unary_unary(
                path, request_serializer=_serialized, response_deserializer=response.FromString
            )
        call = self._methods[path](request, timeout=self.timeout_s if timeout_s is None else timeout_s)
        try:
            answer = await call
            if not isinstance(answer, response):  # grpc gives None for bytes that it cannot read
                code = "INTERNAL"
                raise CsiError(method, code, f"the answer from {self.path} is no {response.DESCRIPTOR.name}")
            return answer
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            raise self._error(method, error) from None
        finally:
            if self._observe is not None:
                self._observe(path, code, asyncio.get_running_loop().time() - started)

    async def _stream(
        self, path: str, request: Message, response: type[_Response], timeout_s: float | None
    ) -> AsyncIterator[_Response]:
        method = path.rpartition("/")[2]
        self._begin(method)
        call = self._channel.unary_stream(
            path, request_serializer=_serialized, response_deserializer=response.FromString
        )(request, timeout=self.timeout_s if timeout_s is None else timeout_s)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._error(method, error) from None
        finally:
            call.cancel()  # no effect when the stream has ended

    def _error(self, method: str, error: Any) -> CsiError:
        code = error.code().name
        message = error.details() or ""
        if code == "UNAVAILABLE":
            message = f"no answer from {self.path}: {message}"
        return CsiError(method, code, message)

    def _begin(self, method: str) -> None:
        """Before anything is asked. Whoever holds a client may find it closed: its driver has just gone."""
        if self._is_closed:
            raise CsiError(method, "UNAVAILABLE", f"the connection to {self.path} was closed")
        if self._on_lost is not None and self._watcher is None:
            self._watcher = asyncio.create_task(self._watch_connection(), name=f"csi-connection {self.path}")

    async def _watch_connection(self) -> None:
        ready = grpc.ChannelConnectivity.READY
        state = self._channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.SHUTDOWN:
            await self._channel.wait_for_state_change(state)
            before, state = state, self._channel.get_state(try_to_connect=True)
            if before is ready and state is not ready and self._on_lost is not None:
                self._on_lost()


def method_named(name: str) -> Any:
    """The descriptor of a CSI method given as `Service.Method` or `Method`; CsiError when there is none."""
    service_name, _, method_name = name.strip("/").replace("/", ".").rpartition(".")
    service_name = service_name.removeprefix("csi.v1").strip(".")
    for service in pb.DESCRIPTOR.services_by_name.values():
        if service_name in ("", service.name) and method_name in service.methods_by_name:
            return service.methods_by_name[method_name]
    raise CsiError(name, "INVALID_ARGUMENT", "there is no such CSI method")


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
