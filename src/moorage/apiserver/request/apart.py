"""Work that takes long, away from the event loop.

Owns: the threads for it, and the size from which on work counts as long.
Start reading at: `apart`.

Python runs one thread at a time, but it switches between them every few milliseconds: a request that is computed in
another thread slows the others down, and does not stop them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
SMALL_BYTES = 8 << 10  # what decoding and checking this much takes is a few milliseconds
PATCHED_BYTES = 1 << 20  # a short patch may make a long document
PAGE_BYTES = 1 << 20  # schemas of custom kinds, before they are made
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="apiserver-apart")


async def apart(size_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `work` returns. It runs in another thread if the data that it works on is not small."""
    if size_bytes <= SMALL_BYTES:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: work(*args, **kwargs))
