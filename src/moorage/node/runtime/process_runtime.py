"""The agent's side of containers: starting, finding again, signalling, entering, and hearing of their end.

Owns: starting the supervisor process, and a `Container` for every attempt at running one.
May not touch: the API, volumes; a specification says everything.
Start reading at: `Runtime.start`, `Runtime.find`.
"""

import array
import asyncio
import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moorage.errors import MoorageError
from moorage.host import libc
from moorage.host.boot import boot_id
from moorage.log import get_logger
from moorage.node.pods.lifecycle import START_ERROR
from moorage.node.runtime import container_state, namespaces, orphans
from moorage.node.runtime.container_state import ABANDONED, parent_of, start_ticks

log = get_logger(__name__)

R = TypeVar("R")

_START_TIMEOUT_S = 30.0
_LEAVE_S = 2.0
_LONGEST_MESSAGE = 1 << 15
_END_FIRST_S, _END_LAST_S = 0.001, 0.5  # between looks at how a container has ended, while that is being written
_AGAIN_S = 0.5  # until a container is looked at again that could not be: most likely no descriptors are left
_GONE = (FileNotFoundError, ProcessLookupError)  # of a process; any other error says nothing of it


class ContainerFailed(MoorageError):
    """A container could not be started, and why."""


class NotCreated(ContainerFailed):
    """There was not even anything to start: no attempt, and tried again whatever the pod says of restarts."""


@dataclass(slots=True)
class RunningContainer:
    """One attempt at running a container."""

    uid: str
    name: str
    attempt: int
    directory: Path
    log: Path
    state: dict[str, Any] = field(default_factory=dict)
    pidfd: int = -1
    is_unsure: bool = False  # it could not be looked at: whatever it may hold is not given to another
    to_be_told: signal.Signals | None = None  # once it can be

    @property
    def is_running(self) -> bool:
        return self.pidfd >= 0 or self.is_unsure

    @property
    def is_ended(self) -> bool:
        return "exit_code" in self.state

    @property
    def id(self) -> str:
        return f"{self.uid}-{self.name}-{self.attempt}"

    @property
    def exit_code(self) -> int:
        return int(self.state.get("exit_code", 137))


class Runtime:
    """Containers of one agent."""

    def __init__(
        self, on_end: Callable[[RunningContainer], None], hide: Sequence[str] = (), open_files: int | None = None
    ) -> None:
        self._on_end = on_end
        self._hide = hide  # directories of the host that no container sees
        self._open_files = open_files  # how many a program may have; as many as this process, if it is not said
        self._supervisor: _Supervisor | None = None
        self._left: list[_Supervisor] = []  # earlier ones that have not ended
        self._followed: dict[int, RunningContainer] = {}
        self._unsure: dict[str, asyncio.TimerHandle] = {}  # until they are looked at again
        self._found_until = 0.0  # until when all that was being started before is waited for

    async def open(self) -> None:
        """Start the supervisor now, so that the first pod does not wait for it."""
        self._connected()

    async def start(self, container: RunningContainer, spec: Mapping[str, Any]) -> None:
        """Run a container; returns when its program has been executed, or raises ContainerFailed."""
        directory, log_file = str(container.directory), str(container.log)
        os.makedirs(directory, 0o750, exist_ok=True)
        os.makedirs(os.path.dirname(log_file), 0o755, exist_ok=True)
        path = f"{directory}/spec.json"
        document = json.dumps({**spec, "state": f"{directory}/state.json", "log": log_file})
        with open(path, "w", opener=_private) as file:  # environment variables may be secret
            file.write(document)
        asked = self._connected()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):  # one that hangs may not even take what it is asked
                reply = await self._ask({"op": "run", "spec": path}, [])
                try:
                    answer = await reply.line()
                finally:
                    reply.close()
        except TimeoutError:
            if not await _when_possible(lambda: _give_up(container.directory)):
                # Its supervisor hangs: the next one has another.
                self._leave(asked)
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

    async def enter(self, container: RunningContainer, request: Mapping[str, Any], streams: Sequence[int]) -> "Reply":
        """Run a program inside; the reply gives its pid and later its exit code."""
        if not container.is_running:
            raise ContainerFailed(f"container {container.name} is not running")
        if container.is_unsure:
            raise ContainerFailed(f"container {container.name} cannot be looked at now; try again")
        process = os.dup(container.pidfd)  # ours is closed when the container ends, maybe while this waits
        try:
            return await self._ask({**request, "op": "exec"}, [*streams, process])
        finally:
            os.close(process)

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
        if self._supervisor is not None:
            self._leave(self._supervisor)
        await asyncio.gather(*(one.leave(patience_s) for one in self._left))

    def _leave(self, supervisor: "_Supervisor") -> None:
        """It ends by itself once it has no container, which is soon if it has none now; its end is heard of."""
        supervisor.hang_up()
        if supervisor is self._supervisor:  # else somebody has left it already, and there may be another
            self._supervisor = None
            self._left = [one for one in (*self._left, supervisor) if not one.is_over]

    def _signal(self, container: RunningContainer, number: signal.Signals) -> None:
        """To the container's first process."""
        if container.pidfd < 0:
            container.to_be_told = number
            return
        try:
            signal.pidfd_send_signal(container.pidfd, number)
        except ProcessLookupError as gone:
            log.debug("container ended by itself", container=container.id, reason=str(gone))

    def _follow(self, container: RunningContainer) -> None:
        self._unsure.pop(container.id, None)
        try:
            pidfd = _first_process(container.state)
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
        if container.to_be_told is not None:
            self._signal(container, container.to_be_told)

    def _heard_end(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        self._read_end(pidfd, _END_FIRST_S)

    def _read_end(self, pidfd: int, wait_s: float) -> None:
        """The process stays a zombie until its supervisor has written down how it ended, or could not. One that an
        older version of this agent has started may be gone a moment before."""
        container = self._followed.get(pidfd)
        if container is None:  # nobody follows it any more
            return
        loop = asyncio.get_running_loop()
        try:
            is_waited_for = _is_attended(container.state)
            state = read_state(container.directory)
            if "exit_code" not in state and (
                is_waited_for or (_is_supervised(container.state) and wait_s < _END_LAST_S)
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

    async def _ask(self, request: Mapping[str, Any], given: list[int]) -> "Reply":
        data = json.dumps(request).encode()
        read, write = os.pipe()
        os.set_blocking(read, False)
        fds = [*given, write]
        try:
            if len(data) > _LONGEST_MESSAGE:
                fds.insert(-1, _in_memory(data))
                data = json.dumps({"op": container_state.ELSEWHERE}).encode()
            for attempt in (1, 2):
                supervisor = self._connected()
                try:
                    await supervisor.send(data, fds)
                    break
                except OSError as error:
                    if attempt == 2:
                        raise NotCreated(f"the process that starts containers cannot be reached: {error}") from error
                    self._leave(supervisor)
        except BaseException:
            os.close(read)
            raise
        finally:
            for fd in fds[len(given) :]:
                os.close(fd)
        return Reply(read)

    def _connected(self) -> "_Supervisor":
        if self._supervisor is not None and self._supervisor.is_over:
            self._leave(self._supervisor)
        if self._supervisor is None:
            self._supervisor = _Supervisor(self._hide, self._open_files, self._lost)
        return self._supervisor


class _Supervisor:
    """The process whose children the containers are. It outlives this one."""

    def __init__(self, hide: Sequence[str], open_files: int | None, on_end: Callable[[int], None]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        try:
            self.pid = self._spawn(theirs, hide, open_files)
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._control.close()
            raise
        finally:
            theirs.close()
        self.is_over = False
        self._over = asyncio.Event()
        self._on_end = on_end
        self._sending = asyncio.Lock()
        self._ready: asyncio.Future[None] | None = None  # when it may take another message
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    async def send(self, data: bytes, fds: list[int]) -> None:
        """One message; waits without holding up anything else while it is busy forking. Raises OSError once it is gone,
        or was left."""
        rights = array.array("i", fds).tobytes()
        async with self._sending:
            while True:
                try:
                    self._control.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                    return
                except BlockingIOError:
                    await self._writable()

    def hang_up(self) -> None:
        """It is asked nothing more. Who waits to ask is told now: nothing is heard of a closed socket."""
        if self._ready is not None:
            asyncio.get_running_loop().remove_writer(self._control)
            _resolve(self._ready)
            self._ready = None
        self._control.close()

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        self._ready = ready = loop.create_future()
        loop.add_writer(self._control, _resolve, ready)
        try:
            await ready
        finally:
            if self._ready is ready:
                loop.remove_writer(self._control)
                self._ready = None

    @staticmethod
    def _spawn(control: socket.socket, hide: Sequence[str], open_files: int | None) -> int:
        control.set_inheritable(True)
        script = str(Path(__file__).with_name("supervisor.py"))
        numbers = (control.fileno(), os.getpid(), open_files or resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        arguments = ("-I", "-S", "-B", script, *map(str, numbers), *hide)
        nothing = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        # Forks of the interpreter enter containers, and a container can make them execute /proc/self/exe.
        with read_only(sys.executable) as executed:
            return os.posix_spawn(executed, [sys.executable, *arguments], os.environ, file_actions=nothing)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        os.waitpid(self.pid, 0)
        self.is_over = True
        self._over.set()
        self._on_end(self.pid)

    async def leave(self, patience_s: float) -> None:
        """Wait a little for its end; it goes on for as long as its containers do."""
        try:
            async with asyncio.timeout(patience_s):
                await self._over.wait()
        except TimeoutError:
            log.debug("the supervisor of containers goes on", pid=self.pid)
        if not self.is_over:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)


class Reply:
    """Lines of JSON from a forked process; `{}` when it has no more to say."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = b""
        self._is_over = False

    async def line(self) -> dict[str, Any]:
        while b"\n" not in self._buffer and not self._is_over:
            await self._more()
        text, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(text)) if text else {}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def _more(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._fd, _resolve, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self._fd)
        data = os.read(self._fd, 65536)
        self._buffer += data
        self._is_over = not data


def read_state(directory: Path) -> dict[str, Any]:
    """Empty if there is none. Raises OSError if that cannot be told."""
    return _read(directory / "state.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return dict(found) if isinstance(found, dict) else {}


def write_state(directory: Path, state: Mapping[str, Any]) -> None:
    if directory.is_dir():
        container_state.write(str(directory / "state.json"), dict(state))


def read_spec(directory: Path) -> dict[str, Any]:
    """The specification of an attempt, as far as it was written and can be read."""
    try:
        return _read(directory / "spec.json")
    except OSError:
        return {}


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
            orphans.end(_read(container.directory / "spec.json"))
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
    if "exit_code" not in state and (_is_attended(state) or _is_left_alone(state)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(state["pid"]), signal.SIGKILL)
    return True


def _not_started(state: Mapping[str, Any]) -> dict[str, Any]:
    now = time.time()
    message = f"it did not start in {_START_TIMEOUT_S:g} s"
    return {"started": now, **state, "exit_code": 128, "reason": START_ERROR, "message": message, "finished": now}


def _in_memory(data: bytes) -> int:
    fd = os.memfd_create("request")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def read_only(path: str) -> Iterator[str]:
    """Where a file of the host can be opened, or executed, so that no container changes it through that: neither what
    is in it nor, though its root may do so with any file that it can reach, its mode, owner and times. A device can be
    written to all the same."""
    tree = libc.open_tree(path, recursive=False)
    try:
        libc.mount_setattr("", namespaces.ATTR_RDONLY, at=tree)
        yield f"/proc/self/fd/{tree}"
    finally:
        os.close(tree)


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


def _resolve(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _first_process(state: Mapping[str, Any]) -> int:
    """A descriptor of a container's first process, or -1 if that is gone. One that has lost its supervisor is killed,
    so it is not there for long, and nothing is started beside it."""
    try:
        pidfd = os.pidfd_open(int(state.get("pid", 0)))
    except (*_GONE, ValueError):
        return -1
    except OSError as error:
        if error.errno == errno.EINVAL:  # no number of a process, or by now that of a thread
            return -1
        raise
    try:
        if _is_attended(state):
            return pidfd
        if _is_left_alone(state):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return pidfd
    except OSError:
        os.close(pidfd)
        raise
    os.close(pidfd)
    return -1


def _is_attended(state: Mapping[str, Any]) -> bool:
    """Whether the container's first process is there, maybe as a zombie, as a child of the process that started it. Its
    number may have become that of another container there; states of earlier versions do not tell."""
    try:
        pid = int(state["pid"])
        is_itself = "start" not in state or start_ticks(pid) == state["start"]
        return is_itself and parent_of(pid) == state["shim"] and _is_supervised(state)
    except (*_GONE, KeyError, ValueError, IndexError):
        return False


def _is_left_alone(state: Mapping[str, Any]) -> bool:
    """Whether the container's first process goes on without the process that has started it: the kernel kills it then,
    unless it has changed its user."""
    try:
        return state["boot"] == boot_id() and bool(start_ticks(int(state["pid"])) == state["start"])
    except (*_GONE, KeyError, ValueError, IndexError):
        return False


def _is_supervised(state: Mapping[str, Any]) -> bool:
    try:
        return start_ticks(int(state["shim"])) == state.get("shim_start")
    except (*_GONE, KeyError, ValueError, IndexError):
        return False
