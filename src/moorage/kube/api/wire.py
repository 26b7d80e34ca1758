"""How lists, watch events and errors look on the wire, decoded without trusting them.

Owns: the outer shapes (list, event, Status) and the splitting of a stream into lines. An object that cannot be read
as its kind is left out with a warning; it never ends a list or a watch.
May not touch: HTTP requests, stores.
Start reading at: `Codec.event`, `Codec.page`.
"""

import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

from moorage.kube.errors import ApiError, Unavailable, error_from
from moorage.kube.objects.meta import KubeObject, Meta
from moorage.log import get_logger

log = get_logger(__name__)

T = TypeVar("T", bound=KubeObject)

_KEPT_DEPTH = 100  # what is nested deeper becomes null; nothing that Moorage reads is
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class WatchEvent(Generic[T]):
    """ADDED, MODIFIED or DELETED with the object; BOOKMARK with an object that has only a version."""

    type: str
    object: T

    @property
    def ends_initial_list(self) -> bool:
        return self.type == "BOOKMARK" and self.object.annotations.get("k8s.io/initial-events-end") == "true"


@dataclass(frozen=True, slots=True)
class ListChunk(Generic[T]):
    """A part of a list, and the token for the next part."""

    items: list[T]
    resource_version: str
    token: str


class _RawListMeta(msgspec.Struct, rename="camel", frozen=True):
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


class Codec:
    """Decoders by kind, made once each."""

    def __init__(self) -> None:
        self._decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}

    def object(self, kind: type[T], body: bytes | msgspec.Raw) -> T:
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.json.Decoder(kind)
        try:
            return of_any_depth(decoder.decode, body)  # type: ignore[no-any-return]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # The Go server writes null for some empty lists and maps (a new CSINode's drivers): null is absent.
            try:
                return msgspec.convert(without_nulls(msgspec.json.decode(shallow(body))), kind)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                raise _bad(f"a {kind.resource.kind}", error) from error

    def page(self, kind: type[T], body: bytes) -> ListChunk[T]:
        raw = _decoded(body, _RawList, "a list")
        items = []
        for one in raw.items or []:
            try:
                items.append(self.object(kind, one))
            except Unavailable as error:
                log.warning("object is left out", kind=kind.resource.kind, reason=str(error))
        return ListChunk(items, raw.metadata.resource_version, raw.metadata.continue_)

    def event(self, kind: type[T], line: bytes) -> WatchEvent[T]:
        """Decode one line of a watch. Raises the error of an ERROR line.

        An object that cannot be read still advances the version: its deletion is reported with its metadata alone, its
        change only as a bookmark.
        """
        raw = _decoded(line, _RawEvent, "a watch event")
        if raw.type == "ERROR":
            status = _decoded(raw.object, dict[str, Any], "a Status")
            code = status.get("code")
            raise error_from(code if isinstance(code, int) else 500, status)
        if raw.type == "BOOKMARK":
            return WatchEvent("BOOKMARK", kind(metadata=_decoded(raw.object, _JustMeta, "a bookmark").metadata))
        try:
            return WatchEvent(raw.type, self.object(kind, raw.object))
        except Unavailable as error:
            log.warning("object is left out", kind=kind.resource.kind, reason=str(error))
            meta = _decoded(raw.object, _JustMeta, "object metadata").metadata
            if raw.type == "DELETED":
                return WatchEvent("DELETED", kind(metadata=meta))
            return WatchEvent("BOOKMARK", kind(metadata=Meta(resource_version=meta.resource_version)))


def error_of(status: int, body: bytes) -> ApiError:
    """The error in an answer; what is no Status becomes its message."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        document = {"message": body[:512].decode(errors="replace")}
    return error_from(status, document if isinstance(document, dict) else {"message": str(document)[:512]})


async def lines_of(stream: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Lines of any length (aiohttp's own readline gives up at 64 KiB)."""
    pieces: list[bytes] = []  # of the line that has not ended yet
    async for chunk in stream.iter_any():
        *ended, rest = chunk.split(b"\n")
        for end in ended:
            line = b"".join((*pieces, end)) if pieces else end
            pieces.clear()
            if line:
                yield line
        if rest:
            pieces.append(rest)


_D = TypeVar("_D")


def _decoded(body: bytes | msgspec.Raw, shape: type[_D], what: str) -> _D:
    try:
        found: _D = of_any_depth(partial(msgspec.json.decode, type=shape), body)
        return found
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _bad(what, error) from error


def of_any_depth(decode: Callable[[bytes | msgspec.Raw], _D], body: bytes | msgspec.Raw) -> _D:
    """Decode; Kubernetes takes objects that are nested deeper (managedFields) than the decoder goes."""
    try:
        return decode(body)
    except RecursionError:
        return decode(shallow(body))


def shallow(body: bytes | msgspec.Raw) -> bytes:
    """The same JSON with null in the place of everything that is nested very deeply."""
    text = bytes(body)
    kept, depth, at = [], 0, 0
    for token in _STRING_OR_BRACKET.finditer(text):
        bracket = token[0]
        if bracket in (b"{", b"["):
            depth += 1
            if depth == _KEPT_DEPTH:
                kept.append(text[at : token.start()] + b"null")
        elif bracket in (b"}", b"]"):
            if depth == _KEPT_DEPTH:
                at = token.end()
            depth -= 1
    return b"".join((*kept, text[at:]))


def _bad(what: str, error: Exception) -> Unavailable:
    return Unavailable(502, "BadAnswer", f"cannot read {what} of the API server: {error}")


def without_nulls(value: Any) -> Any:
    """As a server that leaves out what is nothing would have written it."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value
