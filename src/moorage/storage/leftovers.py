"""Trees below a pool's `tmp/` that are to be removed: unfinished work of dead processes, and reclaimed trash.

Owns: their removal. A tree that cannot be removed is logged, reported by the pool's health, and left where it is; it
never keeps the pool from opening or other trees from being removed.
Start reading at: `Leftovers.remove`, `Leftovers.sweep`.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Sequence

from moorage.host.safe_remove import remove_tree
from moorage.log import get_logger
from moorage.printable import escaped

log = get_logger(__name__)

_RETRY_S = 600.0


class Leftovers:
    """The trees of one pool that are to be removed."""

    def __init__(self, pool: str, tmp: str) -> None:
        self._pool = pool
        self._tmp = tmp
        self._retry_at = 0.0
        self.stuck: dict[str, str] = {}
        """The path of each tree that could not be removed, and why."""

    def remove(self, path: str) -> bool:
        """Remove a tree. Returns False, after reporting it, if that is not possible."""
        try:
            remove_tree(path)
        except Exception as failed:  # whatever a tenant has put there
            if path not in self.stuck:
                log.error("tree cannot be removed", pool=self._pool, path=path, error=str(failed))
            self.stuck[path] = escaped(str(failed))  # it may name files of a tenant, in any bytes
            self._retry_at = time.monotonic() + _RETRY_S
            return False
        self.stuck.pop(path, None)
        return True

    def abandoned(self, min_age_s: float = 0.0) -> list[str]:
        """The paths of what dead processes were building."""
        with os.scandir(self._tmp) as entries:
            paths = [entry.path for entry in entries]
        return [path for path in paths if is_abandoned(path, min_age_s)]

    def sweep(self, paths: Sequence[str]) -> None:
        """Remove trees that were found abandoned when the pool was opened."""
        count = sum(self.remove(path) for path in paths)
        if count:
            log.info("swept unfinished work", pool=self._pool, entries=count)

    def retry(self) -> None:
        """Try again, every ten minutes, to remove what could not be removed."""
        if self.stuck and time.monotonic() >= self._retry_at:
            for path in list(self.stuck):
                self.remove(path)


def is_abandoned(path: str, min_age_s: float) -> bool:
    """Whether what lies in tmp/ is of a process that has ended, and old enough."""
    try:
        found = os.lstat(path)
        if time.time() - found.st_mtime < min_age_s:
            return False
        if not stat.S_ISDIR(found.st_mode):
            return True
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as failed:
        # A held lock says "alive"; no locks at all leaves the age to decide.
        return failed.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(fd)
    return True
