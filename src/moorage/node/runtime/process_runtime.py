"""Containers as processes of this machine: the agent's side.

Owns: following the first process of each container, and what happens if its state cannot be read.
Start reading at: `ProcessRuntime.start`, `ProcessRuntime.find`.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from moorage.log import get_logger
from moorage.node.runtime import START_ERROR, ContainerFailed, NotCreated, Reply, RunningContainer, orphans, terminal
from moorage.node.runtime.container_state import (
    ABANDONED,
    first_process,
    is_attended,
    is_left_alone,
    is_supervised,
    read,
    read_state,
    write_state,
)
from moorage.node.runtime.supervisor_client import Supervisors

log = get_logger(__name__)

R = TypeVar("R")

_START_TIMEOUT_S = 30.0
_LEAVE_S = 2.0
_END_FIRST_S, _END_LAST_S = 0.001, 0.5  # between looks at how a container has ended, while that is being written
_AGAIN_S = 0.5  # until a container is looked at again that could not be: most likely no descriptors are left


class ProcessRuntime:
    """The containers of one agent."""

    def __init__(
        self, on_end: Callable[[RunningContainer], None], hide: Sequence[str] = (), open_files: int | None = None
    ) -> None:
        self._on_end = on_end
        # No container sees the directories in `hide`. A program may have `open_files` open, by default as many as this
        # process.
        self._supervisors = Supervisors(hide, open_files, self._lost)
        self._followed: dict[int, RunningContainer] = {}
        self._unsure: dict[str, asyncio.TimerHandle] = {}  # until they are looked at again
        self._found_until = 0.0  # until when all that was being started before is waited for

    async def open(self) -> None:
        """Start the supervisor now, so that the first pod does not wait for it."""
        self._supervisors.connect()

    async def start(self, container: RunningContainer, spec: Mapping[str, Any]) -> None:
        """Run a container; returns when its program has been executed, or raises ContainerFailed."""
        directory, log_file = str(container.directory), str(container.log)
        os.makedirs(directory, 0o750, exist_ok=True)
        os.makedirs(os.path.dirname(log_file), 0o755, exist_ok=True)
        path = f"{directory}/spec.json"
        document = json.dumps({**spec, "state": f"{directory}/state.json", "log": log_file})
        with open(path, "w", opener=_private) as file:  # environment variables may be secret
            file.write(document)
        asked = self._supervisors.connect()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):  # one that hangs may not even take what it is asked
                reply = await self._supervisors.ask({"op": "run", "spec": path}, [])
                try:
                    answer = await reply.line()
                finally:
                    reply.close()
        except TimeoutError:
            if not await _when_possible(lambda: _give_up(container.directory)):
                # Its supervisor hangs: the next one has another.
                self._supervisors.leave(asked)
            raise ContainerFailed(f"container {container.name} did not start in {_START_TIMEOUT_S:g} s") from None
        container.state = dict(answer.get("state") or {})
        if not container.state:
            container.state = await _when_possible(lambda: read_state(container.directory))
        if "error" in answer or not answer:
            failure = ContainerFailed if container.state else NotCreated
            raise failure(str(answer.get("error") or "the process that starts containers went away"))
        self._follow(container)

    def find(self, container: RunningContainer) -> bool:
        """Take up a container that an earlier agent started: follow it if it runs, read how it ended if not. False if
        it was never started: the agent went after it had written down what to start. Raises OSError if that cannot be
        told; what is begun then would run beside it."""
        if (container.directory / ABANDONED).exists():
            _give_up(container.directory)
            container.state = _not_started(read_state(container.directory))
            return True
        self._found_until = self._found_until or time.monotonic() + _START_TIMEOUT_S
        _wait_for_start(container.directory, self._found_until)
        if not (container.directory / "state.json").exists():
            return False
        container.state = read_state(container.directory)
        if not container.is_ended:
            self._follow(container)
        return True

    def stop(self, container: RunningContainer) -> None:
        """Ask the container to end."""
        self._signal(container, signal.SIGTERM)

    def kill(self, container: RunningContainer) -> None:
        self._signal(container, signal.SIGKILL)

    async def exec(self, container: RunningContainer, request: Mapping[str, Any], streams: Sequence[int]) -> Reply:
        """Run a program inside; the reply gives its pid and later its exit code."""
        if not container.is_running:
            raise ContainerFailed(f"container {container.name} is not running")
        if container.is_unsure:
            raise ContainerFailed(f"container {container.name} cannot be looked at now; try again")
        process = os.dup(container.pidfd)  # ours is closed when the container ends, maybe while this waits
        try:
            return await self._supervisors.ask({**request, "op": "exec"}, [*streams, process])
        finally:
            os.close(process)

    async def open_terminal(self, container: RunningContainer, owner: int) -> tuple[int, int]:
        """Return both sides of a new terminal in a container, the program's second."""
        return await terminal.open_terminal(int(container.state.get("pid") or 0), container.pidfd, owner)

    async def close(self) -> None:
        """Leave; containers go on, and their supervisor with them."""
        loop = asyncio.get_running_loop()
        patience_s = 0.0 if self._followed or self._unsure else _LEAVE_S
        for again in self._unsure.values():
            again.cancel()
        self._unsure.clear()
        for pidfd in list(self._followed):
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._followed.clear()
        await self._supervisors.close(patience_s)

    def _signal(self, container: RunningContainer, number: signal.Signals) -> None:
        """To the container's first process."""
        if container.pidfd < 0:
            container.pending_signal = number
            return
        try:
            signal.pidfd_send_signal(container.pidfd, number)
        except ProcessLookupError as gone:
            log.debug("container ended by itself", container=container.id, reason=str(gone))

    def _follow(self, container: RunningContainer) -> None:
        self._unsure.pop(container.id, None)
        try:
            pidfd = first_process(container.state)
            if pidfd < 0:  # it is over already, maybe since a moment ago: what was written last counts
                _settle(container, read_state(container.directory))
        except OSError as error:
            log.warning("container cannot be looked at yet", container=container.id, reason=str(error))
            container.is_unsure = True
            again = asyncio.get_running_loop().call_later(_AGAIN_S, self._follow, container)
            self._unsure[container.id] = again
            return
        container.is_unsure = False
        if pidfd < 0:
            self._on_end(container)
            return
        container.pidfd = pidfd
        self._followed[pidfd] = container
        asyncio.get_running_loop().add_reader(pidfd, self._heard_end, pidfd)
        if container.pending_signal is not None:
            self._signal(container, container.pending_signal)

    def _heard_end(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        self._read_end(pidfd, _END_FIRST_S)

    def _read_end(self, pidfd: int, wait_s: float) -> None:
        """The process stays a zombie until its supervisor has written down how it ended, or could not. One that an
        older version of this agent has started may be gone a moment before."""
        container = self._followed.get(pidfd)
        if container is None:  # no longer followed
            return
        loop = asyncio.get_running_loop()
        try:
            is_waited_for = is_attended(container.state)
            state = read_state(container.directory)
            if "exit_code" not in state and (
                is_waited_for or (is_supervised(container.state) and wait_s < _END_LAST_S)
            ):
                loop.call_later(wait_s, self._read_end, pidfd, min(2 * wait_s, _END_LAST_S))
                return
            _settle(container, state)
        except OSError as error:
            log.warning("end of a container cannot be read yet", container=container.id, reason=str(error))
            loop.call_later(_AGAIN_S, self._read_end, pidfd, wait_s)
            return
        del self._followed[pidfd]
        os.close(pidfd)
        container.pidfd = -1
        self._on_end(container)

    def _lost(self, supervisor: int) -> None:
        """The kernel kills the containers of a supervisor that dies, but for those that have changed their user."""
        for container in list(self._followed.values()):
            if container.state.get("shim") == supervisor:
                self.kill(container)


async def _when_possible(act: Callable[[], R]) -> R:
    """Try again until it can be told."""
    while True:
        try:
            return act()
        except OSError as error:
            log.warning("a start cannot be looked at yet", reason=str(error))
            await asyncio.sleep(_AGAIN_S)


def _settle(container: RunningContainer, state: dict[str, Any]) -> None:
    """What is known of a container that is over, and nothing left of it; OSError if that cannot be told yet."""
    state = state or container.state
    if "exit_code" not in state:  # its supervisor was killed, and the container with it
        if not _is_followed_by_another(container):
            orphans.end(read(str(container.directory / "spec.json")))
        state |= {"exit_code": 137, "signal": 9, "reason": "ContainerStatusUnknown", "finished": time.time()}
        try:
            write_state(container.directory, state)
        except OSError as error:  # full or read-only: the next agent finds out by itself
            log.warning("end of a container is not recorded", container=container.id, reason=str(error))
    container.state = state


def _is_followed_by_another(container: RunningContainer) -> bool:
    """Whether there is a later attempt, whose processes are in the same control group."""
    names = os.listdir(container.directory.parent) if container.directory.parent.is_dir() else []
    return any(name.isdecimal() and int(name) > container.attempt for name in names)


def _give_up(directory: Path) -> bool:
    """End a start that hangs, whenever that is over: its process executes nothing any more. False if there is none, and
    none will be: the supervisor writes the state and then looks whether it was given up, and here it is the other way
    round."""
    with contextlib.suppress(OSError):  # on a full disk; then no process is without a record either
        os.mknod(directory / ABANDONED, stat.S_IFREG | 0o600)  # which takes no descriptor
    state = read_state(directory)
    if not state:
        return False
    if "exit_code" not in state and (is_attended(state) or is_left_alone(state)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(state["pid"]), signal.SIGKILL)
    return True


def _not_started(state: Mapping[str, Any]) -> dict[str, Any]:
    now = time.time()
    message = f"it did not start in {_START_TIMEOUT_S:g} s"
    return {"started": now, **state, "exit_code": 128, "reason": START_ERROR, "message": message, "finished": now}


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _wait_for_start(directory: Path, ends_at: float) -> None:
    """For a container that was begun for an agent that is gone, and has not come up or failed yet: it would run beside
    the next attempt. Its supervisor holds a lock on the specification until then."""
    try:
        spec = os.open(directory / "spec.json", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        while True:
            try:
                fcntl.flock(spec, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= ends_at:
                    break
                time.sleep(0.005)  # the agent does nothing else yet
    finally:
        os.close(spec)
    log.warning("a container that is being started has not come up", directory=str(directory))
