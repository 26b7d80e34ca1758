"""A socket before a driver: each call passes through a function that may plant a bug.

Owns: the forwarding of every CSI method, the death of the driver, and the memory of one planted bug.
Start reading at: `Proxy`, `Call`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from moorage.csi.client import CsiClient, method_named
from moorage.csi.errors import CsiError

Mutation = Callable[["Call"], Awaitable[Any]]


@dataclass
class Call:
    """One call on its way. `forward` asks the real driver; a stream is a list of messages."""

    method: str
    request: Any
    proxy: "Proxy"

    @property
    def state(self) -> dict[str, Any]:
        """What the bug remembers between calls."""
        return self.proxy.state

    async def forward(self, request: Message | None = None, method: str = "") -> Any:
        name, request = method or self.method, request or self.request
        if method_named(name).server_streaming:
            return [message async for message in getattr(self.proxy.client, name)(request)]
        return await getattr(self.proxy.client, name)(request)

    def answer(self, **fields: Any) -> Any:
        """Return an answer of this method without asking the driver."""
        return method_named(self.method).output_type._concrete_class(**fields)

    def error(self, code: str, message: str = "planted") -> CsiError:
        return CsiError(self.method, code, message)

    async def crash(self) -> Any:
        await self.proxy.stop()
        await asyncio.Event().wait()

    async def hang(self) -> Any:
        await asyncio.Event().wait()


@dataclass
class Proxy:
    """Serves `path` with the calls of the driver behind `client`, changed by `mutation` for the methods in `on`."""

    path: Path
    client: CsiClient
    mutation: Mutation
    on: frozenset[str]
    state: dict[str, Any] = field(default_factory=dict)
    _server: Any = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()

    async def stop(self) -> None:
        """End as a killed process does: without waiting for any call."""
        if self._server is not None:
            server, self._server = self._server, None
            self.path.unlink(missing_ok=True)
            # Awaited by a task of its own: the call that asks for the end is one of those that are cancelled.
            self.state["stopping"] = asyncio.ensure_future(server.stop(0))

    async def ended(self) -> None:
        await self.stop()
        if (stopping := self.state.get("stopping")) is not None:
            await stopping


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no type hints
    """Every method of every CSI service."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def service(self, details: Any) -> Any:
        descriptor = method_named(details.method)
        name, request = descriptor.name, descriptor.input_type._concrete_class
        is_planted = name in self._proxy.on

        async def answer(message: Any, context: Any) -> Any:
            call = Call(name, message, self._proxy)
            try:
                return await (self._proxy.mutation(call) if is_planted else call.forward())
            except CsiError as error:
                await context.abort(grpc.StatusCode[error.code], error.message)

        async def stream(message: Any, context: Any) -> AsyncIterator[Any]:
            for one in await answer(message, context):
                yield one

        options = {"request_deserializer": request.FromString, "response_serializer": _bytes}
        if descriptor.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, **options)
        return grpc.unary_unary_rpc_method_handler(answer, **options)


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()
