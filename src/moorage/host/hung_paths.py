"""Looking at paths that may hang, because the server or the device behind a mount is gone.

Owns: `look`, and the questions that have not been answered. A thread that looks at such a path cannot be
stopped. Callers that ask the same share one thread. What is mounted in its place later is asked again.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moorage.errors import MoorageError
from moorage.host import mountinfo
from moorage.host.threads import in_thread

R = TypeVar("R")

_ANSWER_S = 10.0


class DoesNotAnswer(MoorageError):
    """The path did not respond in time. A thread is still blocked on it."""

    code = "DEADLINE_EXCEEDED"

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} does not answer; what is mounted there hangs")


@dataclass(slots=True)
class _Question:
    answer: "asyncio.Task[Any]"
    hangs_at: int | None = None  # the mount that did not answer in time


_open: dict[tuple[Path, str], _Question] = {}  # of the process, as its threads are


async def probe(path: Path, what: str, question: Callable[[], R]) -> R:
    """The answer to a question, which is `what` for everybody who asks it of this path; DoesNotAnswer after a while."""
    key = (path, what)
    asked = _open.get(key)
    if asked is None or not _is_still_asked(asked, path):
        asked = _ask(key, question)
    try:
        async with asyncio.timeout(_ANSWER_S):
            answer: R = await asyncio.shield(asked.answer)
            return answer
    except TimeoutError:
        asked.hangs_at = _mount_id(path)
        raise DoesNotAnswer(path) from None


def _ask(key: tuple[Path, str], question: Callable[[], Any]) -> _Question:
    path, what = key
    asked = _open[key] = _Question(asyncio.create_task(in_thread(question), name=f"{what} {path}"))

    def forget(answer: "asyncio.Task[Any]") -> None:
        if _open.get(key) is asked:
            del _open[key]
        if not answer.cancelled():
            answer.exception()  # the caller may have stopped waiting

    asked.answer.add_done_callback(forget)
    return asked


def _is_still_asked(asked: _Question, path: Path) -> bool:
    """Not answered yet, and of the mount that is there."""
    if asked.answer.done() or asked.answer.get_loop() is not asyncio.get_running_loop():
        return False
    return asked.hangs_at is None or asked.hangs_at == _mount_id(path)


def _mount_id(path: Path) -> int:
    """What a path is on, by its name: read from the kernel's table, which does not hang."""
    table = {mount.target: mount.mount_id for mount in mountinfo.mounts()}  # of those at one place the top one
    return next((table[str(one)] for one in (path, *path.parents) if str(one) in table), 0)
