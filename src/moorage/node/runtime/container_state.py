"""What is known of a container on disk, and how a process is told from another that has its number.

With the standard library only: used by the agent and by the process whose children containers are.
Owns: how `state.json` is written. In it, `pid` is the container's first process, `start` when it was started, and
`shim` its parent, the supervisor.
Start reading at: `write`.
"""

import errno
import json
import os
from typing import Any

_CHUNK = 65536
ELSEWHERE = "elsewhere"  # a request that is too long for a message: it is in a file that comes with it
DRAINED = "drained"  # a file beside the specification: the agent ended it to be stopped, not for anything it did
ABANDONED = "abandoned"  # a file beside the specification: the agent does not wait for this start any more


def write(path: str, state: dict[str, Any]) -> None:
    """Whole or not at all, unless the disk is full."""
    temporary = f"{path}.new"
    data = json.dumps(state).encode()
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            is_whole = os.write(fd, data) == len(data)
        finally:
            os.close(fd)
        if not is_whole:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
        os.rename(temporary, path)
    except OSError:
        if not _overwrite(path, data):
            raise


def _overwrite(path: str, data: bytes) -> bool:
    """On a full disk: write into the space that an earlier state has. Losing how a container ended would be worse than
    the moment in which the file is not whole."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        padded = data.ljust(os.fstat(fd).st_size)  # never truncated: what is given back might not be there again
        return os.write(fd, padded) == len(padded)
    except OSError:
        return False
    finally:
        os.close(fd)


def content_of(path: str) -> bytes:
    """A small file's content."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while chunk := os.read(fd, _CHUNK):
            data += chunk
        return data
    finally:
        os.close(fd)


def start_ticks(pid: int) -> int:
    """When a process was started, in ticks since boot: with the pid it names a process for good."""
    return int(content_of(f"/proc/{pid}/stat").rpartition(b")")[2].split()[19])


def parent_of(pid: int) -> int:
    """The process that a process is a child of."""
    return int(content_of(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
