"""The state of a container on disk, and whether the process it names is still that process.

With the standard library only: used by the agent and by the process whose children containers are.
Owns: `state.json` and `spec.json` of an attempt. In the state, `pid` is the container's first process, `start` when it
was started, and `shim` its parent, the supervisor.
Start reading at: `write`, `first_process`.
"""

import contextlib
import errno
import json
import os
import signal
from collections.abc import Mapping
from typing import Any

from moorage.host.boot import boot_id

_CHUNK = 65536
ELSEWHERE = "elsewhere"  # a request that is too long for a message: it is in a file that comes with it
ABANDONED = "abandoned"  # a file beside the specification: the agent does not wait for this start any more
_GONE = (FileNotFoundError, ProcessLookupError)  # errors that say that a process ended; others say nothing of it


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


def read_state(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the state of an attempt, empty if there is none. Raises OSError if it cannot be read."""
    return read(f"{os.fspath(directory)}/state.json")


def read_spec(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the specification of an attempt, as far as it was written and can be read."""
    try:
        return read(f"{os.fspath(directory)}/spec.json")
    except OSError:
        return {}


def write_state(directory: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    if os.path.isdir(directory):
        write(f"{os.fspath(directory)}/state.json", dict(state))


def read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(content_of(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return dict(found) if isinstance(found, dict) else {}


def first_process(state: Mapping[str, Any]) -> int:
    """Return a descriptor of a container's first process, or -1 if it has ended. If its supervisor has ended, it is
    killed, so it ends soon, and nothing is started beside it."""
    try:
        pidfd = os.pidfd_open(int(state.get("pid", 0)))
    except (*_GONE, ValueError):
        return -1
    except OSError as error:
        if error.errno == errno.EINVAL:  # no number of a process, or by now that of a thread
            return -1
        raise
    try:
        if is_attended(state):
            return pidfd
        if is_left_alone(state):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return pidfd
    except OSError:
        os.close(pidfd)
        raise
    os.close(pidfd)
    return -1


def is_attended(state: Mapping[str, Any]) -> bool:
    """Whether the container's first process exists, maybe as a zombie, as a child of the process that started it. Its
    pid may have been reused for another container; states of earlier versions have no start time."""
    try:
        pid = int(state["pid"])
        is_itself = "start" not in state or start_ticks(pid) == state["start"]
        return is_itself and parent_of(pid) == state["shim"] and is_supervised(state)
    except (*_GONE, KeyError, ValueError, IndexError):
        return False


def is_left_alone(state: Mapping[str, Any]) -> bool:
    """Whether the container's first process runs without the process that started it. The kernel kills it then, unless
    it has changed its user."""
    try:
        return state["boot"] == boot_id() and bool(start_ticks(int(state["pid"])) == state["start"])
    except (*_GONE, KeyError, ValueError, IndexError):
        return False


def is_supervised(state: Mapping[str, Any]) -> bool:
    try:
        return start_ticks(int(state["shim"])) == state.get("shim_start")
    except (*_GONE, KeyError, ValueError, IndexError):
        return False
