"""The OpenAPI v2 document in protobuf, which older kubectl asks for and accepts nothing else in its place.

Owns: encoding the part of the gnostic Document message that such clients read.
May not touch: what the document says; that is `openapi`.
Start reading at: `document`.
"""

from typing import Any

import yaml

Document = dict[str, Any]
ASKED = "application/com.github.proto-openapi.spec.v2"  # what every spelling of the media type begins with
MEDIA = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"  # with @, as it is asked for, it is no valid type


def document(source: Document) -> bytes:
    """The encoded document."""
    info = _text(1, source["info"]["title"]) + _text(2, source["info"]["version"])
    paths = b"".join(_part(2, _text(1, path) + _part(2, _path_item(item))) for path, item in source["paths"].items())
    definitions = b"".join(_named_schema(name, schema) for name, schema in source["definitions"].items())
    return _text(1, source["swagger"]) + _part(2, info) + _part(8, paths) + _part(9, definitions)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _part(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _text(number: int, text: str) -> bytes:
    return _part(number, text.encode()) if text else b""


def _flag(number: int, value: bool) -> bytes:
    return _varint(number << 3) + b"\x01" if value else b""


def _any(value: Any) -> bytes:
    """Any value, as YAML text."""
    return _text(2, yaml.safe_dump(value, default_flow_style=True))


def _extensions(number: int, source: Document) -> bytes:
    return b"".join(
        _part(number, _text(1, name) + _part(2, _any(value))) for name, value in source.items() if name.startswith("x-")
    )


def _named_schema(name: str, schema: Document) -> bytes:
    return _part(1, _text(1, name) + _part(2, _schema(schema)))


def _schema(schema: Document) -> bytes:
    if "$ref" in schema:
        return _text(1, schema["$ref"])
    out = _text(2, str(schema.get("format") or "")) + _text(4, str(schema.get("description") or ""))
    out += b"".join(_text(19, name) for name in schema.get("required") or [])
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        out += _part(21, _part(1, _schema(extra)))
    elif extra is True:
        out += _part(21, _flag(2, True))
    if schema.get("type"):
        out += _part(22, _text(1, str(schema["type"])))
    if isinstance(schema.get("items"), dict):
        out += _part(23, _part(1, _schema(schema["items"])))
    if schema.get("properties"):
        out += _part(25, b"".join(_named_schema(name, sub) for name, sub in schema["properties"].items()))
    return out + _extensions(31, schema)


_OPERATIONS = {"get": 2, "put": 3, "post": 4, "delete": 5, "patch": 8}


def _path_item(item: Document) -> bytes:
    return b"".join(_part(_OPERATIONS[verb], _operation(body)) for verb, body in item.items() if verb in _OPERATIONS)


def _operation(body: Document) -> bytes:
    out = _text(5, body["operationId"])
    for parameter in body["parameters"]:
        query = _text(2, "query") + _text(4, parameter["name"]) + _text(6, "string")
        out += _part(8, _part(1, _part(2, _part(3, query))))
    response = _part(1, _text(1, "OK"))
    out += _part(9, _part(1, _text(1, "200") + _part(2, response)))
    return out + _extensions(13, body)
