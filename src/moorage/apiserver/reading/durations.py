"""Times as people read them in tables: `5m3s`, `2d4h`.

Owns: durations and ages in Kubernetes' short form.
May not touch: anything else.
Start reading at: `age_of`.
"""

from datetime import UTC, datetime

_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 365 * 86400


def human(seconds: float) -> str:
    """A duration in at most two units; a unit that is zero is left out."""
    s = int(seconds)
    if s < -1:
        return "<invalid>"
    if s < 0:
        return "0s"
    if s < 2 * _MINUTE:
        return f"{s}s"
    if s < 10 * _MINUTE:
        return _pair(s // _MINUTE, "m", s % _MINUTE, "s")
    if s < 3 * _HOUR:
        return f"{s // _MINUTE}m"
    if s < 8 * _HOUR:
        return _pair(s // _HOUR, "h", s % _HOUR // _MINUTE, "m")
    if s < 2 * _DAY:
        return f"{s // _HOUR}h"
    if s < 8 * _DAY:
        return _pair(s // _DAY, "d", s % _DAY // _HOUR, "h")
    if s < 2 * _YEAR:
        return f"{s // _DAY}d"
    if s < 8 * _YEAR:
        return _pair(s // _YEAR, "y", s % _YEAR // _DAY, "d")
    return f"{s // _YEAR}y"


def _pair(one: int, one_unit: str, other: int, other_unit: str) -> str:
    return f"{one}{one_unit}" if other == 0 else f"{one}{one_unit}{other}{other_unit}"


def age_of(stamp: object, now: datetime | None = None) -> str:
    """How long ago a timestamp was."""
    if not isinstance(stamp, str) or not stamp:
        return "<unknown>"
    try:
        moment = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    except ValueError:
        return "<invalid>"
    return human(((now or datetime.now(UTC)) - moment).total_seconds())
