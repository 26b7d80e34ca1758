"""A typed client of any Kubernetes API: reads give structs, writes are creates, patches and deletes.

Owns: HTTP to the API server, retries that are safe, the request limiter, and turning answers into errors.
May not touch: decisions. It never patches on its own account and never re-reads to overcome a conflict.
Start reading at: `Client.request`, `Client.patch`, `Client.watch`.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Self, TypeVar

import aiohttp
import msgspec

from moorage.kube.config import ApiConfig
from moorage.kube.errors import ApiError, TooManyRequests, Unavailable, error_from
from moorage.kube.limiter import Limiter
from moorage.kube.objects.meta import KubeObject, Meta, as_document, version_number
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T", bound=KubeObject)

_PAGE = 1000
_TRIES = 5
_DEFAULT_TIMEOUT_S = 60.0
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


@dataclass(frozen=True, slots=True)
class WatchEvent(Generic[T]):
    """ADDED, MODIFIED or DELETED with the object; BOOKMARK with an object that has only a version."""

    type: str
    object: T

    @property
    def ends_initial_list(self) -> bool:
        return self.type == "BOOKMARK" and self.object.annotations.get("k8s.io/initial-events-end") == "true"


class _RawListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _RawList(msgspec.Struct):
    metadata: _RawListMeta = _RawListMeta()
    items: list[msgspec.Raw] | None = None


class _RawEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _JustMeta(msgspec.Struct):
    metadata: Meta = Meta()


class Client:
    """One connection pool to one API server. Use as `async with Client(config) as client`."""

    def __init__(self, config: ApiConfig, *, qps: float = 0.0, burst: int = 0, identity: str = "moorage") -> None:
        self._config = config
        self._identity = identity
        self._limiter = Limiter(qps, burst or max(1, int(qps * 2)))
        self._session: aiohttp.ClientSession | None = None
        self._decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}
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
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, kind: type[T], name: str, namespace: str = "") -> T:
        """The object as the server has it now; NotFound when it has none."""
        return self.decode(kind, await self.request("GET", kind.resource.path(namespace, name)))

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
            body = await self.request("GET", kind.resource.path(namespace), query={**query, **more})
            raw = msgspec.json.decode(body, type=_RawList)
            items += self._readable(kind, raw.items or [])
            token = raw.metadata.continue_
            if not token:
                return ObjectList(items, raw.metadata.resource_version)

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
        return self.decode(kind, await self.request("POST", path, document, query=self._manager()))

    async def update(
        self, kind: type[T], name: str, body: Mapping[str, Any], namespace: str = "", *, subresource: str = ""
    ) -> T:
        """Replace the whole object: only for documents that were read raw and whole, or are wholly ours."""
        document = {"apiVersion": kind.resource.api_version, "kind": kind.resource.kind, **body}
        path = kind.resource.path(namespace, name, subresource)
        return self.decode(kind, await self.request("PUT", path, document, query=self._manager()))

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
            patch = [{"op": "test", "path": "/metadata/resourceVersion", "value": version}, *patch]
        query = self._manager()
        if how is PatchType.APPLY and force:
            query["force"] = "true"
        path = kind.resource.path(namespace, name, subresource)
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
        await self.request("DELETE", kind.resource.path(namespace, name), options)

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
    ) -> AsyncIterator[WatchEvent[T]]:
        """Changes after `version`, or with `initial` the present state first; Gone when the version is too old."""
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(timeout_s)}
        query |= _selecting(labels, fields)
        if initial:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        if version:
            query["resourceVersion"] = version
        timeout = aiohttp.ClientTimeout(total=timeout_s + 60, sock_connect=30, sock_read=None)
        async with self._send("GET", kind.resource.path(namespace), None, query, "", timeout) as response:
            if response.status >= 400:
                raise _error_of(response.status, await response.read())
            async for line in _lines(response.content):
                event = self._event(kind, line)
                if event is not None:
                    yield event

    def decode(self, kind: type[T], body: bytes | msgspec.Raw) -> T:
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.json.Decoder(kind)
        try:
            return decoder.decode(body)  # type: ignore[no-any-return]
        except msgspec.MsgspecError as error:
            raise Unavailable(
                502, "BadAnswer", f"cannot read a {kind.resource.kind} of the API server: {error}"
            ) from error

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
        """One request, repeated where that is safe: reads always, writes only if the server said to come back (429)
        or never saw them (connection refused)."""
        data = msgspec.json.encode(body) if body is not None else None
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30)
        for attempt in range(1, _TRIES + 1):
            wait_s = min(5.0, 0.05 * 4 ** (attempt - 1)) * random.uniform(0.8, 1.2)
            try:
                async with self._send(method, path, data, query or {}, content_type, timeout) as response:
                    answer = await response.read()
                    if response.status < 400:
                        return answer
                    error = _error_of(response.status, answer)
                    asked = response.headers.get("Retry-After", "")
                    may_repeat = isinstance(error, TooManyRequests) or (method in _READS and error.status >= 500)
                    if asked.isdigit() and may_repeat:
                        wait_s = max(wait_s, float(asked))
            except aiohttp.ClientConnectorError as failure:
                error, may_repeat = (
                    Unavailable(503, "Unreachable", f"API server {self._config.server}: {failure}"),
                    True,
                )
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as failure:
                what = str(failure) or type(failure).__name__
                error = Unavailable(503, "Unreachable", f"{method} {path} at {self._config.server}: {what}")
                may_repeat = method in _READS
            if not may_repeat or attempt == _TRIES:
                raise error
            log.debug("request is tried again", method=method, path=path, reason=str(error), seconds=wait_s)
            await asyncio.sleep(wait_s)
        raise AssertionError("unreachable")

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
        await self._limiter.take()
        self.requests_sent += 1
        headers = {"Accept": "application/json", "User-Agent": f"{self._identity} moorage"}
        if data is not None:
            headers["Content-Type"] = content_type
        if self._config.token is not None:
            headers["Authorization"] = f"Bearer {await self._config.token()}"
        session = self._open()
        async with session.request(
            method,
            self._config.server + path,
            data=data,
            params=dict(query),
            headers=headers,
            timeout=timeout,
        ) as response:
            yield response

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            tls = self._config.tls if self._config.tls is not None else True
            connector: aiohttp.BaseConnector
            if self._config.unix_socket:
                connector = aiohttp.UnixConnector(self._config.unix_socket, limit=0)
            else:
                connector = aiohttp.TCPConnector(ssl=tls, limit=0, keepalive_timeout=60)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=True)
        return self._session

    def _event(self, kind: type[T], line: bytes) -> WatchEvent[T] | None:
        try:
            raw = msgspec.json.decode(line, type=_RawEvent)
        except msgspec.MsgspecError as error:
            raise Unavailable(502, "BadAnswer", f"cannot read a watch event: {error}") from error
        if raw.type == "ERROR":
            status = msgspec.json.decode(raw.object, type=dict[str, Any])
            raise error_from(int(status.get("code") or 500), status)
        if raw.type == "BOOKMARK":
            meta = msgspec.json.decode(raw.object, type=_JustMeta).metadata
            return WatchEvent("BOOKMARK", kind(metadata=meta))
        try:
            return WatchEvent(raw.type, self.decode(kind, raw.object))
        except Unavailable as error:
            log.warning("object is left out", kind=kind.resource.kind, reason=str(error))
            return None

    def _readable(self, kind: type[T], raw: Sequence[msgspec.Raw]) -> Sequence[T]:
        items = []
        for one in raw:
            try:
                items.append(self.decode(kind, one))
            except Unavailable as error:
                log.warning("object is left out", kind=kind.resource.kind, reason=str(error))
        return items

    def _manager(self) -> dict[str, str]:
        return {"fieldManager": self._identity}


def newest(one: T, other: T | None) -> T:
    """The one of two copies of an object that the server wrote last."""
    if other is None or version_number(one.metadata.resource_version) >= other.version:
        return one
    return other


def _selecting(labels: str, fields: str) -> dict[str, str]:
    return {key: text for key, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}


def _error_of(status: int, body: bytes) -> ApiError:
    try:
        document = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        document = {"message": body[:512].decode(errors="replace")}
    return error_from(status, document if isinstance(document, dict) else {"message": str(document)[:512]})


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length (aiohttp's own readline gives up at 64 KiB)."""
    rest = b""
    try:
        async for chunk in stream.iter_any():
            pieces = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
            rest = pieces.pop()
            for piece in pieces:
                if piece:
                    yield piece
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as failure:
        raise Unavailable(503, "Unreachable", f"watch broke off: {failure or type(failure).__name__}") from failure
