"""The HTTP side of the page: pages, parts as they change, and forms.

Owns: routes, headers, error pages and the stream of changed parts.
Start reading at: `Site.application`.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import PurePosixPath

from aiohttp import web
from jinja2 import TemplateError

from moorage.connections import FewConnections
from moorage.errors import MoorageError, UsageError
from moorage.insight.explain import ObjectNotFound
from moorage.kube.errors import ApiError
from moorage.log import get_logger
from moorage.ui.access import HEADERS, Access, RequestRefused
from moorage.ui.actions import Actions
from moorage.ui.board import Board
from moorage.ui.pages import PageRenderer, Query

log = get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_LONGEST_PAUSE_S = 2.0
_PAUSE_S = 0.1  # between two sets of parts to one open page
_HEARTBEAT_S = 10.0
_MOST_OPEN = 32
_LARGEST_FORM = 64 * 1024
_LONGEST_QUERY = 1000
_STATIC = frozenset(file.name for file in (resources.files("moorage.ui") / "static").iterdir())
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Site:
    """The handlers of one page server."""

    def __init__(self, board: Board, access: Access, actions: Actions | None) -> None:
        self._board, self._access, self._actions = board, access, actions
        self._pages = PageRenderer(board, actions is not None)
        self._open = 0
        self.connections: FewConnections | None = None

    def application(self) -> web.Application:
        """Return the application; every answer passes `_guarded`."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(middlewares=[guarded], client_max_size=_LARGEST_FORM)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/live", self._live)
        if self._actions is not None:
            app.router.add_get("/do/{verb}/{word}/{namespace}/{name}", self._ask)
            app.router.add_post("/do/{verb}/{word}/{namespace}/{name}", self._act)
        app.router.add_get("/{path:.*}", self._page)
        return app

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._access.check_host(request)
            response = self._signed_in(request) or await self._answer(request, handler)
        except RequestRefused as refused:
            response = self._problem(refused.status, str(refused))
        except ObjectNotFound as missing:
            response = self._problem(404, str(missing))
        except ApiError as error:
            response = self._problem(502, f"the API server answered: {error}")
        except MoorageError as error:
            response = self._problem(400, str(error))
        except web.HTTPException as error:
            response = self._problem(error.status, error.reason)
        except (TemplateError, LookupError, AttributeError, TypeError, ValueError):
            log.exception("cannot draw a page", path=request.path)
            response = self._problem(500, "this page could not be drawn; the log of moorage ui has the reason")
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.path.startswith("/static/"):
            self._access.check(request)
            if self.connections is not None:
                self.connections.trust(request)
        return await handler(request)

    def _signed_in(self, request: web.Request) -> web.StreamResponse | None:
        """Take the token of a printed link for a cookie, and send the browser to the same page without it."""
        token = request.query.get("token")
        if token is None or request.path.startswith("/static/"):
            return None
        if not self._access.is_right(token):
            raise RequestRefused(401, "this link is not from the moorage ui that runs now: use the one that it printed")
        response = web.Response(status=303, headers={"Location": request.path if request.path[:2] != "//" else "/"})
        secure = self._access.is_tls
        response.set_cookie(
            self._access.cookie_name, self._access.cookie, httponly=True, samesite="Strict", secure=secure, path="/"
        )
        return response

    def _problem(self, status: int, why: str) -> web.Response:
        text = self._pages.draw("problem", {"status": status, "why": why})
        return web.Response(status=status, text=text, content_type="text/html")

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        kind = _TYPES.get(PurePosixPath(name).suffix)
        file = resources.files("moorage.ui") / "static" / name
        if kind is None or name not in _STATIC:
            raise web.HTTPNotFound
        return web.Response(text=file.read_text(), content_type=kind)

    async def _page(self, request: web.Request) -> web.Response:
        query = _query(request, request.path)
        extra = {"server": self._board.client.identity, "live": request.path_qs, "actions": self._actions is not None}
        return web.Response(text=await self._pages.whole(query, extra), content_type="text/html")

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Send the parts of a page whenever they come out different, until the browser leaves."""
        query = _query(request, request.query.get("path", "/")[:_LONGEST_QUERY])
        self._pages.page(query)
        if self._open >= _MOST_OPEN:
            raise RequestRefused(503, f"{_MOST_OPEN} pages are open already: close some")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._open += 1
        try:
            await self._send_changes(query, response)
        except ConnectionError:
            log.debug("a page was closed", path=query.path)
        finally:
            self._open -= 1
        return response

    async def _send_changes(self, query: Query, response: web.StreamResponse) -> None:
        sent: dict[str, str] = {}
        seen = -1
        while True:
            version = await self._board.next_version(seen, _HEARTBEAT_S)
            began = time.monotonic()
            parts = await self._pages.parts(query) if version != seen else {}
            seen = version
            for name, html in parts.items():
                if sent.get(name) != html:
                    sent[name] = html
                    await response.write(f"event: part\ndata: {json.dumps({'id': name, 'html': html})}\n\n".encode())
            await response.write(b": alive\n\n")
            spent = time.monotonic() - began
            await asyncio.sleep(min(max(_PAUSE_S, 4 * spent), _LONGEST_PAUSE_S))  # a fifth of the time at most

    async def _ask(self, request: web.Request) -> web.Response:
        assert self._actions is not None
        plan = self._actions.plan(*_wish(request), dict(request.query))
        return self._form(request, plan)

    def _form(self, request: web.Request, plan: object) -> web.Response:
        values = {"plan": plan, "key": self._access.form_key, "path": request.path}
        return web.Response(text=self._pages.draw("confirm", values), content_type="text/html")

    async def _act(self, request: web.Request) -> web.Response:
        assert self._actions is not None
        sent = {name: value for name, value in (await request.post()).items() if isinstance(value, str)}
        self._access.check_form(sent.get("key", ""))
        plan = self._actions.plan(*_wish(request), sent)
        if "sure" not in sent or plan.refusal:
            return self._form(request, plan)
        await self._actions.carry_out(plan)
        return web.Response(status=303, headers={"Location": plan.then})


def _query(request: web.Request, path: str) -> Query:
    asked = request.query
    start = asked.get("start", "0")
    if not start.isdecimal() or len(start) > 7:
        raise UsageError("start: want a number")
    return Query(path, asked.get("namespace", "")[:253], asked.get("q", "")[:253], int(start))


def _wish(request: web.Request) -> tuple[str, str, str, str]:
    info = request.match_info
    return info["verb"], info["word"], info["namespace"], info["name"]
