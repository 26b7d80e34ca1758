"""The registration directory: which plugin sockets are in it now.

Owns: inotify on the directory tree and the rescan that makes up for lost events.
May not touch: the sockets' content; `manager.py` speaks to them.
Start reading at: `watch`.
"""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from asyncinotify import Inotify, Mask

from moorage.log import get_logger

log = get_logger(__name__)

SocketIdentity = tuple[int, int, int]  # device, inode, time of creation: a replaced socket has another one

_RESCAN_S = 30.0
_RESCAN_BLIND_S = 5.0  # where inotify tells nothing
_SETTLE_S = 0.02
_EVENTS = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.DELETE_SELF
_GONE = (FileNotFoundError, NotADirectoryError)


def _raise(error: OSError) -> None:
    raise error


def sockets_below(directory: Path, on_unread: Callable[[OSError], None] = _raise) -> dict[str, SocketIdentity]:
    """Every unix socket in the tree whose name does not begin with a dot; the suffix does not matter.

    What cannot be read is not known to be gone: `on_unread` is called for it, and raises unless it is given."""
    found: dict[str, SocketIdentity] = {}

    def failed(error: OSError) -> None:
        if not isinstance(error, _GONE):  # a directory that goes away meanwhile is passed over
            on_unread(error)

    for folder, _, names in os.walk(directory, onerror=failed):
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.lstat(path)
            except OSError as error:
                failed(error)
                continue
            if stat.S_ISSOCK(status.st_mode) and not name.startswith("."):
                found[path] = (status.st_dev, status.st_ino, status.st_mtime_ns)
    return found


async def watch(directory: Path, rescan_s: float = _RESCAN_S) -> AsyncIterator[dict[str, SocketIdentity]]:
    """The sockets now, and again after every change; the same answer may come twice.

    Trouble with the disk or with the kernel's limits ends nothing: what cannot be seen counts as it was."""
    found: dict[str, SocketIdentity] = {}
    inotify = _opened(directory)
    try:
        while True:
            _ensure(directory)
            if inotify is not None:
                _watch_tree(inotify, directory)
            found = _seen(directory, found)
            yield found
            if inotify is None:
                await asyncio.sleep(min(rescan_s, _RESCAN_BLIND_S))
                continue
            try:
                async with asyncio.timeout(rescan_s):
                    await inotify.get()
            except TimeoutError:
                continue
            await asyncio.sleep(_SETTLE_S)  # a plugin binds, listens and changes modes in one go
    finally:
        if inotify is not None:
            inotify.close()


def _seen(directory: Path, before: Mapping[str, SocketIdentity]) -> dict[str, SocketIdentity]:
    """The sockets that are there, and below a folder that cannot be read those that were there before."""
    unread: list[OSError] = []
    found = sockets_below(directory, unread.append)
    for error in unread:
        place = error.filename or directory
        log.warning("folder cannot be read; its sockets count as before", path=str(place), reason=str(error))
        found = {path: known for path, known in before.items() if Path(path).is_relative_to(place)} | found
    return found


def _opened(directory: Path) -> Inotify | None:
    """inotify, or None where the kernel has none left to give. Not tried again: a failed try may cost a descriptor."""
    try:
        return Inotify()
    except OSError as error:
        log.warning(
            "changes are not told of; the directory is looked through instead",
            path=str(directory),
            reason=str(error),
            seconds=_RESCAN_BLIND_S,
        )
        return None


def _ensure(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o755)
    except OSError as error:
        log.warning("registration directory cannot be made", path=str(directory), reason=str(error))


def _watch_tree(inotify: Inotify, directory: Path) -> None:
    """Watch every directory there is now. Add each watch again: a directory may have been replaced under its name."""
    for folder, _, _ in os.walk(directory):
        try:
            inotify.add_watch(folder, _EVENTS)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("directory cannot be watched, only rescanned", path=folder, reason=str(error))
