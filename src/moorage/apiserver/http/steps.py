"""How long each step of a request holds the event loop.

Owns: `stepwise`.

While one step runs, every other request waits. Work that may take long belongs into another thread (`request.apart`).
"""

import time
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def stepwise(work: Coroutine[Any, Any, T], note: Callable[[float], None]) -> Generator[Any, Any, T]:
    """Return what `work` returns, and note the processor time of every step between two of its waits."""
    sent: Any = None
    raised: BaseException | None = None
    while True:
        began = time.thread_time()
        try:
            waits_for = work.send(sent) if raised is None else work.throw(raised)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            note(time.thread_time() - began)
        try:
            sent, raised = (yield waits_for), None
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:
            raised = error
