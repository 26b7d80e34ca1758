"""What outlives the first process of a container that sees the host's processes.

Where a container has a PID namespace of its own, the kernel ends everything in it with its first process. One with
`hostPID` has none, and what it has started would go on, with its volumes.
With the standard library only: used by the agent and by the process whose children containers are.
Owns: ending them, found by their control group and those that they have made in it. On a machine without control
groups they are not found.
Start reading at: `end`.
"""

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

_ROUNDS, _PAUSE_S = 50, 0.001  # what is killed goes within a round or two, unless a disk or a server holds it up


def end(spec: Mapping[str, Any]) -> None:
    """Kill what is left of a container, and wait a moment for it to go."""
    if not spec.get("host_pid"):
        return
    directories = spec.get("cgroups", ())
    for directory in directories:
        _kill_all(directory)
    for _ in range(_ROUNDS):
        left = {pid for directory in directories for group in groups_of(directory) for pid in _processes(group)}
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def groups_of(directory: str) -> list[str]:
    """A control group and all below it, each after the one that it is in. A container that is privileged can make more
    of them in one another than functions could call each other."""
    found = [directory]
    for group in found:
        with contextlib.suppress(OSError), os.scandir(group) as entries:
            found += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


def _kill_all(directory: str) -> None:
    """At once, where the kernel does that (v2): no process escapes by starting others meanwhile."""
    with contextlib.suppress(OSError):
        fd = os.open(f"{directory}/cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"1")
        finally:
            os.close(fd)


def _processes(directory: str) -> list[int]:
    """Of a control group; 0 stands for one that cannot be seen from here."""
    try:
        with open(f"{directory}/cgroup.procs", "rb") as lines:
            return [int(line) for line in lines if int(line)]
    except OSError:
        return []
