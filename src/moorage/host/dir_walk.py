"""The way down into a tree of directories of any depth, for whoever changes or removes what is in it.

Owns: which levels are open. How a directory is opened is the walker's.
Start reading at: `Descent`.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_MOST_OPEN = 64  # levels: deeper than what people make, far from what a process may have open


@dataclass(slots=True)
class _Level:
    name: str
    fd: int  # -1 while it is not open
    identity: tuple[int, int]


class DirWalk:
    """The way from a directory down to where a walk is: few descriptors are open, however deep that is.

    Only the deepest levels are kept open. One above them is opened again as `..` of the one below it, and must be the
    very directory that the walk came from: a tree that somebody moves meanwhile leads nowhere else (ESTALE).
    """

    def __init__(self, base: int, down: Callable[[int, str], int], up: Callable[[int], int]) -> None:
        self._base = base  # the caller's
        self._open_below = down
        self._open_above = up
        self._levels: list[_Level] = []

    def __enter__(self) -> "DirWalk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for level in self._levels:
            if level.fd >= 0:
                os.close(level.fd)

    @property
    def fd(self) -> int:
        """Where the walk is."""
        return self._levels[-1].fd if self._levels else self._base

    @property
    def path(self) -> Path:
        """Where the walk is, below its beginning."""
        return Path(*(level.name for level in self._levels))

    def down(self, name: str) -> None:
        fd = self._open_below(self.fd, name)
        self._levels.append(_Level(name, fd, _identity(fd)))
        if len(self._levels) > _MOST_OPEN:
            above = self._levels[-1 - _MOST_OPEN]
            if above.fd >= 0:
                os.close(above.fd)
                above.fd = -1

    def up(self) -> str:
        """Back to the level above; the name of the one that was left."""
        level = self._levels.pop()
        try:
            if self._levels and self._levels[-1].fd < 0:
                self._reopen(self._levels[-1], level.fd)
        finally:
            os.close(level.fd)
        return level.name

    def _reopen(self, level: _Level, below: int) -> None:
        fd = self._open_above(below)
        if _identity(fd) != level.identity:
            os.close(fd)
            raise OSError(errno.ESTALE, "directory was moved while it was walked through", str(self.path))
        level.fd = fd


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
