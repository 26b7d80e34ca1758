"""Lists in pages: a stable order, and tokens that survive changes between two pages.

Owns: what a token means. It names the last entry that was returned, so nothing is skipped or shown twice.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from moorage.errors import InvalidRequest
from moorage.sdk.errors import Aborted

T = TypeVar("T")
_PREFIX = "after:"


def page(items: Sequence[T], id_of: Callable[[T], str], most: int, token: str) -> tuple[list[T], str]:
    """Return one page of sorted items and the token of the next one; `most` 0 means all.

    Raises InvalidArgument for a negative number, Aborted for a token that is not from here.
    """
    if most < 0:
        raise InvalidRequest(f"max_entries is {most}; it must not be negative")
    if token and not token.startswith(_PREFIX):
        raise Aborted(f"starting_token {token[:64]!r} is not from this driver; list again from the start")
    after = token.removeprefix(_PREFIX)
    left = [item for item in items if id_of(item) > after]
    if not most or len(left) <= most:
        return left, ""
    return left[:most], _PREFIX + id_of(left[most - 1])
