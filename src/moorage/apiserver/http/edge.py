"""The HTTP edge: one handler for every path, limits, streams, and errors as Status objects.

Owns: reading requests within their limits, authentication, sending answers and watch streams.
May not touch: objects; it hands requests to `verbs`, `discovery` and the others.
Start reading at: `Edge.handle`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from moorage.apiserver.access.authentication import Authenticator, User
from moorage.apiserver.errors import (
    StatusError,
    bad_request,
    internal,
    invalid,
    no_such_path,
    not_supported,
    too_large_body,
    too_many,
    unauthorized,
)
from moorage.apiserver.formats.negotiate import YAML, Representation, chosen, yaml_of
from moorage.apiserver.handlers.objects import Answer, ObjectHandler, Sent
from moorage.apiserver.kinds.registry import KindRegistry
from moorage.apiserver.limits import ServerLimits
from moorage.apiserver.reading.watch import Watch
from moorage.apiserver.request.options import Call, options_from
from moorage.apiserver.request.routes import Route, route
from moorage.apiserver.store.store import encode
from moorage.errors import InvalidRequest
from moorage.log import get_logger

log = get_logger(__name__)

Special = Callable[[Route, Call | None, Sent, User], Awaitable[Answer] | None]
PageHandler = Callable[[str, str], Answer | None]
_STREAM_HEADERS = {"Content-Type": "application/json", "Cache-Control": "no-cache, private"}
_SMALL_BYTES = 32 << 10
_OPEN_PATHS = ("/healthz", "/livez", "/readyz", "/version")


class Edge:
    """Everything between a socket and an answer."""

    def __init__(
        self, verbs: ObjectHandler, registry: KindRegistry, authenticator: Authenticator, limits: ServerLimits
    ) -> None:
        self.verbs = verbs
        self.registry = registry
        self.authenticator = authenticator
        self.limits = limits
        self.pages: list[PageHandler] = []
        self.specials: list[Special] = []
        self.streams: list[Callable[[web.BaseRequest, Route, User], Awaitable[web.StreamResponse] | None]] = []
        self.allows: Callable[[User, str, Route], None] = lambda _user, _verb, _route: None
        self.watches = 0
        self.requests: dict[tuple[str, int], int] = {}
        self.is_stopping = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; whatever goes wrong, the client gets a Status."""
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
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("request failed", method=request.method, path=request.path)
            http = 500
            return _refusal(internal("an unexpected condition; the server's log has the details"))
        finally:
            self.requests[request.method, http] = self.requests.get((request.method, http), 0) + 1
            if log.is_debug():
                log.debug("request", method=request.method, path=request.path_qs, http=http,
                          seconds=time.perf_counter() - started)  # fmt: skip

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.rel_url.raw_path
        user = self._user(request)
        accept = request.headers.get("Accept", "")
        if user is None:
            if path.split("?")[0] not in _OPEN_PATHS:
                raise unauthorized()
        elif path.startswith("/api"):
            found = route(path, self.registry)
            if found is not None and found.plural:
                return await self._resource(request, found, user)
        for page in self.pages:
            answer = page(path, accept)
            if answer is not None:
                if request.method not in ("GET", "HEAD"):
                    raise StatusError(405, "MethodNotAllowed", "the server does not allow this method here")
                return _response(answer)
        raise no_such_path()

    def _user(self, request: web.BaseRequest) -> User | None:
        transport = request.transport
        certificate = transport.get_extra_info("peercert") if transport else None
        return self.authenticator.identify(request.headers.get("Authorization", ""), certificate)

    async def _resource(self, request: web.BaseRequest, found: Route, user: User) -> web.StreamResponse:
        query = request.rel_url.query
        kind = self.registry.find(found.group, found.version, found.plural)
        is_watch = found.is_watch or (request.method == "GET" and query.get("watch", "") in ("1", "true", "True"))
        self.allows(user, _verb(request.method, found, is_watch), found)
        for stream in self.streams:
            streaming = stream(request, found, user)
            if streaming is not None:
                return await streaming
        sent = Sent(request.method, query, request.headers.get("Content-Type", ""), await self._body(request))
        call = None
        if kind is not None:
            options = options_from(query)
            agent = request.headers.get("User-Agent", "")
            call = Call(kind, found.namespace, found.name, found.subresource, options, user.name, agent)
        for special in self.specials:
            answering = special(found, call, sent, user)
            if answering is not None:
                return _response(await answering, call)
        if kind is None or call is None:
            raise no_such_path()
        wanted = chosen(request.headers.get("Accept", ""))
        if wanted.form == "Table":
            wanted = replace(wanted, include=_include(query.get("includeObject", "")))
        if is_watch and request.method == "GET" and not found.subresource:
            return await self._watch(request, call, wanted)
        if found.subresource and not (found.subresource == "status" and kind.has_status):
            raise no_such_path()
        if kind.is_namespaced and not found.namespace and (found.name or request.method not in ("GET", "DELETE")):
            raise no_such_path() if found.name else bad_request("an empty namespace may not be set during creation")
        answer = await self.verbs.handle(call, sent, wanted)
        if wanted.media == YAML:
            answer = Answer(yaml_of(answer.body), answer.http, YAML)
        return _response(answer, call)

    async def _body(self, request: web.BaseRequest) -> bytes:
        """The whole body, within its limit and in good time."""
        if not request.can_read_body:
            return b""
        limit = self.limits.body_bytes
        if (request.content_length or 0) > limit:
            raise too_large_body(limit)
        if request.content.is_eof():  # the body came with the head, as most do
            data = request.content.read_nowait()
            if len(data) > limit:
                raise too_large_body(limit)
            return data
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_s):
                async for chunk in request.content.iter_any():
                    size += len(chunk)
                    if size > limit:
                        raise too_large_body(limit)
                    chunks.append(chunk)
        except TimeoutError as error:
            raise StatusError(408, "Timeout", "the request's body did not arrive in time") from error
        return b"".join(chunks)

    async def _watch(self, request: web.BaseRequest, call: Call, wanted: Representation) -> web.StreamResponse:
        if self.watches >= self.limits.watches:
            raise too_many("too many watches, please try again later", 5)
        if call.options.is_watch and call.options.token:
            raise bad_request("continue is not allowed with watch")
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        try:
            watch = self.verbs.watch(call, wanted)
        except StatusError as error:
            if error.http != 410:
                raise
            await response.prepare(request)
            await response.write(Watch.error_line(error))
            await response.write_eof()
            return response
        self.watches += 1
        try:
            await response.prepare(request)
            await self._pump(watch, response, request)
        finally:
            self.watches -= 1
        return response

    async def _pump(self, watch: Watch, response: web.StreamResponse, request: web.BaseRequest) -> None:
        """Send lines until the watch ends, the server stops, or the client does not keep up."""
        stop = asyncio.create_task(self.is_stopping.wait())
        send = asyncio.create_task(self._send(watch, response, request))
        try:
            await asyncio.wait([stop, send], return_when=asyncio.FIRST_COMPLETED)
            if send.done():
                send.result()
        except TimeoutError:
            log.info("slow watcher dropped", path=request.path)
            if request.transport is not None:
                request.transport.abort()
        except ConnectionResetError:
            log.debug("watcher went away", path=request.path)
        finally:
            for task in (stop, send):
                task.cancel()
            await asyncio.gather(stop, send, return_exceptions=True)

    async def _send(self, watch: Watch, response: web.StreamResponse, request: web.BaseRequest) -> None:
        async for chunk in watch.lines():
            transport = request.transport
            if transport is not None and transport.get_write_buffer_size() == 0 and len(chunk) < _SMALL_BYTES:
                await response.write(chunk)  # there is room for it, so it cannot stall
                continue
            async with asyncio.timeout(self.limits.stalled_watch_s):
                await response.write(chunk)
        await response.write_eof()


def _verb(method: str, found: Route, is_watch: bool) -> str:
    if is_watch:
        return "watch"
    one = bool(found.name)
    table = {"GET": "get" if one else "list", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch",
             "DELETE": "delete" if one else "deletecollection"}  # fmt: skip
    return table.get(method, method.lower())


def _include(text: str) -> str:
    if text not in ("", "Metadata", "Object", "None"):
        error = not_supported("includeObject", text, ["", "Metadata", "None", "Object"])
        raise invalid("TableOptions", "meta.k8s.io", "", [error])
    return text


def _response(answer: Answer, call: Call | None = None) -> web.Response:
    response = web.Response(body=answer.body, status=answer.http, headers=answer.headers)
    response.headers["Content-Type"] = answer.media
    response.headers["Cache-Control"] = "no-cache, private"
    for warning in call.warnings[:50] if call else ():
        text = warning.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{"".join(c for c in text if c.isprintable())[:500]}"')
    return response


def _refusal(error: StatusError) -> web.Response:
    response = web.Response(body=encode(error.status()), status=error.http)
    response.headers["Content-Type"] = "application/json"
    if error.http == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    retry: Any = error.details.get("retryAfterSeconds")
    if retry:
        response.headers["Retry-After"] = str(retry)
    if error.http in (408, 413):
        response.force_close()
    return response
