"""The components' own records: log lines, as text or JSON, that mention certain names.

Owns: reading Moorage's two log formats, and whole days for lines that only tell the time of day.
May not touch: the API. Its caller says which names to look for.
Start reading at: `read_records`.
"""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from moorage.errors import MoorageError, UsageError
from moorage.kube.objects import seconds_of

_LINE = re.compile(r"^(\d\d):(\d\d):(\d\d)\.(\d{3}) ([A-Z]+) ([\w.]+): (.*)$")
_FIELD = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|\S*)')
_KNOWN = ("time", "level", "logger", "event")


@dataclass(frozen=True)
class LogRecord:
    """One log line: when, who, what, and its fields as text."""

    at: float
    level: str
    logger: str
    event: str
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        """How long it took, where the line says so."""
        try:
            return float(self.fields["seconds"])
        except (KeyError, ValueError):
            return None


def read_records(directory: Path, needles: list[str]) -> list[LogRecord]:
    """The records below a directory of logs that mention any of the needles, oldest first."""
    if not directory.is_dir():
        raise UsageError(f"--logs {directory}: there is no such directory")
    wanted = [needle for needle in needles if needle]
    found: list[LogRecord] = []
    for path in sorted(directory.glob("*.log")):
        found += _read_file(path, wanted)
    return sorted(found, key=lambda record: record.at)


def _read_file(path: Path, needles: list[str]) -> Iterator[LogRecord]:
    try:
        written = path.stat().st_mtime
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise MoorageError(f"log {path} cannot be read: {error.strerror}") from error
    day, later = datetime.fromtimestamp(written).replace(hour=0, minute=0, second=0, microsecond=0), None
    for line in reversed(lines):  # from the end: the file's own time says which day the last line is of
        match = _LINE.match(line)
        if match is None:
            record = _from_json(line) if line.startswith("{") else None
        else:
            since = int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3]) + int(match[4]) / 1000
            bound = later if later is not None else written - day.timestamp() + 1.0
            if since > bound + 1.0:  # lines of several threads may be a little out of order
                day -= timedelta(days=1)
            later = since
            record = _from_text(match, day.timestamp() + since)
        if record is not None and any(needle in line for needle in needles):
            yield record


def _from_text(match: re.Match[str], at: float) -> LogRecord:
    rest = match[7]
    first = _FIELD.search(rest)
    fields = {key: _plain(value) for key, value in _FIELD.findall(rest)}
    return LogRecord(at, match[5].lower(), match[6], rest[: first.start()] if first else rest, fields)


def _from_json(line: str) -> LogRecord | None:
    try:
        found = json.loads(line)
        at = seconds_of(str(found["time"]))
        fields = {str(key): str(value) for key, value in found.items() if key not in _KNOWN}
        if at is None:
            return None
        logger = str(found["logger"]).removeprefix("moorage.")
        return LogRecord(at, str(found["level"]), logger, str(found["event"]), fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # a line of something else


def _plain(value: str) -> str:
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value


def local_clock(at: float) -> str:
    """A moment as people and log files write it."""
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
