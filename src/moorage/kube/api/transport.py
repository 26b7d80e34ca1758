"""Connections to the API server: kept alive, checked before they are used again, and noticed when the peer vanishes.

Owns: the aiohttp session of a client and what its sockets are set to.
May not touch: requests and their meaning.
Start reading at: `open_session`.

A server may close an idle connection at any moment. A write that is sent on such a connection fails in a way that
cannot be told from "done, but the answer was lost", so a connection whose end has already arrived in the kernel is
thrown away before anything is sent on it, and aiohttp's own silent repetition of PUT and DELETE is switched off.
"""

import select
import socket
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection

from moorage.kube.api.config import ApiConfig

_KEEP_S = 60.0  # kube-apiserver closes idle connections after 90 s, aiohttp's server after 75 s
_IDLE_S, _PROBE_S, _PROBES = 30, 10, 3  # a vanished peer is noticed after a minute, also by a silent watch


class _Checked:
    """Mixed into a connector: never hands out a pooled connection that the server has ended, or that is retired."""

    _used: WeakSet[Any]
    _retired: WeakSet[Any]

    async def connect(self, req: ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout) -> Connection:
        while True:
            connection: Connection = await super().connect(req, traces, timeout)  # type: ignore[misc]
            protocol = connection.protocol
            if protocol not in self._used:
                self._used.add(protocol)
                return connection
            if protocol not in self._retired and not _has_ended(connection):
                return connection
            connection.close()

    def retire(self) -> None:
        self._retired.update(self._used)


class _Tcp(_Checked, aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        self._used, self._retired = WeakSet(), WeakSet()
        super().__init__(**options)


class _Unix(_Checked, aiohttp.UnixConnector):
    def __init__(self, path: str, **options: Any) -> None:
        self._used, self._retired = WeakSet(), WeakSet()
        super().__init__(path, **options)


def open_session(config: ApiConfig) -> aiohttp.ClientSession:
    """A session for one API server; must be called on the loop that uses it."""
    connector: aiohttp.BaseConnector
    if config.unix_socket:
        connector = _Unix(config.unix_socket, limit=0, keepalive_timeout=_KEEP_S)
    else:
        tls = config.tls if config.tls is not None else True
        connector = _Tcp(ssl=tls, limit=0, keepalive_timeout=_KEEP_S, socket_factory=_socket)
    session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
    session._retry_connection = False  # there is no public switch; `Client.request` decides what is safe to repeat
    return session


def retire_connections(session: aiohttp.ClientSession) -> None:
    """Nothing new is sent on connections that were made so far; what is under way there, such as a watch, goes on."""
    assert isinstance(session.connector, _Checked)
    session.connector.retire()


def was_surely_not_sent(failure: BaseException) -> bool:
    """Whether a failed request cannot have reached the server whole."""
    if isinstance(failure, aiohttp.ClientConnectorError):
        return True
    return isinstance(failure, aiohttp.ClientConnectionResetError) and "Cannot write" in str(failure)


def _socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    return made


def _has_ended(connection: Connection) -> bool:
    """An idle connection has nothing to say: if there is something to read, it is its end."""
    transport = connection.transport
    found = transport.get_extra_info("socket") if transport is not None else None
    if found is None or found.fileno() < 0:
        return True
    poller = select.poll()
    poller.register(found.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poller.poll(0))
