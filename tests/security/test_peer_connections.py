"""Peers that nobody knows, and accounts, take every connection; others must still be served."""

import asyncio
import functools
import json
import logging
import ssl

import pytest
from tests.support.accounts import rule, serve_accounts

from moorage.apiserver.http.places import Places
from moorage.apiserver.limits import ServerLimits

CONFIG = "/api/v1/namespaces/default/configmaps"
LIMITS = ServerLimits(
    connections=60, nameless_connections=10, connections_of_account=8, requests_of_account=4, watches_of_account=5,
    headers_s=20.0, handshake_s=20.0, body_s=20.0,
)  # fmt: skip


@pytest.fixture
async def cluster(tmp_path):
    async with serve_accounts(tmp_path / "api", limits=LIMITS) as accounts:
        yield accounts


class Peer:
    """A raw connection."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def sends(self, text):
        self.writer.write(text.encode())
        await self.writer.drain()
        return self

    async def is_cut(self):
        try:
            async with asyncio.timeout(20):
                while await self.reader.read(4096):
                    pass
        except ConnectionError:
            pass
        return True

    @property
    def is_open(self):
        return not self.reader.at_eof() and self.reader.exception() is None


@pytest.fixture
async def connect():
    made = []

    async def connected(url, text="", **tls):
        host, port = url.partition("://")[2].split(":")
        one = Peer(*await asyncio.open_connection(host, int(port), **tls))
        made.append(one)
        return await one.sends(text) if text else one

    yield connected
    for one in made:
        one.writer.transport.abort()
    await asyncio.sleep(0)


@pytest.fixture
def peer(cluster, connect):
    return functools.partial(connect, cluster.server.insecure_url)


def request(token, path=CONFIG):
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"


async def heads(peer):
    """The status line of the next answer, whose body is read too."""
    async with asyncio.timeout(20):
        head = (await peer.reader.readuntil(b"\r\n\r\n")).decode()
        size = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length")), 0)
        await peer.reader.readexactly(size)
    return head


async def test_silent_peers_push_out_each_other_and_no_user(cluster, peer):
    bob = await cluster.account("bob", rule("list", "configmaps"))
    user = await peer(request(bob.token))
    assert "200 OK" in await heads(user)
    silent = [await peer() for _ in range(40)]
    await silent[0].is_cut()
    slow = [await peer("GET / HTTP/1.1\r\nHost: x\r\nX-A") for _ in range(40)]
    await slow[0].is_cut()
    assert (await cluster.admin("GET", CONFIG))[0] == 200
    assert (await (await cluster.caller("", bob.token))("GET", CONFIG))[0] == 200
    assert "200 OK" in await heads(await user.sends(request(bob.token))), "its connection was kept"
    assert cluster.server.listener.places.taken <= LIMITS.connections


async def test_handshakes_that_do_not_end_are_counted(cluster, connect):
    silent = [await connect(cluster.server.url, "\x16\x03") for _ in range(70)]
    await silent[0].is_cut()
    context = ssl.create_default_context(cafile=str(cluster.server.identity.ca))
    user = await connect(cluster.server.url, request(cluster.server.token), ssl=context)
    assert "200 OK" in await heads(user)
    assert cluster.server.listener.places.taken <= LIMITS.connections


@pytest.mark.parametrize("path", ["/healthz", "/version", CONFIG, "/"])
async def test_an_anonymous_answer_is_the_last_on_its_connection(peer, path):
    one = await peer(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")
    assert "Connection: close" in await heads(one)
    assert await one.is_cut()


async def test_an_account_has_a_share_of_the_connections(cluster, peer):
    bob, eve = [await cluster.account(name, rule("list", "configmaps")) for name in ("bob", "eve")]
    taken = [await peer(request((bob if n % 2 else eve).token)) for n in range(12)]
    answers = [await heads(one) for one in taken]
    assert sum("200 OK" in answer for answer in answers) == LIMITS.connections_of_account, "they share one"
    refused = taken[next(n for n, answer in enumerate(answers) if "429" in answer)]
    assert await refused.is_cut()
    assert (await cluster.admin("GET", CONFIG))[0] == 200
    other = await cluster.account("other", rule("list", "configmaps"), namespace="kube-public")
    assert (await other("GET", "/api/v1/namespaces/kube-public/configmaps"))[0] == 200
    taken[answers.index(next(a for a in answers if "200" in a))].writer.transport.abort()
    async with asyncio.timeout(20):
        while (await bob("GET", CONFIG))[0] != 200:
            await asyncio.sleep(0.05)


async def test_an_account_has_a_share_of_requests_and_watches(cluster, peer):
    bob = await cluster.account("bob", rule("list watch create", "configmaps"))
    head = f"POST {CONFIG} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {bob.token}\r\nContent-Length: 9\r\n\r\n"
    slow = [await peer(head) for _ in range(LIMITS.requests_of_account)]
    async with asyncio.timeout(20):
        while (await bob("GET", CONFIG))[0] != 429:
            await asyncio.sleep(0.05)
    assert (await cluster.admin("GET", CONFIG))[0] == 200
    for one in slow:
        one.writer.transport.abort()
    async with asyncio.timeout(20):
        while (await bob("GET", CONFIG))[0] != 200:
            await asyncio.sleep(0.05)
    watches = [await peer(request(bob.token, f"{CONFIG}?watch=1")) for _ in range(6)]
    assert sorted(await asyncio.gather(*(first_line(one) for one in watches)))[-2:] == ["200", "429"]


async def first_line(peer):
    async with asyncio.timeout(20):
        return (await peer.reader.readline()).decode().split()[1]


@pytest.mark.parametrize("limits", [ServerLimits(headers_s=0.2), ServerLimits(handshake_s=0.2)])
async def test_a_peer_that_sends_nothing_or_not_enough_is_cut(tmp_path, limits, connect):
    async with serve_accounts(tmp_path, limits=limits) as cluster:
        url = cluster.server.insecure_url if limits.headers_s < 1 else cluster.server.url
        one = await connect(url, "GET / HT" if limits.headers_s < 1 else "\x16\x03\x01")
        assert await one.is_cut()


async def test_a_body_that_does_not_come_is_not_waited_for(tmp_path, connect):
    async with serve_accounts(tmp_path, limits=ServerLimits(body_s=0.2)) as cluster:
        head = f"Host: x\r\nAuthorization: Bearer {cluster.server.token}\r\nContent-Length: 100\r\n\r\n"
        one = await connect(cluster.server.insecure_url, f"POST {CONFIG} HTTP/1.1\r\n{head}abc")
        assert " 408 " in await heads(one)
        assert await one.is_cut()


async def test_a_client_that_does_not_read_a_long_list_is_dropped(tmp_path, connect):
    async with serve_accounts(tmp_path, limits=ServerLimits(stalled_s=0.3)) as cluster:
        for n in range(12):
            body = {"metadata": {"name": f"c{n}"}, "data": {"a": "x" * 900_000}}
            assert (await cluster.admin("POST", CONFIG, json.dumps(body)))[0] == 201
        await connect(cluster.server.insecure_url, request(cluster.server.token), limit=1 << 10)
        opened = cluster.server.listener.connections
        async with asyncio.timeout(20):
            while cluster.server.listener.connections >= opened:
                await asyncio.sleep(0.05)


ASKS = b"GET / HTTP/1.1\r\nHost: x\r\n"
MALFORMED = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x00" * 100,
    ASKS + b"Content-Length: -1\r\n\r\n",
    ASKS + b"no colon\r\n\r\n",
    ASKS + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n",
    ASKS + b"".join(b"A%d: b\r\n" % n for n in range(500)) + b"\r\n",
    ASKS + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ASKS + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET //[x/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: \xff\r\n\r\n",
    b"GET /%ff%zz HTTP/1.1\r\nAuthorization: \xff\r\n\r\n",
]


async def test_what_is_no_http_is_refused_and_leaves_no_traceback(cluster, peer, caplog):
    caplog.set_level(logging.INFO)
    for sent in MALFORMED:
        one = await peer()
        one.writer.write(sent)
        one.writer.write_eof()
        async with asyncio.timeout(20):
            try:
                answer = await one.reader.read(64 << 10)
            except ConnectionError:
                answer = b""
        assert answer == b"" or answer.split()[1][:1] == b"4", sent[:80]
    assert (await cluster.admin("GET", CONFIG))[0] == 200
    assert "Traceback" not in caplog.text
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_one_machine_has_few_places_before_it_says_who_it_is():
    places = Places(ServerLimits(connections_of_peer=2))
    taken = [places.take("192.0.2.1") for _ in range(3)]
    assert [place is not None for place in taken] == [True, True, False]
    assert places.take("192.0.2.2") is not None
    assert all(places.take("127.0.0.1") for _ in range(10))
    first, second = [place for place in taken if place is not None]
    assert first.give("bob", is_bounded=True)
    assert places.take("192.0.2.1") is not None
    for place in (first, second):
        place.leave()
        place.leave()
    assert places.taken == 12


def test_accounts_together_leave_room_for_administrators():
    places = Places(ServerLimits(connections=100, connections_of_account=100))

    def give(account, is_bounded):
        place = places.take("")
        assert place is not None
        return place.give(account, is_bounded=is_bounded)

    given = [give(f"n{n}", True) for n in range(80)]
    assert given.count(True) == 75
    assert give("", False)
