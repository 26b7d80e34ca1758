"""Calls that may block for long, each in a thread of its own.

Owns: `in_thread`. A pool of a fixed size would let a few dead filesystems hold up every other volume, and keep the
agent from ending; these threads are daemons, and as many as there are calls at a time. One that has done its work
waits for the next call, because starting a thread costs more than most calls.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_MOST_IDLE = 8
_IDLE_S = 30.0
_idle: list["_Worker"] = []
_idle_lock = threading.Lock()


class _Worker:
    """A thread that does one call after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def give(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def run(self) -> None:
        while True:
            try:
                self._calls.get(timeout=_IDLE_S)()
            except queue.Empty:
                with _idle_lock:
                    if self in _idle:
                        _idle.remove(self)
                        return
                continue  # a call was given at the last moment
            with _idle_lock:
                if len(_idle) >= _MOST_IDLE:
                    return
                _idle.append(self)


def _hand_over(call: Callable[[], None]) -> None:
    with _idle_lock:
        worker = _idle.pop() if _idle else None
    if worker is None:
        worker = _Worker()
        threading.Thread(target=worker.run, name="node call", daemon=True).start()
    worker.give(call)


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

    _hand_over(run)
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
