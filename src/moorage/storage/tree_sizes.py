"""What directory volumes take on disk, without walking them over and over.

Owns: the last known size of each tree, and the bound on the time that one walk may take.
Start reading at: `TreeSizes.bytes_of`.
"""

import contextlib
import os
import threading
import time

from moorage.host.dir_walk import opened, tree_bytes

_FRESH_S = 600.0
_WALK_S = 1.0
_MAX_KNOWN = 10_000


class TreeSizes:
    """Sizes by inode, so a tree keeps its figure when it moves to the trash."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], tuple[float, int]] = {}

    def bytes_of(self, path: str) -> int:
        """What a tree takes, from a walk of at most ten minutes ago.

        A walk ends after a second with what it found by then: an estimate that is too small makes the
        pool look fuller, never emptier.
        """
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return 0
        key = (found.st_dev, found.st_ino)
        now = time.monotonic()
        with self._lock:
            at, size = self._known.get(key, (float("-inf"), 0))
        if now - at < _FRESH_S:
            return size
        size = max(size, _walked(path, now + _WALK_S))
        # A second look soon is cheap for small trees: only slow walks are remembered for long.
        if time.monotonic() - now > 0.01:
            with self._lock:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[key] = (now, size)
        return size


def _walked(path: str, deadline: float) -> int:
    total = 0
    with contextlib.suppress(OSError), opened(path) as top:
        for size in tree_bytes(top):
            total += size
            if time.monotonic() > deadline:
                break
    return total
