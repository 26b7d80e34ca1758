"""Field sizes that CSI allows, checked by reflection before a request reaches a service.

Owns: the table of limits (CSI, "Size Limits") and the walk over a message.
Start reading at: `check_request`.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from moorage.errors import InvalidRequest

STRING_BYTES = 128
MAP_BYTES = 4096
PATH_BYTES = 4095  # what the kernel takes, without the NUL; CSI asks for at least 128
NODE_ID_BYTES = 256
MOST_ITEMS = 20_000  # of one list: more than a cluster has nodes, and few enough to look at each

_PATHS = frozenset({"staging_target_path", "target_path", "volume_path", "volume_publish_path"})
_SUMMED = frozenset({"mount_flags"})


def check_request(message: Message) -> None:
    """Check a CSI request. Those of plugin registration have no limits: the kubelet's reasons may be long."""
    if message.DESCRIPTOR.file.package == "csi.v1":
        check(message)


def check(message: Message, prefix: str = "") -> None:
    """Raise InvalidRequest naming the first field that is larger than CSI allows."""
    for field, value in message.ListFields():
        name = f"{prefix}{field.name}"
        if isinstance(value, Mapping):
            _check_map(name, value)
        elif isinstance(value, Message):
            check(value, f"{name}.")
        elif field.is_repeated:
            _check_repeated(field, name, value)
        elif isinstance(value, str):
            _check_string(name, field.name, value)


def _check_string(name: str, field_name: str, value: str) -> None:
    limit = STRING_BYTES
    if field_name in _PATHS:
        limit = PATH_BYTES
    elif field_name == "node_id":
        limit = NODE_ID_BYTES
    size = len(value.encode())
    if size > limit:
        raise InvalidRequest(f"{name} has {size} bytes; at most {limit} are allowed")


def _check_repeated(field: FieldDescriptor, name: str, values: Any) -> None:
    if len(values) > MOST_ITEMS:
        raise InvalidRequest(f"{name} has {len(values)} items; at most {MOST_ITEMS} are allowed")
    if field.name in _SUMMED:
        size = sum(len(value.encode()) for value in values)
        if size > MAP_BYTES:
            raise InvalidRequest(f"{name} have {size} bytes together; at most {MAP_BYTES} are allowed")
        return
    for index, value in enumerate(values):
        if isinstance(value, Message):
            check(value, f"{name}[{index}].")
        elif isinstance(value, str):
            _check_string(f"{name}[{index}]", field.name, value)


def _check_map(name: str, value: Mapping[Any, Any]) -> None:
    """Only the whole map is limited; how long one value may be is up to its meaning."""
    size = sum(len(str(key).encode()) + len(str(item).encode()) for key, item in value.items())
    if size > MAP_BYTES:
        raise InvalidRequest(f"{name} has {size} bytes; at most {MAP_BYTES} are allowed")
