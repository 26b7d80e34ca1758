"""A typed CSI client: every method of every service, with deadlines, reconnect and clear errors.

Owns: the gRPC channel to one driver's socket. A driver may hang, crash and come back: every call has a deadline, and
gRPC connects again when the socket returns. The client never retries a call.
Start reading at: `CsiClient`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from moorage.csi.endpoint import grpc_target, socket_path_from
from moorage.csi.errors import CsiError
from moorage.csi.generated import csi_pb2 as pb
from moorage.csi.generated import registration_pb2
from moorage.csi.generated.csi_calls import CsiCalls
from moorage.csi.pending import Calls
from moorage.csi.runtime import keep_running

_Response = TypeVar("_Response", bound=Message)

LARGEST_ANSWER_BYTES = 64 * 1024 * 1024
_READY = grpc.ChannelConnectivity.READY
_BETWEEN_PROBES_S = 0.05
_IDENTITY_ONLY = 1  # of the bits of compression algorithms

_OPTIONS = [
    # By default gRPC sends the socket's path, percent-encoded, which some servers refuse.
    ("grpc.default_authority", "localhost"),
    # A driver that restarts must be reached within a second. gRPC's own back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 400),
    # Despite its name, this bounds one attempt to connect. A busy driver may take long to send its first frame; a
    # missing one refuses at once.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.enable_retries", 0),
    # Clients of the same socket share no connection, because each of them reports the loss of its own.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),  # `on_connection_lost` cannot tell an idle connection from a lost one
    ("grpc.max_receive_message_length", LARGEST_ANSWER_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
]


class CsiClient(CsiCalls):
    """A connection to one driver, with a coroutine for each CSI method.

    Call `await client.CreateVolume(pb.CreateVolumeRequest(...), timeout_s=30)`. A failed call raises CsiError.
    `on_connection_lost` is called in the event loop each time an established connection breaks. `observe` is called
    after each unary call with its path, its code and its seconds. `calls` holds the unary calls in flight.
    Use as `async with`, or call `close`.
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
        self.calls = Calls()
        self._channel: Any = None  # opened by the first call, because gRPC ties a channel to the running event loop
        self._methods: dict[str, Any] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._is_connected = False
        self._is_closed = False

    async def call(self, method: str, request: Message, timeout_s: float | None = None) -> Message:
        """Call a method by its name, `Node.NodeGetInfo` or `NodeGetInfo`, for a name known only at run time."""
        descriptor = method_named(method)
        path = f"/{descriptor.containing_service.full_name}/{descriptor.name}"
        return await self._unary(path, request, descriptor.output_type._concrete_class, timeout_s)

    async def registration_info(self, timeout_s: float | None = None) -> registration_pb2.PluginInfo:
        """Ask a registration socket for the plugin's name, type, endpoint and versions."""
        path = "/pluginregistration.Registration/GetInfo"
        return await self._unary(path, registration_pb2.InfoRequest(), registration_pb2.PluginInfo, timeout_s)

    async def notify_registration(
        self, registered: bool, error: str = "", timeout_s: float | None = None
    ) -> registration_pb2.RegistrationStatusResponse:
        """Report to a registration socket whether the plugin was registered."""
        return await self._unary(
            "/pluginregistration.Registration/NotifyRegistrationStatus",
            registration_pb2.RegistrationStatus(plugin_registered=registered, error=error),
            registration_pb2.RegistrationStatusResponse,
            timeout_s,
        )

    async def wait_connected(self, timeout_s: float) -> None:
        """Return once connected. Raises CsiError UNAVAILABLE if that takes longer than `timeout_s`."""
        self._begin("connect")
        try:
            # Not wait_for, which loses a cancellation that arrives as the channel becomes ready.
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
                self._note_connected()
        except grpc.aio.UsageError:  # the channel was closed meanwhile
            self._check_open("connect")
            raise
        except TimeoutError:
            raise CsiError("connect", "UNAVAILABLE", f"nothing answered on {self.path} in {timeout_s:g} s") from None

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once the driver's Probe answers ready. Raises the CsiError of a failed Probe.

        If the connection breaks meanwhile, wait for the next one: it may be that of a driver that has just stopped.
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
                await asyncio.sleep(_BETWEEN_PROBES_S)

    async def close(self) -> None:
        """Close the connection. Running calls fail with UNAVAILABLE."""
        self._is_closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
            self._watcher = None
        if self._channel is not None:
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
        pending = self.calls.begin(method, request)
        code = "CANCELLED"  # until the call has ended otherwise
        if path not in self._methods:
            self._methods[path] = self._channel.unary_unary(path)
        try:
            call = self._methods[path](request.SerializeToString(), timeout=self._timeout(timeout_s))
            answer = self._read(method, response, await call)
            code = "OK"
            self._note_connected()
            return answer
        except grpc.aio.AioRpcError as failure:
            error = self._error(method, failure)
            code = error.code
            raise error from None
        except CsiError as failure:
            code = failure.code
            raise
        except asyncio.CancelledError:
            self._raise_if_closed(method)
            raise
        finally:
            seconds = asyncio.get_running_loop().time() - started
            self.calls.end(pending, code, seconds)
            if self._observe is not None:
                self._observe(path, code, seconds)

    async def _stream(
        self, path: str, request: Message, response: type[_Response], timeout_s: float | None
    ) -> AsyncIterator[_Response]:
        method = path.rpartition("/")[2]
        self._begin(method)
        call = self._channel.unary_stream(path)(request.SerializeToString(), timeout=self._timeout(timeout_s))
        try:
            async for message in call:
                yield self._read(method, response, message)
        except grpc.aio.AioRpcError as error:
            raise self._error(method, error) from None
        except asyncio.CancelledError:
            self._raise_if_closed(method)
            raise
        finally:
            call.cancel()  # no effect when the stream has ended

    def _timeout(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    def _read(self, method: str, response: type[_Response], message: bytes) -> _Response:
        try:
            return response.FromString(message)
        except DecodeError:
            text = f"the answer from {self.path} is not a {response.DESCRIPTOR.name}"
            raise CsiError(method, "INTERNAL", text) from None

    def _error(self, method: str, error: Any) -> CsiError:
        code, message = error.code().name, error.details() or ""
        return CsiError(method, code, f"no answer from {self.path}: {message}" if code == "UNAVAILABLE" else message)

    def _begin(self, method: str) -> None:
        """Open the channel and watch it. Raises CsiError if the client is closed: its driver may be unregistered."""
        self._check_open(method)
        if self._channel is None:
            keep_running()
            self._channel = grpc.aio.insecure_channel(grpc_target(self.path), options=_OPTIONS)
        if self._on_lost is not None and self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(self._on_lost), name=f"csi-connection {self.path}")

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise CsiError(method, "UNAVAILABLE", f"the connection to {self.path} was closed")

    def _raise_if_closed(self, method: str) -> None:
        """Tell a call that `close` ended from one whose task was cancelled: gRPC raises CancelledError for both."""
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            self._check_open(method)

    def _note_connected(self) -> None:
        """Remember a connection that may be lost before `_watch` sees it."""
        if self._watcher is not None and self._channel.get_state() is _READY:
            self._is_connected = True

    async def _watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` each time a connection ends: it broke, or the driver said goodbye."""
        state = self._channel.get_state()
        while state is not grpc.ChannelConnectivity.SHUTDOWN:
            if state is _READY:
                self._is_connected = True
            await self._channel.wait_for_state_change(state)
            before, state = state, self._channel.get_state()
            if self._is_connected and (before is _READY or state is not _READY):
                self._is_connected = False
                on_lost()


def method_named(name: str) -> Any:
    """Return the descriptor of `Service.Method` or `Method`. Raises CsiError if there is none."""
    service_name, _, method_name = name.strip("/").replace("/", ".").rpartition(".")
    service_name = service_name.removeprefix("csi.v1").strip(".")
    for service in pb.DESCRIPTOR.services_by_name.values():
        if service_name in ("", service.name) and method_name in service.methods_by_name:
            return service.methods_by_name[method_name]
    raise CsiError(name, "INVALID_ARGUMENT", "there is no such CSI method")
