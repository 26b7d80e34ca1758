"""gRPC calls to whoever listens on a socket: unary ones, and those that are answered by a stream.

Owns: connecting when a call needs it, deadlines, messages within bodies, and the status of a call.
May not touch: frames (`http2.py`); what a message means (`client.py`). It never tries again by itself.
Start reading at: `Channel.unary`.
"""

import asyncio
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import lru_cache
from urllib.parse import unquote

import hpack

from moorage.csi import http2
from moorage.csi.http2 import Connection, Stream

_CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
# What an answer that is none of gRPC's says, and what a stream that is broken off does.
_OF_HTTP = {b"400": "INTERNAL", b"401": "UNAUTHENTICATED", b"403": "PERMISSION_DENIED", b"404": "UNIMPLEMENTED",
            b"429": "UNAVAILABLE", b"502": "UNAVAILABLE", b"503": "UNAVAILABLE", b"504": "UNAVAILABLE"}  # fmt: skip
_OF_RESET = {
    http2.REFUSED_STREAM: "UNAVAILABLE", http2.CANCEL: "CANCELLED", http2.ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED",
    http2.INADEQUATE_SECURITY: "PERMISSION_DENIED",
}  # fmt: skip
_STATUS = b"grpc-status"
_PREFIX = struct.Struct(">BL")  # whether a message is compressed, and its length
_LARGEST_MESSAGE = 64 << 20
_MOST_DIGITS = 8  # of a timeout
# A connection may take long to be made, for a busy driver needs more than a moment for its first frame. One that is not
# there refuses at once.
_DIAL_S = 10.0
_LATE = ("DEADLINE_EXCEEDED", "Deadline Exceeded")
_CLOSED = "the connection was closed"


class CallFailed(Exception):
    """How a call has ended; `code` is the name of a gRPC code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Channel:
    """Calls over one connection, which is made when it is needed and made again after it was lost."""

    def __init__(self, path: str, on_lost: Callable[[], None] | None = None) -> None:
        self._path = path
        self._on_lost = on_lost
        self._connection: Connection | None = None
        self._dialling: asyncio.Task[Connection] | None = None
        self._leaving: set[Connection] = set()  # they take no more calls, and end those that they have
        self._is_closed = False

    async def unary(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """The one message of an answer, or CallFailed."""
        messages: list[bytes] = []
        async with _Asking(self, method, request, timeout_s) as call:
            while not call.is_over and len(messages) < 2:
                await call.something()
                while call.messages:
                    messages.append(call.take())
        if call.is_over and call.code != "OK":
            raise CallFailed(call.code, call.message)
        if len(messages) != 1:
            raise CallFailed("INTERNAL", f"{len(messages) or 'no'} messages came where there is to be one")
        return messages[0]

    async def stream(self, method: str, request: bytes, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """Every message of an answer; CallFailed may come after some of them."""
        async with _Asking(self, method, request, timeout_s) as call:
            while True:
                while call.messages:
                    yield call.take()
                if call.is_over:
                    break
                await call.something()
        if call.code != "OK":
            raise CallFailed(call.code, call.message)

    async def connected(self) -> Connection:
        """The connection; CallFailed if there is none to be had now."""
        if self._connection is not None:
            return self._connection
        if self._is_closed:
            raise CallFailed("UNAVAILABLE", _CLOSED)
        if self._dialling is None:
            self._dialling = asyncio.create_task(self._dial(), name=f"csi-connect {self._path}")
            self._dialling.add_done_callback(self._dialled)
        dialling = self._dialling
        try:
            return await asyncio.shield(dialling)  # others wait for it as well
        except asyncio.CancelledError:
            if self._is_closed and dialling.cancelled():
                raise CallFailed("UNAVAILABLE", _CLOSED) from None
            raise

    async def close(self) -> None:
        """At once: calls that are open fail."""
        self._is_closed = True
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait([self._dialling])
        for connection in (*self._leaving, *((self._connection,) if self._connection is not None else ())):
            connection.close(_CLOSED)
        self._leaving.clear()

    async def _dial(self) -> Connection:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(_DIAL_S):
                _, connection = await asyncio.get_running_loop().create_unix_connection(
                    lambda: Connection(self._over), self._path
                )
                await connection.ready
            if not connection.is_open:
                raise CallFailed("UNAVAILABLE", "the connection was closed by the other side at once")
            self._connection = connection
            return connection
        except TimeoutError:
            raise CallFailed("UNAVAILABLE", f"it did not begin to speak HTTP/2 in {_DIAL_S:g} s") from None
        except OSError as error:
            raise CallFailed("UNAVAILABLE", str(error)) from error
        finally:
            if connection is not None and connection is not self._connection:
                connection.close("it did not begin to speak HTTP/2")

    def _dialled(self, task: "asyncio.Task[Connection]") -> None:
        self._dialling = None
        if not task.cancelled():
            task.exception()  # maybe nobody waits any more

    def _over(self, connection: Connection) -> None:
        """It takes no more calls."""
        if connection is self._connection:
            self._connection = None
            self._leaving = {one for one in self._leaving if one.is_used}
            self._leaving.add(connection)
            if self._on_lost is not None and not self._is_closed:
                self._on_lost()


class _Asking:
    """One call for as long as somebody waits for its answer."""

    def __init__(self, channel: Channel, method: str, request: bytes, timeout_s: float) -> None:
        self._channel, self._method, self._timeout_s = channel, method, timeout_s
        self._body = _PREFIX.pack(0, len(request)) + request

    async def __aenter__(self) -> "Call":
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._timeout_s
        connection = self._channel._connection
        if connection is None:
            connection = await self._connected(ends_at)
        self._connection = connection
        self._call = Call(connection, ends_at)
        self._timer = loop.call_at(ends_at, self._call.end, *_LATE)
        connection.begin(self._call, _headers(self._method, self._timeout_s), self._body)
        return self._call

    async def _connected(self, ends_at: float) -> Connection:
        try:
            async with asyncio.timeout_at(ends_at):
                return await self._channel.connected()
        except TimeoutError:
            raise CallFailed(*_LATE) from None

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        self._connection.cancel(self._call)  # no effect when it has ended


class Call(Stream):
    """What has come of an answer."""

    __slots__ = ("_buffer", "_connection", "_ends_at", "_is_begun", "_waiter", "code", "is_over", "message", "messages")

    def __init__(self, connection: Connection, ends_at: float) -> None:
        super().__init__()
        self.messages: deque[bytes] = deque()
        self.is_over = False
        self.code = self.message = ""  # once it is over
        self._connection = connection
        self._ends_at = ends_at
        self._is_begun = False
        self._buffer = bytearray()  # a part of a message
        self._waiter: asyncio.Future[None] | None = None

    async def something(self) -> None:
        """Until something more has come."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def take(self) -> bytes:
        message = self.messages.popleft()
        if not self.messages:
            self._connection.want_more(self)
        return message

    def end(self, code: str, message: str) -> None:
        """Whatever comes later does not matter."""
        if not self.is_over:
            self.is_over, self.code, self.message = True, code, message
            self._wake()

    def heard_headers(self, headers: list[tuple[bytes, bytes]], is_last: bool) -> None:
        found = dict(headers)
        if not self._is_begun and not (is_last and _STATUS in found):  # which would say more
            self._begin(found.get(b":status", b""), found.get(b"content-type", b""))
        if is_last:
            self._heard_status(found)

    def heard_data(self, data: bytes, is_last: bool) -> None:
        if self.is_over:
            return
        self._buffer += data
        while len(self._buffer) >= _PREFIX.size and not self.is_over:
            is_compressed, size = _PREFIX.unpack_from(self._buffer)
            if is_compressed:
                self.end("INTERNAL", "a message is compressed, which nobody has asked for")
            elif size > _LARGEST_MESSAGE:
                self.end("RESOURCE_EXHAUSTED", f"a message has {size} bytes; at most {_LARGEST_MESSAGE} are taken")
            elif len(self._buffer) < _PREFIX.size + size:
                break
            else:
                self.messages.append(bytes(self._buffer[_PREFIX.size : _PREFIX.size + size]))
                del self._buffer[: _PREFIX.size + size]
                self._wake()
        if is_last:
            self._heard_status({})
        elif not self.messages:
            self._connection.want_more(self)

    def was_reset(self, code: int) -> None:
        if code == http2.CANCEL and asyncio.get_running_loop().time() >= self._ends_at:
            self.end(*_LATE)  # both sides have a clock
        self.end(_OF_RESET.get(code, "INTERNAL"), f"the call was broken off with HTTP/2 error {code}")

    def was_lost(self, why: str) -> None:
        self.end("UNAVAILABLE", why)

    def _begin(self, status: bytes, kind: bytes) -> None:
        if status.startswith(b"1"):  # there is another one to come
            return
        self._is_begun = True
        if status != b"200":
            code = _OF_HTTP.get(status, "UNKNOWN")
            self.end(code, f"the answer has the HTTP status {status.decode('ascii', 'replace')[:9]!r}")
        elif not kind.startswith(b"application/grpc"):
            self.end("UNKNOWN", "the answer is not one of gRPC")

    def _heard_status(self, trailers: dict[bytes, bytes]) -> None:
        status = trailers.get(_STATUS, b"")
        if not status.isdigit():
            self.end("INTERNAL", "the answer ended without a status")
            return
        is_known = len(status) <= 2 and int(status) < len(_CODES)
        code = _CODES[int(status)] if is_known else "UNKNOWN"
        if code == "OK" and self._buffer:
            self.end("INTERNAL", "the answer ended within a message")
        else:
            self.end(code, unquote(trailers.get(b"grpc-message", b"").decode("ascii", "replace")))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@lru_cache(maxsize=256)
def _headers(method: str, timeout_s: float) -> bytes:
    """Of a request, compressed without anything to be remembered, so that they do not depend on earlier ones."""
    # gRPC's library would say the socket's path as authority, percent-encoded, which some servers refuse.
    told = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost", "te": "trailers",
            "content-type": "application/grpc", "user-agent": "grpc-python-moorage",
            "grpc-timeout": _timeout(timeout_s)}  # fmt: skip
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*each) for each in told.items()], huffman=False)


def _timeout(seconds: float) -> str:
    """At most eight digits."""
    milliseconds = max(1, round(seconds * 1000))
    return (
        f"{milliseconds}m"
        if len(str(milliseconds)) <= _MOST_DIGITS
        else f"{min(round(seconds), 10**_MOST_DIGITS - 1)}S"
    )
