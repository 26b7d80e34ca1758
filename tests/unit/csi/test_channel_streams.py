"""Answers of many messages."""

import asyncio

import http2_peer as h2
import pytest
from http2_peer import code_of, frame, message, reset, talking


async def test_messages_come_as_they_arrive(path):
    async with talking(path) as talk:
        messages, first, peer = await talk.streaming(b"request")
        peer.send(peer.headers(1, *h2.BEGINNING), frame(h2.DATA, 0, 1, message(b"1")))
        assert await first == b"1"
        peer.send(frame(h2.DATA, 0, 1, message(b"2") + message(b"") + message(b"4") + message(b"5")[:3]))
        assert [await anext(messages) for _ in range(3)] == [b"2", b"", b"4"]
        peer.send(frame(h2.DATA, 0, 1, message(b"5")[3:]))
        assert await anext(messages) == b"5"
        peer.send(peer.headers(1, *h2.OK, flags=h2.END_STREAM))
        assert [each async for each in messages] == []
        assert await peer.meanwhile() == []


async def test_a_stream_may_have_no_messages(path):
    async with talking(path) as talk:
        messages = talk.channel.stream(h2.METHOD, b"", h2.LIMIT_S)
        first = asyncio.ensure_future(anext(messages, None))
        peer = await talk.peer()
        await peer.request()
        peer.send(peer.headers(1, *h2.BEGINNING, *h2.OK, flags=h2.END_STREAM))
        assert await first is None


@pytest.mark.parametrize("end", ["trailers", "reset", "closed", "deadline"])
async def test_an_error_comes_after_the_messages_before_it(path, end):
    async with talking(path) as talk:
        peer = await talk.connected()
        messages = talk.channel.stream(h2.METHOD, b"", 0.3 if end == "deadline" else h2.LIMIT_S)
        first = asyncio.ensure_future(anext(messages))
        await peer.request()
        peer.send(peer.headers(1, *h2.BEGINNING), frame(h2.DATA, 0, 1, message(b"1") + message(b"2")))
        assert await first == b"1"
        if end == "trailers":
            peer.send(peer.headers(1, ("grpc-status", "11"), ("grpc-message", "no more"), flags=h2.END_STREAM))
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
            assert (await peer.until(h2.RST_STREAM)).code == h2.CANCEL


async def test_a_stream_that_is_left_is_broken_off(path):
    async with talking(path) as talk:
        messages, first, peer = await talk.streaming()
        peer.send(peer.headers(1, *h2.BEGINNING), frame(h2.DATA, 0, 1, message(b"1") + message(b"2")))
        await first
        await messages.aclose()
        told = await peer.until(h2.RST_STREAM)
        assert (told.number, told.code) == (1, h2.CANCEL)
        call = talk.ask()
        await peer.request()
        peer.send(frame(h2.DATA, 0, 1, message(b"3")), peer.answer(3, b"answer"))
        assert await call == b"answer"


async def test_a_stream_that_is_left_before_it_began_says_nothing(path):
    async with talking(path) as talk:
        await talk.channel.stream(h2.METHOD, b"", h2.LIMIT_S).aclose()
        assert talk.peers == []


async def test_a_large_message_may_follow_small_ones_in_a_stream(path):
    async with talking(path) as talk:
        messages, first, peer = await talk.streaming()
        large = bytes(range(256)) * (9 << 12)
        peer.send(peer.headers(1, *h2.BEGINNING))
        body = b"".join(message(each) for each in (b"1", large, b"2", large))
        sending = asyncio.create_task(peer.send_within_windows(1, body))
        assert await first == b"1"
        assert [await anext(messages) for _ in range(3)] == [large, b"2", large]
        await sending
        peer.send(peer.headers(1, *h2.OK, flags=h2.END_STREAM))
        assert await anext(messages, None) is None
