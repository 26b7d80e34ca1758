"""gRPC calls over a connection of our own: what a request is, and an answer."""

import asyncio
import struct

import http2_peer as h2
import pytest
from http2_peer import (
    Frame,
    failure,
    frame,
    message,
    padded,
    property_test,
    reset,
    talking,
    told_settings,
)
from hypothesis import given
from hypothesis import strategies as st

from moorage.csi.http2 import Connection


async def test_a_unary_call_says_what_grpc_says(path):
    async with talking(path) as talk:
        call = talk.ask(b"request", timeout_s=2.5)
        peer = await talk.stranger()
        await peer.preface()
        first = await peer.next()
        assert (first.kind, first.flags, first.number) == (h2.SETTINGS, 0, 0)
        assert dict(struct.iter_unpack(">HL", first.payload))[h2.ENABLE_PUSH] == 0
        peer.send(told_settings({}))
        assert (await peer.until(h2.SETTINGS)).flags == h2.ACK
        request = await peer.request()
        assert request.number == 1
        assert request.headers == [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", h2.METHOD),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "grpc-python-moorage"),
            ("grpc-timeout", "2500m"),
        ]
        assert request.body == b"\x00\x00\x00\x00\x07request"
        assert peer.seen[-1] == Frame(h2.DATA, h2.END_STREAM, 1, request.body)
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
        frame(h2.HEADERS, h2.END_HEADERS | h2.PADDED, number, padded(peer.block(*h2.BEGINNING), 0)),
        frame(h2.DATA, h2.PADDED, number, padded(message(b"answer"))),
        frame(h2.DATA, h2.PADDED, number, padded(b"", 255)),
        frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM | h2.PADDED, number, padded(peer.block(*h2.OK), 200)),
    ])  # fmt: skip


def with_priority(peer, number):
    priority = struct.pack(">LB", 0, 15)
    last = h2.END_HEADERS | h2.END_STREAM | h2.PADDED | h2.WITH_PRIORITY
    return b"".join([
        frame(h2.HEADERS, h2.END_HEADERS | h2.WITH_PRIORITY, number, priority + peer.block(*h2.BEGINNING)),
        frame(h2.PRIORITY, 0, number, priority),
        frame(h2.DATA, 0, number, message(b"answer")),
        frame(h2.HEADERS, last, number, padded(priority + peer.block(*h2.OK))),
    ])  # fmt: skip


def with_continuations(peer, number):
    """Each header block one byte at a time; only the first frame says that the stream ends."""
    first, last = peer.block(*h2.BEGINNING, ("x-more", "more")), peer.block(*h2.OK, ("x-more", "most"))
    return b"".join([
        frame(h2.HEADERS, 0, number, b""),
        *(frame(h2.CONTINUATION, 0, number, bytes([each])) for each in first),
        frame(h2.CONTINUATION, h2.END_HEADERS, number, b""),
        frame(h2.DATA, 0, number, message(b"answer")),
        frame(h2.HEADERS, h2.END_STREAM | h2.PADDED, number, padded(last[:2])),
        *(frame(h2.CONTINUATION, 0, number, bytes([each])) for each in last[2:-1]),
        frame(h2.CONTINUATION, h2.END_HEADERS, number, last[-1:]),
    ])  # fmt: skip


def without_huffman(peer, number):
    return b"".join([
        frame(h2.HEADERS, h2.END_HEADERS, number, peer.block(*h2.BEGINNING, huffman=False)),
        frame(h2.DATA, 0, number, message(b"answer")),
        frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, number, peer.block(*h2.OK, huffman=False)),
    ])  # fmt: skip


def over_many_frames(peer, number):
    pieces = [frame(h2.DATA, 0, number, bytes([each])) for each in message(b"answer")]
    return b"".join([
        peer.headers(number, *h2.BEGINNING),
        frame(h2.DATA, 0, number),
        *pieces,
        peer.headers(number, *h2.OK, flags=h2.END_STREAM),
    ])  # fmt: skip


def among_unknown_frames(peer, number):
    return b"".join([
        frame(0xB, 0xFF, number, b"unknown"),
        peer.headers(number, *h2.BEGINNING),
        frame(0xFF, 0, 0, bytes(h2.LARGEST_FRAME)),
        frame(h2.DATA, 0, number, message(b"answer")),
        frame(0xA, 0, 2**31 - 1),
        peer.headers(number, *h2.OK, flags=h2.END_STREAM),
    ])  # fmt: skip


def with_a_reset_behind_it(peer, number):
    return peer.answer(number, b"answer") + reset(number, h2.NO_ERROR)


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
        peer.send(with_continuations(peer, 1), frame(h2.PING, payload=b"12345678"))
        assert await call == b"answer"
        assert (await peer.until(h2.PING)).payload == b"12345678"
        for shape in (with_padding, over_many_frames, among_unknown_frames):
            call = talk.ask()
            peer.send(shape(peer, (await peer.request()).number))
            assert await call == b"answer"


async def test_an_error_may_come_with_the_first_headers(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(
            peer.headers(1, *h2.BEGINNING, ("grpc-status", "5"), ("grpc-message", "no volume v"), flags=h2.END_STREAM)
        )
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
            first = peer.headers(number, *h2.BEGINNING)
            block = peer.block(("grpc-message", words), ("grpc-status", status))
            blocks.append(block)
            peer.send(first, frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, number, block))
            error = await failure(call)
            assert (error.message, error.code) == (words, h2.CODES[int(status)])
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
            first = peer.block(*h2.BEGINNING, huffman=huffman)
            last = peer.block(("grpc-status", status), ("grpc-message", words), *more, huffman=huffman)
            peer.send(
                frame(h2.HEADERS, h2.END_HEADERS, number, first),
                frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, number, last),
            )
            error = await failure(call)
            assert (error.code, error.message) == (h2.CODES[int(status)], words)
