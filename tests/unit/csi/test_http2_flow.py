"""How much may be sent, in both directions, and which streams wait for their turn."""

import asyncio
import struct

import http2_peer as h2
import pytest
from http2_peer import Frame, code_of, frame, message, padded, reset, sent, talking, told_settings, window

from moorage.csi.channel import CallFailed


async def test_a_large_request_is_sent_only_as_far_as_it_is_wanted(path):
    async with talking(path) as talk:
        request = bytes(range(256)) * 1000
        body = message(request)
        call, peer, got = await talk.begun(request)
        assert len(got) == h2.SMALLEST_WINDOW
        peer.send(window(0, 1000))  # the stream has no room yet
        assert await peer.meanwhile() == []
        peer.send(window(1, 400))
        got += sent(await peer.meanwhile())
        assert len(got) == h2.SMALLEST_WINDOW + 400
        peer.send(window(1, 1_000_000))  # now it is the connection which has none
        got += sent(await peer.meanwhile())
        assert len(got) == h2.SMALLEST_WINDOW + 1000
        assert not any(each.flags & h2.END_STREAM for each in peer.seen if each.kind == h2.DATA)
        peer.send(window(0, 1_000_000))
        got += sent(await peer.meanwhile())
        assert got == body
        frames = [each for each in peer.seen if each.kind == h2.DATA]
        assert max(len(each.payload) for each in frames) == h2.LARGEST_FRAME
        assert [each.flags for each in frames] == [0] * (len(frames) - 1) + [h2.END_STREAM]
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


async def test_a_window_may_become_negative(path):
    async with talking(path) as talk:
        call, peer, _ = await talk.begun(bytes(200_000))
        peer.send(window(0, 1_000_000), told_settings({h2.FIRST_WINDOW: 10}))
        assert sent(await peer.meanwhile()) == b""
        peer.send(window(1, h2.SMALLEST_WINDOW - 10))  # back to nothing
        assert sent(await peer.meanwhile()) == b""
        peer.send(window(1, 1))
        assert len(sent(await peer.meanwhile())) == 1
        peer.send(told_settings({h2.FIRST_WINDOW: 15}))
        assert len(sent(await peer.meanwhile())) == 5
        second = talk.ask(bytes(100))
        await peer.until(h2.HEADERS)
        assert len(sent(await peer.meanwhile(), 3)) == 15  # new streams begin with what was said last
        peer.send(told_settings({h2.FIRST_WINDOW: 2**31 - 1 - h2.SMALLEST_WINDOW}))
        await peer.meanwhile()
        assert len(sent(peer.seen, 1)) == 200_005
        assert len(sent(peer.seen, 3)) == 105
        peer.send(peer.answer(3, b"second"), peer.answer(1, b"first"))
        assert await asyncio.gather(call, second) == [b"first", b"second"]


async def test_a_stream_may_begin_without_any_room(path):
    async with talking(path) as talk:
        call, peer, got = await talk.begun(b"request", {h2.FIRST_WINDOW: 0})
        assert got == b""
        for _ in message(b"request"):
            peer.send(window(1, 1))
        got = await peer.meanwhile()
        assert sent(got) == message(b"request")
        assert [each.flags for each in got] == [0] * 11 + [h2.END_STREAM]
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


async def test_a_peer_may_want_larger_frames(path):
    async with talking(path) as talk:
        call = talk.ask(bytes(50_000))
        peer = await talk.peer({h2.FRAME_SIZE: 40_000})
        assert (await peer.request()).body == message(bytes(50_000))
        assert [len(each.payload) for each in peer.seen if each.kind == h2.DATA] == [40_000, 10_005]
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


async def test_an_answer_may_come_before_the_request_is_sent(path):
    async with talking(path) as talk:
        call, peer, _ = await talk.begun(bytes(200_000))
        peer.send(peer.answer(1, trailers=[("grpc-status", "8")]))
        assert await code_of(call) == "RESOURCE_EXHAUSTED"
        assert (await peer.until(h2.RST_STREAM)).number == 1
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
        assert await peer.meanwhile() == [Frame(h2.WINDOW_UPDATE, 0, 0, struct.pack(">L", 2**30 + 6))]


async def test_an_answer_larger_than_its_window_arrives_whole(path):
    async with talking(path) as talk:
        content = bytes(range(256)) * (10 << 12)
        call, peer = await talk.asked()
        peer.send(peer.headers(1, *h2.BEGINNING))
        await peer.send_within_windows(1, message(content))
        peer.send(peer.headers(1, *h2.OK, flags=h2.END_STREAM))
        assert len(content) == 10 << 20
        assert await call == content
        assert sum(each.kind == h2.WINDOW_UPDATE and each.number == 1 for each in peer.seen) > 0


async def test_padding_counts_as_what_was_brought(path):
    """Else a stream of many padded frames would come to stand."""
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(peer.headers(1, *h2.BEGINNING))
        whole = padded(b"", 255)
        for _ in range((9 << 20) // len(whole) // 256):
            while peer.windows[1] < 256 * len(whole):
                await peer.next()
            peer.send(*[frame(h2.DATA, h2.PADDED, 1, whole)] * 256)
            peer.windows[1] -= 256 * len(whole)
        peer.send(frame(h2.DATA, 0, 1, message(b"answer")), peer.headers(1, *h2.OK, flags=h2.END_STREAM))
        assert await call == b"answer"


async def test_a_stream_whose_messages_nobody_takes_gets_no_more(path):
    async with talking(path) as talk:
        messages, first, peer = await talk.streaming()
        room = peer.windows[1]
        piece = message(bytes(h2.LARGEST_FRAME - 5))
        peer.send(peer.headers(1, *h2.BEGINNING), frame(h2.DATA, 0, 1, piece), frame(h2.DATA, 0, 1, piece))
        await first
        for _ in range(room // h2.LARGEST_FRAME - 2):
            peer.send(frame(h2.DATA, 0, 1, piece))
        assert await peer.meanwhile() == []
        peer.send(peer.headers(1, *h2.OK, flags=h2.END_STREAM))
        assert sum([1 async for _ in messages]) == room // h2.LARGEST_FRAME - 1


async def test_a_stream_gets_more_once_its_messages_are_taken(path):
    async with talking(path) as talk:
        messages, first, peer = await talk.streaming()
        room = peer.windows[1]
        piece = message(bytes(h2.LARGEST_FRAME - 5))
        peer.send(peer.headers(1, *h2.BEGINNING))
        peer.send(*[frame(h2.DATA, 0, 1, piece)] * (room // h2.LARGEST_FRAME))
        await first
        await peer.meanwhile()
        for _ in range(room // h2.LARGEST_FRAME - 1):
            await anext(messages)
        await peer.meanwhile()
        granted = sum(each.code for each in peer.seen if each[::2] == (h2.WINDOW_UPDATE, 1))
        assert granted == room
        await messages.aclose()


async def test_more_than_was_asked_for_breaks_the_connection(path):
    async with talking(path) as talk:
        messages, first, peer = await talk.streaming()
        room = peer.windows[1]
        piece = message(bytes(h2.LARGEST_FRAME - 5))
        peer.send(peer.headers(1, *h2.BEGINNING), frame(h2.DATA, 0, 1, piece))
        await first
        peer.send(*[frame(h2.DATA, 0, 1, piece)] * (room // h2.LARGEST_FRAME))
        assert (await peer.until(h2.GOAWAY)).payload[4:8] == struct.pack(">L", h2.FLOW_CONTROL_ERROR)
        with pytest.raises(CallFailed, match="more came than was asked for") as caught:
            async for _ in messages:
                pass
        assert caught.value.code == "UNAVAILABLE"


async def test_a_call_waits_for_its_turn(path):
    async with talking(path) as talk:
        calls = [talk.ask(bytes([number])) for number in range(3)]
        peer = await talk.peer({h2.MAX_STREAMS: 1})
        for number in range(3):
            request = await peer.request()
            assert request.body == message(bytes([number]))
            assert [each for each in await peer.meanwhile() if each.kind == h2.HEADERS] == []
            peer.send(peer.answer(request.number, b"answer"))
            assert await calls[number] == b"answer"


@pytest.mark.parametrize("how", ["cancelled", "reset", "settings"])
async def test_a_turn_comes_whatever_makes_room(path, how):
    async with talking(path) as talk:
        first, second = talk.ask(b"first"), talk.ask(b"second")
        peer = await talk.peer({h2.MAX_STREAMS: 1})
        await peer.request()
        assert await peer.meanwhile() == []
        if how == "cancelled":
            first.cancel()
        elif how == "reset":
            peer.send(reset(1, h2.CANCEL))
        else:
            peer.send(told_settings({h2.MAX_STREAMS: 2}))
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
        peer = await talk.peer({h2.MAX_STREAMS: 1})
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
        peer = await talk.peer({h2.MAX_STREAMS: 1})
        await peer.request()
        assert await code_of(talk.ask(b"second", timeout_s=0.01)) == "DEADLINE_EXCEEDED"
        assert await peer.meanwhile() == []
        peer.send(peer.answer(1, b"answer"))
        assert await first == b"answer"
        assert await peer.meanwhile() == []


async def test_waiting_calls_are_lost_with_the_connection(path):
    async with talking(path) as talk:
        calls = [talk.ask() for _ in range(3)]
        peer = await talk.peer({h2.MAX_STREAMS: 1})
        await peer.request()
        peer.close()
        assert [await code_of(call) for call in calls] == ["UNAVAILABLE"] * 3
