"""Lists in pages: a stable order, and tokens that survive changes between two pages.

Owns: what a token means. It names the last entry that was returned, so nothing is skipped or shown twice.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from moorage.errors import InvalidRequest
from moorage.sdk.errors import Aborted
from moorage.sdk.operations import Page

T = TypeVar("T")
_PREFIX = "after:"


def position(max_entries: int, starting_token: str) -> str:
    """Return the entry after which a list begins, "" for the first page.

    Raises InvalidArgument for a negative number, Aborted for a token that no list of ours had.
    """
    if max_entries < 0:
        raise InvalidRequest(f"max_entries is {max_entries}; it must not be negative")
    after = starting_token.removeprefix(_PREFIX)
    if starting_token and (after == starting_token or not after):
        raise bad_token(starting_token)
    return after


def token_of(page: Page[T]) -> str:
    """Return the token with which the next page begins, "" if there is none."""
    return f"{_PREFIX}{page.next}" if page.next else ""


def bad_token(token: str) -> Aborted:
    """Return the error after which a caller begins with the first page."""
    return Aborted(f"starting_token {token[:64]!r} is not from this driver; list again without it")


def page(items: Sequence[T], id_of: Callable[[T], str], after: str, most: int) -> Page[T]:
    """Return one page of sorted items; `most` 0 means all."""
    left = [item for item in items if id_of(item) > after]
    if not most or len(left) <= most:
        return Page(left)
    return Page(left[:most], id_of(left[most - 1]))
