"""One connection and whoever is at its other end: how much may be sent, what breaks it, and how it is closed."""

import asyncio
import socket
import struct

import hpack
import pytest
from http2_peer import (
    ACK,
    BEGINNING,
    CANCEL,
    CODES,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE,
    GOAWAY,
    HEADERS,
    LARGEST_FRAME,
    LIMIT_S,
    MAX_STREAMS,
    METHOD,
    OK,
    PADDED,
    PING,
    PREFACE,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    SMALLEST_WINDOW,
    TABLE_SIZE,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Frame,
    code_of,
    failure,
    farewell,
    frame,
    message,
    padded,
    property_test,
    reset,
    sent,
    talking,
    told_settings,
    window,
)
from hypothesis import given
from hypothesis import strategies as st

from moorage.csi.channel import CallFailed, Channel
from moorage.csi.http2 import Connection

# Flow control.


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
        peer = await talk.answered()


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
        peer = await talk.answered()
        assert not lost.is_set()
        peer.close()
        await lost.wait()
        await talk.answered()  # by another
        assert len(talk.peers) == 2


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
        peer = await talk.answered()
        peer.send(farewell(1))
        await peer.gone()
        assert talk.losses == 1
        peer = await talk.answered()


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
        peer = await talk.answered()


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
