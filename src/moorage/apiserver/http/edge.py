"""The path of one request: who asks, what for, whether it is allowed, and which handler answers.

Owns: the order of authentication, authorization and handling; errors as Status objects; the headers of answers.
Start reading at: `Edge.handle`.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from aiohttp import web

from moorage.apiserver.access.attributes import Attributes, path_attributes, resource_attributes
from moorage.apiserver.access.authentication import Authenticator, User
from moorage.apiserver.access.authorization import Authorizer
from moorage.apiserver.access.escalation import UserGuard
from moorage.apiserver.access.impersonation import impersonated
from moorage.apiserver.documents.endpoints import Pages
from moorage.apiserver.documents.metrics import ServerMetrics
from moorage.apiserver.errors import (
    StatusError,
    bad_request,
    internal,
    invalid,
    method_not_allowed,
    no_such_path,
    not_supported,
    unauthorized,
    unsupported_media,
)
from moorage.apiserver.formats.negotiate import YAML, Representation, chosen, yaml_of
from moorage.apiserver.handlers.node_proxy import KubeletProxy
from moorage.apiserver.handlers.objects import ObjectHandler
from moorage.apiserver.http.body import read_body
from moorage.apiserver.http.shares import Shares
from moorage.apiserver.http.steps import stepwise
from moorage.apiserver.http.watch_streams import WatchStreams
from moorage.apiserver.kinds.registry import Kind, KindRegistry
from moorage.apiserver.limits import ServerLimits
from moorage.apiserver.request.apart import PAGE_BYTES, apart
from moorage.apiserver.request.messages import Answer, Sent
from moorage.apiserver.request.options import Call, options_from
from moorage.apiserver.request.routes import Route, route
from moorage.apiserver.store.store import encode
from moorage.errors import InvalidRequest
from moorage.log import get_logger

log = get_logger(__name__)

_OPEN_PATHS = ("/healthz", "/livez", "/readyz", "/version")
_CONNECTING = ("exec", "attach", "portforward")
_SMALL = ("binding", "eviction", "scale", "token")  # subresources whose bodies hold a few fields
_PART_BYTES = 256 << 10


class SubresourceHandler(Protocol):
    """Answers requests that are more than plain verbs on stored objects."""

    def answer(self, route: Route, call: Call | None, sent: Sent, user: User) -> Awaitable[Answer] | None:
        """Return the answer; None if the route belongs to another handler."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """What answers requests, in the order in which they are asked."""

    node_proxy: KubeletProxy
    subresources: tuple[SubresourceHandler, ...]
    objects: ObjectHandler
    pages: Pages


class Edge:
    """Everything between a parsed HTTP request and its response."""

    def __init__(
        self,
        registry: KindRegistry,
        access: tuple[Authenticator, Authorizer],
        handlers: Handlers,
        limits: ServerLimits,
        metrics: ServerMetrics,
    ) -> None:
        self._registry = registry
        self._authenticator, self._authorizer = access
        self._handlers = handlers
        self._limits = limits
        self._metrics = metrics
        self._watches = WatchStreams(limits, metrics)
        self._shares = Shares(limits)

    def stop(self) -> None:
        """End every watch."""
        self._watches.is_stopping.set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, and measure how long each of its steps holds the event loop."""
        return await stepwise(self._handle(request), lambda seconds: self._note_step(request, seconds))

    def _note_step(self, request: web.BaseRequest, seconds: float) -> None:
        self._metrics.steps.note(seconds)
        if seconds > self._limits.held_s:
            log.warning("a request held the event loop", method=request.method, path=request.path, seconds=seconds)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Every failure becomes a Status."""
        started = time.perf_counter()
        http = 499
        try:
            response = await self._answer(request)
            http = response.status
            return response
        except StatusError as error:
            http = error.http
            return _refusal(error)
        except InvalidRequest as error:
            http = 400
            return _refusal(bad_request(str(error)))
        except (RecursionError, OverflowError) as error:
            http = 400
            return _refusal(
                bad_request(f"the object is nested too deeply or holds a number that is too large: {error}")
            )
        except UnicodeEncodeError as error:
            http = 400
            return _refusal(bad_request(f"the object holds text that is not valid Unicode: {error.reason}"))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("request failed", method=request.method, path=request.path)
            http = 500
            return _refusal(internal("an unexpected condition; the server's log has the details"))
        finally:
            self._metrics.count(request.method, http)
            if log.is_debug():
                log.debug("request", method=request.method, path=request.path_qs, http=http,
                          seconds=time.perf_counter() - started)  # fmt: skip

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.rel_url.raw_path
        user = self._user(request)
        if user is None:
            if path not in _OPEN_PATHS:
                raise unauthorized()
            response = await self._page(request, path)
            response.force_close()  # connections are kept for users
            return response
        with self._shares.of(request, user):
            return await self._answer_user(request, user, path)

    async def _answer_user(self, request: web.BaseRequest, user: User, path: str) -> web.StreamResponse:
        user = impersonated(user, request.headers, self._authorizer)
        if path.startswith("/api"):
            found = route(path, self._registry)
            if found is not None and found.plural:
                return await self._resource(request, found, user)
        self._authorizer.allow(user, path_attributes(request.method, path))
        return await self._page(request, path)

    def _user(self, request: web.BaseRequest) -> User | None:
        transport = request.transport
        certificate = transport.get_extra_info("peercert") if transport else None
        return self._authenticator.identify(request.headers.get("Authorization", ""), certificate)

    async def _page(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        size = PAGE_BYTES if path.startswith(("/api", "/openapi")) else 0  # schemas are as large as definitions are
        answer = await apart(size, self._handlers.pages.answer, path, request.headers.get("Accept", ""))
        if answer is None:
            raise no_such_path()
        if request.method not in ("GET", "HEAD"):
            raise method_not_allowed()
        return await self._sent(request, answer)

    async def _resource(self, request: web.BaseRequest, found: Route, user: User) -> web.StreamResponse:
        query = request.rel_url.query
        asked = resource_attributes(request.method, found, query)
        self._authorizer.allow(user, asked)
        if found.subresource in _CONNECTING and asked.verb != "create":
            self._authorizer.allow(user, replace(asked, verb="create"))  # a GET that runs a command is no mere read
        streaming = self._handlers.node_proxy.stream(request, found)
        if streaming is not None:
            return await streaming
        kind = self._registry.find(found.group, found.version, found.plural)
        call = self._call(request, kind, found, user, asked) if kind is not None else None
        if call is not None and asked.verb == "watch" and request.method == "GET" and not found.subresource:
            if call.options.token:
                raise bad_request("continue is not allowed with watch")
            wanted = _wanted(request.headers, query)
            return await self._watches.send(request, lambda: self._handlers.objects.watch(call, wanted))
        sent = await self._read(request, call, found)
        for handler in self._handlers.subresources:
            answering = handler.answer(found, call, sent, user)
            if answering is not None:
                return await self._sent(request, await answering, call)
        if call is None:
            raise no_such_path()
        _check_place(call, request.method)
        wanted = _wanted(request.headers, query)
        answer = await self._handlers.objects.handle(call, sent, wanted)
        if wanted.media == YAML:
            body = b"".join((answer.body, *answer.more))
            answer = Answer(await apart(len(body), yaml_of, body), answer.http, YAML)
        return await self._sent(request, answer, call)

    async def _read(self, request: web.BaseRequest, call: Call | None, found: Route) -> Sent:
        """Return what the client sent, decoded. Raises 413 if it is too large for what it is."""
        is_object = call is not None and (request.method != "DELETE" and found.subresource not in _SMALL)
        limit = self._limits.body_bytes if is_object else self._limits.small_body_bytes
        query, content_type = request.rel_url.query, request.headers.get("Content-Type", "")
        sent = Sent(request.method, query, content_type, await read_body(request, limit, self._limits.body_s))
        if sent.body:
            if request.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise unsupported_media("the body of the request must not be compressed")
            await sent.read()
        if call is not None:
            call.size_bytes = len(sent.body)
        return sent

    async def _sent(self, request: web.BaseRequest, answer: Answer, call: Call | None = None) -> web.StreamResponse:
        """Return the response. A long one is sent here, in parts, and given up if the client does not read."""
        response = _response(answer, call)
        if (len(answer.body) <= _PART_BYTES and not answer.more) or request.method == "HEAD":
            return response
        stream = web.StreamResponse(status=answer.http, headers=response.headers)
        stream.content_length = sum(map(len, (answer.body, *answer.more)))
        await stream.prepare(request)
        try:
            for body in (answer.body, *answer.more):
                view = memoryview(body)
                for start in range(0, len(body), _PART_BYTES):
                    async with asyncio.timeout(self._limits.stalled_s):
                        await stream.write(view[start : start + _PART_BYTES])
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client does not read its answer") from error
        return stream

    def _call(self, request: web.BaseRequest, kind: Kind, found: Route, user: User, asked: Attributes) -> Call:
        return Call(
            kind,
            found.namespace,
            found.name,
            found.subresource,
            options_from(request.rel_url.query),
            user.name,
            request.headers.get("User-Agent", ""),
            guard=UserGuard(self._authorizer, user, asked),
        )


def _check_place(call: Call, method: str) -> None:
    """Raise 404 or 400 if the path names no place where an object of the kind can be."""
    kind = call.kind
    if call.subresource and not (call.subresource == "status" and kind.has_status):
        raise no_such_path()
    if kind.is_namespaced and not call.namespace and (call.name or method not in ("GET", "DELETE")):
        raise no_such_path() if call.name else bad_request("an empty namespace may not be set during creation")


def _wanted(headers: Mapping[str, str], query: Mapping[str, str]) -> Representation:
    """Return the representation that a client accepts."""
    wanted = chosen(headers.get("Accept", ""))
    if wanted.form != "Table":
        return wanted
    include = query.get("includeObject", "")
    if include not in ("", "Metadata", "Object", "None"):
        error = not_supported("includeObject", include, ["", "Metadata", "None", "Object"])
        raise invalid("TableOptions", "meta.k8s.io", "", [error])
    return replace(wanted, include=include)


def _response(answer: Answer, call: Call | None = None) -> web.Response:
    response = web.Response(body=answer.body, status=answer.http, headers=answer.headers)
    response.headers["Content-Type"] = answer.media
    response.headers["Cache-Control"] = "no-cache, private"
    for warning in call.warnings[:50] if call else ():
        text = warning.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{"".join(c for c in text if c.isprintable())[:500]}"')
    return response


def _refusal(error: StatusError) -> web.Response:
    try:
        body = encode(error.status())
    except UnicodeEncodeError:  # the message quotes text of the request that has halves of surrogate pairs
        body = json.dumps(error.status()).encode()
    response = web.Response(body=body, status=error.http)
    response.headers["Content-Type"] = "application/json"
    if error.http == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    retry: Any = error.details.get("retryAfterSeconds")
    if retry:
        response.headers["Retry-After"] = str(retry)
    if error.http in (401, 408, 413):
        response.force_close()
    return response
