"""`moorage csi`: one CSI call, by hand, to any driver."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moorage.cli import show
from moorage.cli.app import App, CallTimeout, Endpoint, Output, SecretsFile
from moorage.csi import text as csi_text
from moorage.csi.client import CsiClient, method_named
from moorage.csi.errors import CsiError
from moorage.errors import UsageError
from moorage.suggest import did_you_mean

app = App()


def _complete_method(incomplete: str) -> list[str]:
    names = [word for name in csi_text.methods() for word in (name, name.partition(".")[2])]
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def _complete_field(ctx: typer.Context, incomplete: str) -> list[str]:
    try:
        known = csi_text.fields_of(ctx.params.get("method") or "")
    except CsiError:
        return []
    return [f"{path}=" for path, _ in known if path.startswith(incomplete)]


@app.command()
def csi(
    method: Annotated[
        str, typer.Argument(help="Method, such as CreateVolume or Node.NodeGetInfo.", autocompletion=_complete_method)
    ] = "",
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIELD=VALUE]...",
            help="Nested with dots; FIELD:=JSON for JSON values.",
            autocompletion=_complete_field,
        ),
    ] = None,
    endpoint: Endpoint = "unix:///run/csi/socket",
    json_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Request as JSON; - is standard input.")
    ] = None,
    secrets_file: SecretsFile = None,
    show_methods: Annotated[bool, typer.Option("--list", help="List methods, or a method's fields, and stop.")] = False,
    timeout_s: CallTimeout = 60.0,
    output: Output = "text",
) -> None:
    """Make one CSI call, by hand, to any driver.

    Sizes may have a unit, such as 64Mi. With -o json each message of the answer is one line.

    Examples:

      moorage csi --list

      moorage csi NodeGetInfo --endpoint unix:///run/csi.sock

      moorage csi CreateVolume name=v1 capacity_range.required_bytes=64Mi \\
        volume_capabilities.0.mount.fs_type=ext4 \\
        volume_capabilities.0.access_mode.mode=SINGLE_NODE_WRITER
    """
    as_json = show.check_output(output)
    if show_methods:
        _print_list(method)
        return
    if not method:
        raise UsageError("which method? `moorage csi --list` names them all")
    try:
        method_named(method)
    except CsiError as error:
        raise UsageError(_no_such(method)) from error
    document = _document(json_file)
    if secrets_file is not None:
        document["secrets"] = _secrets(secrets_file)
    request = csi_text.request_from(method, fields or [], document)
    asyncio.run(_call(endpoint, method, request, timeout_s, compact=as_json))


async def _call(endpoint: str, method: str, request: Any, timeout_s: float, compact: bool) -> None:
    async with CsiClient(endpoint, timeout_s=timeout_s) as client:
        if csi_text.is_streaming(method):
            stream = getattr(client, method_named(method).name)(request)
            async for message in stream:
                show.json_out(csi_text.answer_document(message), compact=True)
            return
        show.json_out(csi_text.answer_document(await client.call(method, request)), compact)


def _print_list(method: str) -> None:
    if not method:
        show.columns(("METHOD",), [(name,) for name in csi_text.methods()])
        return
    try:
        show.columns(("FIELD", "TYPE"), csi_text.fields_of(method))
    except CsiError as error:
        raise UsageError(_no_such(method)) from error


def _no_such(method: str) -> str:
    names = [word for name in csi_text.methods() for word in (name, name.partition(".")[2])]
    return f"there is no CSI method {method!r}{did_you_mean(method, names) or '; `moorage csi --list` shows all'}"


def _document(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    return _json(sys.stdin.read() if str(path) == "-" else _text(path), str(path))


def _secrets(path: Path) -> dict[str, Any]:
    """Return the secrets of a file. Raises UsageError, which never quotes a value."""
    found = _json(_text(path), str(path))
    wrong = sorted(name for name, value in found.items() if not isinstance(value, str))
    if wrong:
        raise UsageError(f"{path}: the value of {', '.join(wrong)} is no string")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as failed:
        raise UsageError(f"{path}: cannot be read: {getattr(failed, 'strerror', None) or 'it is no text'}") from failed


def _json(text: str, source: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{source}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{source}: want a JSON object")
    return document
