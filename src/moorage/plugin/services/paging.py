"""Lists in pages, over several pools: a stable order, and tokens that survive what happens in between.

Owns: what a token means. It holds the pool and id of the last entry that was returned, so nothing
is skipped or shown twice whatever happens to other objects. A token that is not ours is ABORTED.
Start reading at: `collect`.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from moorage.errors import InvalidRequest, MoorageError
from moorage.storage import Page, Pool

_PREFIX = "after:"
Item = TypeVar("Item")


class BadToken(MoorageError):
    """A starting_token that this plugin did not hand out; the caller starts again from the first page."""

    code = "ABORTED"


def shown(
    fetch: Callable[[Pool, str, int], Page[Item]], is_shown: Callable[[Item], bool]
) -> Callable[[Pool, str, int], Page[Item]]:
    """`fetch` without what is not for the caller: a page is as full, and a token as true, as if it were not there."""

    def fetched(pool: Pool, after: str, limit: int) -> Page[Item]:
        found: list[Item] = []
        while True:
            page = fetch(pool, after, limit - len(found) if limit else 0)
            found += [item for item in page.items if is_shown(item)]
            if not page.next or (limit and len(found) >= limit):
                return Page(tuple(found), page.next)
            after = page.next

    return fetched


def check(max_entries: int, starting_token: str) -> None:
    """InvalidRequest or BadToken for what no list can begin with."""
    if max_entries < 0:
        raise InvalidRequest(f"max_entries is {max_entries}; it must not be negative")
    _position(starting_token)


def collect(
    pools: Iterable[Pool],
    fetch: Callable[[Pool, str, int], Page[Item]],
    id_of: Callable[[Item], str],
    max_entries: int,
    starting_token: str,
) -> tuple[list[Item], str]:
    """One page of what `fetch(pool, after_id, limit)` finds, and the next page's token; 0 means all."""
    check(max_entries, starting_token)
    from_pool, after = _position(starting_token)
    wanted = max_entries + 1 if max_entries else 0  # one more tells whether a page follows
    found: list[tuple[str, Item]] = []
    for pool in pools:
        if pool.name < from_pool:
            continue
        left = wanted - len(found) if wanted else 0
        if wanted and left <= 0:
            break
        start = after if pool.name == from_pool else ""
        found += [(pool.name, item) for item in fetch(pool, start, left).items]
    if not max_entries or len(found) <= max_entries:
        return [item for _, item in found], ""
    pool_name, last = found[max_entries - 1]
    return [item for _, item in found[:max_entries]], f"{_PREFIX}{pool_name}/{id_of(last)}"


def _position(token: str) -> tuple[str, str]:
    if not token:
        return "", ""
    pool, slash, ident = token.removeprefix(_PREFIX).partition("/")
    if not token.startswith(_PREFIX) or not slash or not pool or not ident:
        raise BadToken(f"starting_token {token!r} is not one of this plugin; start again without it")
    return pool, ident
