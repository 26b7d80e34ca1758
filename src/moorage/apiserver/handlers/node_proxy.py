"""Logs of and commands in containers: the request goes on to the node that runs the pod.

Owns: finding the node's endpoint, copying log streams, joining two WebSockets, and the bounds on what a node answers.
Start reading at: `KubeletProxy.stream`.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Iterable
from typing import Any

import aiohttp
from aiohttp import web

from moorage.apiserver.access.node_tls import NodeTls
from moorage.apiserver.errors import StatusError, bad_request, internal, not_found
from moorage.apiserver.kinds.registry import Object
from moorage.apiserver.request.routes import Route
from moorage.apiserver.store.store import Store, decode

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_NEEDS_WEB_SOCKET = (
    "kubectl 1.31 or later is needed for this (or another client that uses WebSocket with v5.channel.k8s.io or "
    "v4.channel.k8s.io): SPDY, which older ones use, is not served"
)
_HOST = re.compile(r"[\w.-]+|[0-9a-f:.]+", re.ASCII | re.IGNORECASE)
_NO_PORT_FORWARD = "port-forward is not served: pods use the network of their node, so connect to the port itself"
_LARGEST_MESSAGE = 32 << 20  # of a WebSocket, as a kubelet takes it
_LARGEST_REFUSAL = 4096
_CONNECT_S = 10.0
_ANSWER_S = 30.0  # until a node has sent the head of its answer


class RedirectRefused(aiohttp.ClientError):
    """A node answered with a redirect. Following it would send our credentials to a place of the node's choice."""


async def _refuse_redirect(*_: Any) -> None:
    raise RedirectRefused("it answers with a redirect")


class KubeletProxy:
    """Forwards pods/log and pods/exec."""

    def __init__(self, store: Store, tls: NodeTls) -> None:
        self._store = store
        self._tls = tls
        self._tracing = aiohttp.TraceConfig()  # type: ignore[no-untyped-call, unused-ignore]
        self._tracing.on_request_redirect.append(_refuse_redirect)  # a WebSocket has no other switch for this

    def stream(self, request: web.BaseRequest, route: Route) -> Awaitable[web.StreamResponse] | None:
        """Return the streamed answer; None if the route is not for a node."""
        if (route.group, route.plural) != ("", "pods"):
            return None
        if route.subresource == "log" and request.method == "GET":
            return self._log(request, route)
        if route.subresource in ("exec", "attach") and request.method in ("GET", "POST"):
            return self._exec(request, route)
        if route.subresource == "portforward":
            raise StatusError(501, "NotImplemented", _NO_PORT_FORWARD)
        return None

    def _target(self, request: web.BaseRequest, route: Route) -> tuple[Object, str]:
        """Return the pod's node and the container that is meant."""
        record = self._store.get("pods", route.namespace, route.name)
        if record is None:
            raise not_found("pods", "", route.name)
        spec = decode(record.body)["spec"]
        parts = ("initContainers", "containers", "ephemeralContainers")
        names = [container["name"] for part in parts for container in spec.get(part) or []]
        name = request.rel_url.query.get("container") or ""
        if not name:
            main = [container["name"] for container in spec.get("containers") or []]
            if len(main) != 1:
                raise bad_request(f"a container name must be specified for pod {route.name}, choose one of: {main}")
            name = main[0]
        if name not in names:
            raise bad_request(f"container {name[:80]} is not valid for pod {route.name}")
        node = spec.get("nodeName")
        if not node:
            raise bad_request(f'container "{name}" in pod "{route.name}" is waiting to start: pod is not scheduled')
        record = self._store.get("nodes", "", node)
        if record is None:
            raise not_found("nodes", "", node)
        return decode(record.body), name

    def _session(self, node: Object) -> aiohttp.ClientSession:
        """Return a session that trusts this node and no other."""
        connector = aiohttp.TCPConnector(ssl=self._tls.context_for(node))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, trace_configs=[self._tracing])

    async def _log(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        node, container = self._target(request, route)
        query = [(k, v) for k, v in request.rel_url.query.items() if k != "container"]
        url = f"{_endpoint(node)}/containerLogs/{route.namespace}/{route.name}/{container}"
        async with self._session(node) as session:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    answer = await session.get(url, params=query, allow_redirects=False)
                async with answer:
                    if answer.status != 200:
                        raise await _refused(answer)
                    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
                    await response.prepare(request)
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                    return response
            except (aiohttp.ClientError, TimeoutError) as error:
                raise _unreachable(route, error) from error

    async def _exec(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        node, container = self._target(request, route)
        offered = [p.strip() for p in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        usable = [protocol for protocol in PROTOCOLS if protocol in offered]
        query = _exec_query(request.rel_url.query.items())
        url = f"{_endpoint(node)}/{route.subresource}/{route.namespace}/{route.name}/{container}"
        async with self._session(node) as session:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    if not usable:
                        raise await self._refusal(session, url, query)
                    upstream = await _connected(session, url, query, usable)
                    if upstream is None:
                        raise await self._refusal(session, url, query)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise _unreachable(route, error) from error
            chosen = upstream.protocol or usable[0]
            downstream = web.WebSocketResponse(protocols=(chosen,), max_msg_size=_LARGEST_MESSAGE)
            await downstream.prepare(request)
            await _join(downstream, upstream)
            return downstream

    async def _refusal(self, session: aiohttp.ClientSession, url: str, query: list[tuple[str, str]]) -> StatusError:
        """Return why a node does not take a command, in its own words: a refused WebSocket has only a number.

        A kubectl whose WebSocket was refused asks again with SPDY and shows the answer to that, so both get the same.
        """
        async with session.post(url, params=query, allow_redirects=False) as answer:
            error = await _refused(answer)
        if answer.status < 400 or "upgrade" in str(error).lower():  # nothing is wrong but the way of asking
            return bad_request(_NEEDS_WEB_SOCKET)
        return error


async def _connected(
    session: aiohttp.ClientSession, url: str, query: list[tuple[str, str]], protocols: list[str]
) -> aiohttp.ClientWebSocketResponse | None:
    """Return a WebSocket to a node; None if the node refuses it."""
    try:
        return await session.ws_connect(url, params=query, protocols=protocols, max_msg_size=_LARGEST_MESSAGE)
    except aiohttp.WSServerHandshakeError:
        return None


async def _refused(answer: aiohttp.ClientResponse) -> StatusError:
    """Return what a node answered as an error: the text plainly, or the message of a Status."""
    chunks, size = [], 0
    async for chunk in answer.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > _LARGEST_REFUSAL:
            break
    text = b"".join(chunks)[:_LARGEST_REFUSAL].decode(errors="replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    message = str(found["message"]) if isinstance(found, dict) and "message" in found else text
    if not 400 <= answer.status < 600:
        return internal(f"the node answers with status {answer.status}")
    return StatusError(answer.status, _REASONS.get(answer.status, "InternalError"), message[:2000])


def _unreachable(route: Route, error: Exception) -> StatusError:
    return internal(f"the node of pod {route.name} does not answer: {error or 'no answer in time'}")


def _exec_query(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the parameters as a kubelet takes them: it has its own names for streams, and reads only `1` as yes."""
    named = [(_STREAMS.get(name, name), value) for name, value in pairs if name != "container"]
    switches = ("tty", *_STREAMS.values())
    return [
        (name, "1" if name in switches else value)
        for name, value in named
        if name not in switches or value.lower() in ("true", "1")
    ]


async def _join(one: Any, other: Any) -> None:
    """Copy both ways until either side is done."""
    tasks = [asyncio.create_task(_copy(one, other)), asyncio.create_task(_copy(other, one))]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(one.close(), other.close(), return_exceptions=True)


async def _copy(source: Any, target: Any) -> None:
    async for message in source:
        if message.type == aiohttp.WSMsgType.BINARY:
            await target.send_bytes(message.data)
        elif message.type == aiohttp.WSMsgType.TEXT:
            await target.send_str(message.data)


def _endpoint(node: Object) -> str:
    """Return the URL at which the node's agent listens."""
    status, meta = node.get("status") or {}, node["metadata"]
    port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
    addresses = {a.get("type"): a.get("address") for a in status.get("addresses") or []}
    host = addresses.get("InternalIP") or addresses.get("ExternalIP") or addresses.get("Hostname")
    if not port or not host or not 0 < int(port) < 65536:
        raise internal(f"node {meta['name']} does not say where its agent listens")
    if not _HOST.fullmatch(host):  # the node says this: an address with a path in it would lead our request elsewhere
        raise internal(f"node {meta['name']} says that its agent listens at {host[:80]!r}, which is no address")
    name = f"[{host}]" if ":" in host else host
    return f"https://{name}:{int(port)}"


_STREAMS = {"stdin": "input", "stdout": "output", "stderr": "error"}
_REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 422: "Invalid", 501: "NotImplemented",
}  # fmt: skip
