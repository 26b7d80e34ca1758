"""A process until SIGTERM or SIGINT, and tasks that end together.

Owns: which signals stop a process, and that no task outlives the block that started it.
Start reading at: `stop_event`, `run_until_signal`, `first_of`.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_STOPS = (signal.SIGTERM, signal.SIGINT)


class StopEvent(asyncio.Event):
    """Set by the first SIGTERM or SIGINT. `hurry` is set by the second. The third ends the process at once."""

    def __init__(self) -> None:
        super().__init__()
        self.hurry = asyncio.Event()

    def note_signal(self) -> None:
        """Note one more signal."""
        if self.is_set():
            self.hurry.set()
            for number in _STOPS:
                asyncio.get_running_loop().remove_signal_handler(number)
        self.set()


def stop_event() -> StopEvent:
    """Return an event that SIGTERM or SIGINT sets, for a process that has an end of its own to run."""
    stop = StopEvent()
    _on_signal(stop.note_signal)
    return stop


async def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result. SIGTERM or SIGINT cancels it; CancelledError is then raised."""
    working = asyncio.create_task(work, name="until-signal")
    _on_signal(working.cancel)
    try:
        return await working
    finally:
        await cancel_all([working])


async def first_of(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Return or raise as the first of the tasks that ends. The others are cancelled and awaited."""
    tasks = list(tasks)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel_all(tasks)


async def run_unless(stop: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Await `work` unless `stop` is set first, which cancels it. Returns whether the work was done."""
    working = asyncio.create_task(work, name="unless-stopped")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
        return working.done()
    finally:
        await cancel_all([working, stopping])


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for their ends. What they raise is dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _on_signal(act: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in _STOPS:
        loop.add_signal_handler(number, act)
