"""A gRPC server on one unix socket, and the one place that surrounds every call.

Owns: the socket file (replacing a dead one, refusing a live one, mode 0600), the graceful stop,
and for each call: size limits, one log line without secrets, a metric, and turning a MoorageError
into a status. Services raise errors and return messages; they never touch the context.
May not touch: what the calls mean.
Start reading at: `CsiServer`.
"""

import asyncio
import inspect
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.empty_pb2 import Empty as Malformed
from google.protobuf.message import DecodeError, Message

from moorage.csi import limits, redact
from moorage.csi.endpoint import grpc_target, is_live, socket_path_from
from moorage.csi.errors import EndpointInUse, NotServed
from moorage.csi.metrics import CallMetrics
from moorage.csi.runtime import keep_running
from moorage.errors import InvalidRequest, MoorageError
from moorage.log import get_logger

log = get_logger(__name__)

LARGEST_REQUEST_BYTES = 4 * 1024 * 1024

_QUIET = frozenset({"Probe", "NodeGetVolumeStats", "GetCapacity", "NodeGetVolumeHealth", "NodeGetStorageHealth"})
"""Asked again and again by machines: their successes are logged at debug level."""


class CsiServer:
    """Serves gRPC services on one endpoint; use as `async with`, or `start` and `stop`.

    Services are added through `grpc`, with the generated `add_…Servicer_to_server` functions.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        driver_name: str = "",
        metrics: CallMetrics | None = None,
        log_calls: bool = True,
    ) -> None:
        self.path = socket_path_from(endpoint)
        self._inode = 0
        self._surround = _Surround(driver_name, metrics, log_calls)
        keep_running()
        self.grpc: Any = grpc.aio.server(
            interceptors=[self._surround],
            options=[
                ("grpc.max_receive_message_length", LARGEST_REQUEST_BYTES),
                ("grpc.so_reuseport", 0),
            ],
        )

    @property
    def running(self) -> int:
        """How many operations are running, also those whose caller has gone away."""
        return len(self._surround.operations)

    def check_free(self) -> None:
        """EndpointInUse when another process answers; for owners that have more to start first."""
        if is_live(self.path):
            raise EndpointInUse(str(self.path))

    async def start(self) -> None:
        """Listen; EndpointInUse when another process already does."""
        self.check_free()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        # The socket must never be open to others, not even between bind and chmod.
        before = os.umask(0o177)
        try:
            self.grpc.add_insecure_port(grpc_target(self.path))
        finally:
            os.umask(before)
        self.path.chmod(0o600)
        self._inode = _inode_of(self.path)
        await self.grpc.start()

    async def stop(self, grace_s: float = 30.0) -> None:
        """Accept no more calls, then let running operations finish, for at most `grace_s`."""
        deadline = time.monotonic() + grace_s
        await self.grpc.stop(grace_s)
        operations = self._surround.operations
        if operations:
            left = max(0.0, deadline - time.monotonic())
            await asyncio.wait(set(operations), timeout=left)
        if operations:
            log.warning("operations were still running at the end", count=len(operations))
        # Another process may have put its own socket here while the last operations finished.
        if self._inode and self._inode == _inode_of(self.path):
            self.path.unlink(missing_ok=True)

    async def wait_closed(self) -> None:
        await self.grpc.wait_for_termination()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class _Surround(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no type hints
    """Wraps every method of every service."""

    def __init__(self, driver_name: str, metrics: CallMetrics | None, log_calls: bool) -> None:
        self._driver_name = driver_name
        self._metrics = metrics
        self._log_calls = log_calls
        self.operations: set[asyncio.Task[Any]] = set()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        options = {
            "request_deserializer": _decoder(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            wrapped = self._stream(details.method, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(wrapped, **options)
        return grpc.unary_unary_rpc_method_handler(self._unary(details.method, handler.unary_unary), **options)

    def _unary(self, name: str, method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Message, context: Any) -> Any:
            outcome = _Outcome(name, request)
            with outcome:
                _check(request)
                outcome.response = await self._to_the_end(_invoke(method, request, context, name))
            await self._finish(outcome, context)
            return outcome.response

        return call

    def _stream(self, name: str, method: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Message, context: Any) -> AsyncIterator[Any]:
            outcome = _Outcome(name, request)
            with outcome:
                _check(request)
                async for message in _messages(method, request, context, name):
                    yield message
            await self._finish(outcome, context)

        return call

    async def _to_the_end(self, work: Awaitable[Any]) -> Any:
        """A caller that goes away does not stop an operation in the middle: it runs to its end."""
        task = asyncio.ensure_future(work)
        self.operations.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self.operations.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has gone; the outcome is known again when it asks again

    async def _finish(self, outcome: "_Outcome", context: Any) -> None:
        if self._metrics is not None:
            self._metrics.observe(self._driver_name, outcome.name, outcome.code, outcome.seconds)
        if self._log_calls:
            outcome.write_log_line()
        if outcome.code != "OK":
            await context.abort(grpc.StatusCode[outcome.code], outcome.message or outcome.code)


def _decoder(decode: Callable[[bytes], Message]) -> Callable[[bytes], Message]:
    """Decode a request. One that is malformed becomes an Empty, so that it is answered like any wrong request."""

    def decoded(raw: bytes) -> Message:
        try:
            return decode(raw)
        except DecodeError:
            return Malformed()

    return decoded


def _check(request: Message) -> None:
    if isinstance(request, Malformed):
        raise InvalidRequest("the request cannot be decoded: it is no message of this method")
    limits.check_request(request)


class _Outcome:
    """What became of one call. As a context manager it turns exceptions into code and message."""

    def __init__(self, name: str, request: Message) -> None:
        self.name = name
        self.request = request
        self.response: Any = None
        self.code = "OK"
        self.message = ""
        self._started = time.perf_counter()
        self.seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.seconds = time.perf_counter() - self._started
        if error is None:
            return True
        if isinstance(error, MoorageError):
            # It may name files of a tenant, in any bytes; a status is Unicode.
            self.code, self.message = error.code, str(error).encode("utf-8", "backslashreplace").decode()
            return True
        if not isinstance(error, Exception):
            self.code, self.message = "CANCELLED", "the caller went away"
            self.write_log_line()
            return False
        # The traceback is for the log; the caller learns only that it is there.
        log.exception("call failed unexpectedly", method=self.name)
        self.code = "INTERNAL"
        self.message = f"{self.method} failed unexpectedly ({type(error).__name__}); see the log of this process"
        return True

    @property
    def method(self) -> str:
        return self.name.rpartition("/")[2]

    def write_log_line(self) -> None:
        quiet = self.code == "OK" and (self.method in _QUIET or self.method.endswith("GetCapabilities"))
        if quiet and not log.is_debug():
            return
        write = log.debug if quiet else log.info
        fields = {"method": self.method, "code": self.code, "seconds": self.seconds}
        if self.message:
            fields["error"] = self.message
        write("call", **fields, request=redact.one_line(self.request))


def _inode_of(path: Path) -> int:
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return 0


async def _invoke(method: Callable[..., Any], request: Message, context: Any, name: str) -> Any:
    try:
        answer = method(request, context)
    except NotImplementedError:  # the generated base class, for a method that a service leaves out
        raise NotServed(f"{name} is not served by this process") from None
    return await answer if inspect.isawaitable(answer) else answer


async def _messages(method: Callable[..., Any], request: Message, context: Any, name: str) -> AsyncIterator[Any]:
    try:
        answer = method(request, context)
    except NotImplementedError:
        raise NotServed(f"{name} is not served by this process") from None
    async for message in answer:
        yield message
