"""A request as the `moorage csi` command that sends it again.

Owns: the translation of a message into words, the inverse of `moorage.csi.text`. Secrets become `--secrets-file`.
Start reading at: `command_for`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from moorage.csi.redact import STRIPPED, plain
from moorage.suggest import command

_LONGEST = 24  # fields of one command


def command_for(method: str, request: Message, endpoint: str) -> str:
    """Return the command that sends this request again; a shell takes it as it is."""
    document = json_format.MessageToDict(request, preserving_proto_field_name=True)
    has_secrets = any(value == STRIPPED for value in plain(request).values())
    for name, value in plain(request).items():
        if value == STRIPPED:
            document.pop(name, None)
    words = [f"{path}{value}" for path, value in _words("", document)][:_LONGEST]
    flags = ["--endpoint", endpoint]
    if has_secrets:
        flags += ["--secrets-file", "SECRETS.json"]
    return str(command("moorage", "csi", method, *words, *flags))


def _words(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value and not any("." in key or "=" in key for key in value):
        for key, item in value.items():
            yield from _words(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for index, item in enumerate(value):
            yield from _words(f"{path}.{index}", item)
    elif isinstance(value, str):
        yield path, f"={value}"
    elif path:
        yield path, f":={json.dumps(value)}"
