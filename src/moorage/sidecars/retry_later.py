"""A set of keys that are not to be tried again for a while.

Owns: when each key was added. Adding a key again keeps its first time, so every key leaves in the end.
"""

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class RetryLater(Generic[K]):
    """Keys with the time when they were added. Each leaves after `retention_s`."""

    def __init__(self, retention_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._retention_s = retention_s
        self._clock = clock
        self._since: dict[K, float] = {}

    def add(self, key: K) -> bool:
        """Add a key. Returns False if it is in the set already."""
        if self.left_s(key) > 0:
            return False
        self._since[key] = self._clock()
        return True

    def discard(self, key: K) -> None:
        self._since.pop(key, None)

    def left_s(self, key: K) -> float:
        """Return the seconds until the key may be tried again, 0 if it is not in the set."""
        since = self._since.get(key)
        if since is None:
            return 0.0
        left = since + self._retention_s - self._clock()
        if left <= 0:
            del self._since[key]
            return 0.0
        return left

    def __contains__(self, key: K) -> bool:
        return self.left_s(key) > 0

    def __len__(self) -> int:
        return sum(1 for key in list(self._since) if key in self)
