"""The one door to the terminal: sentences, columns, JSON, errors and progress.

Owns: everything that a command writes to stdout or stderr. All text passes `printable`, so no text from an object, a
driver or a file can move the cursor, change a title or colour, or pretend to be another line. Colours come from here
alone. JSON is exact: what is not printable is written with JSON's own escapes.
Start reading at: `say`.
"""

import contextlib
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from moorage.errors import UsageError
from moorage.printable import many_lines, one_line

if TYPE_CHECKING:
    from moorage.host.extents import CopyProgress

Part = str | tuple[str, str]
"""A text, or a style and a text."""

_LONGEST_COMMAND = 16_384
_NARROWEST = 12  # of a column that is cut
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


def check_output(output: str, *more: str) -> bool:
    """Return whether JSON is wanted. Raises UsageError for anything but text, json and what else the command has."""
    allowed = ("text", *more, "json")
    if output not in allowed:
        raise UsageError(f"--output {output!r}: want {', '.join(allowed[:-1])} or {allowed[-1]}")
    return output == "json"


def say(*parts: Part, style: str = "", err: bool = False) -> None:
    """Write one line. Each part may have a style of its own; `style` is for the others."""
    stream = sys.stderr if err else sys.stdout
    stream.write("".join(_styled(stream, part, style) for part in parts) + "\n")


def command(text: str) -> None:
    """Write a command on one line, so that it can be copied whole. Its words are quoted; see `moorage.suggest`."""
    sys.stdout.write(_coloured(sys.stdout, one_line(text, _LONGEST_COMMAND), "green") + "\n")


def heading(text: str, style: str = "") -> None:
    """Write a line below an empty one."""
    say()
    say(text, style=style)


def paragraph(text: str, style: str = "", indent: str = "", hang: str = "") -> None:
    """Write one line of prose; on a terminal, wrap it at the width, later lines indented by `hang` more."""
    text = one_line(text)
    lines = [indent + text]
    if sys.stdout.isatty():
        width = max(40, shutil.get_terminal_size().columns - 1)
        later = indent + hang
        lines = textwrap.wrap(
            text, width, initial_indent=indent, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
        ) or [indent]
    for line in lines:
        say(line, style=style)


def status(text: str) -> None:
    """Replace the terminal's last line; an empty text clears it."""
    sys.stdout.write(f"\r\x1b[K{one_line(text)[: shutil.get_terminal_size().columns - 1]}")
    sys.stdout.flush()


def is_terminal() -> bool:
    """Whether stdout is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def json_out(value: Any, compact: bool = False, err: bool = False) -> None:
    """Write one JSON document, on one line if it is to be compact."""
    import msgspec

    try:
        raw = msgspec.json.encode(value, enc_hook=_plain)
        text = (raw if compact else msgspec.json.format(raw, indent=2)).decode()
    except UnicodeEncodeError:  # a file name that is not UTF-8
        import json

        text = json.dumps(msgspec.to_builtins(value, enc_hook=_plain), indent=None if compact else 2)
    (sys.stderr if err else sys.stdout).write(many_lines(text) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot show a {type(value).__name__}")


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, is_wide: bool = False) -> None:
    """Write aligned columns. A table drawn by a library takes seconds for ten thousand rows.

    On a terminal the cells of the first column are cut in their middle until a line fits, unless the table is wide.
    """
    shown = [[one_line(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - shutil.get_terminal_size().columns
    if excess > 0 and sys.stdout.isatty() and not is_wide:
        widths[0] = max(_NARROWEST, widths[0] - excess)
        shown = [[_cut(row[0], widths[0]), *row[1:]] for row in shown]
    form = "  ".join(f"{{:<{width}}}" for width in widths)
    sys.stdout.write("\n".join(form.format(*row).rstrip() for row in shown) + "\n")


def _cut(text: str, width: int) -> str:
    """Cut a name in its middle: names of volumes differ at their ends."""
    if len(text) <= width:
        return text
    kept = width - 1
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"


def traceback_out(text: str) -> None:
    """Write a traceback to stderr."""
    sys.stderr.write(many_lines(text))


def _styled(stream: TextIO, part: Part, otherwise: str) -> str:
    style, text = part if isinstance(part, tuple) else (otherwise, part)
    return _coloured(stream, one_line(text), style)


def _coloured(stream: TextIO, text: str, style: str) -> str:
    has_colours = stream.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and text and has_colours else text


def size(count: int) -> str:
    """Return a size as `1.5Gi`, with at most one digit after the point."""
    if count < 1024:
        return str(count)
    amount, units = float(count) / 1024, iter(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))
    unit = next(units)
    while amount >= 1023.95:
        amount, unit = amount / 1024, next(units)
    return f"{amount:.1f}".removesuffix(".0") + unit


def age(seconds: float) -> str:
    """Return a time as `5m`, `3h` or `2d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def age_since(created_ns: int) -> str:
    return age(time.time() - created_ns / 1e9) if created_ns else "-"


@contextlib.contextmanager
def progress_bar(title: str) -> "Iterator[CopyProgress | None]":
    """Show a bar if stderr is a terminal; stdout may be the data.

    The bar appears with the first progress, so that a quick operation leaves no empty bar behind.
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


def _started_bar(stack: contextlib.ExitStack, title: str) -> "CopyProgress":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    parts = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    bars = stack.enter_context(Bars(*parts, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)))
    task = bars.add_task(one_line(title, 60), total=None)
    return lambda done, total: bars.update(task, completed=done, total=total)
