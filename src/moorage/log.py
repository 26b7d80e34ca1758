"""Logs: one event with fields, as text for people or JSON for machines.

Owns: the logger type and its two formats. Loggers are made with `get_logger(__name__)` and used
as `log.info("volume published", volume=volume_id, seconds=took)`. Secrets have no field.
A record is one line, except for a traceback, whose lines are indented: no text in a field can look like another record.
Start reading at: `Logger`, `configure`.
"""

import json
import logging
import sys
import time
from typing import Any, TextIO

from moorage.printable import LONGEST_FIELD, escaped, many_lines, one_line, shortened

_FIELDS = "moorage_fields"


class Logger:
    """A standard-library logger whose calls take fields instead of format arguments."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, **fields: Any) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """Log an error with the traceback of the exception being handled."""
        self._emit(logging.ERROR, event, fields, exc_info=True)

    def is_debug(self) -> bool:
        return self._logger.isEnabledFor(logging.DEBUG)

    def _emit(self, level: int, event: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields}, exc_info=exc_info, stacklevel=3)


class TextFormat(logging.Formatter):
    """`12:00:01.234 INFO plugin.node: volume published volume=pvc-1 seconds=0.012`"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("moorage.")
        event = one_line(record.getMessage(), LONGEST_FIELD)
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {name}: {event}"
        for key, value in getattr(record, _FIELDS, {}).items():
            line += f" {key}={_as_text(value)}"
        if record.exc_info:
            line += "\n" + many_lines(self.formatException(record.exc_info), indent="  ")
        return line


class JsonFormat(logging.Formatter):
    """One JSON object a line: time, level, logger, event, and the fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(getattr(record, _FIELDS, {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return escaped(json.dumps(line, default=str))


def get_logger(name: str) -> Logger:
    return Logger(logging.getLogger(name))


def configure(level: str = "info", style: str = "text", stream: TextIO | None = None) -> None:
    """Send Moorage's logs to `stream` (default: standard error). Other libraries log warnings and errors only."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormat() if style == "json" else TextFormat())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("moorage").setLevel(level.upper())


def _as_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = shortened(str(value), LONGEST_FIELD)
    is_plain = text and text.isprintable() and " " not in text and '"' not in text
    return text if is_plain else escaped(json.dumps(text))
