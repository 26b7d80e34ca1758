"""One connection and whoever is at its other end: what breaks it, and how it is closed."""

import asyncio
import socket
import struct

import hpack
import http2_peer as h2
import pytest
from http2_peer import (
    Frame,
    code_of,
    failure,
    farewell,
    frame,
    message,
    property_test,
    reset,
    talking,
    told_settings,
    window,
)
from hypothesis import given
from hypothesis import strategies as st

from moorage.csi.channel import Channel
from moorage.csi.http2 import Connection

# Connections.


async def test_nobody_there_is_unavailable(tmp_path):
    async with asyncio.timeout(h2.LIMIT_S):
        channel = Channel(f"{tmp_path}/nothing.sock")
        assert await code_of(channel.unary(h2.METHOD, b"", h2.LIMIT_S)) == "UNAVAILABLE"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(f"{tmp_path}/dead.sock")
        await channel.close()
        channel = Channel(f"{tmp_path}/dead.sock")
        assert await code_of(anext(channel.stream(h2.METHOD, b"", h2.LIMIT_S))) == "UNAVAILABLE"
        assert await code_of(channel.connected()) == "UNAVAILABLE"
        await channel.close()


@pytest.mark.parametrize("words", [
    b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x15\x03\x01\x00\x02\x02\x16",
    b"",
    b"\0",
    h2.PREFACE,
    frame(h2.SETTINGS, payload=b"12345"),
    frame(h2.SETTINGS, number=1),
    frame(h2.PING, payload=bytes(8)) + told_settings({}),
    frame(h2.GOAWAY, payload=bytes(8)),
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
        st.sampled_from([*h2.BEGINNING, ("grpc-status", "0"), ("grpc-status", "5"), ("x", "y"), (":status", "404")])
    ).map(lambda headers: hpack.Encoder().encode(headers)),
)
frames = st.builds(
    frame,
    st.integers(0, 10),
    st.sampled_from(
        [0, h2.END_STREAM, h2.END_HEADERS, h2.END_HEADERS | h2.END_STREAM, h2.PADDED, h2.WITH_PRIORITY, 0xFF]
    ),
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
            assert isinstance(outcome, bytes) or outcome.code in h2.CODES[1:]
        assert talk.losses <= 1  # none if all came too early


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_connection_that_ends_takes_its_calls_along(path, how):
    async with talking(path) as talk:
        calls = [talk.ask(), talk.ask()]
        peer = await talk.peer()
        await peer.request()
        await peer.request()
        peer.send(peer.headers(1, *h2.BEGINNING), frame(h2.DATA, 0, 1, message(b"answer")[:-1]))
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
        peer.send(frame(h2.PING, payload=b"12345678"), peer.answer(1, b"first"))
        assert await calls[0] == b"first"
        await peer.gone()
        assert Frame(h2.PING, h2.ACK, 0, b"12345678") in peer.seen
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
        peer = await talk.peer({h2.MAX_STREAMS: 1})
        await peer.request()
        peer.send(farewell(1))
        assert await code_of(second) == "UNAVAILABLE"
        peer.send(peer.answer(1, b"answer"))
        assert await first == b"answer"
        await peer.gone()
        assert sum(each.kind == h2.HEADERS for each in peer.seen) == 1


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
        peer.send(frame(h2.PING, payload=b"12345678"), frame(h2.PING, h2.ACK, payload=b"abcdefgh"))
        assert await peer.next() == Frame(h2.PING, h2.ACK, 0, b"12345678")
        assert await peer.meanwhile() == []
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


async def test_settings_are_acknowledged_each_time(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        peer.send(told_settings({h2.TABLE_SIZE: 0}), frame(h2.SETTINGS, h2.ACK), told_settings({0xF000: 7}))
        assert await peer.meanwhile() == [Frame(h2.SETTINGS, h2.ACK, 0, b"")] * 2
        peer.send(peer.answer(1, b"answer"))
        assert await call == b"answer"


VIOLATIONS = {
    "a promise": frame(h2.PUSH_PROMISE, h2.END_HEADERS, 1, struct.pack(">L", 2) + b"\x88"),
    "a frame that is too large": frame(h2.DATA, 0, 1, bytes(h2.LARGEST_FRAME + 1))[:9],
    "nothing to continue": frame(h2.CONTINUATION, h2.END_HEADERS, 1, b"\x88"),
    "headers that are not continued": frame(h2.HEADERS, 0, 1, b"\x88") + frame(h2.PING, payload=bytes(8)),
    "headers that are continued elsewhere": frame(h2.HEADERS, 0, 1, b"\x88")
    + frame(h2.CONTINUATION, h2.END_HEADERS, 3),
    "headers within headers": frame(h2.HEADERS, 0, 1, b"\x88") + frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x88"),
    "headers without end": frame(h2.HEADERS, 0, 1) + frame(h2.CONTINUATION, 0, 1, b"\x88" * h2.LARGEST_FRAME) * 5,
    "headers that are large only when read": frame(h2.HEADERS, 0, 1)
    + frame(h2.CONTINUATION, 4, 1, b"\x88" * h2.LARGEST_FRAME),
    "headers that cannot be read": frame(h2.HEADERS, h2.END_HEADERS, 1, b"\xfe"),
    "headers that break off": frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x40\x7f"),
    "headers with a wrong word": frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x00\x01x\x84\xff\xff\xff\xff"),
    "a table that is too large": frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x3f\xff\xff\x03"),
    "headers of nothing": frame(h2.HEADERS, h2.END_HEADERS, 0, b"\x88"),
    "headers of a stream that was not begun": frame(h2.HEADERS, h2.END_HEADERS, 5, b"\x88"),
    "data of nothing": frame(h2.DATA, 0, 0, b"x"),
    "data of a stream that was not begun": frame(h2.DATA, 0, 5, b"x"),
    "data of a stream of its own": frame(h2.DATA, 0, 2, b"x"),
    "a reset of a stream that was not begun": reset(5, h2.CANCEL),
    "a reset that is too short": frame(h2.RST_STREAM, 0, 1, b"123"),
    "room for a stream that was not begun": window(5, 1),
    "no more room": window(0, 0),
    "too much room": window(0, 2**31 - 1),
    "room of a wrong size": frame(h2.WINDOW_UPDATE, 0, 0, b"12345"),
    "too much padding": frame(h2.DATA, h2.PADDED, 1, b"\x05abcd"),
    "padding without a length": frame(h2.DATA, h2.PADDED, 1),
    "headers with too much padding": frame(h2.HEADERS, h2.PADDED | h2.END_HEADERS, 1, b"\x02\x88"),
    "half a setting": frame(h2.SETTINGS, payload=b"12345"),
    "settings of a stream": frame(h2.SETTINGS, number=1),
    "a first window that is too large": told_settings({h2.FIRST_WINDOW: 2**31}),
    "frames of no size": told_settings({h2.FRAME_SIZE: 0}),
    "frames that are too small": told_settings({h2.FRAME_SIZE: h2.LARGEST_FRAME - 1}),
    "frames that cannot be written": told_settings({h2.FRAME_SIZE: 2**24}),
    "a short farewell": frame(h2.GOAWAY, payload=bytes(7)),
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
        assert (told.kind, told.number, len(told.payload)) == (h2.GOAWAY, 0, 8)
        assert told.payload[4:] != bytes(4)
        await peer.gone()
        assert [await code_of(call) for call in calls] == ["UNAVAILABLE"] * 2
        assert talk.losses == 1
        peer = await talk.answered()


async def test_what_comes_too_late_is_ignored_and_still_understood(path):
    async with talking(path) as talk:
        call, peer = await talk.asked()
        call.cancel()
        await peer.until(h2.RST_STREAM)
        late = [("grpc-status", "5"), ("grpc-message", "said before")]
        peer.send(
            peer.headers(1, *h2.BEGINNING),
            frame(h2.DATA, 0, 1, message(b"late")),
            window(1, 100),
            peer.headers(1, *late, flags=h2.END_STREAM),
            reset(1, h2.CANCEL),
        )
        call = talk.ask()
        request = await peer.request()
        peer.send(peer.headers(request.number, *h2.BEGINNING), peer.headers(request.number, *late, flags=h2.END_STREAM))
        error = await failure(call)
        assert (error.code, error.message) == ("NOT_FOUND", "said before")
        assert len(talk.peers) == 1


# Closing.


def connecting():
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("csi-connect")]


async def test_closing_ends_calls(path):
    async with talking(path) as talk:
        messages = talk.channel.stream(h2.METHOD, b"", h2.LIMIT_S)
        calls = [talk.ask(), asyncio.ensure_future(anext(messages)), talk.ask()]
        peer = await talk.peer({h2.MAX_STREAMS: 2})
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
