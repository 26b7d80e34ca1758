"""How calls end: with a status, with an error of any layer below, and at their deadlines."""

import asyncio
import struct

import http2_peer as h2
import pytest
from http2_peer import (
    Frame,
    code_of,
    failure,
    frame,
    message,
    reset,
    talking,
    window,
)

from moorage.csi import channel as channel_module


@pytest.mark.parametrize(("number", "name"), list(enumerate(h2.CODES))[1:])
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
        peer.send(peer.headers(1, *h2.BEGINNING), frame(h2.DATA, h2.END_STREAM, 1, message(b"answer")))
        assert await code_of(call) == "INTERNAL"


async def test_an_answer_that_ends_within_a_message_is_none(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        body = message(b"whole") + message(b"half")[:-2]
        peer.send(
            peer.headers(1, *h2.BEGINNING), frame(h2.DATA, 0, 1, body), peer.headers(1, *h2.OK, flags=h2.END_STREAM)
        )
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
        peer.send(peer.headers(1, *beginning, flags=h2.END_STREAM if is_whole else 0))
        assert await code_of(call) == name
        resets = [each for each in await peer.meanwhile() if each.kind == h2.RST_STREAM]
        assert len(resets) == (0 if is_whole else 1)  # nobody waits for the page
        assert talk.losses == 0


async def test_a_status_of_grpc_says_more_than_one_of_http(path):
    """By gRPC's http-grpc-status-mapping.md: if there is a grpc-status, it must be used."""
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(
            peer.headers(
                1, (":status", "503"), h2.BEGINNING[1], ("grpc-status", "8"), ("grpc-message", "x"), flags=h2.END_STREAM
            )
        )
        assert await code_of(call) == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("more", [[("content-type", "text/html")], []])
async def test_an_answer_that_is_not_grpc_is_unknown(path, more):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.headers(1, (":status", "200"), *more), frame(h2.DATA, h2.END_STREAM, 1, b"<html>"))
        error = await failure(call)
        assert (error.code, error.message) == ("UNKNOWN", "the answer is not one of gRPC")


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"])
async def test_every_way_to_say_grpc_is_understood(path, kind):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(
            peer.headers(1, (":status", "200"), ("content-type", kind)),
            frame(h2.DATA, 0, 1, message(b"answer")),
            peer.headers(1, *h2.OK, flags=h2.END_STREAM),
        )
        assert await call == b"answer"


@pytest.mark.parametrize("messages", [[], [b"one", b"two"], [b"", b""], [b""] * 1000])
async def test_a_unary_call_has_one_message(path, messages):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(
            peer.headers(1, *h2.BEGINNING),
            frame(h2.DATA, 0, 1, b"".join(message(each) for each in messages)),
            peer.headers(1, *h2.OK, flags=h2.END_STREAM),
        )
        assert await code_of(call) == "INTERNAL"


async def test_a_second_message_of_a_unary_call_does_not_bring_it_to_a_stand(path):
    """It may be larger than what the stream may bring, and nobody takes the first one."""
    async with talking(path) as talk:
        call = talk.ask(timeout_s=1)
        peer = await talk.peer()
        await peer.request()
        peer.send(peer.headers(1, *h2.BEGINNING))
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
        peer.send(peer.headers(1, *h2.BEGINNING), frame(h2.DATA, 0, 1, prefix))
        assert await code_of(call) == name
        assert (await peer.until(h2.RST_STREAM)).code == h2.CANCEL
        peer.send(frame(h2.DATA, 0, 1, bytes(1000)), peer.headers(1, *h2.OK, flags=h2.END_STREAM))
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
            peer.send(peer.headers(1, *h2.BEGINNING), frame(h2.DATA, 0, 1, message(b"answer")))
        peer.send(reset(1, code))
        assert await code_of(call) == name
        assert await peer.meanwhile() == []
        assert talk.losses == 0


async def test_a_deadline_is_told_to_the_other_side(path):
    async with talking(path) as talk:
        peer = await talk.connected()
        call = talk.ask(timeout_s=0.05)
        await peer.request()
        peer.send(peer.headers(1, *h2.BEGINNING))
        assert await code_of(call) == "DEADLINE_EXCEEDED"
        told = await peer.until(h2.RST_STREAM)
        assert (told.number, told.code) == (1, h2.CANCEL)


async def test_a_call_that_is_cancelled_is_broken_off(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        call.cancel()
        told = await peer.until(h2.RST_STREAM)
        assert (told.number, told.code) == (1, h2.CANCEL)
        await asyncio.wait([call])
        assert call.cancelled()
        assert await peer.meanwhile() == []


async def test_a_call_is_broken_off_once_also_within_its_request(path):
    async with talking(path) as talk:
        call, peer, _ = await talk.begun(bytes(200_000))
        call.cancel()
        await asyncio.wait([call])
        peer.send(window(0, 1_000_000), window(1, 1_000_000))
        assert await peer.meanwhile() == [Frame(h2.RST_STREAM, 0, 1, struct.pack(">L", h2.CANCEL))]


async def test_a_deadline_that_the_other_side_notices_first_is_a_deadline(path):
    """As in gRPC's own library: a server that ends a call at its deadline says CANCEL, for there is no other word."""
    async with talking(path) as talk:
        loop = asyncio.get_running_loop()
        peer = await talk.connected()
        ends_at = loop.time() + 0.05
        call = talk.ask(timeout_s=0.05)
        await peer.request()
        peer.send(reset(1, h2.CANCEL))
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
