"""gRPC calls over a connection of our own, against a peer that says frame by frame what a test wants, and gRPC itself.

Every conversation here is bounded, and at its end no task is left and nothing was raised where nobody saw it.
"""

import asyncio
import gc
import socket
import struct
from collections import defaultdict
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import NamedTuple

import grpc
import hpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moorage.csi import channel as channel_module
from moorage.csi.channel import CallFailed, Channel
from moorage.csi.http2 import Connection

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


@pytest.fixture
def path(tmp_path):
    return f"{tmp_path}/csi.sock"


async def failure(call):
    with pytest.raises(CallFailed) as caught:
        await call
    return caught.value


async def code_of(call):
    return (await failure(call)).code


# What a request is, and an answer.


async def test_a_unary_call_says_what_grpc_says(path):
    async with talking(path) as talk:
        call = talk.ask(b"request", timeout_s=2.5)
        peer = await talk.stranger()
        await peer.preface()
        first = await peer.next()
        assert (first.kind, first.flags, first.number) == (SETTINGS, 0, 0)
        assert dict(struct.iter_unpack(">HL", first.payload))[ENABLE_PUSH] == 0
        peer.send(told_settings({}))
        assert (await peer.until(SETTINGS)).flags == ACK
        request = await peer.request()
        assert request.number == 1
        assert request.headers == [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", METHOD),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "grpc-python-moorage"),
            ("grpc-timeout", "2500m"),
        ]
        assert request.body == b"\x00\x00\x00\x00\x07request"
        assert peer.seen[-1] == Frame(DATA, END_STREAM, 1, request.body)
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"
        assert await peer.meanwhile() == []  # nothing more is said about a call that is over


@pytest.mark.parametrize(
    ("timeout_s", "said"),
    [
        (0.0001, "1m"),
        (0.25, "250m"),
        (99999.999, "99999999m"),
        (100000, "100000S"),
        (10**9, "99999999S"),
    ],
)
async def test_a_deadline_is_told_in_at_most_eight_digits(path, timeout_s, said):
    async with talking(path) as talk:
        peer = await talk.connected()
        call = talk.ask(timeout_s=timeout_s)
        assert dict((await peer.request()).headers)["grpc-timeout"] == said
        peer.send(peer.answer(1, b""))
        await asyncio.wait([call])  # the shortest deadline is over before any answer
        call.exception()


async def test_a_method_name_may_have_any_length(path):
    async with talking(path) as talk:
        peer = None
        for length in (1, 126, 127, 128, 254, 255, 256, 4000):
            call = talk.ask(method="/" + "x" * (length - 1))
            peer = peer or await talk.peer()
            request = await peer.request()
            assert len(dict(request.headers)[":path"]) == length
            peer.send(peer.answer(request.number, b""))
            await call


async def test_calls_that_begin_together_share_one_connection(path):
    async with talking(path) as talk:
        calls = [talk.ask(bytes([number])) for number in range(3)]
        peer = await talk.peer()
        requests = [await peer.request() for _ in calls]
        assert [request.number for request in requests] == [1, 3, 5]
        for request in reversed(requests):
            peer.send(peer.answer(request.number, request.body[5:]))
        assert await asyncio.gather(*calls) == [b"\0", b"\1", b"\2"]
        assert len(talk.peers) == 1


def plain(peer, number):
    return peer.answer(number, b"answer")


def with_padding(peer, number):
    return b"".join([
        frame(HEADERS, END_HEADERS | PADDED, number, padded(peer.block(*BEGINNING), 0)),
        frame(DATA, PADDED, number, padded(message(b"answer"))),
        frame(DATA, PADDED, number, padded(b"", 255)),
        frame(HEADERS, END_HEADERS | END_STREAM | PADDED, number, padded(peer.block(*OK), 200)),
    ])  # fmt: skip


def with_priority(peer, number):
    priority = struct.pack(">LB", 0, 15)
    return b"".join([
        frame(HEADERS, END_HEADERS | WITH_PRIORITY, number, priority + peer.block(*BEGINNING)),
        frame(PRIORITY, 0, number, priority),
        frame(DATA, 0, number, message(b"answer")),
        frame(HEADERS, END_HEADERS | END_STREAM | PADDED | WITH_PRIORITY, number, padded(priority + peer.block(*OK))),
    ])  # fmt: skip


def with_continuations(peer, number):
    """Each header block one byte at a time; only the first frame says that the stream ends."""
    first, last = peer.block(*BEGINNING, ("x-more", "more")), peer.block(*OK, ("x-more", "most"))
    return b"".join([
        frame(HEADERS, 0, number, b""),
        *(frame(CONTINUATION, 0, number, bytes([each])) for each in first),
        frame(CONTINUATION, END_HEADERS, number, b""),
        frame(DATA, 0, number, message(b"answer")),
        frame(HEADERS, END_STREAM | PADDED, number, padded(last[:2])),
        *(frame(CONTINUATION, 0, number, bytes([each])) for each in last[2:-1]),
        frame(CONTINUATION, END_HEADERS, number, last[-1:]),
    ])  # fmt: skip


def without_huffman(peer, number):
    return b"".join([
        frame(HEADERS, END_HEADERS, number, peer.block(*BEGINNING, huffman=False)),
        frame(DATA, 0, number, message(b"answer")),
        frame(HEADERS, END_HEADERS | END_STREAM, number, peer.block(*OK, huffman=False)),
    ])  # fmt: skip


def over_many_frames(peer, number):
    pieces = [frame(DATA, 0, number, bytes([each])) for each in message(b"answer")]
    return b"".join([
        peer.headers(number, *BEGINNING), frame(DATA, 0, number), *pieces, peer.headers(number, *OK, flags=END_STREAM)
    ])  # fmt: skip


def among_unknown_frames(peer, number):
    return b"".join([
        frame(0xB, 0xFF, number, b"unknown"),
        peer.headers(number, *BEGINNING),
        frame(0xFF, 0, 0, bytes(LARGEST_FRAME)),
        frame(DATA, 0, number, message(b"answer")),
        frame(0xA, 0, 2**31 - 1),
        peer.headers(number, *OK, flags=END_STREAM),
    ])  # fmt: skip


def with_a_reset_behind_it(peer, number):
    return peer.answer(number, b"answer") + reset(number, NO_ERROR)


def with_early_hints(peer, number):
    return peer.headers(number, (":status", "103"), ("link", "x")) + peer.answer(number, b"answer")


SHAPES = [plain, with_padding, with_priority, with_continuations, without_huffman, over_many_frames,
          among_unknown_frames, with_a_reset_behind_it, with_early_hints]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_answer_may_have_any_legal_shape(path, shape):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(shape(peer, 1))
        assert await call == b"answer"
        call = talk.ask()
        await peer.request()
        peer.send(peer.answer(3, b"next"))
        assert await call == b"next"
        assert talk.losses == 0


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 10, 13])
async def test_an_answer_may_come_in_pieces_of_any_size(path, monkeypatch, size):
    whole = Connection.data_received

    def in_pieces(connection, data):
        for at in range(0, len(data), size):
            whole(connection, data[at : at + size])

    monkeypatch.setattr(Connection, "data_received", in_pieces)
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(with_continuations(peer, 1), frame(PING, payload=b"12345678"))
        assert await call == b"answer"
        assert (await peer.until(PING)).payload == b"12345678"
        for shape in (with_padding, over_many_frames, among_unknown_frames):
            call = talk.ask()
            peer.send(shape(peer, (await peer.request()).number))
            assert await call == b"answer"


async def test_an_error_may_come_with_the_first_headers(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.headers(1, *BEGINNING, ("grpc-status", "5"), ("grpc-message", "no volume v"), flags=END_STREAM))
        error = await failure(call)
        assert (error.code, error.message) == ("NOT_FOUND", "no volume v")


async def test_headers_that_only_repeat_mean_what_they_mean_now(path):
    """The same bytes stand for other headers after something new was remembered."""
    async with talking(path) as talk:
        peer, blocks = None, []
        for words, status in ["a5", "a5", "b9", "b9", "a5", "b5", "a9", "c8", "c8", "a5", "b9"]:
            call = talk.ask()
            peer = peer or await talk.peer()
            number = (await peer.request()).number
            first = peer.headers(number, *BEGINNING)
            block = peer.block(("grpc-message", words), ("grpc-status", status))
            blocks.append(block)
            peer.send(first, frame(HEADERS, END_HEADERS | END_STREAM, number, block))
            error = await failure(call)
            assert (error.message, error.code) == (words, CODES[int(status)])
        assert blocks[1] == blocks[3] == blocks[8]  # or this shows nothing


header_lists = st.lists(
    st.tuples(
        st.sampled_from([4096, 4096, 4096, 4096, 150, 90, 0]),
        st.booleans(),
        st.sampled_from("abcd"),
        st.sampled_from("59"),
        st.lists(st.sampled_from([("x-more", "1"), ("x-more", "2"), ("x-other", "3"), ("date", "4")]), max_size=2),
    ),
    min_size=1,
    max_size=25,
)


@property_test
@given(said=header_lists)
async def test_headers_are_never_stale(path, said):
    """Whatever is remembered, forgotten and repeated in between, each call hears its own words."""
    async with talking(path) as talk:
        peer = None
        for table_size, huffman, words, status, more in said:
            call = talk.ask()
            peer = peer or await talk.peer()
            number = (await peer.request()).number
            if peer.encoder.header_table_size != table_size:
                peer.encoder.header_table_size = table_size
            first = peer.block(*BEGINNING, huffman=huffman)
            last = peer.block(("grpc-status", status), ("grpc-message", words), *more, huffman=huffman)
            peer.send(
                frame(HEADERS, END_HEADERS, number, first), frame(HEADERS, END_HEADERS | END_STREAM, number, last)
            )
            error = await failure(call)
            assert (error.code, error.message) == (CODES[int(status)], words)


# How calls end.


@pytest.mark.parametrize(("number", "name"), list(enumerate(CODES))[1:])
async def test_each_code_has_its_name(path, number, name):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.answer(1, trailers=[("grpc-status", str(number)), ("grpc-message", "words")]))
        error = await failure(call)
        assert (error.code, error.message, str(error)) == (name, "words", "words")


@pytest.mark.parametrize("status", ["17", "255", "4294967295"])
async def test_a_code_that_nobody_knows_is_unknown(path, status):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.answer(1, b"answer", trailers=[("grpc-status", status), ("grpc-message", "words")]))
        error = await failure(call)
        assert (error.code, error.message) == ("UNKNOWN", "words")


@pytest.mark.parametrize("trailers", [
    [("grpc-status", "1" * 5000)],
    [("grpc-status", "-1")],
    [("grpc-status", "")],
    [("grpc-status", "OK")],
    [("x-other", "0")],
    [],
], ids=["endless", "negative", "empty", "a word", "another", "nothing"])  # fmt: skip
async def test_an_answer_without_a_readable_status_is_no_answer(path, trailers):
    async with talking(path) as talk:
        call, peer = await talk.asked(timeout_s=2)
        peer.send(peer.answer(1, b"answer", trailers=trailers))
        assert await code_of(call) in {"INTERNAL", "UNKNOWN"}
        assert talk.losses == 0


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("pool main is full", "pool main is full"),
        ("%E4%BD%93%E7%A9%8D is %F0%9F%90%9F", "体積 is 🐟"),
        ("100%25 + %0A", "100% + \n"),
        ("50% of it", "50% of it"),
        ("%zz %", "%zz %"),
        ("%FF", "\N{REPLACEMENT CHARACTER}"),
        (b"caf\xe9", "caf\N{REPLACEMENT CHARACTER}"),
    ],
)
async def test_words_of_an_error_are_decoded_and_never_refused(path, sent, meant):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.answer(1, trailers=[("grpc-status", "13"), ("grpc-message", sent)]))
        assert (await failure(call)).message == meant


async def test_an_answer_that_ends_with_its_data_has_no_status(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.headers(1, *BEGINNING), frame(DATA, END_STREAM, 1, message(b"answer")))
        assert await code_of(call) == "INTERNAL"


async def test_an_answer_that_ends_within_a_message_is_none(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        body = message(b"whole") + message(b"half")[:-2]
        peer.send(peer.headers(1, *BEGINNING), frame(DATA, 0, 1, body), peer.headers(1, *OK, flags=END_STREAM))
        assert await code_of(call) == "INTERNAL"


@pytest.mark.parametrize(
    ("status", "name"),
    [
        ("400", "INTERNAL"),
        ("401", "UNAUTHENTICATED"),
        ("403", "PERMISSION_DENIED"),
        ("404", "UNIMPLEMENTED"),
        ("429", "UNAVAILABLE"),
        ("502", "UNAVAILABLE"),
        ("503", "UNAVAILABLE"),
        ("504", "UNAVAILABLE"),
        ("500", "UNKNOWN"),
        ("204", "UNKNOWN"),
        ("abc", "UNKNOWN"),
        ("9" * 5000, "UNKNOWN"),
    ],
)
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "open"])
async def test_an_answer_of_http_has_a_code_too(path, status, name, is_whole):
    async with talking(path) as talk:
        call, peer = await talk.asked(timeout_s=2)
        beginning = [(":status", status), ("content-type", "text/html")]
        peer.send(peer.headers(1, *beginning, flags=END_STREAM if is_whole else 0))
        assert await code_of(call) == name
        resets = [each for each in await peer.meanwhile() if each.kind == RST_STREAM]
        assert len(resets) == (0 if is_whole else 1)  # nobody waits for the page
        assert talk.losses == 0


async def test_a_status_of_grpc_says_more_than_one_of_http(path):
    """By gRPC's http-grpc-status-mapping.md: if there is a grpc-status, it must be used."""
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(
            peer.headers(
                1, (":status", "503"), BEGINNING[1], ("grpc-status", "8"), ("grpc-message", "x"), flags=END_STREAM
            )
        )
        assert await code_of(call) == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("more", [[("content-type", "text/html")], []])
async def test_an_answer_that_is_not_grpc_is_unknown(path, more):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.headers(1, (":status", "200"), *more), frame(DATA, END_STREAM, 1, b"<html>"))
        error = await failure(call)
        assert (error.code, error.message) == ("UNKNOWN", "the answer is not one of gRPC")


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"])
async def test_every_way_to_say_grpc_is_understood(path, kind):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(
            peer.headers(1, (":status", "200"), ("content-type", kind)),
            frame(DATA, 0, 1, message(b"answer")),
            peer.headers(1, *OK, flags=END_STREAM),
        )
        assert await call == b"answer"


@pytest.mark.parametrize("messages", [[], [b"one", b"two"], [b"", b""], [b""] * 1000])
async def test_a_unary_call_has_one_message(path, messages):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(
            peer.headers(1, *BEGINNING),
            frame(DATA, 0, 1, b"".join(message(each) for each in messages)),
            peer.headers(1, *OK, flags=END_STREAM),
        )
        assert await code_of(call) == "INTERNAL"


async def test_a_second_message_of_a_unary_call_does_not_bring_it_to_a_stand(path):
    """It may be larger than what the stream may bring, and nobody takes the first one."""
    async with talking(path) as talk:
        call = talk.ask(timeout_s=1)
        peer = await talk.peer()
        await peer.request()
        peer.send(peer.headers(1, *BEGINNING))
        sending = asyncio.create_task(peer.send_within_windows(1, message(b"one") + message(bytes(9 << 20))))
        try:
            assert await code_of(call) == "INTERNAL"
        finally:
            sending.cancel()
            await asyncio.wait([sending])


async def test_an_empty_message_is_a_message(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.answer(1, b""))
        assert await call == b""


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        (struct.pack(">BL", 1, 3) + b"abc", "INTERNAL"),
        (struct.pack(">BL", 255, 0), "INTERNAL"),
        (struct.pack(">BL", 0, (64 << 20) + 1), "RESOURCE_EXHAUSTED"),
        (struct.pack(">BL", 0, 2**32 - 1), "RESOURCE_EXHAUSTED"),
    ],
)
async def test_a_message_that_will_not_be_taken_is_not_waited_for(path, prefix, name):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.headers(1, *BEGINNING), frame(DATA, 0, 1, prefix))
        assert await code_of(call) == name
        assert (await peer.until(RST_STREAM)).code == CANCEL
        peer.send(frame(DATA, 0, 1, bytes(1000)), peer.headers(1, *OK, flags=END_STREAM))
        assert await peer.meanwhile() == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (0, "INTERNAL"),
        (1, "INTERNAL"),
        (2, "INTERNAL"),
        (3, "INTERNAL"),
        (7, "UNAVAILABLE"),
        (8, "CANCELLED"),
        (11, "RESOURCE_EXHAUSTED"),
        (12, "PERMISSION_DENIED"),
        (13, "INTERNAL"),
        (2**32 - 1, "INTERNAL"),
    ],
)
@pytest.mark.parametrize("is_begun", [True, False], ids=["begun", "unanswered"])
async def test_a_call_that_is_broken_off_says_why(path, code, name, is_begun):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        if is_begun:
            peer.send(peer.headers(1, *BEGINNING), frame(DATA, 0, 1, message(b"answer")))
        peer.send(reset(1, code))
        assert await code_of(call) == name
        assert await peer.meanwhile() == []
        assert talk.losses == 0


# Flow control.


def sent(frames, number=1):
    return b"".join(each.payload for each in frames if each.kind == DATA and each.number == number)


async def test_a_large_request_is_sent_only_as_far_as_it_is_wanted(path):
    async with talking(path) as talk:
        request = bytes(range(256)) * 1000
        body = message(request)
        call, peer, got = await talk.begun(request)
        assert len(got) == SMALLEST_WINDOW
        peer.send(window(0, 1000))  # the stream has no room yet
        assert await peer.meanwhile() == []
        peer.send(window(1, 400))
        got += sent(await peer.meanwhile())
        assert len(got) == SMALLEST_WINDOW + 400
        peer.send(window(1, 1_000_000))  # now it is the connection which has none
        got += sent(await peer.meanwhile())
        assert len(got) == SMALLEST_WINDOW + 1000
        assert not any(each.flags & END_STREAM for each in peer.seen if each.kind == DATA)
        peer.send(window(0, 1_000_000))
        got += sent(await peer.meanwhile())
        assert got == body
        frames = [each for each in peer.seen if each.kind == DATA]
        assert max(len(each.payload) for each in frames) == LARGEST_FRAME
        assert [each.flags for each in frames] == [0] * (len(frames) - 1) + [END_STREAM]
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


async def test_a_window_may_become_negative(path):
    async with talking(path) as talk:
        call, peer, _ = await talk.begun(bytes(200_000))
        peer.send(window(0, 1_000_000), told_settings({FIRST_WINDOW: 10}))
        assert sent(await peer.meanwhile()) == b""
        peer.send(window(1, SMALLEST_WINDOW - 10))  # back to nothing
        assert sent(await peer.meanwhile()) == b""
        peer.send(window(1, 1))
        assert len(sent(await peer.meanwhile())) == 1
        peer.send(told_settings({FIRST_WINDOW: 15}))
        assert len(sent(await peer.meanwhile())) == 5
        second = talk.ask(bytes(100))
        await peer.until(HEADERS)
        assert len(sent(await peer.meanwhile(), 3)) == 15  # new streams begin with what was said last
        peer.send(told_settings({FIRST_WINDOW: 2**31 - 1 - SMALLEST_WINDOW}))
        await peer.meanwhile()
        assert len(sent(peer.seen, 1)) == 200_005
        assert len(sent(peer.seen, 3)) == 105
        peer.send(peer.answer(3, b"second"), peer.answer(1, b"first"))
        assert await asyncio.gather(call, second) == [b"first", b"second"]


async def test_a_stream_may_begin_without_any_room(path):
    async with talking(path) as talk:
        call, peer, got = await talk.begun(b"request", {FIRST_WINDOW: 0})
        assert got == b""
        for _ in message(b"request"):
            peer.send(window(1, 1))
        got = await peer.meanwhile()
        assert sent(got) == message(b"request")
        assert [each.flags for each in got] == [0] * 11 + [END_STREAM]
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


async def test_a_peer_may_want_larger_frames(path):
    async with talking(path) as talk:
        call = talk.ask(bytes(50_000))
        peer = await talk.peer({FRAME_SIZE: 40_000})
        assert (await peer.request()).body == message(bytes(50_000))
        assert [len(each.payload) for each in peer.seen if each.kind == DATA] == [40_000, 10_005]
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


async def test_an_answer_may_come_before_the_request_is_sent(path):
    async with talking(path) as talk:
        call, peer, _ = await talk.begun(bytes(200_000))
        peer.send(peer.answer(1, trailers=[("grpc-status", "8")]))
        assert await code_of(call) == "RESOURCE_EXHAUSTED"
        assert (await peer.until(RST_STREAM)).number == 1
        peer.send(window(0, 1_000_000), window(1, 1_000_000))
        assert await peer.meanwhile() == []


async def test_a_request_that_is_broken_off_is_not_sent_on(path):
    async with talking(path) as talk:
        call, peer, _ = await talk.begun(bytes(200_000))
        peer.send(reset(1, 11), window(0, 1_000_000), window(1, 1_000_000))
        assert await code_of(call) == "RESOURCE_EXHAUSTED"
        assert await peer.meanwhile() == []


async def test_a_connection_asks_for_more_before_its_window_is_used_up(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        assert peer.window == 2**31 - 1
        (await talk.channel.connected())._received = 2**30 - 5  # nobody wants to send as much here
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"
        assert await peer.meanwhile() == [Frame(WINDOW_UPDATE, 0, 0, struct.pack(">L", 2**30 + 6))]


async def test_an_answer_larger_than_its_window_arrives_whole(path):
    async with talking(path) as talk:
        content = bytes(range(256)) * (10 << 12)
        call, peer = await talk.asked()
        peer.send(peer.headers(1, *BEGINNING))
        await peer.send_within_windows(1, message(content))
        peer.send(peer.headers(1, *OK, flags=END_STREAM))
        assert len(content) == 10 << 20
        assert await call == content
        assert sum(each.kind == WINDOW_UPDATE and each.number == 1 for each in peer.seen) > 0


async def test_padding_counts_as_what_was_brought(path):
    """Else a stream of many padded frames would come to stand."""
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.headers(1, *BEGINNING))
        whole = padded(b"", 255)
        for _ in range((9 << 20) // len(whole) // 256):
            while peer.windows[1] < 256 * len(whole):
                await peer.next()
            peer.send(*[frame(DATA, PADDED, 1, whole)] * 256)
            peer.windows[1] -= 256 * len(whole)
        peer.send(frame(DATA, 0, 1, message(b"answer")), peer.headers(1, *OK, flags=END_STREAM))
        assert await call == b"answer"


async def test_a_stream_whose_messages_nobody_takes_gets_no_more(path):
    async with talking(path) as talk:
        messages = talk.channel.stream(METHOD, b"", LIMIT_S)
        first = asyncio.ensure_future(anext(messages))
        peer = await talk.peer()
        await peer.request()
        room = peer.windows[1]
        piece = message(bytes(LARGEST_FRAME - 5))
        peer.send(peer.headers(1, *BEGINNING), frame(DATA, 0, 1, piece), frame(DATA, 0, 1, piece))
        await first
        for _ in range(room // LARGEST_FRAME - 2):
            peer.send(frame(DATA, 0, 1, piece))
        assert await peer.meanwhile() == []
        peer.send(peer.headers(1, *OK, flags=END_STREAM))
        assert sum([1 async for _ in messages]) == room // LARGEST_FRAME - 1


async def test_a_stream_gets_more_once_its_messages_are_taken(path):
    async with talking(path) as talk:
        messages = talk.channel.stream(METHOD, b"", LIMIT_S)
        first = asyncio.ensure_future(anext(messages))
        peer = await talk.peer()
        await peer.request()
        room = peer.windows[1]
        piece = message(bytes(LARGEST_FRAME - 5))
        peer.send(peer.headers(1, *BEGINNING))
        peer.send(*[frame(DATA, 0, 1, piece)] * (room // LARGEST_FRAME))
        await first
        await peer.meanwhile()
        for _ in range(room // LARGEST_FRAME - 1):
            await anext(messages)
        await peer.meanwhile()
        granted = sum(each.code for each in peer.seen if each[::2] == (WINDOW_UPDATE, 1))
        assert granted == room
        await messages.aclose()


async def test_more_than_was_asked_for_breaks_the_connection(path):
    async with talking(path) as talk:
        messages = talk.channel.stream(METHOD, b"", LIMIT_S)
        first = asyncio.ensure_future(anext(messages))
        peer = await talk.peer()
        await peer.request()
        room = peer.windows[1]
        piece = message(bytes(LARGEST_FRAME - 5))
        peer.send(peer.headers(1, *BEGINNING), frame(DATA, 0, 1, piece))
        await first
        peer.send(*[frame(DATA, 0, 1, piece)] * (room // LARGEST_FRAME))
        assert (await peer.until(GOAWAY)).payload[4:8] == struct.pack(">L", FLOW_CONTROL_ERROR)
        with pytest.raises(CallFailed, match="more came than was asked for") as caught:
            async for _ in messages:
                pass
        assert caught.value.code == "UNAVAILABLE"


async def test_a_call_waits_for_its_turn(path):
    async with talking(path) as talk:
        calls = [talk.ask(bytes([number])) for number in range(3)]
        peer = await talk.peer({MAX_STREAMS: 1})
        for number in range(3):
            request = await peer.request()
            assert request.body == message(bytes([number]))
            assert [each for each in await peer.meanwhile() if each.kind == HEADERS] == []
            peer.send(peer.answer(request.number, b"answer"))
            assert await calls[number] == b"answer"


@pytest.mark.parametrize("how", ["cancelled", "reset", "settings"])
async def test_a_turn_comes_whatever_makes_room(path, how):
    async with talking(path) as talk:
        first, second = talk.ask(b"first"), talk.ask(b"second")
        peer = await talk.peer({MAX_STREAMS: 1})
        await peer.request()
        assert await peer.meanwhile() == []
        if how == "cancelled":
            first.cancel()
        elif how == "reset":
            peer.send(reset(1, CANCEL))
        else:
            peer.send(told_settings({MAX_STREAMS: 2}))
        assert (await peer.request()).body == message(b"second")
        peer.send(peer.answer(3, b"answer"))
        assert await second == b"answer"
        if how == "settings":
            peer.send(peer.answer(1, b"answer"))
        await asyncio.wait([first])
        if not first.cancelled():
            first.exception()


async def test_a_waiting_call_that_is_cancelled_is_never_sent(path):
    async with talking(path) as talk:
        first, second, third = talk.ask(b"first"), talk.ask(b"second"), talk.ask(b"third")
        peer = await talk.peer({MAX_STREAMS: 1})
        await peer.request()
        second.cancel()
        await asyncio.wait([second])
        assert second.cancelled()
        peer.send(peer.answer(1, b"answer"))
        assert await first == b"answer"
        request = await peer.request()
        assert (request.number, request.body) == (3, message(b"third"))
        peer.send(peer.answer(3, b"answer"))
        assert await third == b"answer"


async def test_a_waiting_call_has_its_deadline(path):
    async with talking(path) as talk:
        first = talk.ask(b"first")
        peer = await talk.peer({MAX_STREAMS: 1})
        await peer.request()
        assert await code_of(talk.ask(b"second", timeout_s=0.01)) == "DEADLINE_EXCEEDED"
        assert await peer.meanwhile() == []
        peer.send(peer.answer(1, b"answer"))
        assert await first == b"answer"
        assert await peer.meanwhile() == []


async def test_waiting_calls_are_lost_with_the_connection(path):
    async with talking(path) as talk:
        calls = [talk.ask() for _ in range(3)]
        peer = await talk.peer({MAX_STREAMS: 1})
        await peer.request()
        peer.close()
        assert [await code_of(call) for call in calls] == ["UNAVAILABLE"] * 3


# Deadlines.


async def test_a_deadline_is_told_to_the_other_side(path):
    async with talking(path) as talk:
        peer = await talk.connected()
        call = talk.ask(timeout_s=0.05)
        await peer.request()
        peer.send(peer.headers(1, *BEGINNING))
        assert await code_of(call) == "DEADLINE_EXCEEDED"
        told = await peer.until(RST_STREAM)
        assert (told.number, told.code) == (1, CANCEL)


async def test_a_call_that_is_cancelled_is_broken_off(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        call.cancel()
        told = await peer.until(RST_STREAM)
        assert (told.number, told.code) == (1, CANCEL)
        await asyncio.wait([call])
        assert call.cancelled()
        assert await peer.meanwhile() == []


async def test_a_call_is_broken_off_once_also_within_its_request(path):
    async with talking(path) as talk:
        call, peer, _ = await talk.begun(bytes(200_000))
        call.cancel()
        await asyncio.wait([call])
        peer.send(window(0, 1_000_000), window(1, 1_000_000))
        assert await peer.meanwhile() == [Frame(RST_STREAM, 0, 1, struct.pack(">L", CANCEL))]


async def test_a_deadline_that_the_other_side_notices_first_is_a_deadline(path):
    """As in gRPC's own library: a server that ends a call at its deadline says CANCEL, for there is no other word."""
    async with talking(path) as talk:
        loop = asyncio.get_running_loop()
        peer = await talk.connected()
        ends_at = loop.time() + 0.05
        call = talk.ask(timeout_s=0.05)
        await peer.request()
        peer.send(reset(1, CANCEL))
        while loop.time() < ends_at + 0.05:
            pass  # this loop is too busy to notice
        assert await code_of(call) == "DEADLINE_EXCEEDED"


async def test_a_deadline_also_bounds_connecting(path):
    async with talking(path) as talk:
        assert await code_of(talk.ask(timeout_s=0.05)) == "DEADLINE_EXCEEDED"
        peer = await talk.stranger()
        call = talk.ask()
        await peer.greet({})  # late, but it speaks; it is the same connection
        assert (await peer.request()).number == 1
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"
        assert len(talk.peers) == 1


async def test_a_peer_that_accepts_and_says_nothing_is_left(path, monkeypatch):
    async with talking(path) as talk:
        monkeypatch.setattr(channel_module, "_DIAL_S", 0.05)
        call = talk.ask()
        await asyncio.wait([call])
        assert not call.cancelled()
        assert await code_of(call) == "UNAVAILABLE"
        async with asyncio.timeout(2):
            await (await talk.stranger()).gone()
        call = talk.ask()
        peer = await talk.peer()
        await peer.request()
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"
        assert talk.losses == 0


# Connections.


async def test_nobody_there_is_unavailable(tmp_path):
    async with asyncio.timeout(LIMIT_S):
        channel = Channel(f"{tmp_path}/nothing.sock")
        assert await code_of(channel.unary(METHOD, b"", LIMIT_S)) == "UNAVAILABLE"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(f"{tmp_path}/dead.sock")
        await channel.close()
        channel = Channel(f"{tmp_path}/dead.sock")
        assert await code_of(anext(channel.stream(METHOD, b"", LIMIT_S))) == "UNAVAILABLE"
        assert await code_of(channel.connected()) == "UNAVAILABLE"
        await channel.close()


@pytest.mark.parametrize("words", [
    b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x15\x03\x01\x00\x02\x02\x16",
    b"",
    b"\0",
    PREFACE,
    frame(SETTINGS, payload=b"12345"),
    frame(SETTINGS, number=1),
    frame(PING, payload=bytes(8)) + told_settings({}),
    frame(GOAWAY, payload=bytes(8)),
], ids=range(10))  # fmt: skip
async def test_a_peer_that_does_not_speak_http2_is_unavailable(path, words):
    async with talking(path) as talk:
        calls = [talk.ask(), talk.ask()]
        peer = await talk.stranger()
        peer.send(words)
        peer.close()
        assert [await code_of(call) for call in calls] == ["UNAVAILABLE"] * 2
        assert talk.losses == 0  # there was none to lose
        call = talk.ask()
        peer = await talk.peer()
        await peer.request()
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


@property_test
@given(words=st.binary(max_size=100) | st.binary(max_size=40).map(lambda more: told_settings({}) + more))
async def test_noise_is_unavailable(path, words):
    async with talking(path) as talk:
        call = talk.ask()
        peer = await talk.stranger()
        peer.send(words)
        peer.close()
        assert await code_of(call) == "UNAVAILABLE"


payloads = st.one_of(
    st.binary(max_size=20),
    st.integers(0, 2**32 - 1).map(lambda number: struct.pack(">L", number)),
    st.tuples(st.integers(1, 6), st.sampled_from([0, 1, 16383, 16384, 2**24, 2**31 - 1, 2**31, 2**32 - 1])).map(
        lambda each: struct.pack(">HL", *each)
    ),
    st.sampled_from([bytes(8), b"\x88", message(b"answer"), message(b"")]),
    st.lists(
        st.sampled_from([*BEGINNING, ("grpc-status", "0"), ("grpc-status", "5"), ("x", "y"), (":status", "404")])
    ).map(lambda headers: hpack.Encoder().encode(headers)),
)
frames = st.builds(
    frame,
    st.integers(0, 10),
    st.sampled_from([0, END_STREAM, END_HEADERS, END_HEADERS | END_STREAM, PADDED, WITH_PRIORITY, 0xFF]),
    st.sampled_from([0, 1, 1, 1, 2, 3, 5]),
    payloads,
)


@property_test
@given(said=st.lists(frames, max_size=12))
async def test_any_frames_at_all_end_a_call_and_nothing_else(path, said):
    """Large requests and small ones; whatever is said to them, each ends as calls end."""
    async with talking(path) as talk:
        calls = [talk.ask(bytes(100_000)), talk.ask(b"request")]
        peer = await talk.peer()
        peer.send(*said)
        peer.close()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, bytes) or outcome.code in CODES[1:]
        assert talk.losses <= 1  # none if all came too early


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_connection_that_ends_takes_its_calls_along(path, how):
    async with talking(path) as talk:
        calls = [talk.ask(), talk.ask()]
        peer = await talk.peer()
        await peer.request()
        await peer.request()
        peer.send(peer.headers(1, *BEGINNING), frame(DATA, 0, 1, message(b"answer")[:-1]))
        if how == "closed":
            peer.close()
        else:  # the kernel says so when something was sent that is never read
            peer.stop_reading()
            calls.append(talk.ask())
            await asyncio.sleep(0)
            await peer.closed()
        assert {await code_of(call) for call in calls} == {"UNAVAILABLE"}
        assert talk.losses == 1
        call = talk.ask()
        peer = await talk.peer()
        assert (await peer.request()).number == 1
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"
        assert talk.losses == 1


async def test_a_loss_is_told_also_when_nobody_calls(path):
    async with talking(path) as talk:
        lost = asyncio.Event()
        talk.channel._on_lost = lost.set
        call, peer = await talk.asked()
        peer.send(peer.answer(1, b"answer"))
        await call
        peer.close()
        await lost.wait()


async def test_a_peer_that_goes_away_ends_what_it_has_begun(path):
    async with talking(path) as talk:
        calls = [talk.ask() for _ in range(3)]
        peer = await talk.peer()
        for _ in calls:
            await peer.request()
        peer.send(farewell(3, b"restart"))
        error = await failure(calls[2])
        assert (error.code, error.message) == ("UNAVAILABLE", "the other side is going away: restart")
        assert talk.losses == 1
        later = talk.ask()
        new = await talk.peer()
        assert (await new.request()).number == 1
        peer.send(peer.answer(3, b"second"))
        assert await calls[1] == b"second"
        peer.send(frame(PING, payload=b"12345678"), peer.answer(1, b"first"))
        assert await calls[0] == b"first"
        await peer.gone()
        assert Frame(PING, ACK, 0, b"12345678") in peer.seen
        new.send(new.answer(1, b"later"))
        assert await later == b"later"
        assert (talk.losses, len(talk.peers)) == (1, 2)


async def test_a_farewell_may_be_said_twice(path):
    """Gracefully: first that no more calls are taken, then which is the last that was."""
    async with talking(path) as talk:
        calls = [talk.ask() for _ in range(2)]
        peer = await talk.peer()
        for _ in calls:
            await peer.request()
        peer.send(farewell(2**31 - 1), farewell(1))
        assert await code_of(calls[1]) == "UNAVAILABLE"
        peer.send(peer.answer(1, b"answer"))
        assert await calls[0] == b"answer"
        await peer.gone()
        assert talk.losses == 1


async def test_a_peer_that_goes_away_unused_is_replaced(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.answer(1, b"answer"))
        await call
        peer.send(farewell(1))
        await peer.gone()
        assert talk.losses == 1
        call = talk.ask()
        peer = await talk.peer()
        await peer.request()
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


async def test_waiting_calls_do_not_go_with_a_peer_that_goes_away(path):
    async with talking(path) as talk:
        first, second = talk.ask(), talk.ask()
        peer = await talk.peer({MAX_STREAMS: 1})
        await peer.request()
        peer.send(farewell(1))
        assert await code_of(second) == "UNAVAILABLE"
        peer.send(peer.answer(1, b"answer"))
        assert await first == b"answer"
        await peer.gone()
        assert sum(each.kind == HEADERS for each in peer.seen) == 1


async def test_a_peer_that_goes_away_at_once_is_unavailable(path):
    async with talking(path) as talk:
        call = talk.ask()
        peer = await talk.stranger()
        peer.send(told_settings({}), farewell(0))
        assert await code_of(call) == "UNAVAILABLE"
        await peer.gone()


async def test_a_ping_is_answered_with_what_it_said(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(frame(PING, payload=b"12345678"), frame(PING, ACK, payload=b"abcdefgh"))
        assert await peer.next() == Frame(PING, ACK, 0, b"12345678")
        assert await peer.meanwhile() == []
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


async def test_settings_are_acknowledged_each_time(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(told_settings({TABLE_SIZE: 0}), frame(SETTINGS, ACK), told_settings({0xF000: 7}))
        assert await peer.meanwhile() == [Frame(SETTINGS, ACK, 0, b"")] * 2
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


VIOLATIONS = {
    "a promise": frame(PUSH_PROMISE, END_HEADERS, 1, struct.pack(">L", 2) + b"\x88"),
    "a frame that is too large": frame(DATA, 0, 1, bytes(LARGEST_FRAME + 1))[:9],
    "nothing to continue": frame(CONTINUATION, END_HEADERS, 1, b"\x88"),
    "headers that are not continued": frame(HEADERS, 0, 1, b"\x88") + frame(PING, payload=bytes(8)),
    "headers that are continued elsewhere": frame(HEADERS, 0, 1, b"\x88") + frame(CONTINUATION, END_HEADERS, 3),
    "headers within headers": frame(HEADERS, 0, 1, b"\x88") + frame(HEADERS, END_HEADERS, 1, b"\x88"),
    "headers without end": frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1, b"\x88" * LARGEST_FRAME) * 5,
    "headers that are large only when read": frame(HEADERS, 0, 1) + frame(CONTINUATION, 4, 1, b"\x88" * LARGEST_FRAME),
    "headers that cannot be read": frame(HEADERS, END_HEADERS, 1, b"\xfe"),
    "headers that break off": frame(HEADERS, END_HEADERS, 1, b"\x40\x7f"),
    "headers with a wrong word": frame(HEADERS, END_HEADERS, 1, b"\x00\x01x\x84\xff\xff\xff\xff"),
    "a table that is too large": frame(HEADERS, END_HEADERS, 1, b"\x3f\xff\xff\x03"),
    "headers of nothing": frame(HEADERS, END_HEADERS, 0, b"\x88"),
    "headers of a stream that was not begun": frame(HEADERS, END_HEADERS, 5, b"\x88"),
    "data of nothing": frame(DATA, 0, 0, b"x"),
    "data of a stream that was not begun": frame(DATA, 0, 5, b"x"),
    "data of a stream of its own": frame(DATA, 0, 2, b"x"),
    "a reset of a stream that was not begun": reset(5, CANCEL),
    "a reset that is too short": frame(RST_STREAM, 0, 1, b"123"),
    "room for a stream that was not begun": window(5, 1),
    "no more room": window(0, 0),
    "too much room": window(0, 2**31 - 1),
    "room of a wrong size": frame(WINDOW_UPDATE, 0, 0, b"12345"),
    "too much padding": frame(DATA, PADDED, 1, b"\x05abcd"),
    "padding without a length": frame(DATA, PADDED, 1),
    "headers with too much padding": frame(HEADERS, PADDED | END_HEADERS, 1, b"\x02\x88"),
    "half a setting": frame(SETTINGS, payload=b"12345"),
    "settings of a stream": frame(SETTINGS, number=1),
    "a first window that is too large": told_settings({FIRST_WINDOW: 2**31}),
    "frames of no size": told_settings({FRAME_SIZE: 0}),
    "frames that are too small": told_settings({FRAME_SIZE: LARGEST_FRAME - 1}),
    "frames that cannot be written": told_settings({FRAME_SIZE: 2**24}),
    "a short farewell": frame(GOAWAY, payload=bytes(7)),
}


@pytest.mark.parametrize("words", VIOLATIONS.values(), ids=VIOLATIONS)
async def test_a_peer_that_breaks_the_rules_is_left(path, words):
    async with talking(path) as talk:
        calls = [talk.ask(), talk.ask()]
        peer = await talk.peer()
        await peer.request()
        await peer.request()
        peer.send(words)
        told = await peer.next()
        assert (told.kind, told.number, len(told.payload)) == (GOAWAY, 0, 8)
        assert told.payload[4:] != bytes(4)
        await peer.gone()
        assert [await code_of(call) for call in calls] == ["UNAVAILABLE"] * 2
        assert talk.losses == 1
        call = talk.ask()
        peer = await talk.peer()
        await peer.request()
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


async def test_what_comes_too_late_is_ignored_and_still_understood(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        call.cancel()
        await peer.until(RST_STREAM)
        late = [("grpc-status", "5"), ("grpc-message", "said before")]
        peer.send(
            peer.headers(1, *BEGINNING),
            frame(DATA, 0, 1, message(b"late")),
            window(1, 100),
            peer.headers(1, *late, flags=END_STREAM),
            reset(1, CANCEL),
        )
        call = talk.ask()
        request = await peer.request()
        peer.send(peer.headers(request.number, *BEGINNING), peer.headers(request.number, *late, flags=END_STREAM))
        error = await failure(call)
        assert (error.code, error.message) == ("NOT_FOUND", "said before")
        assert len(talk.peers) == 1


# Closing.


def connecting():
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("csi-connect")]


async def test_closing_ends_calls(path):
    async with talking(path) as talk:
        messages = talk.channel.stream(METHOD, b"", LIMIT_S)
        calls = [talk.ask(), asyncio.ensure_future(anext(messages)), talk.ask()]
        peer = await talk.peer({MAX_STREAMS: 2})
        await peer.request()
        await peer.request()
        await talk.channel.close()
        assert [await code_of(call) for call in calls] == ["UNAVAILABLE"] * 3
        await peer.gone()
        assert talk.losses == 0  # who closes it knows


@pytest.mark.parametrize("is_met", [True, False])
async def test_closing_ends_connecting(path, is_met):
    async with talking(path) as talk:
        calls = [talk.ask(), talk.ask()]
        if is_met:
            peer = await talk.stranger()
            await peer.preface()
        else:
            await asyncio.sleep(0)
        await talk.channel.close()
        assert connecting() == []
        assert [await code_of(call) for call in calls] == ["UNAVAILABLE"] * 2
        if is_met:
            async with asyncio.timeout(2):
                await peer.gone()


async def test_closing_ends_a_connection_that_was_made_in_that_moment(path, monkeypatch):
    closing, heard = [], Connection.data_received

    def close_and_hear(connection, data):
        closing.append(asyncio.ensure_future(talk.channel.close()))
        heard(connection, data)

    monkeypatch.setattr(Connection, "data_received", close_and_hear)
    async with talking(path) as talk:
        call = talk.ask()
        peer = await talk.peer()
        assert await code_of(call) == "UNAVAILABLE"
        await asyncio.wait(closing)
        async with asyncio.timeout(2):
            await peer.gone()


async def test_a_connection_that_fails_when_nobody_waits_any_more_is_nobodys_error(path):
    async with talking(path) as talk:
        assert await code_of(talk.ask(timeout_s=0.01)) == "DEADLINE_EXCEEDED"
        peer = await talk.stranger()
        peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await asyncio.wait(connecting())
        await peer.gone()


async def test_closing_leaves_no_connection_of_calls_that_gave_up(path):
    async with talking(path) as talk:
        assert await code_of(talk.ask(timeout_s=0.01)) == "DEADLINE_EXCEEDED"
        peer = await talk.stranger()
        await talk.channel.close()
        async with asyncio.timeout(2):
            await peer.preface()
            await peer.gone()


async def test_closing_ends_what_a_peer_that_goes_away_still_does(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(farewell(1))
        await peer.meanwhile()
        later = talk.ask()
        new = await talk.peer()
        await new.request()
        await talk.channel.close()
        assert [await code_of(each) for each in (call, later)] == ["UNAVAILABLE"] * 2
        await peer.gone()
        await new.gone()


async def test_closing_twice_is_closing_once(path):
    async with talking(path) as talk:
        await talk.channel.close()
        await talk.channel.close()
        assert talk.peers == []


async def test_a_call_that_is_cancelled_while_connecting_leaves_the_others(path):
    async with talking(path) as talk:
        first, second = talk.ask(b"first"), talk.ask(b"second")
        peer = await talk.stranger()
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        await peer.greet({})
        assert (await peer.request()).body == message(b"second")
        peer.send(peer.answer(1, b"answer"))
        assert await second == b"answer"


# Streams of messages.


async def test_messages_come_as_they_arrive(path):
    async with talking(path) as talk:
        messages = talk.channel.stream(METHOD, b"request", LIMIT_S)
        first = asyncio.ensure_future(anext(messages))
        peer = await talk.peer()
        assert (await peer.request()).body == message(b"request")
        peer.send(peer.headers(1, *BEGINNING), frame(DATA, 0, 1, message(b"1")))
        assert await first == b"1"
        peer.send(frame(DATA, 0, 1, message(b"2") + message(b"") + message(b"4") + message(b"5")[:3]))
        assert [await anext(messages) for _ in range(3)] == [b"2", b"", b"4"]
        peer.send(frame(DATA, 0, 1, message(b"5")[3:]))
        assert await anext(messages) == b"5"
        peer.send(peer.headers(1, *OK, flags=END_STREAM))
        assert [each async for each in messages] == []
        assert await peer.meanwhile() == []


async def test_a_stream_may_have_no_messages(path):
    async with talking(path) as talk:
        messages = talk.channel.stream(METHOD, b"", LIMIT_S)
        first = asyncio.ensure_future(anext(messages, None))
        peer = await talk.peer()
        await peer.request()
        peer.send(peer.headers(1, *BEGINNING, *OK, flags=END_STREAM))
        assert await first is None


@pytest.mark.parametrize("end", ["trailers", "reset", "closed", "deadline"])
async def test_an_error_comes_after_the_messages_before_it(path, end):
    async with talking(path) as talk:
        peer = await talk.connected()
        messages = talk.channel.stream(METHOD, b"", 0.3 if end == "deadline" else LIMIT_S)
        first = asyncio.ensure_future(anext(messages))
        await peer.request()
        peer.send(peer.headers(1, *BEGINNING), frame(DATA, 0, 1, message(b"1") + message(b"2")))
        assert await first == b"1"
        if end == "trailers":
            peer.send(peer.headers(1, ("grpc-status", "11"), ("grpc-message", "no more"), flags=END_STREAM))
        elif end == "reset":
            peer.send(reset(1, 11))
        elif end == "closed":
            peer.close()
        assert await anext(messages) == b"2"
        code = await code_of(anext(messages))
        assert code == {"trailers": "OUT_OF_RANGE", "reset": "RESOURCE_EXHAUSTED", "closed": "UNAVAILABLE"}.get(
            end, "DEADLINE_EXCEEDED"
        )
        if end == "deadline":
            assert (await peer.until(RST_STREAM)).code == CANCEL


async def test_a_stream_that_is_left_is_broken_off(path):
    async with talking(path) as talk:
        messages = talk.channel.stream(METHOD, b"", LIMIT_S)
        first = asyncio.ensure_future(anext(messages))
        peer = await talk.peer()
        await peer.request()
        peer.send(peer.headers(1, *BEGINNING), frame(DATA, 0, 1, message(b"1") + message(b"2")))
        await first
        await messages.aclose()
        told = await peer.until(RST_STREAM)
        assert (told.number, told.code) == (1, CANCEL)
        call = talk.ask()
        await peer.request()
        peer.send(frame(DATA, 0, 1, message(b"3")), peer.answer(3, b"answer"))
        assert await call == b"answer"


async def test_a_stream_that_is_left_before_it_began_says_nothing(path):
    async with talking(path) as talk:
        await talk.channel.stream(METHOD, b"", LIMIT_S).aclose()
        assert talk.peers == []


async def test_a_large_message_may_follow_small_ones_in_a_stream(path):
    async with talking(path) as talk:
        messages = talk.channel.stream(METHOD, b"", LIMIT_S)
        first = asyncio.ensure_future(anext(messages))
        peer = await talk.peer()
        await peer.request()
        large = bytes(range(256)) * (9 << 12)
        peer.send(peer.headers(1, *BEGINNING))
        body = b"".join(message(each) for each in (b"1", large, b"2", large))
        sending = asyncio.create_task(peer.send_within_windows(1, body))
        assert await first == b"1"
        assert [await anext(messages) for _ in range(3)] == [large, b"2", large]
        await sending
        peer.send(peer.headers(1, *OK, flags=END_STREAM))
        assert await anext(messages, None) is None


# gRPC's own server.


class Served:
    """A server of gRPC's own library, and what its methods wait for."""

    def __init__(self):
        self.started, self.may_end = asyncio.Event(), asyncio.Event()

    async def echo(self, request, context):
        return request

    async def size(self, request, context):
        return str(len(request)).encode()

    async def make(self, request, context):
        return bytes(range(256)) * (int(request) // 256)

    async def wait(self, request, context):
        self.started.set()
        await self.may_end.wait()
        return b"waited"

    async def refuse(self, request, context):
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "100% 体積\n")

    async def count(self, request, context):
        for number in range(int(request)):
            yield b"%d" % number
        if request.startswith(b"0"):
            await context.abort(grpc.StatusCode.DATA_LOSS, "counted out")

    def handlers(self):
        unary = (self.echo, self.size, self.make, self.wait, self.refuse)
        methods = {each.__name__: grpc.unary_unary_rpc_method_handler(each) for each in unary}
        return grpc.method_handlers_generic_handler(
            "test.Served", methods | {"count": grpc.unary_stream_rpc_method_handler(self.count)}
        )


@asynccontextmanager
async def serving(path):
    served, server = Served(), grpc.aio.server()
    server.add_generic_rpc_handlers([served.handlers()])
    server.add_insecure_port(f"unix://{path}")
    async with asyncio.timeout(LIMIT_S):
        await server.start()
        channel = Channel(path)
        try:
            yield served, server, channel
        finally:
            await channel.close()
            await server.stop(0)


async def test_large_messages_go_both_ways(path):
    async with serving(path) as (_, _, channel):
        request = bytes(range(256)) * (3 << 12)
        assert await channel.unary("/test.Served/size", request, LIMIT_S) == b"%d" % (3 << 20)
        assert await channel.unary("/test.Served/echo", request, LIMIT_S) == request
        large = await channel.unary("/test.Served/make", b"%d" % (20 << 20), LIMIT_S)
        assert large == bytes(range(256)) * (20 << 12)


async def test_many_calls_go_on_at_once(path):
    async with serving(path) as (_, _, channel):
        requests = [b"%d" % number * (1 + number % 50) for number in range(300)]
        calls = [channel.unary("/test.Served/echo", each, LIMIT_S) for each in requests]
        assert await asyncio.gather(*calls) == requests


async def test_errors_of_a_real_server_are_understood(path):
    async with serving(path) as (_, _, channel):
        for _ in range(3):  # from the second time on, most headers only repeat
            error = await failure(channel.unary("/test.Served/refuse", b"", LIMIT_S))
            assert (error.code, error.message) == ("FAILED_PRECONDITION", "100% 体積\n")
            assert await code_of(channel.unary("/test.Served/nothing", b"", LIMIT_S)) == "UNIMPLEMENTED"
            assert await channel.unary("/test.Served/echo", b"", LIMIT_S) == b""
        assert await code_of(channel.unary("/test.Served/echo", bytes(5 << 20), LIMIT_S)) == "RESOURCE_EXHAUSTED"


async def test_a_deadline_holds_at_a_real_server(path):
    async with serving(path) as (served, _, channel):
        assert await code_of(channel.unary("/test.Served/wait", b"", 0.1)) == "DEADLINE_EXCEEDED"
        served.may_end.set()
        assert await channel.unary("/test.Served/wait", b"", LIMIT_S) == b"waited"


async def test_a_stream_of_a_real_server_comes_whole(path):
    async with serving(path) as (_, _, channel):
        counted = [each async for each in channel.stream("/test.Served/count", b"2000", LIMIT_S)]
        assert counted == [b"%d" % number for number in range(2000)]
        messages = channel.stream("/test.Served/count", b"03", LIMIT_S)
        assert [await anext(messages) for _ in range(3)] == [b"0", b"1", b"2"]
        assert await code_of(anext(messages)) == "DATA_LOSS"


async def test_a_real_server_that_stops_ends_what_it_does(path):
    async with serving(path) as (served, server, channel):
        call = asyncio.create_task(channel.unary("/test.Served/wait", b"", LIMIT_S))
        await served.started.wait()
        lost = asyncio.Event()
        channel._on_lost = lost.set
        stop = asyncio.create_task(server.stop(LIMIT_S))
        await lost.wait()
        assert await code_of(channel.unary("/test.Served/echo", b"", LIMIT_S)) == "UNAVAILABLE"
        served.may_end.set()
        assert await call == b"waited"
        await stop
        async with serving(path):
            assert await channel.unary("/test.Served/echo", b"again", LIMIT_S) == b"again"
