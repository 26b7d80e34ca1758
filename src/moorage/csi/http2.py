"""HTTP/2 as far as a client of gRPC needs it: one connection, many streams, on a socket that is already secured.

gRPC's own library does this in threads of its own. Each answer then passes from thread to thread before the event loop
has it, which costs more processor time than all that is said here: see docs/decisions/. Header compression is hpack's.
Owns: frames, flow control in both directions, which streams are open, and what of it breaks a connection.
May not touch: what headers and bodies mean (`channel.py`).
Start reading at: `Connection.begin`, `Connection.data_received`.
"""

import asyncio
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import cast

import hpack

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    0, 1, 3, 4, 5, 6, 7, 8, 9,
)  # fmt: skip
_ACK = _END_STREAM = 0x1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20
_ENABLE_PUSH, _MAX_STREAMS, _FIRST_WINDOW, _FRAME_SIZE, _LIST_SIZE = 2, 3, 4, 5, 6
NO_ERROR, _PROTOCOL_ERROR, _FLOW_CONTROL_ERROR, _FRAME_SIZE_ERROR, _COMPRESSION_ERROR = 0, 1, 3, 6, 9
REFUSED_STREAM, CANCEL, ENHANCE_YOUR_CALM, INADEQUATE_SECURITY = 7, 8, 11, 12

_HEAD = struct.Struct(">HBBBL")  # the length is of three bytes
_NUMBER = struct.Struct(">L")
_SETTING = struct.Struct(">HL")
_PING_SIZE = 8
_LAST = 2**31 - 1  # the last number of a stream, and the largest window
_LARGEST_FRAME = 1 << 14  # that both sides may always send; a peer is not asked for more
_SMALLEST_WINDOW = 65535  # of a stream and of a connection, until something else is said
_WINDOW = 4 << 20  # what a stream may bring before somebody has taken it
_LARGEST_LIST = 1 << 16
_MOST_KNOWN = 64
_REPEATED, _LONGER = 0x80, 0xFF  # of compressed headers: bytes that each stand for one that is remembered


class Stream(ABC):
    """A request and what comes back. Whoever makes one says what is to happen then."""

    __slots__ = ("held", "number", "unsent", "window")

    def __init__(self) -> None:
        self.number = 0  # once it has begun
        self.unsent = memoryview(b"")
        self.window = 0  # what of it may be sent
        self.held = 0  # bytes received for which no more was asked

    @abstractmethod
    def heard_headers(self, headers: list[tuple[bytes, bytes]], is_last: bool) -> None:
        """The first ones, or the last."""

    @abstractmethod
    def heard_data(self, data: bytes, is_last: bool) -> None:
        """Some of the body."""

    @abstractmethod
    def was_reset(self, code: int) -> None:
        """By the other side: there will be no more."""

    @abstractmethod
    def was_lost(self, why: str) -> None:
        """With the connection. The other side may have got the request, or not."""


class Connection(asyncio.Protocol):
    """One connection. `ready` is settled when the other side has shown that it speaks HTTP/2, or has not."""

    def __init__(self, on_over: Callable[["Connection"], None]) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_open = True  # for new streams
        self._on_over = on_over  # called once: no stream can be begun any more
        self._transport: asyncio.Transport | None = None
        self._why = "the connection was closed by the other side"
        self._streams: dict[int, Stream] = {}
        self._waiting: deque[tuple[Stream, bytes, bytes]] = deque()  # until the other side takes more streams
        self._next = 1
        self._most_streams = _LAST
        self._window = self._first_window = _SMALLEST_WINDOW
        self._frame_size = _LARGEST_FRAME
        self._received = 0  # for which no more was asked, of all streams
        self._buffer = b""
        self._out: list[bytes] = []
        self._block = bytearray()  # of headers that go on in the next frame
        self._block_of = self._block_flags = 0
        self._decoder = hpack.Decoder(max_header_list_size=_LARGEST_LIST)
        self._known: dict[bytes, list[tuple[bytes, bytes]]] = {}  # blocks that only repeat what the decoder remembers
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            _DATA: self._heard_data, _HEADERS: self._heard_headers, _CONTINUATION: self._heard_continuation,
            _RST_STREAM: self._heard_reset, _SETTINGS: self._heard_settings, _PING: self._heard_ping,
            _GOAWAY: self._heard_goaway, _WINDOW_UPDATE: self._heard_window, _PUSH_PROMISE: self._heard_promise,
        }  # fmt: skip

    @property
    def is_used(self) -> bool:
        return bool(self._streams)

    def begin(self, stream: Stream, headers: bytes, body: bytes) -> None:
        """Send a request with these compressed headers."""
        if not self.is_open:
            stream.was_lost(self._why)
            return
        if len(self._streams) >= self._most_streams:
            self._waiting.append((stream, headers, body))
            return
        self._open(stream, headers, body)
        self._flush()

    def cancel(self, stream: Stream) -> None:
        """Nobody waits for it any more; no effect if it is over."""
        if self._streams.get(stream.number) is stream:
            self._send(_RST_STREAM, 0, stream.number, _NUMBER.pack(CANCEL))
            stream.unsent = memoryview(b"")
            self._end(stream)
            self._flush()
        elif not stream.number:
            self._waiting = deque(one for one in self._waiting if one[0] is not stream)

    def want_more(self, stream: Stream) -> None:
        """What the stream has brought is taken."""
        if stream.held >= _WINDOW // 2 and self._streams.get(stream.number) is stream:
            self._send(_WINDOW_UPDATE, 0, stream.number, _NUMBER.pack(stream.held))
            stream.held = 0
            self._flush()

    def close(self, why: str) -> None:
        """At once; open streams are lost."""
        self._why = why
        self._stop_taking()
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        settings = ((_ENABLE_PUSH, 0), (_FIRST_WINDOW, _WINDOW), (_LIST_SIZE, _LARGEST_LIST))
        self._out.append(_PREFACE)
        self._send(_SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in settings))
        self._send(_WINDOW_UPDATE, 0, 0, _NUMBER.pack(_LAST - _SMALLEST_WINDOW))
        self._flush()

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data if self._buffer else data
        at, size = 0, len(data)
        try:
            while size - at >= _HEAD.size:
                high, low, kind, flags, number = _HEAD.unpack_from(data, at)
                end = at + _HEAD.size + (high << 8 | low)
                if end - at - _HEAD.size > _LARGEST_FRAME:
                    raise _Violation(_FRAME_SIZE_ERROR, "a frame is too large, or this is not HTTP/2")
                if end > size:
                    break
                self._heard(kind, flags, number & _LAST, data[at + _HEAD.size : end])
                at = end
        except _Violation as error:
            self._send(_GOAWAY, 0, 0, _NUMBER.pack(0) + _NUMBER.pack(error.code))
            self._flush()
            self.close(str(error))
            return
        self._buffer = data[at:]
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._why = str(error)
        self._stop_taking()
        self._transport = None
        lost = [*self._streams.values(), *(stream for stream, _, _ in self._waiting)]
        self._streams.clear()
        self._waiting.clear()
        for stream in lost:
            stream.was_lost(self._why)

    # Frames.

    def _heard(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block_of and (kind != _CONTINUATION or number != self._block_of):
            raise _Violation(_PROTOCOL_ERROR, "headers are not continued")
        if not self.ready.done() and kind != _SETTINGS:
            raise _Violation(_PROTOCOL_ERROR, "no settings came first, so this is not HTTP/2")
        handler = self._handlers.get(kind)
        if handler is not None:  # kinds that nobody knows are to be ignored
            handler(flags, number, payload)

    def _heard_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size
        if self._received > _LAST // 2:
            self._send(_WINDOW_UPDATE, 0, 0, _NUMBER.pack(self._received))
            self._received = 0
        if flags & _PADDED:
            payload = _without_padding(payload)
        stream = self._stream(number)
        if stream is None:
            return
        stream.held += size
        if stream.held > _WINDOW:
            raise _Violation(_FLOW_CONTROL_ERROR, "more came than was asked for")
        is_last = bool(flags & _END_STREAM)
        if is_last:
            self._end(stream)
        stream.heard_data(payload, is_last)

    def _heard_headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & _PADDED:
            payload = _without_padding(payload)
        if flags & _PRIORITY:
            payload = payload[_NUMBER.size + 1 :]
        self._heard_block(flags, number, flags, payload)

    def _heard_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if not self._block_of:
            raise _Violation(_PROTOCOL_ERROR, "nothing is to be continued")
        block, self._block = bytes(self._block + payload), bytearray()
        self._block_of = 0
        self._heard_block(flags, number, self._block_flags, block)

    def _heard_block(self, flags: int, number: int, first_flags: int, block: bytes) -> None:
        stream = self._stream(number)
        if len(block) > _LARGEST_LIST:
            raise _Violation(_COMPRESSION_ERROR, "headers are too large")
        if not flags & _END_HEADERS:
            self._block, self._block_of, self._block_flags = bytearray(block), number, first_flags
            return
        headers = self._read_headers(block)  # also of a stream that is over: the next ones build on them
        if stream is None:
            return
        is_last = bool(first_flags & _END_STREAM)
        if is_last:
            self._end(stream)
        stream.heard_headers(headers, is_last)

    def _read_headers(self, block: bytes) -> list[tuple[bytes, bytes]]:
        if block in self._known:
            return self._known[block]
        try:
            headers = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except hpack.HPACKError as error:
            raise _Violation(_COMPRESSION_ERROR, f"headers cannot be read: {error}") from error
        if not block or min(block) < _REPEATED or max(block) == _LONGER or len(self._known) == _MOST_KNOWN:
            self._known.clear()
        else:
            self._known[block] = headers
        return headers

    def _heard_reset(self, flags: int, number: int, payload: bytes) -> None:
        stream = self._stream(number)
        code = _number(payload)
        if stream is not None:
            stream.unsent = memoryview(b"")
            self._end(stream)
            stream.was_reset(code)

    def _heard_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) % _SETTING.size:
            raise _Violation(_FRAME_SIZE_ERROR, "settings cannot be read, or this is not HTTP/2")
        if flags & _ACK:
            if payload:
                raise _Violation(_FRAME_SIZE_ERROR, "settings are taken and set at once")
            return
        for name, value in _SETTING.iter_unpack(payload):
            if name == _MAX_STREAMS:
                self._most_streams = value
            elif name == _FRAME_SIZE:
                if not _LARGEST_FRAME <= value < 1 << 24:
                    raise _Violation(_PROTOCOL_ERROR, "a frame size is out of bounds")
                self._frame_size = value
            elif name == _FIRST_WINDOW:
                if value > _LAST:
                    raise _Violation(_FLOW_CONTROL_ERROR, "a window is too large")
                for stream in self._streams.values():
                    stream.window += value - self._first_window
                self._first_window = value
        self._send(_SETTINGS, _ACK, 0, b"")
        if not self.ready.done():
            self.ready.set_result(None)
        self._go_on()

    def _heard_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != _PING_SIZE:
            raise _Violation(_FRAME_SIZE_ERROR, "a ping cannot be read")
        if not flags & _ACK:
            self._send(_PING, _ACK, 0, payload)

    def _heard_goaway(self, flags: int, number: int, payload: bytes) -> None:
        """Streams that the other side has begun go on; it does nothing about the others."""
        if len(payload) < 2 * _NUMBER.size:
            raise _Violation(_FRAME_SIZE_ERROR, "a farewell cannot be read")
        words = payload[2 * _NUMBER.size :].decode("utf-8", "replace")
        self._why = f"the other side is going away{f': {words}' if words else ''}"
        self._stop_taking()
        last = _number(payload[: _NUMBER.size]) & _LAST
        left = [stream for number, stream in self._streams.items() if number > last]
        left += [stream for stream, _, _ in self._waiting]
        self._waiting.clear()
        for stream in left:
            self._streams.pop(stream.number, None)
            stream.was_lost(self._why)
        self._leave_if_over()

    def _heard_window(self, flags: int, number: int, payload: bytes) -> None:
        more = _number(payload) & _LAST
        stream = self._stream(number) if number else None
        if not number:
            self._window += more
        elif stream is not None:
            stream.window += more
        if not more or max(self._window, stream.window if stream is not None else 0) > _LAST:
            raise _Violation(_FLOW_CONTROL_ERROR, "a window is wrong")
        self._go_on()

    def _heard_promise(self, flags: int, number: int, payload: bytes) -> None:
        raise _Violation(_PROTOCOL_ERROR, "nobody has asked for promises")

    # Streams.

    def _stream(self, number: int) -> Stream | None:
        """None if it is over on this side."""
        if number % 2 == 0 or number >= self._next:
            raise _Violation(_PROTOCOL_ERROR, f"nobody has begun stream {number}")
        return self._streams.get(number)

    def _open(self, stream: Stream, headers: bytes, body: bytes) -> None:
        stream.number, stream.window, stream.unsent = self._next, self._first_window, memoryview(body)
        self._streams[stream.number] = stream
        self._next += 2
        if self._next > _LAST:
            self._stop_taking()
        self._send(_HEADERS, _END_HEADERS, stream.number, headers)
        self._send_body(stream)

    def _send_body(self, stream: Stream) -> None:
        """As much as may be sent now."""
        while stream.unsent:
            size = min(len(stream.unsent), self._window, stream.window, self._frame_size)
            if size <= 0:
                return
            piece, stream.unsent = stream.unsent[:size], stream.unsent[size:]
            self._window -= size
            stream.window -= size
            self._send(_DATA, 0 if stream.unsent else _END_STREAM, stream.number, piece)

    def _go_on(self) -> None:
        """The other side takes more, maybe."""
        for stream in list(self._streams.values()):
            if stream.unsent:
                self._send_body(stream)
        while self._waiting and self.is_open and len(self._streams) < self._most_streams:
            self._open(*self._waiting.popleft())

    def _end(self, stream: Stream) -> None:
        del self._streams[stream.number]
        if stream.unsent:  # the answer is there already
            self._send(_RST_STREAM, 0, stream.number, _NUMBER.pack(NO_ERROR))
            stream.unsent = memoryview(b"")
        if self._waiting:
            self._go_on()
        if not self.is_open:
            self._leave_if_over()

    def _stop_taking(self) -> None:
        if self.is_open:
            self.is_open = False
            if not self.ready.done():
                self.ready.set_exception(ConnectionError(self._why))
                self.ready.exception()  # maybe nobody waits any more
            self._on_over(self)

    def _leave_if_over(self) -> None:
        if not self._streams and not self._waiting and self._transport is not None:
            self._flush()
            self._transport.close()  # once what was written is sent

    def _send(self, kind: int, flags: int, number: int, payload: bytes | memoryview) -> None:
        size = len(payload)
        self._out.append(_HEAD.pack(size >> 8, size & 0xFF, kind, flags, number))
        self._out.append(bytes(payload))

    def _flush(self) -> None:
        if self._out:
            if self._transport is not None and not self._transport.is_closing():
                self._transport.write(b"".join(self._out))
            self._out.clear()


class _Violation(Exception):
    """The other side does not keep to the protocol."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def _number(payload: bytes) -> int:
    if len(payload) != _NUMBER.size:
        raise _Violation(_FRAME_SIZE_ERROR, "a frame has a wrong size")
    return int(_NUMBER.unpack(payload)[0])


def _without_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise _Violation(_PROTOCOL_ERROR, "a frame has more padding than it is long")
    return payload[1 : len(payload) - payload[0]]
