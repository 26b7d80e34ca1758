"""Logs of and commands in containers: the request goes on to the node that runs the pod.

Owns: finding the node's endpoint, copying log streams, joining two WebSockets.
May not touch: stored objects, except to read the pod and its node.
Start reading at: `KubeletProxy.stream`.
"""

import asyncio
import json
import re
import ssl
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

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


class KubeletProxy:
    """Forwards pods/log and pods/exec."""

    def __init__(self, store: Store, certificate: tuple[Path, Path] | None = None) -> None:
        self._store = store
        self._tls: ssl.SSLContext | bool = False
        if certificate is not None:  # agents ask who we are; their own certificates are self-signed
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the system's authorities would only take up memory
            self._tls.check_hostname = False
            self._tls.verify_mode = ssl.CERT_NONE
            self._tls.load_cert_chain(*certificate)

    def stream(self, request: web.BaseRequest, route: Route) -> Awaitable[web.StreamResponse] | None:
        if (route.group, route.plural) != ("", "pods"):
            return None
        if route.subresource == "log" and request.method == "GET":
            return self._log(request, route)
        if route.subresource in ("exec", "attach") and request.method in ("GET", "POST"):
            return self._exec(request, route)
        if route.subresource == "portforward":
            raise StatusError(501, "NotImplemented", _NO_PORT_FORWARD)
        return None

    def _target(self, request: web.BaseRequest, route: Route) -> tuple[str, str]:
        """The endpoint of the pod's node, and the container that is meant."""
        record = self._store.get("pods", route.namespace, route.name)
        if record is None:
            raise not_found("pods", "", route.name)
        pod = decode(record.body)
        names = [c["name"] for part in ("initContainers", "containers") for c in pod["spec"].get(part) or []]
        name = request.rel_url.query.get("container") or ""
        if not name:
            main = [c["name"] for c in pod["spec"].get("containers") or []]
            if len(main) != 1:
                raise bad_request(f"a container name must be specified for pod {route.name}, choose one of: {main}")
            name = main[0]
        if name not in names:
            raise bad_request(f"container {name[:80]} is not valid for pod {route.name}")
        node = pod["spec"].get("nodeName")
        if not node:
            raise bad_request(f'container "{name}" in pod "{route.name}" is waiting to start: pod is not scheduled')
        record = self._store.get("nodes", "", node)
        if record is None:
            raise not_found("nodes", "", node)
        return _endpoint(decode(record.body)), name

    async def _log(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        base, container = self._target(request, route)
        query = [(k, v) for k, v in request.rel_url.query.items() if k != "container"]
        url = f"{base}/containerLogs/{route.namespace}/{route.name}/{container}"
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                async with session.get(url, params=query, ssl=self._tls) as answer:
                    if answer.status != 200:
                        text = (await answer.text())[:500]
                        raise StatusError(answer.status, _REASONS.get(answer.status, "InternalError"), text)
                    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
                    await response.prepare(request)
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                    return response
            except aiohttp.ClientConnectionError as error:
                raise internal(f"the node of pod {route.name} does not answer: {error}") from error

    async def _exec(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        base, container = self._target(request, route)
        offered = [p.strip() for p in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        usable = [protocol for protocol in PROTOCOLS if protocol in offered]
        query = _exec_query(request.rel_url.query.items())
        url = f"{base}/{route.subresource}/{route.namespace}/{route.name}/{container}"
        async with aiohttp.ClientSession() as session:
            try:
                if not usable:
                    raise await self._refusal(session, url, query)
                upstream = await session.ws_connect(url, params=query, protocols=usable, ssl=self._tls, max_msg_size=0)
            except aiohttp.WSServerHandshakeError:
                raise await self._refusal(session, url, query) from None
            except aiohttp.ClientError as error:
                raise internal(f"the node of pod {route.name} does not take the command: {error}") from error
            chosen = upstream.protocol or usable[0]
            downstream = web.WebSocketResponse(protocols=(chosen,), max_msg_size=0)
            await downstream.prepare(request)
            await _join(downstream, upstream)
            return downstream

    async def _refusal(self, session: aiohttp.ClientSession, url: str, query: list[tuple[str, str]]) -> StatusError:
        """Why a node does not take a command, in its own words: a refused WebSocket tells only a number. A kubectl
        whose WebSocket was refused asks again with SPDY and shows the answer to that, so both get the same one."""
        async with session.post(url, params=query, ssl=self._tls) as answer:
            text = _message_in((await answer.text())[:2000])
        if answer.status < 400 or "upgrade" in text.lower():  # nothing is wrong but the way of asking
            return bad_request(_NEEDS_WEB_SOCKET)
        return StatusError(answer.status, _REASONS.get(answer.status, "InternalError"), text)


def _message_in(text: str) -> str:
    """What a node said: plainly, or in a Status."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return str(found["message"]) if isinstance(found, dict) and "message" in found else text


def _exec_query(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The parameters as a kubelet takes them: it has its own names for the streams, and reads only `1` as yes."""
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
    """Where the node's agent listens."""
    status, meta = node.get("status") or {}, node["metadata"]
    port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
    addresses = {a.get("type"): a.get("address") for a in status.get("addresses") or []}
    host = addresses.get("InternalIP") or addresses.get("ExternalIP") or addresses.get("Hostname")
    if not port or not host:
        raise internal(f"node {meta['name']} does not say where its agent listens")
    if not _HOST.fullmatch(host):  # the node says this: an address with a path in it would lead our request elsewhere
        raise internal(f"node {meta['name']} says that its agent listens at {host[:80]!r}, which is no address")
    name = f"[{host}]" if ":" in host else host
    return f"https://{name}:{int(port)}"


_STREAMS = {"stdin": "input", "stdout": "output", "stderr": "error"}
_REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 422: "Invalid", 501: "NotImplemented",
}  # fmt: skip
