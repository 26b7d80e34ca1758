"""From the body of a request to an object of the kind that the path names.

Owns: apiVersion and kind checks, namespaces, dropping unknown fields, and the form in which objects are stored.
May not touch: storage.
Start reading at: `intake`.
"""

from typing import Any

from moorage.apiserver.errors import StatusError, bad_request
from moorage.apiserver.kinds.registry import Kind, Object
from moorage.apiserver.kinds.schema import Normaliser, WrongType
from moorage.apiserver.request.options import Call, refuse_unknown_fields


class NotOfKind(StatusError):
    """The body cannot be read as the kind that the endpoint takes."""

    def __init__(self, message: str) -> None:
        super().__init__(400, "BadRequest", message)


def intake(call: Call, body: Any, stored: Object | None = None) -> Object:
    """The object in its stored form; refused when it is not what the endpoint takes.

    `stored` is what a patch was made from: the parts that the patch left alone need no second look.
    """
    kind = call.kind
    obj = shaped(kind, body)
    check_identity(kind, obj)
    name = obj["metadata"].get("name", "") if isinstance(obj["metadata"], dict) else ""
    if kind.custom is not None:
        obj, unknown = kind.custom.intake(obj)
    else:
        normaliser = Normaliser(kind.name)
        try:
            obj = normaliser.struct(obj, kind.type, "", stored)
        except WrongType as error:
            message = f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}: {error}'
            raise NotOfKind(message) from error
        unknown = normaliser.unknown
    refuse_unknown_fields(kind, name, unknown, call)
    _place(call, obj)
    if kind.decode_from is not None:
        obj = kind.decode_from(obj)
    return ordered(obj)


def shaped(kind: Kind, body: Any) -> Object:
    if not isinstance(body, dict):
        raise bad_request(f"couldn't get version/kind; json parse error: the body is not an object but {_word(body)}")
    metadata = body.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise bad_request(
            f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}: json: cannot unmarshal '
            f"{_word(metadata)} into Go struct field {kind.name}.metadata of type v1.ObjectMeta"
        )
    return {**body, "apiVersion": body.get("apiVersion") or kind.api_version, "kind": body.get("kind") or kind.name,
            "metadata": metadata or {}}  # fmt: skip


def check_identity(kind: Kind, obj: Object) -> None:
    """apiVersion and kind must be those of the endpoint."""
    if obj["kind"] != kind.name or not isinstance(obj["apiVersion"], str):
        raise NotOfKind(
            f'{str(obj["kind"])[:80]} in version "{str(obj["apiVersion"]).rpartition("/")[2][:80]}" cannot be handled '
            f'as a {kind.name}: no kind "{str(obj["kind"])[:80]}" is registered for this endpoint',
        )
    if obj["apiVersion"] != kind.api_version:
        raise bad_request(
            f"the API version in the data ({obj['apiVersion'][:120]}) does not match the expected API version "
            f"({kind.api_version})"
        )


def _place(call: Call, obj: Object) -> None:
    meta = obj["metadata"]
    if call.kind.is_namespaced:
        if meta.get("namespace") not in (None, "", call.namespace):
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        meta["namespace"] = call.namespace
    else:
        meta.pop("namespace", None)


def ordered(obj: Object) -> Object:
    """The same object, beginning with kind, apiVersion and metadata as people expect to read it."""
    head = {"kind": obj["kind"], "apiVersion": obj["apiVersion"], "metadata": obj["metadata"]}
    return {**head, **{key: value for key, value in obj.items() if key not in head}}


def _word(value: Any) -> str:
    names = {str: "string", bool: "bool", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")
