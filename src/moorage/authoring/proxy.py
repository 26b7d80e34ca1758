"""A socket between the callers of a driver and the driver: every call is passed on and observed.

Owns: the forwarding. The socket stays while the driver is restarted; calls get UNAVAILABLE meanwhile.
Start reading at: `ObservingProxy`.
"""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.csi.server import CsiServer
from moorage.errors import MoorageError

_CALLERS = {  # in a cluster of ours and in one with the official sidecars, each method has one kind of caller
    "CreateVolume": "provisioner",
    "DeleteVolume": "provisioner",
    "GetCapacity": "provisioner",
    "ControllerPublishVolume": "attacher",
    "ControllerUnpublishVolume": "attacher",
    "ListVolumes": "attacher",
    "ControllerExpandVolume": "resizer",
    "ControllerModifyVolume": "resizer",
    "ControllerGetVolume": "health monitor",
    "ControllerGetVolumeHealth": "health monitor",
    "ControllerListVolumeHealth": "health monitor",
}
_LONGEST_CALL_S = 600.0


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """One call and its answer; `response` is None if it failed."""

    method: str
    request: Any
    response: Any
    code: str
    message: str
    seconds: float

    @property
    def caller(self) -> str:
        """Who makes calls of this kind."""
        if self.method.startswith("Node"):
            return "kubelet"
        is_snapshot = "Snapshot" in self.method
        return _CALLERS.get(self.method, "snapshotter" if is_snapshot else "sidecars")

    @property
    def subject(self) -> str:
        """The volume or the snapshot that the call is about."""
        for field in ("volume_id", "snapshot_id", "group_snapshot_id", "name"):
            if value := getattr(self.request, field, ""):
                return str(value)
        return ""


class _Refused(MoorageError):
    """What the driver answered, in its own words."""

    def __init__(self, error: CsiError) -> None:
        super().__init__(error.message)
        self.__dict__["code"] = error.code


class ObservingProxy:
    """Serves one socket and passes calls on to another; use as `async with`."""

    def __init__(self, path: Path, driver: Path, observe: Callable[[ObservedCall], None]) -> None:
        self.path = path
        self._driver = driver
        self._observe = observe
        self._server = CsiServer(str(path), log_calls=False)
        services = pb.DESCRIPTOR.services_by_name.values()
        self._server.grpc.add_generic_rpc_handlers([self._handlers(service) for service in services])

    async def __aenter__(self) -> Self:
        self._client = CsiClient(str(self._driver))
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace_s=1.0)
        await self._client.close()

    def _handlers(self, service: Any) -> Any:
        methods = {method.name: self._handler(method) for method in service.methods}
        return grpc.method_handlers_generic_handler(service.full_name, methods)

    def _handler(self, method: Any) -> Any:
        kind = getattr(pb, method.input_type.name)
        options = {"request_deserializer": kind.FromString, "response_serializer": _serialized}
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._streaming(method.name), **options)
        return grpc.unary_unary_rpc_method_handler(self._unary(method.name), **options)

    def _unary(self, name: str) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            began = time.perf_counter()
            left = context.time_remaining()
            try:
                response = await self._client.call(name, request, _LONGEST_CALL_S if left is None else left)
            except CsiError as error:
                seconds = time.perf_counter() - began
                self._observe(ObservedCall(name, request, None, error.code, error.message, seconds))
                raise _Refused(error) from error
            self._observe(ObservedCall(name, request, response, "OK", "", time.perf_counter() - began))
            return response

        return answer

    def _streaming(self, name: str) -> Any:
        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            began, code, message = time.perf_counter(), "OK", ""
            try:
                async for response in getattr(self._client, name)(request, _LONGEST_CALL_S):
                    yield response
            except CsiError as error:
                code, message = error.code, error.message
                raise _Refused(error) from error
            finally:
                self._observe(ObservedCall(name, request, None, code, message, time.perf_counter() - began))

        return answer


def _serialized(answer: Any) -> bytes:
    return bytes(answer.SerializeToString())
