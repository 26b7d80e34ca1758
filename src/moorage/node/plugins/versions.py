"""Which CSI versions a plugin offers, and whether they will do.

Owns: the rule of the registration handshake. Pure.
"""

import re
from collections.abc import Iterable

_VERSION = re.compile(r"\s*v?((?:0|[1-9][0-9]*)(?:\.[0-9]+)+)")

Version = tuple[int, ...]


def version_from(text: str) -> Version | None:
    """`1.2.3` or `v1.2-rc1` as numbers, at least three; None for what a kubelet does not take either, such as `1`."""
    match = _VERSION.match(text)
    if match is None:
        return None
    numbers = tuple(int(part) for part in match[1].split("."))
    return numbers + (0,) * (3 - len(numbers))


def highest_usable(versions: Iterable[str]) -> Version | None:
    """The highest version of major 1; None when the plugin speaks only older or newer ones."""
    usable = [v for text in versions if (v := version_from(text)) is not None and v[0] <= 1]
    best = max(usable, default=None)
    return best if best is not None and best[0] == 1 else None
