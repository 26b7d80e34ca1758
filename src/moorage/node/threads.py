"""Calls that may block for long, each in a thread of its own.

Owns: `in_thread`. A shared pool would let a few dead filesystems hold up every other volume, and keep the agent from
ending; these threads are daemons and are as many as there are calls.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def in_thread(work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `work`. A caller that is cancelled leaves the call to its fate: it cannot be stopped."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def run() -> None:
        try:
            result = work(*args, **kwargs)
        except Exception as error:
            _tell(loop, _fail, done, error)
        else:
            _tell(loop, _succeed, done, result)

    threading.Thread(target=run, name=f"node {getattr(work, '__name__', 'call')}", daemon=True).start()
    return await done


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *args: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(what, *args)


def _succeed(done: "asyncio.Future[R]", result: R) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: "asyncio.Future[Any]", error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
