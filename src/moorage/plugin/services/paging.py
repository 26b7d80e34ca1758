"""Lists in pages, over several pools in a stable order.

Owns: the position in such a list. It holds the pool and id of the last entry that was returned.
Start reading at: `collect`.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from moorage.sdk.operations import Page
from moorage.sdk.paging import bad_token
from moorage.storage import Page as PoolPage
from moorage.storage import Pool

Item = TypeVar("Item")


def shown(
    fetch: Callable[[Pool, str, int], PoolPage[Item]], is_shown: Callable[[Item], bool]
) -> Callable[[Pool, str, int], PoolPage[Item]]:
    """Return `fetch` without what callers may not see. Its pages are as full as if that were not there."""

    def fetched(pool: Pool, after: str, limit: int) -> PoolPage[Item]:
        found: list[Item] = []
        while True:
            page = fetch(pool, after, limit - len(found) if limit else 0)
            found += [item for item in page.items if is_shown(item)]
            if not page.next or (limit and len(found) >= limit):
                return PoolPage(tuple(found), page.next)
            after = page.next

    return fetched


def collect(
    pools: Iterable[Pool],
    fetch: Callable[[Pool, str, int], PoolPage[Item]],
    id_of: Callable[[Item], str],
    position: str,
    most: int,
) -> Page[Item]:
    """Return one page of what `fetch(pool, after_id, limit)` finds; `most` 0 means all. Raises Aborted."""
    from_pool, after = pool_and_id(position)
    wanted = most + 1 if most else 0  # one more tells whether a page follows
    found: list[tuple[str, Item]] = []
    for pool in pools:
        if pool.name < from_pool:
            continue
        left = wanted - len(found) if wanted else 0
        if wanted and left <= 0:
            break
        start = after if pool.name == from_pool else ""
        found += [(pool.name, item) for item in fetch(pool, start, left).items]
    if not most or len(found) <= most:
        return Page([item for _, item in found])
    pool_name, last = found[most - 1]
    return Page([item for _, item in found[:most]], f"{pool_name}/{id_of(last)}")


def pool_and_id(position: str) -> tuple[str, str]:
    """Return where a list begins. Raises Aborted if no list of ours ended there."""
    pool, slash, ident = position.partition("/")
    if position and not (pool and slash and ident):
        raise bad_token(position)
    return pool, ident
