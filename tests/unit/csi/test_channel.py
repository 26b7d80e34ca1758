"""gRPC calls over a connection of our own: requests, answers, their ends, and streams of messages."""

import asyncio
import struct
from contextlib import asynccontextmanager

import grpc
import pytest
from http2_peer import (
    ACK,
    BEGINNING,
    CANCEL,
    CODES,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    LARGEST_FRAME,
    LIMIT_S,
    METHOD,
    NO_ERROR,
    OK,
    PADDED,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WITH_PRIORITY,
    Frame,
    code_of,
    failure,
    frame,
    message,
    padded,
    property_test,
    reset,
    talking,
    told_settings,
    window,
)
from hypothesis import given
from hypothesis import strategies as st

from moorage.csi import channel as channel_module
from moorage.csi.channel import Channel
from moorage.csi.http2 import Connection

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
        await talk.answered(peer)
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
        await talk.answered()
        assert talk.losses == 0


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
