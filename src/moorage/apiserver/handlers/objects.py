"""One request on a resource, from method and path to bytes.

Owns: which operation a method means, the content types of patches, lists as joined bytes, and how answers look.
Start reading at: `ObjectHandler.handle`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from moorage.apiserver.errors import (
    StatusError,
    bad_request,
    forbidden_field,
    invalid,
    method_not_allowed,
    unsupported_media,
)
from moorage.apiserver.formats.negotiate import Representation
from moorage.apiserver.kinds.registry import Kind, Object
from moorage.apiserver.reading import tables
from moorage.apiserver.reading.watch import WatchStream
from moorage.apiserver.request.apart import apart
from moorage.apiserver.request.messages import APPLY, Answer, Sent
from moorage.apiserver.request.options import Call, delete_options_from
from moorage.apiserver.store.selection import ListPage, Reading, begin_list, page_of
from moorage.apiserver.store.store import decode, encode
from moorage.apiserver.writing.admission import default_class
from moorage.apiserver.writing.apply import apply_patch
from moorage.apiserver.writing.json_patch import json_patch, merge_patch
from moorage.apiserver.writing.operations import Operations
from moorage.apiserver.writing.strategic_patch import strategic_patch

MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
_PART_BYTES = 256 << 10


class ObjectHandler:
    """The verbs on resources and their plain subresources."""

    def __init__(self, resources: Operations) -> None:
        self.resources = resources
        self.store = resources.store

    def watch(self, call: Call, wanted: Representation) -> WatchStream:
        return WatchStream(self.store, call, self._renderer(call.kind, wanted))

    async def handle(self, call: Call, sent: Sent, wanted: Representation) -> Answer:
        """Carry out one request."""
        match sent.method, bool(call.name):
            case "GET", True:
                return await self._shown(call, self.resources.get(call), wanted)
            case "GET", False:
                return await self._list(call, wanted)
            case "POST", False if not call.subresource:
                obj = sent.document()
                return await self._shown(call, await self.resources.create(call, obj), wanted, 201)
            case "PUT", True:
                obj = sent.document()
                body, created = await self.resources.update(call, obj)
                return await self._shown(call, body, wanted, 201 if created else 200)
            case "PATCH", True:
                return await self._patch(call, sent, wanted)
            case "DELETE", True if not call.subresource:
                return await self._delete(call, sent, wanted)
            case "DELETE", False:
                return await self._delete_collection(call, sent)
        raise method_not_allowed()

    async def _shown(self, call: Call, body: bytes, wanted: Representation, http: int = 200) -> Answer:
        render = self._renderer(call.kind, wanted)
        if render and not wanted.form.endswith("List"):
            return Answer(await apart(len(body), render, body), http)
        return Answer(body, http)

    def _renderer(self, kind: Kind, wanted: Representation) -> Callable[[bytes], bytes] | None:
        """How one object's bytes are turned into what the client wants; None for the bytes as they are."""
        if wanted.form == "Table":
            return lambda body: self._table_row(kind, body, wanted)
        if wanted.form == "PartialObjectMetadata":
            return lambda body: encode(tables.partial(self._in_version(kind, body), wanted.version))
        if kind.encode_to is not None:
            convert = kind.encode_to
            return lambda body: encode(convert(decode(body)))
        return None

    def _table_row(self, kind: Kind, body: bytes, wanted: Representation) -> bytes:
        obj = self._in_version(kind, body)
        meta = {"resourceVersion": obj["metadata"].get("resourceVersion", "")}
        return tables.table_of(kind, [obj], meta, wanted.version, wanted.include)

    def _in_version(self, kind: Kind, body: bytes) -> Object:
        obj: Object = decode(body)
        if kind.encode_to is not None and obj.get("apiVersion") != kind.api_version:
            return kind.encode_to(obj)
        return obj

    async def _list(self, call: Call, wanted: Representation) -> Answer:
        reading = begin_list(self.store, call)
        default = default_class(self.store) if call.kind.name == "StorageClass" and wanted.form == "Table" else None
        first, *more = await apart(reading.size_bytes, self._listed, reading, wanted, default or "")
        return Answer(first, more=more)

    def _listed(self, reading: Reading, wanted: Representation, default: str) -> list[bytes]:
        page, kind = page_of(reading), reading.call.kind
        meta = _list_meta(page)
        if wanted.form == "Table":
            objects = [self._in_version(kind, record.body) for record in page.records]
            return [tables.table_of(kind, objects, meta, wanted.version, wanted.include, default)]
        if wanted.form.startswith("PartialObjectMetadata"):
            items = [encode(tables.partial(decode(record.body), wanted.version)) for record in page.records]
            return joined("PartialObjectMetadataList", f"meta.k8s.io/{wanted.version}", meta, items)
        if kind.encode_to is None:
            return joined(kind.list_name, kind.api_version, meta, [record.body for record in page.records])
        items = [encode(kind.encode_to(decode(record.body))) for record in page.records]
        return joined(kind.list_name, kind.api_version, meta, items)

    async def _patch(self, call: Call, sent: Sent, wanted: Representation) -> Answer:
        kind = call.kind
        if sent.media == APPLY:
            body, created = await apply_patch(self.resources, call, sent.document())
            return await self._shown(call, body, wanted, 201 if created else 200)
        if call.options.force is not None:
            error = forbidden_field("force", "may not be specified for non-apply patch")
            raise invalid("PatchOptions", "meta.k8s.io", "", [error])
        return await self._shown(call, await self.resources.patch(call, patch_function(kind, sent)), wanted)

    async def _delete(self, call: Call, sent: Sent, wanted: Representation) -> Answer:
        options = delete_options_from(sent.document(), sent.query)
        body, gone = await self.resources.delete(call, options)
        if not gone or call.kind.answers_deleted:
            return await self._shown(call, body, wanted)
        meta = decode(body)["metadata"]
        details = {"name": call.name, "group": call.kind.group, "kind": call.kind.plural, "uid": meta.get("uid")}
        return Answer(encode({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
            "details": {key: value for key, value in details.items() if value},
        }))  # fmt: skip

    async def _delete_collection(self, call: Call, sent: Sent) -> Answer:
        options = delete_options_from(sent.document(), sent.query)
        reading = begin_list(self.store, call)
        page = await apart(reading.size_bytes, page_of, reading)
        for record in page.records:
            meta = decode(record.body)["metadata"]
            one = Call(call.kind, meta.get("namespace", ""), meta["name"], "", call.options, call.user)
            try:
                await self.resources.delete(one, options)
            except StatusError as error:
                if error.http != 404:
                    raise
        bodies = [record.body for record in page.records]
        first, *more = joined(call.kind.list_name, call.kind.api_version, _list_meta(page), bodies)
        return Answer(first, more=more)


def patch_function(kind: Kind, sent: Sent) -> Callable[[Object], Object]:
    """What a patch of any kind but apply does to an object."""
    media = sent.media
    if media == JSON_PATCH:
        steps = sent.document()
        return lambda old: _object(json_patch(old, steps))
    if media == MERGE:
        merge = _object(sent.document())
        return lambda old: _object(merge_patch(old, merge))
    if media == STRATEGIC and not kind.is_custom:
        strategic = _object(sent.document())
        return lambda old: strategic_patch(old, strategic, kind.type)
    known = [JSON_PATCH, MERGE, *([] if kind.is_custom else [STRATEGIC]), APPLY]
    raise unsupported_media(
        "the body of the request was in an unknown format - accepted media types include: " + ", ".join(known)
    )


def joined(kind: str, api_version: str, meta: Mapping[str, Any], items: list[bytes]) -> list[bytes]:
    """A list made of objects that are already encoded, in parts that can be sent one after the other."""
    head = b'{"kind":"%b","apiVersion":"%b","metadata":%b,"items":[' % (
        kind.encode(), api_version.encode(), encode(meta))  # fmt: skip
    parts, some, size = [], [], 0
    for item in items:
        some.append(item)
        size += len(item)
        if size > _PART_BYTES:
            parts.append(b"".join((head, b",".join(some))))
            head, some, size = b",", [], 0
    if some or not parts:
        return [*parts, b"%b%b]}" % (head, b",".join(some))]
    parts[-1] += b"]}"
    return parts


def _list_meta(page: ListPage) -> dict[str, Any]:
    meta: dict[str, Any] = {"resourceVersion": str(page.revision)}
    if page.token:
        meta["continue"] = page.token
    if page.remaining:
        meta["remainingItemCount"] = page.remaining
    return meta


def _object(value: Any) -> Object:
    if not isinstance(value, dict):
        raise bad_request("error decoding patch: the patch must leave an object")
    return value
