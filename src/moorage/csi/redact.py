"""Requests as one line of JSON with every secret replaced, also inside nested messages.

Owns: finding the fields that are marked `csi_secret`, by reflection, once per message type; and the few that
may be sensitive without a mark.
Start reading at: `one_line`.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from moorage.csi.generated import csi_pb2

STRIPPED = "***stripped***"
_LONGEST_TEXT, _MOST_ITEMS = 256, 50
_UNMARKED = frozenset({"mount_flags"})  # some filesystems take credentials there
_TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"  # kubelet puts these among plain attributes


def one_line(message: Message) -> str:
    """`message` as JSON for a log line; secrets are replaced, long values and lists cut short."""
    return json.dumps(plain(message), ensure_ascii=False, separators=(",", ":"))


def plain(message: Message) -> dict[str, Any]:
    """The fields that are set, as plain data without secrets."""
    secret = _secret_fields(message.DESCRIPTOR)
    return {
        field.name: STRIPPED if field.name in secret else _value(field, value) for field, value in message.ListFields()
    }


@cache
def _secret_fields(descriptor: Descriptor) -> frozenset[str]:
    marked = {field.name for field in descriptor.fields if field.GetOptions().Extensions[csi_pb2.csi_secret]}
    return frozenset(marked | _UNMARKED)


def _value(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _map_value(str(key), item) for key, item in value.items()}
    if isinstance(value, Message):
        return plain(value)
    if field.is_repeated:
        more = [f"…({len(value)} items)"] if len(value) > _MOST_ITEMS else []
        return [_value_item(field, item) for item in value[:_MOST_ITEMS]] + more
    return _value_item(field, value)


def _value_item(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return _shortened(value) if isinstance(value, str) else value


def _map_value(key: str, value: Any) -> Any:
    if key == _TOKENS:
        return STRIPPED
    if isinstance(value, Message):
        return plain(value)
    return _shortened(value) if isinstance(value, str) else value


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…({len(text)} characters)"
