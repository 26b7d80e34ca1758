"""Which CSI versions a plugin offers, and whether they will do.

Owns: the rule of the registration handshake. Pure.
"""

import re
from collections.abc import Iterable

_VERSION = re.compile(r"^v?(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:[-+].*)?$")

Version = tuple[int, int, int]


def version_from(text: str) -> Version | None:
    """`1.2.3` or `v1` as numbers; None when it is no version."""
    match = _VERSION.match(text.strip())
    if match is None:
        return None
    major, minor, patch = (int(part or 0) for part in match.groups())
    return (major, minor, patch)


def highest_usable(versions: Iterable[str]) -> Version | None:
    """The highest version of major 1; None when the plugin speaks only older or newer ones."""
    usable = [v for text in versions if (v := version_from(text)) is not None and v[0] <= 1]
    best = max(usable, default=None)
    return best if best is not None and best[0] == 1 else None
