"""The other side of a connection, which says frame by frame what a test wants, and a channel that talks to it.

Every conversation is bounded, and at its end no task is left and nothing was raised where nobody saw it.
"""

import asyncio
import gc
import struct
from collections import defaultdict
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import NamedTuple

import grpc
import hpack
import pytest
from hypothesis import HealthCheck, settings

from moorage.csi.channel import CallFailed, Channel

LIMIT_S = 10
METHOD = "/csi.v1.Identity/Probe"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20
TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, FIRST_WINDOW, FRAME_SIZE = range(1, 6)
NO_ERROR, FLOW_CONTROL_ERROR, CANCEL = 0, 3, 8
LARGEST_FRAME = 16384
SMALLEST_WINDOW = 65535

CODES = [code.name for code in sorted(grpc.StatusCode, key=lambda code: code.value[0])]
BEGINNING = ((":status", "200"), ("content-type", "application/grpc"))
OK = (("grpc-status", "0"),)

property_test = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Frame(NamedTuple):
    kind: int
    flags: int
    number: int
    payload: bytes

    @property
    def code(self):
        """The one number that it says."""
        return struct.unpack(">L", self.payload)[0]


class Request(NamedTuple):
    number: int
    headers: list
    body: bytes


def frame(kind, flags=0, number=0, payload=b""):
    return struct.pack(">L", len(payload))[1:] + struct.pack(">BBL", kind, flags, number) + payload


def told_settings(values):
    return frame(SETTINGS, payload=b"".join(struct.pack(">HL", *each) for each in values.items()))


def window(number, more):
    return frame(WINDOW_UPDATE, number=number, payload=struct.pack(">L", more))


def reset(number, code):
    return frame(RST_STREAM, number=number, payload=struct.pack(">L", code))


def farewell(last, words=b""):
    return frame(GOAWAY, payload=struct.pack(">LL", last, NO_ERROR) + words)


def padded(payload, padding=7):
    return bytes([padding]) + payload + bytes(padding)


def message(content, flag=0):
    return struct.pack(">BL", flag, len(content)) + content


class Peer:
    """The other side of one connection. It keeps all that it has read, and says only what it is told to."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer
        self._pings = count(1)
        self._first_window = SMALLEST_WINDOW
        self.seen = []
        self.window = SMALLEST_WINDOW
        self.windows = defaultdict(lambda: self._first_window)
        self.encoder, self.decoder = hpack.Encoder(), hpack.Decoder()

    def send(self, *frames):
        self._writer.write(b"".join(frames))

    def block(self, *headers, huffman=True):
        return self.encoder.encode(headers, huffman=huffman)

    def headers(self, number, *headers, flags=0):
        return frame(HEADERS, END_HEADERS | flags, number, self.block(*headers))

    def answer(self, number, *messages, trailers=OK):
        """Everything that a call is answered with."""
        body = [frame(DATA, 0, number, message(each)) for each in messages]
        return b"".join([self.headers(number, *BEGINNING), *body, self.headers(number, *trailers, flags=END_STREAM)])

    async def preface(self):
        assert await self._reader.readexactly(len(PREFACE)) == PREFACE

    async def greet(self, values):
        self.send(told_settings(values))
        await self.preface()
        await self.until(SETTINGS)

    async def next(self):
        head = await self._reader.readexactly(9)
        kind, flags, number = struct.unpack(">BBL", head[3:])
        read = Frame(kind, flags, number, await self._reader.readexactly(int.from_bytes(head[:3], "big")))
        self.seen.append(read)
        if kind == WINDOW_UPDATE and number:
            self.windows[number] += read.code
        elif kind == WINDOW_UPDATE:
            self.window += read.code
        elif kind == SETTINGS:
            values = dict(struct.iter_unpack(">HL", read.payload))
            self._first_window = values.get(FIRST_WINDOW, self._first_window)
        return read

    async def until(self, kind):
        while True:
            read = await self.next()
            if read.kind == kind:
                return read

    async def request(self):
        """The next one, to its end."""
        begun = await self.until(HEADERS)
        assert begun.flags == END_HEADERS
        body, flags = b"", 0
        while not flags & END_STREAM:
            _, flags, number, piece = await self.until(DATA)
            assert number == begun.number
            body += piece
        return Request(begun.number, self.decoder.decode(begun.payload), body)

    async def meanwhile(self):
        """What was sent until all that was said to it so far is heard."""
        payload = struct.pack(">Q", next(self._pings))
        self.send(frame(PING, payload=payload))
        before = len(self.seen)
        while (await self.until(PING)).payload != payload:
            pass
        return self.seen[before:-1]

    async def send_within_windows(self, number, data, flags=0):
        data = memoryview(data)
        while data:
            size = min(len(data), LARGEST_FRAME, self.window, self.windows[number])
            if size <= 0:
                await self.next()
                continue
            self.send(frame(DATA, flags, number, bytes(data[:size])))
            self.window -= size
            self.windows[number] -= size
            data = data[size:]
            await self._writer.drain()

    async def gone(self):
        """Once the client has ended the connection."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await self.next()

    def stop_reading(self):
        self._writer.transport.pause_reading()

    def close(self):
        self._writer.close()

    async def closed(self):
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


class Conversation:
    """A channel, and whoever it has connected to."""

    def __init__(self, path):
        self.losses = 0
        self.channel = Channel(path, self._lost)
        self.peers = []
        self._new = asyncio.Queue()

    def _lost(self):
        self.losses += 1

    def met(self, reader, writer):
        self.peers.append(Peer(reader, writer))
        self._new.put_nowait(self.peers[-1])

    async def stranger(self):
        """The next connection, before anything is said on it."""
        return await self._new.get()

    async def peer(self, values=None):
        peer = await self.stranger()
        await peer.greet(values or {})
        return peer

    async def connected(self):
        """For calls whose deadline is so short that connecting must not count."""
        connecting = asyncio.ensure_future(self.channel.connected())
        peer = await self.peer()
        await connecting
        return peer

    def ask(self, request=b"", timeout_s=LIMIT_S, method=METHOD):
        return asyncio.create_task(self.channel.unary(method, request, timeout_s))

    async def asked(self, request=b"", timeout_s=LIMIT_S):
        """A call that waits for its answer, and who is to give it; it is stream 1."""
        call = self.ask(request, timeout_s)
        peer = await self.peer()
        assert (await peer.request()).number == 1
        return call, peer

    async def streaming(self, request=b""):
        """Messages of a call that are to come, the first of which is waited for, and who is to send them."""
        messages = self.channel.stream(METHOD, request, LIMIT_S)
        first = asyncio.ensure_future(anext(messages))
        peer = await self.peer()
        assert (await peer.request()).body == message(request)
        return messages, first, peer

    async def answered(self, peer=None):
        """A whole call: to this peer, or to whoever is met next."""
        call = self.ask()
        peer = peer or await self.peer()
        peer.send(peer.answer((await peer.request()).number, b"answer"))
        assert await call == b"answer"
        return peer

    async def begun(self, request, values=None):
        """A call that is too large to be sent at once, and what of it was."""
        call = self.ask(request)
        peer = await self.peer(values)
        await peer.until(HEADERS)
        return call, peer, sent(await peer.meanwhile())


@asynccontextmanager
async def talking(path):
    unseen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    before = asyncio.all_tasks()
    gc.freeze()  # so that looking for what is left does not look through all that was there
    async with asyncio.timeout(LIMIT_S):
        talk = Conversation(path)
        server = await asyncio.start_unix_server(talk.met, path)
        try:
            yield talk
        finally:
            await talk.channel.close()
            server.close()
            for peer in talk.peers:
                await peer.closed()
    await asyncio.sleep(0)
    gc.collect()
    gc.unfreeze()
    assert unseen == []
    assert asyncio.all_tasks() == before


def sent(frames, number=1):
    return b"".join(each.payload for each in frames if each.kind == DATA and each.number == number)


async def failure(call):
    with pytest.raises(CallFailed) as caught:
        await call
    return caught.value


async def code_of(call):
    return (await failure(call)).code
