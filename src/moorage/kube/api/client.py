"""A typed client of any Kubernetes API: reads give structs, writes are creates, patches and deletes.

Owns: HTTP to the API server, retries that are safe, the request limiter, and turning answers into errors.
May not touch: decisions. It never patches on its own account and never re-reads to overcome a conflict.
Start reading at: `Client.request`, `Client.patch`, `Client.watch`.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Self, TypeVar

import aiohttp
import msgspec

from moorage import __version__
from moorage.kube.api import metrics
from moorage.kube.api.config import ApiConfig, RenewablePair, RenewableToken
from moorage.kube.api.limiter import Limiter
from moorage.kube.api.transport import open_session, retire_connections, was_surely_not_sent
from moorage.kube.api.wire import Codec, ListChunk, WatchEvent, error_of, lines_of
from moorage.kube.errors import ApiError, BadRequest, Gone, TooManyRequests, Unauthorized, Unavailable
from moorage.kube.objects.meta import KubeObject, as_document, version_number
from moorage.log import get_logger

__all__ = ["TRIES", "TRIES_FOR_A_PERSON", "Client", "ObjectList", "PatchType", "WatchEvent", "newest"]

log = get_logger(__name__)

T = TypeVar("T", bound=KubeObject)

_PAGE = 1000
TRIES = 5  # four seconds: a server that restarts is back
TRIES_FOR_A_PERSON = 3  # a quarter of a second: a user waits at a terminal
_LONGEST_WAIT_S = 30.0
_DEFAULT_TIMEOUT_S = 60.0
_AT_ONCE = 100  # requests in flight, watches not counted; a unix socket takes 128 connections in one go
_READS = frozenset({"GET", "HEAD"})


class PatchType(Enum):
    """How a patch is meant; the value is its content type."""

    JSON = "application/json-patch+json"
    MERGE = "application/merge-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"
    APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class ObjectList(Generic[T]):
    """A list as of one revision."""

    items: list[T]
    resource_version: str


class _NoAnswer(Unavailable):
    """The request failed below HTTP; `unsent` when the server cannot have seen it whole."""

    def __init__(self, message: str, unsent: bool, is_final: bool) -> None:
        super().__init__(503, "Unreachable", message)
        self.unsent = unsent
        self.is_final = is_final


class Client:
    """One connection pool to one API server. Use as `async with Client(config) as client`."""

    def __init__(
        self,
        config: ApiConfig,
        *,
        qps: float = 0.0,
        burst: int = 0,
        identity: str = "moorage",
        tries: int = TRIES,
    ) -> None:
        self._config = config
        self._tries = tries
        self._identity = identity
        self._limiter = Limiter(qps, burst or max(1, int(qps * 2)))
        self._host = config.unix_socket or config.server.partition("://")[2]
        self._session: aiohttp.ClientSession | None = None
        self._pair_version = 0
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._is_closed = False
        self._codec = Codec()
        self.requests_sent = 0

    @property
    def namespace(self) -> str:
        """The namespace of the credentials: the context's or the account's."""
        return self._config.namespace

    @property
    def identity(self) -> str:
        return self._identity

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections; requests after this fail."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, kind: type[T], name: str, namespace: str = "") -> T:
        """The object as the server has it now; NotFound when it has none."""
        return self.decode(kind, await self.request("GET", _path_of(kind, name, namespace)))

    async def find(self, kind: type[T], name: str, namespace: str = "") -> T | None:
        """The object as the server has it now, or None."""
        try:
            return await self.get(kind, name, namespace)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, kind: type[T], namespace: str = "", *, labels: str = "", fields: str = "", page: int = _PAGE
    ) -> ObjectList[T]:
        """All objects, in pages of one consistent snapshot. An object that cannot be read is logged and left out."""
        query = _selecting(labels, fields)
        items: list[T] = []
        token = ""
        while True:
            more = {"limit": str(page), **({"continue": token} if token else {})}
            try:
                found = await self._page(kind, namespace, {**query, **more})
            except Gone:
                if not token:
                    raise
                found = await self._page(kind, namespace, query)  # the snapshot was lost half-way: all at once, then
                return ObjectList(found.items, found.resource_version)
            items += found.items
            token = found.token
            if not token:
                return ObjectList(items, found.resource_version)

    async def create(
        self,
        kind: type[T],
        body: KubeObject | Mapping[str, Any],
        namespace: str = "",
        *,
        subresource: str = "",
        name: str = "",
    ) -> T:
        """Create an object; apiVersion and kind are filled in. AlreadyExists when the name is taken."""
        document = {"apiVersion": kind.resource.api_version, "kind": kind.resource.kind, **as_document(body)}
        namespace = namespace or (document.get("metadata") or {}).get("namespace", "")
        path = kind.resource.path(namespace, name, subresource)
        return self.decode(kind, await self.request("POST", path, document, query=self._writing()))

    async def update(
        self, kind: type[T], name: str, body: Mapping[str, Any], namespace: str = "", *, subresource: str = ""
    ) -> T:
        """Replace the whole object: only for documents that were read raw and whole, or are wholly ours."""
        document = {"apiVersion": kind.resource.api_version, "kind": kind.resource.kind, **body}
        path = _path_of(kind, name, namespace, subresource)
        return self.decode(kind, await self.request("PUT", path, document, query=self._writing()))

    async def patch(
        self,
        kind: type[T],
        name: str,
        patch: Mapping[str, Any] | Sequence[Any],
        namespace: str = "",
        *,
        how: PatchType = PatchType.MERGE,
        subresource: str = "",
        version: str = "",
        force: bool = False,
    ) -> T:
        """Change some fields. With `version` the patch succeeds only on that resourceVersion (Conflict otherwise)."""
        if version and isinstance(patch, Mapping):
            patch = {**patch, "metadata": {**patch.get("metadata", {}), "resourceVersion": version}}
        elif version:
            # Not a `test`: a failed test is Invalid, a version that differs is a Conflict.
            patch = [{"op": "replace", "path": "/metadata/resourceVersion", "value": version}, *patch]
        query = self._writing()
        if how is PatchType.APPLY and force:
            query["force"] = "true"
        path = _path_of(kind, name, namespace, subresource)
        return self.decode(kind, await self.request("PATCH", path, patch, query=query, content_type=how.value))

    async def delete(
        self,
        kind: type[KubeObject],
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        version: str = "",
        grace_s: int | None = None,
        propagation: str = "",
    ) -> None:
        """Ask for deletion; NotFound when it is not there, Conflict when a precondition does not hold."""
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        preconditions = {k: v for k, v in (("uid", uid), ("resourceVersion", version)) if v}
        if preconditions:
            options["preconditions"] = preconditions
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if propagation:
            options["propagationPolicy"] = propagation
        await self.request("DELETE", _path_of(kind, name, namespace), options)

    async def watch(
        self,
        kind: type[T],
        namespace: str = "",
        *,
        version: str = "",
        labels: str = "",
        fields: str = "",
        initial: bool = False,
        timeout_s: int = 420,
    ) -> AsyncGenerator[WatchEvent[T], None]:
        """Changes after `version`, or with `initial` the present state first; Gone when the version is too old.

        It ends when the server ends it, and raises Unavailable when the connection breaks. A caller that leaves the
        loop early must close it: `async with aclosing(client.watch(…)) as events`.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(timeout_s)}
        query |= _selecting(labels, fields)
        if initial:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        if version:
            query["resourceVersion"] = version
        timeout = aiohttp.ClientTimeout(total=timeout_s + 60, sock_connect=30, sock_read=None)
        async with self._send("GET", kind.resource.path(namespace), None, query, "", timeout) as response:
            if response.status >= 400:
                raise error_of(response.status, await response.read())
            async with aclosing(lines_of(response.content)) as lines:
                async for line in lines:
                    yield self._codec.event(kind, line)

    def decode(self, kind: type[T], body: bytes | msgspec.Raw) -> T:
        """An object of a kind from its JSON; Unavailable (BadAnswer) when it is none."""
        return self._codec.object(kind, body)

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout_s: float = _DEFAULT_TIMEOUT_S,
    ) -> bytes:
        """One request, repeated where that is safe: reads always, writes only if the server said to come back (429, or
        503 with Retry-After), did not accept the token or certificate (401, once, with a fresh one) or cannot have seen
        them."""
        data = msgspec.json.encode(body) if body is not None else None
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30)
        for attempt in range(1, self._tries + 1):
            wait_s = min(5.0, 0.05 * 4 ** (attempt - 1)) * random.uniform(0.8, 1.2)
            try:
                async with (
                    self._slots,
                    self._send(method, path, data, query or {}, content_type, timeout) as response,
                ):
                    answer = await response.read()
                    if response.status < 400:
                        return answer
                    asked_s = _retry_after_s(response.headers.get("Retry-After"))
                    error: ApiError = error_of(response.status, answer)
                    may_repeat = self._may_repeat(method, error, asked_s, attempt)
                    wait_s = 0.0 if error.status == 401 else max(wait_s, asked_s or 0.0)
            except _NoAnswer as failure:
                error, may_repeat = failure, not failure.is_final and (failure.unsent or method in _READS)
            if not may_repeat or attempt == self._tries:
                raise error
            log.debug("request is tried again", method=method, path=path, reason=str(error), seconds=wait_s)
            metrics.observe_retry(method, self._host, error.status)
            await asyncio.sleep(wait_s)
        raise AssertionError("unreachable")

    async def _page(self, kind: type[T], namespace: str, query: Mapping[str, str]) -> ListChunk[T]:
        return self._codec.page(kind, await self.request("GET", kind.resource.path(namespace), query=query))

    def _may_repeat(self, method: str, error: ApiError, asked_s: float | None, attempt: int) -> bool:
        if isinstance(error, Unauthorized):
            shown = (self._config.token, self._config.pair)
            renewable = [one for one in shown if isinstance(one, RenewableToken | RenewablePair)]
            if attempt > 1 or not renewable:
                return False
            for one in renewable:
                one.expire()
            self._pair_version = 0  # with another connection, whatever this one has shown
            return True
        if isinstance(error, TooManyRequests) or (error.status == 503 and asked_s is not None):
            return True
        return method in _READS and error.status >= 500 and error.reason != "Timeout"

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        path: str,
        data: bytes | None,
        query: Mapping[str, str],
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request and its answer; every failure below HTTP, also while the answer is read, is a _NoAnswer."""
        await self._limiter.take()
        headers = {"Accept": "application/json", "User-Agent": f"{self._identity}/{__version__} (moorage)"}
        if data is not None:
            headers["Content-Type"] = content_type
        if self._config.token is not None and (token := await self._config.token()):
            headers["Authorization"] = f"Bearer {token}"
        self.requests_sent += 1
        url, params = self._config.server + path, dict(query)
        started, code = time.monotonic(), "<error>"
        try:
            async with self._open().request(
                method, url, data=data, params=params, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                code = str(response.status)
                metrics.observe_request(method, self._host, code, time.monotonic() - started)
                yield response
        except (aiohttp.ClientError, OSError) as failure:  # TimeoutError is an OSError
            if code == "<error>":
                metrics.observe_request(method, self._host, code, time.monotonic() - started)
            what = str(failure) or type(failure).__name__
            if self._config.pair is not None:
                self._config.pair.expire()  # a server that does not accept it may just hang up
            is_final = isinstance(failure, aiohttp.ClientConnectorCertificateError | aiohttp.InvalidURL)
            raise _NoAnswer(
                f"{method} {path} at {self._config.server}: {what}", was_surely_not_sent(failure), is_final
            ) from failure

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise Unavailable(503, "Closed", "this client has been closed")
        if self._session is None:
            self._session = open_session(self._config)
        if self._config.pair is not None and (version := self._config.pair.version()) != self._pair_version:
            self._pair_version = version
            retire_connections(self._session)
        return self._session

    def _writing(self) -> dict[str, str]:
        """Return the query of a write. Unknown fields are not checked: no one would read the header about them."""
        return {"fieldManager": self._identity, "fieldValidation": "Ignore"}


def newest(one: T, other: T | None) -> T:
    """The one of two copies of an object that the server wrote last."""
    if other is None or version_number(one.metadata.resource_version) >= other.version:
        return one
    return other


def _path_of(kind: type[KubeObject], name: str, namespace: str, subresource: str = "") -> str:
    """The path of one object. Without a name it would be that of all of them, which could then all be deleted."""
    if not name:
        raise BadRequest(400, "BadRequest", f"a {kind.resource.kind} without a name is asked for")
    return kind.resource.path(namespace, name, subresource)


def _selecting(labels: str, fields: str) -> dict[str, str]:
    return {key: text for key, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}


def _retry_after_s(header: str | None) -> float | None:
    """The seconds a server asks to wait, within reason; None when it does not ask."""
    if header is None or not (header.isascii() and header.isdigit()):
        return None
    return min(float(header), _LONGEST_WAIT_S)
