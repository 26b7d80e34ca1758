"""What commands share in showing things: JSON, columns, sizes, ages and progress.

Owns: output only. Nothing here knows what is shown.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from moorage.errors import UsageError
from moorage.host.extents import CopyProgress

Output = Annotated[str, typer.Option("-o", "--output", help="text or json.")]


def check_output(output: str) -> bool:
    """Whether JSON is wanted; anything but text and json is an error."""
    if output not in ("text", "json"):
        raise UsageError(f"--output {output!r}: want text or json")
    return output == "json"


def json_out(value: Any) -> None:
    raw = msgspec.json.encode(value, enc_hook=_plain)
    sys.stdout.write(msgspec.json.format(raw, indent=2).decode() + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot show a {type(value).__name__}")


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns. Plain text: a table drawn by a library takes seconds for ten thousand rows."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    form = "  ".join(f"{{:<{width}}}" for width in widths)
    lines = [form.format(*row).rstrip() for row in (head, *rows)]
    sys.stdout.write("\n".join(lines) + "\n")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def size(count: int) -> str:
    """`1.5Gi`: a size for people, with one digit after the point at most."""
    if count < 1024:
        return str(count)
    amount, units = float(count) / 1024, iter(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))
    unit = next(units)
    while amount >= 1023.95:
        amount, unit = amount / 1024, next(units)
    return f"{amount:.1f}".removesuffix(".0") + unit


def age(seconds: float) -> str:
    """`5m`, `3h`, `2d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def age_since(created_ns: int) -> str:
    return age(time.time() - created_ns / 1e9) if created_ns else "-"


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[CopyProgress | None]:
    """A bar on a terminal, on stderr because stdout may be the data; nothing elsewhere.

    It appears with the first progress: what is done in an instant leaves no empty bar behind.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with contextlib.ExitStack() as stack:
        update: CopyProgress | None = None

        def show(done: int, total: int) -> None:
            nonlocal update
            update = update or _started_bar(stack, title)
            update(done, total)

        yield show


def _started_bar(stack: contextlib.ExitStack, title: str) -> CopyProgress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    parts = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    bars = stack.enter_context(Bars(*parts, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)))
    task = bars.add_task(title, total=None)
    return lambda done, total: bars.update(task, completed=done, total=total)
