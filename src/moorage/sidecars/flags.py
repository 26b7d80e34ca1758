"""Command-line flags the way Go programs take them, so that the arguments of an official sidecar can stay as they are.

Owns: parsing `--leader-election=true`, `-csi-address=/x`, `--timeout 10s`, and the list of flags for --help.
Start reading at: `parse`.
"""

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

from moorage.errors import UsageError
from moorage.sidecars.settings import SidecarSettings, duration_s, duration_text

# Accepted so that an official sidecar's arguments can stay, and without meaning here; the second kind takes a value.
IGNORED_SWITCHES = frozenset(
    {"alsologtostderr", "automaxprocs", "enable-pprof", "log-json-split-stream", "log-text-split-stream", "logtostderr"}
    | {"add_dir_header", "one_output", "skip_headers", "skip_log_headers"}
)
IGNORED = frozenset(
    {"connection-timeout", "log-file", "log-flush-frequency", "log-json-info-buffer-size", "log-text-info-buffer-size"}
    | {"logging-format", "master", "max-grpc-log-length", "node-list-add-interval", "v", "vmodule"}
    | {"log_backtrace_at", "log_dir", "log_file", "log_file_max_size", "stderrthreshold", "volume-list-add-interval"}
)
_TRUE, _FALSE = frozenset({"true", "1", "t"}), frozenset({"false", "0", "f"})


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag: its names, the field that it fills, and how its value is read."""

    names: tuple[str, ...]
    field: str
    kind: str  # bool, int, float, str or duration
    default: Any
    help: str


def all_flags() -> list[Flag]:
    """Every flag of `Settings`."""
    return [_flag(field) for field in dataclasses.fields(SidecarSettings)]


def parse(arguments: Sequence[str]) -> tuple[SidecarSettings, list[str]]:
    """The settings, and the arguments that are not flags; UsageError names what is wrong."""
    by_name = {name: flag for flag in all_flags() for name in flag.names}
    values: dict[str, Any] = {}
    others: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            return SidecarSettings(**values), others + waiting
        if not argument.startswith("-"):
            others.append(argument)
            continue
        name, has_value, text = argument.lstrip("-").partition("=")
        if name in IGNORED_SWITCHES:
            continue
        if name in IGNORED:
            if not has_value and waiting:
                waiting.pop(0)
            continue
        flag = by_name.get(name)
        if flag is None:
            raise UsageError(f"no flag is called --{name}; see moorage sidecars --help")
        if not has_value and flag.kind == "bool":
            text = "true"
        elif not has_value:
            if not waiting:
                raise UsageError(f"--{name} needs a value")
            text = waiting.pop(0)
        values[flag.field] = _read(flag, name, text)
    return SidecarSettings(**values), others


def help_text() -> str:
    """The flags with their defaults, one a line."""
    lines = []
    for flag in all_flags():
        names = ", ".join(f"--{name}" for name in flag.names)
        default = duration_text(flag.default) if flag.kind == "duration" and flag.default is not None else flag.default
        shown = (
            f" (default {str(default).lower() if flag.kind == 'bool' else default})"
            if default not in ("", None)
            else ""
        )
        lines.append(f"{names}: {flag.help}{shown}")
    return "\n".join(lines)


def _flag(field: "dataclasses.Field[Any]") -> Flag:
    kind: Any = typing.get_type_hints(SidecarSettings)[field.name]
    if isinstance(kind, types.UnionType):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    is_duration = field.metadata["kind"] == "duration"
    name = field.metadata["name"] or (field.name.removesuffix("_s") if is_duration else field.name)
    names = [name.replace("_", "-"), field.metadata["also"]]
    return Flag(
        names=tuple(filter(None, names)),
        field=field.name,
        kind="duration" if is_duration else kind.__name__,
        default=field.default,
        help=field.metadata["help"],
    )


def _read(flag: Flag, name: str, text: str) -> Any:
    try:
        match flag.kind:
            case "duration":
                return duration_s(text)
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "bool" if text.lower() in _TRUE | _FALSE:
                return text.lower() in _TRUE
            case "str":
                return text
    except (ValueError, UsageError) as error:
        raise UsageError(f"--{name}: {error}") from None
    raise UsageError(f"--{name}: {text!r} is neither true nor false")
