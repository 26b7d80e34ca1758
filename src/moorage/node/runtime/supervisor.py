"""The process whose children an agent's containers are: it starts them, keeps their logs, records how they ended.

Run as a script with an isolated interpreter and the standard library only: it must start fast, stay small and have no
threads. It reads requests from a socket; each starts a process that becomes a container (`sandbox.py`) or enters one
that runs (`enter.py`). It outlives the agent for as long as it has containers: whatever the next agent must know is in
`state.json` beside each specification. Signals go from the agent to a container's first process. If this process dies,
the kernel kills its containers.
Owns: the containers' first processes, their log files, their state files.
May not touch: anything else of Moorage, nor anything that can hang for one container: that is done in the child.
Start reading at: `Supervisor.run`.
"""

import contextlib
import errno
import fcntl
import functools
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

# The interpreter is started without site packages; only the package's own, empty parents are imported on the way.
sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from moorage.host.boot import boot_id
from moorage.node.runtime import container_state, exec_child, launch, namespaces, orphans, rootfs, sandbox
from moorage.node.runtime.log_writer import ContainerLog
from moorage.node.runtime.supervisor_io import answer, become_quiet, end_child, pipes, receive, text_of

_CHUNK = 65536
_SAID = 16384  # of output at a time: others want to be heard, too
_LAST_CHUNKS = 128  # what a pipe may hold when its writers are gone
_COLLECT_AFTER = 64  # ended containers


class _Container:
    """One that was started here and has not ended."""

    __slots__ = ("fail", "failure", "is_starting", "lock", "log", "pid", "pidfd", "reply", "spec", "state", "streams")

    def __init__(self, spec: dict[str, Any], pid: int, reply: int, lock: int) -> None:
        self.spec = spec
        self.is_starting = True
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.reply, self.lock = reply, lock
        self.fail = -1  # where it says why it did not come up; -1 once that is known
        self.failure = b""
        self.streams: dict[int, str] = {}
        self.state: dict[str, Any] = {}
        self.log = ContainerLog(spec["log"])


class ContainerSupervisor:
    """Serves one agent, and its containers after that."""

    def __init__(
        self,
        control: socket.socket,
        agent: int,
        template: rootfs.Template,
        origin: sandbox.SupervisorOrigin,
    ) -> None:
        self._control: socket.socket | None = control
        self._agent = agent
        self._template = template
        self._origin = origin
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._containers: set[_Container] = set()
        self._ended = 0
        self._me = {"shim": os.getpid(), "shim_start": container_state.start_ticks(os.getpid()), "boot": boot_id()}
        self._watch(control.fileno(), self._asked)

    def run(self) -> None:
        """Until there is neither an agent nor a container."""
        while self._control is not None or self._containers:
            for fd, _ in self._poll.poll():
                handler = self._handlers.get(fd)
                if handler is not None:  # else an earlier one of this round has ended it
                    handler()

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN)

    def _follow(self, container: _Container, fd: int, act: Callable[[], object]) -> None:
        """What goes wrong with one container ends it, and none of the others."""

        def handler() -> None:
            try:
                act()
            except Exception as error:
                container.state["message"] = f"it could not be attended to: {error!r}"
                if fd in self._handlers:
                    self._close(fd)
                if fd == container.pidfd:
                    self._containers.discard(container)
                    os.waitpid(container.pid, os.WNOHANG)  # the agent waits for as long as it is a zombie
                else:
                    os.kill(container.pid, signal.SIGKILL)

        self._watch(fd, handler)

    def _close(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)
        os.close(fd)

    # Requests.

    def _asked(self) -> None:
        assert self._control is not None
        data, fds = receive(self._control)
        if data is None:
            return
        if not data:
            self._handlers.pop(self._control.fileno())
            self._poll.unregister(self._control.fileno())
            self._control.close()
            self._control = None
            return
        if not fds:  # too many files are open here: the agent gets no answer
            return
        *given, reply = fds
        try:
            request = json.loads(data)
            if request["op"] == container_state.ELSEWHERE:
                request = json.loads(container_state.content_of(f"/proc/self/fd/{given[-1]}"))
                os.close(given.pop())
            if request["op"] == "run":
                self._start(request["spec"], reply)
            else:
                self._enter(request, given, reply)
        except Exception as error:  # of one request; all containers live with this process
            answer(reply, {"error": text_of(error)})
            os.close(reply)
        for fd in given:
            os.close(fd)

    def _start(self, path: str, reply: int) -> None:
        """Takes over `reply`, unless it raises. The specification is locked until the container has come up or not:
        `Runtime.find` waits for it."""
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.getppid() != self._agent:  # asked after locking: the next agent looks for the lock first
                raise OSError(errno.ESRCH, "the agent that asked is gone")
            spec = json.loads(container_state.content_of(path))
            sandbox.check(spec)
            sandbox.filter_of(spec)
            container = self._launch(spec, reply, lock)
        except BaseException:
            os.close(lock)
            raise
        self._containers.add(container)
        self._follow(container, container.fail, lambda: self._heard(container))
        self._follow(container, container.pidfd, lambda: self._gone(container))
        for fd in container.streams:
            self._follow(container, fd, functools.partial(self._said, container, fd))

    def _launch(self, spec: dict[str, Any], reply: int, lock: int) -> _Container:
        """All that may hang or fail for this container alone is done in its own process."""
        (out, out_write), (err, err_write), (fail, fail_write), (go_read, go) = pipes(4)
        try:
            if spec.get("uid"):  # its program may open them once more, by name
                for fd in (out_write, err_write):
                    os.fchown(fd, spec["uid"], -1)
            files = sandbox.ContainerFiles(go_read, out_write, err_write)
            if not spec.get("host_pid"):
                namespaces.unshare(namespaces.CLONE_NEWPID)
            try:
                pid = launch.fork(
                    lambda report: sandbox.become(report, spec, self._template, self._origin, files),
                    launch.Report(fail_write),
                )
            finally:
                self._origin.return_to_processes()
        except BaseException:
            for fd in (out, err, fail, go):
                os.close(fd)
            raise
        finally:
            for fd in (out_write, err_write, fail_write, go_read):
                os.close(fd)
        try:
            container = _Container(spec, pid, reply, lock)
        except OSError:  # too many files are open here
            for fd in (out, err, fail, go):
                os.close(fd)
            end_child(pid)
            raise
        container.state = {**self._me, "pid": pid, "start": container_state.start_ticks(pid), "started": time.time()}
        for fd in (out, err, fail):
            os.set_blocking(fd, False)
        container.fail, container.streams = fail, {out: "stdout", err: "stderr"}
        try:
            container_state.write(spec["state"], container.state)
            directory = os.path.dirname(spec["state"])
            if not os.path.isdir(directory) or os.path.exists(f"{directory}/{container_state.ABANDONED}"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(spec["state"])
                raise OSError(errno.ESRCH, "the agent no longer waits for it")
        except OSError:  # without a record no agent would ever end it
            os.kill(pid, signal.SIGKILL)
            for fd in (out, err, fail):
                os.close(fd)
            self._watch(container.pidfd, lambda: self._reap(pid, container.pidfd))
            os.close(go)
            raise
        with contextlib.suppress(BrokenPipeError):  # it has failed already, and has said why
            os.write(go, b"g")
        os.close(go)
        return container

    def _enter(self, request: dict[str, Any], given: list[int], reply: int) -> None:
        sandbox.filter_of(request)
        pid = os.fork()
        if pid:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:  # too many files are open here
                end_child(pid)
                raise
            os.close(reply)
            self._watch(pidfd, lambda: self._reap(pid, pidfd))
            return
        status = 1
        try:
            for fd in (*self._handlers, self._poll.fileno()):
                os.close(fd)
            for container in self._containers:
                if container.is_starting:  # its agent waits for the start, and must not wait for this process
                    os.close(container.reply)
                    os.close(container.lock)
            os.setsid()
            status = exec_child.run(request, given, reply, self._origin)
        except BaseException as error:
            answer(reply, {"error": text_of(error)})
        finally:
            os._exit(status)

    def _reap(self, pid: int, pidfd: int) -> None:
        os.waitpid(pid, 0)
        self._close(pidfd)

    # What containers say.

    def _heard(self, container: _Container) -> None:
        """Why a container does not come up; the end of the pipe without a word means that its program runs."""
        while True:
            try:
                data = os.read(container.fail, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                break
            container.failure += data
        self._close(container.fail)
        container.fail = -1
        if not container.failure:
            self._up(container)

    def _up(self, container: _Container) -> None:
        container.is_starting = False
        answer(container.reply, {"state": container.state})  # if no agent receives it, the next one reads the record
        self._let_go(container)

    def _let_go(self, container: _Container) -> None:
        fcntl.flock(container.lock, fcntl.LOCK_UN)  # closing would not do: a fork that hangs may have it open as well
        os.close(container.lock)
        os.close(container.reply)

    def _said(self, container: _Container, fd: int) -> bool:
        """Takes one piece of output; False when there is none now."""
        try:
            data = os.read(fd, _SAID)
        except BlockingIOError:
            return False
        container.log.add(container.streams[fd], data)
        if not data:
            self._close(fd)
            del container.streams[fd]
        return bool(data)

    def _gone(self, container: _Container) -> None:
        """Its first process has ended. It stays a zombie until the end is recorded: so the agent can tell."""
        result = os.waitid(os.P_PID, container.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if result is None:
            return
        if container.fail >= 0:
            self._heard(container)
        orphans.end(container.spec)
        # Once the first process is gone everything in its PID namespace is: what is in the pipes is all there is.
        for fd in list(container.streams):
            for _ in range(_LAST_CHUNKS):
                if not self._said(container, fd):
                    break
        container.log.close()
        if container.failure:
            self._failed(container)
        else:
            is_exit = result.si_code == os.CLD_EXITED
            code = {"exit_code": result.si_status} if is_exit else {"exit_code": 128 + result.si_status,
                                                                    "signal": result.si_status}  # fmt: skip
            self._record(container, {"finished": time.time(), **code})
        os.waitpid(container.pid, 0)
        for fd in (*container.streams, container.pidfd):
            self._close(fd)
        self._containers.discard(container)
        self._ended += 1
        if self._ended % _COLLECT_AFTER == 0:
            gc.collect()

    def _failed(self, container: _Container) -> None:
        """Where nothing was created there is no state of it either."""
        text, is_created = launch.failure_from(container.failure)
        failure: dict[str, Any] = {"error": text}
        if not is_created:
            with contextlib.suppress(OSError):
                os.unlink(container.spec["state"])
        else:
            why = {"exit_code": 128, "finished": time.time(), "reason": "StartError", "message": text}
            self._record(container, why)
            failure["state"] = container.state
        answer(container.reply, failure)
        self._let_go(container)

    def _record(self, container: _Container, end: dict[str, Any]) -> None:
        container.state |= end
        with contextlib.suppress(OSError):  # the agent finds that it has ended, and not how
            container_state.write(container.spec["state"], container.state)


def main(control_fd: int, agent: int, open_files: int, hide: list[str]) -> None:
    """Serve until there are neither an agent nor containers."""
    os.closerange(3, control_fd)  # the agent may have been given files that every child gets
    os.closerange(control_fd + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    template = rootfs.template(hide)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the agent was started with: programs inherit it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    with open("/proc/self/comm", "wb") as name:  # else it would be called after the descriptor that it was executed by
        name.write(b"supervisor")
    origin = sandbox.SupervisorOrigin.take(open_files)
    supervisor = ContainerSupervisor(control, agent, template, origin)
    become_quiet()
    sys.path.clear()  # children run in the roots of containers, where nothing may be imported
    sys.meta_path.clear()
    gc.disable()  # a collection in a fork would touch, and so copy, every page that it shares with this process
    gc.freeze()
    supervisor.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
