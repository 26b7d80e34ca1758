"""Bodies in Kubernetes' protobuf encoding, as kubectl and the Go components send them.

Owns: decoding the envelope and any type of the schema table into plain JSON values. Answers are always JSON, which
every such client accepts.
May not touch: storage.
Start reading at: `document_from`.
"""

import base64
import struct as packing
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from moorage.apiserver.errors import StatusError, bad_request, too_many_values, unsupported_media
from moorage.apiserver.formats.decode import check_depth, check_values, json_from
from moorage.apiserver.kinds.registry import package_of
from moorage.apiserver.kinds.schema import ANY, Type, known_types, struct

MAGIC = b"k8s\x00"
_DEPTH = 64
LIMIT_BYTES = 1 << 20  # it is read field by field


def document_from(data: bytes) -> Any:
    """The object in an envelope; its type is the one that the envelope names."""
    if not data.startswith(MAGIC):
        raise bad_request("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")
    if len(data) > LIMIT_BYTES:
        raise too_many_values(f"protobuf of more than {LIMIT_BYTES} bytes is not read; send JSON")
    try:
        found = _unwrapped(data[len(MAGIC) :])
        check_values(found)
        check_depth(found)
        return found
    except StatusError:
        raise
    except (ValueError, IndexError, packing.error, OverflowError, OSError, RecursionError) as error:
        raise bad_request(f"the protobuf message is malformed: {error}") from error


def _unwrapped(data: bytes) -> Any:
    api_version = kind = content_type = ""
    raw = b""
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            parts = {n: v.decode() for n, v in _fields(value) if isinstance(v, bytes)}
            api_version, kind = parts.get(1, ""), parts.get(2, "")
        elif number == 2 and isinstance(value, bytes):
            raw = value
        elif number == 4 and isinstance(value, bytes):
            content_type = value.decode()
    if content_type == "application/json":
        return json_from(raw)
    group, _, version = api_version.rpartition("/")
    name = f"{package_of(group)}.{version}.{kind}"
    if kind == "DeleteOptions":
        name = "meta.v1.DeleteOptions"
    if name not in _known():
        raise unsupported_media(f"protobuf bodies of {api_version[:80]}, Kind={kind[:80]} are not accepted; send JSON")
    return {"kind": kind, "apiVersion": api_version, **_message(raw, struct(name), 0)}


_KNOWN: set[str] = set()


def _known() -> set[str]:
    if not _KNOWN:
        _KNOWN.update(known_types())
    return _KNOWN


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint is too long")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes | float]]:
    """Number and value of every field: varints as int, the rest as bytes."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
                yield tag >> 3, value
            case 1:
                yield tag >> 3, data[at : at + 8]
                at += 8
            case 2:
                size, at = _varint(data, at)
                if at + size > end:
                    raise ValueError("a field is cut short")
                yield tag >> 3, data[at : at + size]
                at += size
            case 5:
                yield tag >> 3, data[at : at + 4]
                at += 4
            case other:
                raise ValueError(f"wire type {other} is not used")


def _message(data: bytes, node: Type, depth: int) -> dict[str, Any]:
    if depth > _DEPTH:
        raise ValueError("the message is nested too deeply")
    inner = {f.name for inlined in node.inlined.values() for f in inlined.fields.values()}
    by_number = {f.number: f for f in node.fields.values() if f.number and f.name not in inner}
    out: dict[str, Any] = {}
    for number, value in _fields(data):
        if number in node.inlined and isinstance(value, bytes):
            out |= _message(value, node.inlined[number], depth + 1)
            continue
        known = by_number.get(number)
        if known is not None:
            _put(out, known.name, known.type, value, depth)
    return out


def _put(out: dict[str, Any], name: str, node: Type, value: Any, depth: int) -> None:
    if node.shape == "list":
        item = node.item or ANY
        found = out.setdefault(name, [])
        if item.shape in ("int32", "int64") and isinstance(value, bytes):  # packed
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                found.append(_signed(number))
        else:
            found.append(_value(value, item, depth))
    elif node.shape == "map":
        key, entry = "", b""
        for number, part in _fields(_bytes(value)):
            if number == 1 and isinstance(part, bytes):
                key = part.decode()
            elif number == 2:
                entry = part  # type: ignore[assignment]
        out.setdefault(name, {})[key] = _map_value(entry, node.item or ANY, depth)
    else:
        out[name] = _value(value, node, depth)


def _map_value(value: Any, node: Type, depth: int) -> Any:
    if node.shape == "list":  # a list inside a map is a message with repeated items
        item = node.item or ANY
        return [_value(part, item, depth) for number, part in _fields(_bytes(value)) if number == 1]
    return _value(value, node, depth)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _value(value: Any, node: Type, depth: int) -> Any:
    match node.shape:
        case "struct":
            return _message(_bytes(value), node, depth + 1)
        case "string":
            return _bytes(value).decode()
        case "bool":
            return bool(value)
        case "int32" | "int64" | "byte":
            if not isinstance(value, int):
                raise ValueError("expected a varint")
            return _signed(value)
        case "number":
            return packing.unpack("<d", _bytes(value))[0]
        case "bytes":
            return base64.b64encode(_bytes(value)).decode()
        case "quantity":
            return _first(value, 1, b"0").decode()
        case "time" | "microtime":
            return _time(_bytes(value), node.shape == "microtime")
        case "duration":
            return _duration(dict(_fields(_bytes(value))).get(1, 0))
        case "intorstring":
            parts = dict(_fields(_bytes(value)))
            text = parts.get(3, b"")
            return _bytes(text).decode() if parts.get(1) else _signed(int(parts.get(2) or 0))
    raw = _first(value, 1, b"")
    return json_from(raw) if raw else None


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("expected bytes")
    return value


def _first(value: Any, wanted: int, otherwise: bytes) -> bytes:
    for number, part in _fields(_bytes(value)):
        if number == wanted:
            return _bytes(part)
    return otherwise


def _time(data: bytes, has_fraction: bool) -> str | None:
    parts = dict(_fields(data))
    if not parts:
        return None  # the zero time
    seconds = _signed(int(parts.get(1) or 0))
    moment = datetime.fromtimestamp(seconds, UTC)
    text = moment.strftime("%Y-%m-%dT%H:%M:%S")
    if has_fraction:
        text += f".{int(parts.get(2) or 0) // 1000:06d}"
    return None if seconds == -62135596800 else text + "Z"


def _duration(value: Any) -> str:
    nanoseconds = _signed(int(value))
    return f"{nanoseconds / 1e9:g}s"
