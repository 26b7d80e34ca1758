"""Wait in a test for something that another task, process or node does.

Owns: `until`.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "condition") -> Any:
    """Return the first true value of a condition, which may be a coroutine function.

    Raises AssertionError with `what` if it has none within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in {timeout_s} s")
        await asyncio.sleep(0.02)
