"""`moorage trace`: what happened to an object, who did it, and where the time went."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from moorage.cli import show
from moorage.cli.app import App, Kubeconfig, Namespace, Output
from moorage.errors import MoorageError
from moorage.insight.log_records import local_clock
from moorage.insight.perfetto import document
from moorage.insight.trace import Trace
from moorage.insight.trace import trace as trace_one
from moorage.insight.trace_sources import TraceStep
from moorage.kube.api import config
from moorage.kube.api.client import TRIES_FOR_A_PERSON, Client
from moorage.printable import one_line

app = App()

_TITLES = ("time", "since", "took", "who", "object", "what")
_LONGEST_NAME = 32
_LEAST_ROOM = 40
_INDENT = "    "


@app.command()
def trace(
    reference: Annotated[
        str, typer.Argument(metavar="OBJECT", help="pvc/NAME, pod/NAME, pv/NAME, va/NAME or snapshot/NAME.")
    ],
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = "",
    logs: Annotated[
        str,
        typer.Option(metavar="PATH", help="Directory of the components' logs. Otherwise `logs` beside the kubeconfig."),
    ] = "",
    perfetto: Annotated[str, typer.Option(metavar="FILE", help="Also write a trace for ui.perfetto.dev.")] = "",
    output: Output = "text",
) -> None:
    """Tell what happened to a claim, pod, volume, attachment or snapshot, and where the time went.

    Examples:

      moorage trace pvc/data

      moorage trace pod/web --logs /tmp/moor/logs --perfetto web.json
    """
    as_json = show.check_output(output)
    told = asyncio.run(_trace(reference, namespace, kubeconfig, _logs(logs, kubeconfig)))
    if perfetto:
        _write(Path(perfetto), told)
    if as_json:
        show.json_out(told)
    else:
        _print(told)


async def _trace(reference: str, namespace: str, kubeconfig: str, logs: Path | None) -> Trace:
    api = config.load(kubeconfig or None)
    async with Client(api, identity="moorage-trace", tries=TRIES_FOR_A_PERSON) as client:
        return await trace_one(client, reference, namespace or client.namespace, logs)


def _logs(asked: str, kubeconfig: str) -> Path | None:
    """What was asked for, or what `moorage up` keeps beside its kubeconfig."""
    if asked:
        return Path(asked)
    known = kubeconfig or os.environ.get("KUBECONFIG", "")
    beside = Path(known).parent / "logs" if known else None
    return beside if beside is not None and beside.is_dir() else None


def _write(path: Path, told: Trace) -> None:
    try:
        path.write_text(json.dumps(document(told)))
    except OSError as error:
        raise MoorageError(f"--perfetto {path} cannot be written: {error.strerror}") from error


def _print(told: Trace) -> None:
    show.say(f"{told.object}, with {', '.join(map(_short, told.subjects[1:])) or 'nothing else'}")
    show.say()
    head, *rows = _table([_TITLES, *(_cells(step, told.start) for step in told.steps)], _width())
    for line in head:
        show.say(line, style="dim")
    for step, lines in zip(told.steps, rows, strict=True):
        for line in lines:
            show.say(line, style="red" if step.is_failure else "")
    if told.shares:
        end = "until it could be used" if told.is_done else "so far; it cannot be used yet"
        show.heading(f"{told.seconds:.3f} s {end}. Where the time went:")
    for share in told.shares:
        part = share.seconds / told.seconds if told.seconds else 0.0
        line = f"  {share.seconds:9.3f} s {part:4.0%}  {share.who}: {one_line(share.longest[:100])}"
        show.say(line[: _width()])


def _cells(step: TraceStep, start: float) -> tuple[str, ...]:
    clock = local_clock(step.at) if step.is_exact else local_clock(step.at)[:8]
    since = f"+{max(0.0, step.at - start):.3f}" if step.is_exact else f"~{max(0.0, step.at - start):.0f}"
    took = f"{step.took:.3f}" if step.took is not None else ""
    return clock, since, took, one_line(step.who), one_line(_short(step.object)), one_line(step.what)


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def _table(rows: list[tuple[str, ...]], width: int) -> list[list[str]]:
    """Return the lines of each row, aligned in columns. If there is little room for `what`, it gets its own line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = width - sum(widths[:-1]) - 2 * (len(widths) - 1)
    lines = []
    for *front, what in rows:
        aligned = "  ".join(
            cell.rjust(widths[at]) if at in (1, 2) else cell.ljust(widths[at]) for at, cell in enumerate(front)
        )
        if room >= _LEAST_ROOM:
            lines.append([f"{aligned}  {what[:room]}".rstrip()])
        else:
            lines.append([aligned[:width].rstrip(), f"{_INDENT}{what}"[:width]])
    return lines


def _short(name: str) -> str:
    """Names that hold a uid or a hash, cut in their middle: only their ends differ."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:12]}…{name[-8:]}"
