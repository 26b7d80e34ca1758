"""Measure how long single callbacks hold the event loop.

Owns: `no_stall`, for tests that run a server in their own event loop.
Start reading at: `no_stall`.
"""

import asyncio
import gc
import time
from asyncio.events import Handle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LIMIT_S = 0.05


@dataclass
class Stalls:
    """The longest step that ran on the loop so far, and the callback that ran it."""

    longest_s: float = 0.0
    callback: str = ""

    def note(self, seconds: float, callback: Any) -> None:
        if seconds > self.longest_s:
            self.longest_s, self.callback = seconds, repr(callback)


@contextmanager
def no_stall(limit_s: float = LIMIT_S) -> Iterator[Stalls]:
    """Fail if any callback of the event loop uses more than `limit_s` of processor time within the block.

    Processor time of the loop's thread is counted, so that other processes on a busy machine do not matter. The steps
    of the calling task are not counted: they are the test itself. Works with asyncio's own event loop, not with uvloop.
    """
    stalls = Stalls()
    caller = asyncio.current_task()
    original: Callable[[Handle], None] = Handle._run

    def measured(handle: Handle) -> None:
        callback = handle._callback  # type: ignore[attr-defined]
        began = time.thread_time()
        try:
            original(handle)
        finally:
            if getattr(callback, "__self__", None) is not caller:
                stalls.note(time.thread_time() - began, getattr(callback, "__self__", callback))

    gc.collect()
    gc.freeze()  # a collection of everything that the tests have loaded would count as a stall
    Handle._run = measured  # type: ignore[method-assign, assignment]
    try:
        yield stalls
    finally:
        Handle._run = original  # type: ignore[method-assign, assignment]
        gc.unfreeze()
    assert stalls.longest_s <= limit_s, f"{stalls.callback} held the event loop for {stalls.longest_s * 1000:.0f} ms"
