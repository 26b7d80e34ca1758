"""Lists of a driver, page by page, within bounds.

Owns: how many pages and entries a list may have, and how long it may take: a driver may be wrong about where it ends.
Start reading at: `pages`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from moorage.csi.errors import CsiError

MOST_ENTRIES = 200_000  # four times the volumes of the largest clusters that are known
MOST_PAGES = 20_000
LONGEST_S = 300.0


class Listed(Protocol):
    """One answer to a listing call."""

    @property
    def entries(self) -> Sequence[Any]: ...

    @property
    def next_token(self) -> str: ...


P = TypeVar("P", bound=Listed)


async def pages(method: str, ask: Callable[[str], Awaitable[P]]) -> AsyncIterator[P]:
    """Yield every page of a list; `ask` gets the token of a page.

    Raises CsiError if the list has no end: it repeats a token, or is longer than any list of volumes.
    """
    token, count, seen = "", 0, set[str]()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LONGEST_S
    while True:
        page = await ask(token)
        count += len(page.entries)
        yield page
        token = page.next_token
        if not token:
            return
        if token in seen:
            raise CsiError(method, "INTERNAL", "the driver's list repeats a token, so it has no end")
        seen.add(token)
        if count > MOST_ENTRIES or len(seen) > MOST_PAGES or loop.time() > deadline:
            raise CsiError(
                method,
                "RESOURCE_EXHAUSTED",
                f"the driver's list has not ended after {count} entries on {len(seen)} pages",
            )
