"""The registration directory: which plugin sockets are in it now.

Owns: inotify on the directory tree and the rescan that makes up for lost events.
May not touch: the sockets' content; `manager.py` speaks to them.
Start reading at: `watch`.
"""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

from asyncinotify import Inotify, Mask

from moorage.log import get_logger

log = get_logger(__name__)

Identity = tuple[int, int, int]  # device, inode, time of creation: a socket made anew has another one

_RESCAN_S = 30.0
_SETTLE_S = 0.02
_EVENTS = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.DELETE_SELF


def sockets_below(directory: Path) -> dict[str, Identity]:
    """Every unix socket in the tree whose name does not begin with a dot; the suffix does not matter."""
    found: dict[str, Identity] = {}
    for folder, _, names in os.walk(directory):  # a directory that goes away meanwhile is passed over
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if stat.S_ISSOCK(status.st_mode) and not name.startswith("."):
                found[path] = (status.st_dev, status.st_ino, status.st_mtime_ns)
    return found


async def watch(directory: Path, rescan_s: float = _RESCAN_S) -> AsyncIterator[dict[str, Identity]]:
    """The sockets now, and again after every change; the same answer may come twice."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o755)
    with Inotify() as inotify:
        while True:
            _watch_tree(inotify, directory)
            yield sockets_below(directory)
            try:
                async with asyncio.timeout(rescan_s):
                    await inotify.get()
            except TimeoutError:
                continue
            await asyncio.sleep(_SETTLE_S)  # a plugin binds, listens and changes modes in one go


def _watch_tree(inotify: Inotify, directory: Path) -> None:
    """Watch every directory there is now. Each time anew: one of the same name may be another than before."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o755)
    for folder, _, _ in os.walk(directory):
        try:
            inotify.add_watch(folder, _EVENTS)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("directory cannot be watched, only rescanned", path=folder, reason=str(error))
