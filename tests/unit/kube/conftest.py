"""A small API server with scripted misbehaviour, and an event loop on which waiting costs no time."""

import asyncio
import json
import selectors
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from moorage.kube.api.client import Client
from moorage.kube.api.config import ApiConfig, from_values


class _Selector(selectors.DefaultSelector):
    """Jumps over the time in which nothing happens; sockets of this process are served first."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        # A busy kernel may hold back what was written to a socket: look longer before a jump that ends requests.
        patience = 20 if timeout is None else 0.001 if timeout < 0.5 else 0.01
        ready = super().select(patience)
        if not ready and timeout is None:
            raise RuntimeError("the loop would wait for ever")
        if not ready and timeout is not None:
            self.now += max(timeout, 1e-6)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def _quiet(body: Callable[[], Awaitable[Any]]) -> Coroutine[Any, Any, Any]:
    async def run() -> Any:
        result = await body()
        for _ in range(5):
            await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"left running: {left}"
        return result

    return run()


@pytest.fixture
def virtual():
    """Run a story on virtual time; it may leave no task behind."""

    def run(body: Callable[[], Awaitable[Any]]) -> Any:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(_quiet(body))

    return run


@dataclass
class Fault:
    """What happens to the next request that it is meant for, instead of (or after) its normal handling."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    drop: bool = False  # cut the connection without an answer
    apply_first: bool = False  # the change happens, the answer is lost
    method: str = ""
    watches: bool = False


class FakeApi:
    """Keeps objects of any kind; lists, watches, creates, replaces, merges and deletes them."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, str, str, dict[str, Any]]] = []  # version, type, path, object
        self.version = 100
        self.oldest = 0
        self.streams_lists = True
        self.ignores_initial = False
        self.refuse_stream_with = 0  # an ERROR line of this code in the stream
        self.faults: deque[Fault] = deque()
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.headers: list[dict[str, str]] = []
        self.names: list[str] = []  # that clients have shown, or ""
        self.accept_token = ""
        self.accept_name = ""  # in a client certificate
        self.watchers: dict[web.StreamResponse, asyncio.Queue[bytes | None]] = {}
        self.transports: set[Any] = set()
        self.page_limit = 0
        self.lose_pages = False
        self.may_list = True
        self.silent: set[str] = set()  # paths that get no answer
        self._stopping = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, *, unix: str = "", tls: ssl.SSLContext | None = None) -> "FakeApi":
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._stopping.clear()
        if unix:
            await web.UnixSite(self._runner, unix).start()
        else:
            site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls)
            await site.start()
            self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        self.cut_watches()
        self._stopping.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> "FakeApi":
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def config(self) -> ApiConfig:
        return from_values(f"http://127.0.0.1:{self.port}")

    def client(self, **options: Any) -> Client:
        return Client(self.config, **options)

    def requests(self, method: str = "", watch: bool | None = None) -> list[str]:
        return [
            path
            for verb, path, query in self.seen
            if (not method or verb == method) and (watch is None or ("watch" in query) is watch)
        ]

    # What others do to the store

    def put(self, path: str, kind: str = "ConfigMap", **more: Any) -> dict[str, Any]:
        """Create or replace the object at a path such as /api/v1/namespaces/ns/configmaps/name."""
        parts = path.split("/")
        namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts else ""
        old = self.objects.get(path)
        uid = more.pop("uid", None) or (old["metadata"]["uid"] if old else f"uid-{self.version}")
        meta = {"name": parts[-1], "namespace": namespace, "uid": uid, **more.pop("metadata", {})}
        return self._save(path, {"kind": kind, "metadata": meta, **more}, "MODIFIED" if old else "ADDED")

    def remove(self, path: str) -> None:
        obj = self.objects.pop(path)
        self._tell("DELETED", path, obj)

    def compact(self) -> None:
        """Forget all history: a resume from the past gets 410."""
        self.oldest = self.version
        self.history.clear()

    def bookmark(self, version: int = 0) -> None:
        line = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version or self.version)}}}
        self.say(line)

    def say(self, line: Any) -> None:
        """Send a line to every watcher as it is."""
        raw = line if isinstance(line, bytes) else json.dumps(line).encode()
        for queue in self.watchers.values():
            queue.put_nowait(raw + b"\n")

    def cut_watches(self) -> None:
        for queue in self.watchers.values():
            queue.put_nowait(None)

    def cut_idle(self) -> None:
        """Close every connection at once, from the server's side."""
        for transport in list(self.transports):
            transport.abort()
        self.transports.clear()

    def _save(self, path: str, obj: dict[str, Any], type: str) -> dict[str, Any]:
        self.objects[path] = obj
        return self._tell(type, path, obj)

    def _tell(self, type: str, path: str, obj: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        if type != "DELETED":
            self.objects[path] = obj
        self.history.append((self.version, type, path, obj))
        line = json.dumps({"type": type, "object": obj}).encode() + b"\n"
        for response, queue in self.watchers.items():
            if _is_below(path, response.headers["X-Path"]):
                queue.put_nowait(line)
        return obj

    # What is served

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, request.path, dict(request.query)))
        self.headers.append(dict(request.headers))
        self.transports.add(request.transport)
        if self.accept_token and request.headers.get("Authorization") != f"Bearer {self.accept_token}":
            return _status(401, "Unauthorized")
        self.names.append(_common_name(request))
        if self.accept_name and self.names[-1] != self.accept_name:
            return _status(401, "Unauthorized")
        if request.path in self.silent:
            await self._stopping.wait()
        fault = self._fault_for(request)
        if fault is not None:
            if fault.apply_first:
                await self._serve(request)
            if fault.drop:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return _status(fault.status, "Scripted", fault.headers, fault.body)
        return await self._serve(request)

    def _fault_for(self, request: web.Request) -> Fault | None:
        for fault in self.faults:
            if fault.method in ("", request.method) and fault.watches == ("watch" in request.query):
                self.faults.remove(fault)
                return fault
        return None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path, known = request.path, self.objects.get(request.path)
        body = await request.json() if request.can_read_body else {}
        match request.method:
            case "GET" if not self.may_list and path.rsplit("/", 1)[1] == "configmaps":
                return _status(403, "Forbidden")
            case "GET" if "watch" in request.query:
                return await self._watch(request)
            case "GET" if known is not None:
                return web.json_response(known)
            case "GET" if path.rsplit("/", 1)[1] in ("configmaps", "events", "leases"):
                return self._list(request)
            case "POST":
                return self._create(f"{path}/{body['metadata']['name']}", body)
            case "PUT" | "PATCH" | "DELETE" if known is not None:
                return self._change(request.method, path, known, body)
        return _status(404, "NotFound")

    def _list(self, request: web.Request) -> web.Response:
        items = [obj for path, obj in sorted(self.objects.items()) if _is_below(path, request.path)]
        meta = {"resourceVersion": str(self.version)}
        limit = int(request.query.get("limit", 0)) if self.page_limit else 0
        start = int(request.query.get("continue", 0))
        if start and self.lose_pages:
            return _status(410, "Expired")
        if limit and start + self.page_limit < len(items):
            meta["continue"] = str(start + self.page_limit)
            items = items[start : start + self.page_limit]
        else:
            items = items[start:]
        return web.json_response({"metadata": meta, "items": items})

    def _create(self, path: str, body: dict[str, Any]) -> web.Response:
        if path in self.objects:
            return _status(409, "AlreadyExists")
        body["metadata"].setdefault("uid", f"uid-{self.version}")
        return web.json_response(self._save(path, body, "ADDED"), status=201)

    def _change(self, method: str, path: str, known: dict[str, Any], body: Any) -> web.Response:
        wanted = body.get("metadata", {}).get("resourceVersion") if isinstance(body, dict) else None
        if wanted and wanted != known["metadata"]["resourceVersion"]:
            return _status(409, "Conflict")
        if method == "DELETE":
            self.remove(path)
            return web.json_response(known)
        return web.json_response(self._save(path, body if method == "PUT" else _merged(known, body), "MODIFIED"))

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        initial = "sendInitialEvents" in query
        if initial and not self.streams_lists:
            return _status(422, "Invalid")
        since = int(query.get("resourceVersion") or 0)
        response = web.StreamResponse(headers={"X-Path": request.path})
        await response.prepare(request)
        if not initial and since < self.oldest:
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
            await response.write(json.dumps(gone).encode() + b"\n")
            return response
        if initial and self.refuse_stream_with:
            error = {
                "type": "ERROR",
                "object": {"kind": "Status", "code": self.refuse_stream_with, "reason": "Scripted"},
            }
            await response.write(json.dumps(error).encode() + b"\n")
            return response
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for line in self._backlog(request.path, initial, since):
            queue.put_nowait(json.dumps(line).encode() + b"\n")
        self.watchers[response] = queue
        try:
            while (raw := await queue.get()) is not None:
                await response.write(raw)
        finally:
            del self.watchers[response]
        if request.transport is not None:
            request.transport.abort()
        return response

    def _backlog(self, path: str, initial: bool, since: int) -> list[dict[str, Any]]:
        if not initial:
            return [{"type": t, "object": o} for v, t, p, o in self.history if v > since and _is_below(p, path)]
        lines = [{"type": "ADDED", "object": obj} for p, obj in sorted(self.objects.items()) if _is_below(p, path)]
        if not self.ignores_initial:
            notes = {"k8s.io/initial-events-end": "true"}
            meta = {"resourceVersion": str(self.version), "annotations": notes}
            lines.append({"type": "BOOKMARK", "object": {"metadata": meta}})
        return lines


def _common_name(request: web.Request) -> str:
    certificate = request.transport.get_extra_info("peercert") if request.transport else None
    subject = dict(pair for part in (certificate or {}).get("subject", ()) for pair in part)
    return str(subject.get("commonName", ""))


def _is_below(path: str, collection: str) -> bool:
    """Whether an object belongs to a list path, of one namespace or of all."""
    if path.startswith(collection + "/"):
        return True
    base, plural = collection.rsplit("/", 1)
    parts = path.split("/")
    return path.startswith(f"{base}/namespaces/") and parts[-2] == plural


def _merged(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict) or not isinstance(old, dict):
        return patch
    result = dict(old)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(old.get(key), value)
    return result


def _status(code: int, reason: str, headers: dict[str, str] | None = None, body: Any = None) -> web.Response:
    document = body if body is not None else {"kind": "Status", "code": code, "reason": reason, "message": reason}
    if isinstance(document, bytes):
        return web.Response(body=document, status=code, headers=headers)
    return web.json_response(document, status=code, headers=headers)


@pytest.fixture
def fake():
    """The class of the fake server and of its faults, for stories that start their own."""
    return FakeApi


@pytest.fixture
def fault():
    return Fault
