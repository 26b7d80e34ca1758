"""Reading ahead in a thread, so that reading and checksums overlap with writing.

Owns: one bounded queue between a producer's thread and its consumer.
May not touch: what is produced.
Start reading at: `ahead`.
"""

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_DEPTH = 4
RING = _DEPTH + 3
"""Buffers that a producer needs to use them in turn: those in the queue, one on either side of it, and a spare."""


class _End(Generic[T]):
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterator[T], depth: int = _DEPTH) -> Iterator[T]:
    """The same items in the same order, produced in a thread of their own; its errors are raised here.

    A consumer that leaves early ends the producer at its next item.
    """
    made: queue.Queue[T | _End[T]] = queue.Queue(depth)
    stop = threading.Event()

    def produce() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                made.put(item)
                if stop.is_set():
                    break
        except BaseException as failed:  # carried to the consumer, which raises it
            error = failed
        made.put(_End(error))

    thread = threading.Thread(target=produce, name="read-ahead", daemon=True)
    thread.start()
    finished = False
    try:
        while True:
            item = made.get()
            if isinstance(item, _End):
                finished = True
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stop.set()
        while not finished:
            finished = isinstance(made.get(), _End)
        thread.join()
