"""A CSI call written by a person: `METHOD field=value …` becomes a request, an answer becomes plain data.

Owns: the path syntax (`volume_capabilities.0.mount.fs_type=ext4`, `parameters.kind=image`, a JSON value after `:=`),
and the listing of methods and fields for help and completion.
May not touch: terminals; `moorage csi` prints.
Start reading at: `request_from`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from moorage.csi.client import method_named
from moorage.csi.generated import csi_pb2 as pb
from moorage.csi.sizes import size_from
from moorage.errors import InvalidRequest, UsageError
from moorage.suggest import did_you_mean

_WHOLE_NUMBERS = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_INT32)


def methods() -> list[str]:
    """Every method as `Service.Method`."""
    services = pb.DESCRIPTOR.services_by_name.values()
    return [f"{service.name}.{method.name}" for service in services for method in service.methods]


def is_streaming(method: str) -> bool:
    return bool(method_named(method).server_streaming)


def fields_of(method: str) -> list[tuple[str, str]]:
    """The fields of a method's request, one level deep into messages: (path, type)."""
    found: list[tuple[str, str]] = []
    for field in method_named(method).input_type.fields:
        found.append((field.name, type_name(field)))
        if _is_plain_message(field):
            found += [(f"{field.name}.{inner.name}", type_name(inner)) for inner in field.message_type.fields]
    return found


def type_name(field: FieldDescriptor) -> str:
    """A field's type as a person would write it."""
    if _is_map(field):
        return "map<string, string>"
    name = (
        field.message_type.name if field.message_type else field.enum_type.name if field.enum_type else _scalar(field)
    )
    return f"list of {name}" if field.is_repeated else name


def request_from(method: str, words: Sequence[str], document: Mapping[str, Any] | None = None) -> Message:
    """The request that the words describe, on top of a JSON document; UsageError names the word that is wrong."""
    descriptor = method_named(method).input_type
    tree: dict[str, Any] = json.loads(json.dumps(dict(document or {})))
    for word in words:
        path, value = _split(word)
        _put(tree, descriptor, path.split("."), value, word)
    request: Message = descriptor._concrete_class()
    try:
        json_format.ParseDict(tree, request)
    except json_format.ParseError as error:
        raise UsageError(f"{method}: {error}") from error
    return request


def answer_document(message: Message) -> dict[str, Any]:
    """An answer as plain data with the field names of the protocol."""
    return dict(json_format.MessageToDict(message, preserving_proto_field_name=True))


def _split(word: str) -> tuple[str, Any]:
    path, separator, text = word.partition("=")
    if not separator or not path.rstrip(":"):
        raise UsageError(f"{word!r}: want field=value, or field:=JSON")
    if not path.endswith(":"):
        return path, text
    try:
        return path[:-1], json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{word!r}: what follows := is not JSON: {error}") from error


def _put(tree: dict[str, Any], descriptor: Descriptor, steps: list[str], value: Any, word: str) -> None:
    name, rest = steps[0], steps[1:]
    field = descriptor.fields_by_name.get(name)
    if field is None:
        known = ", ".join(sorted(descriptor.fields_by_name)) or "none"
        meant = did_you_mean(name, descriptor.fields_by_name) or f"; it has: {known}"
        raise UsageError(f"{word!r}: {descriptor.name} has no field {name!r}{meant}")
    if _is_map(field):
        if rest:
            tree.setdefault(name, {})[".".join(rest)] = str(value)
        else:
            tree[name] = value
    elif field.is_repeated and rest:
        _put_item(tree.setdefault(name, []), field, rest, value, word)
    elif field.message_type is not None and rest:
        _put(tree.setdefault(name, {}), field.message_type, rest, value, word)
    elif rest:
        raise UsageError(f"{word!r}: {name!r} is a {type_name(field)} and has no fields of its own")
    elif field.is_repeated and not isinstance(value, list):
        tree.setdefault(name, []).append(_coerced(field, value, word))
    else:
        tree[name] = _coerced(field, value, word)


def _put_item(items: list[Any], field: FieldDescriptor, rest: list[str], value: Any, word: str) -> None:
    if not rest[0].isdigit() or int(rest[0]) > len(items):
        raise UsageError(f"{word!r}: {field.name!r} is a list; want {field.name}.{len(items)}")
    at = int(rest[0])
    if field.message_type is None or len(rest) == 1:
        items[at : at + 1] = [_coerced(field, value, word)]
        return
    if at == len(items):
        items.append({})
    _put(items[at], field.message_type, rest[1:], value, word)


def _coerced(field: FieldDescriptor, value: Any, word: str) -> Any:
    if not isinstance(value, str):
        return value
    if field.message_type is not None:
        if value in ("", "{}"):
            return {}
        raise UsageError(f"{word!r}: {field.name!r} is a {type_name(field)}; give its fields, or JSON with :=")
    if field.type == FieldDescriptor.TYPE_BOOL:
        if value not in ("true", "false"):
            raise UsageError(f"{word!r}: want true or false")
        return value == "true"
    if field.name.endswith("_bytes") and value[:1].isdigit() and not value.isdigit() and field.type in _WHOLE_NUMBERS:
        return _size(word, value)
    return value


def _size(word: str, value: str) -> int:
    try:
        return size_from(word.partition("=")[0], value)
    except InvalidRequest as error:
        raise UsageError(str(error)) from error


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _is_plain_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not field.is_repeated and not _is_map(field)


def _scalar(field: FieldDescriptor) -> str:
    names = {
        FieldDescriptor.TYPE_STRING: "string",
        FieldDescriptor.TYPE_BOOL: "bool",
        FieldDescriptor.TYPE_INT64: "int64",
        FieldDescriptor.TYPE_INT32: "int32",
        FieldDescriptor.TYPE_BYTES: "bytes",
    }
    return names.get(field.type, "number")
