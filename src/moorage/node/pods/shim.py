"""The process beside each container: starts it, keeps its log, records how it ended.

Runs in a fork of the zygote with the standard library only. It outlives the agent: whatever the agent must know is in
`state.json` beside the container's specification, written whole.
Owns: the container's first process, its log file, its state file.
Start reading at: `run`.

Signals: USR1 asks the container to stop (its stop signal), USR2 kills it. If the shim dies, the kernel kills
the container.
"""

import contextlib
import json
import os
import select
import signal
import time
from typing import Any

from moorage.node.pods import sandbox

_CHUNK = 65536
_LONGEST_LINE = 16384
_ROTATE_BYTES = 10 * 1024 * 1024


def run(spec_path: str, reply: int) -> int:
    """Start the container that `spec.json` describes and stay until it has ended."""
    with open(spec_path, encoding="utf-8") as file:
        spec: dict[str, Any] = json.load(file)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    os.set_blocking(wakeup_read, False)
    for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    sandbox.join(spec.get("shim_cgroups", []))
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    fail_read, fail_write = os.pipe()
    if not spec.get("host_pid"):
        sandbox.unshare(sandbox.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        for fd in (out_read, err_read, fail_read, wakeup_read, wakeup_write, reply):
            os.close(fd)
        signal.set_wakeup_fd(-1)
        sandbox.become(spec, out_write, err_write, fail_write)
    for fd in (out_write, err_write, fail_write):
        os.close(fd)
    _become_quiet()
    started = time.time()
    state: dict[str, Any] = {
        "shim": os.getpid(),
        "shim_start": start_ticks(os.getpid()),
        "pid": pid,
        "started": started,
    }
    _write(spec["state"], state)
    failed = _all_of(fail_read)
    if failed:
        _, status = os.waitpid(pid, 0)
        state |= {"exit_code": 128, "finished": time.time(), "reason": "StartError", "message": failed}
        _write(spec["state"], state)
        os.write(reply, json.dumps({"error": failed}).encode())
        return 0
    os.write(reply, json.dumps({"shim": os.getpid(), "pid": pid, "started": started}).encode())
    os.close(reply)
    logs = _Logs(spec["log"])
    status = _attend(pid, spec, {out_read: "stdout", err_read: "stderr"}, wakeup_read, logs)
    ended: dict[str, Any] = {"finished": time.time(), "exit_code": os.waitstatus_to_exitcode(status)}
    if ended["exit_code"] < 0:
        ended["signal"] = -ended["exit_code"]
        ended["exit_code"] = 128 + ended["signal"]
    logs.close()
    _write(spec["state"], state | ended)
    return 0


def start_ticks(pid: int) -> int:
    """When a process was started, in ticks since boot: with the pid it names a process for good."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def _attend(pid: int, spec: dict[str, Any], streams: dict[int, str], wakeup: int, logs: "_Logs") -> int:
    poll = select.poll()
    for fd in (*streams, wakeup):
        poll.register(fd, select.POLLIN)
    status: int | None = None
    while status is None or streams:
        # Once the first process is gone everything in its PID namespace is: what is in the pipes is all there is.
        for fd, _ in poll.poll(None if status is None else 200):
            if fd != wakeup:
                data = os.read(fd, _CHUNK)
                logs.add(streams[fd], data)
                if not data:
                    poll.unregister(fd)
                    os.close(fd)
                    del streams[fd]
                continue
            for number in os.read(wakeup, 256):
                if number == signal.SIGUSR1:
                    _send(pid, int(spec.get("stop_signal", signal.SIGTERM)))
                elif number == signal.SIGUSR2:
                    _send(pid, signal.SIGKILL)
            if status is None:
                found, ended = os.waitpid(pid, os.WNOHANG)
                status = ended if found == pid else None
        else:
            if status is not None and not poll.poll(0):
                break
    return status


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class _Logs:
    """One log file in the format of container runtimes: time, stream, F(ull) or P(artial), text."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._partial = {"stdout": b"", "stderr": b""}
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size

    def add(self, stream: str, data: bytes) -> None:
        text = self._partial[stream] + data
        *lines, rest = text.split(b"\n")
        out = b"".join(_line(stream, b"F", line) for line in lines)
        if rest and (not data or len(rest) > _LONGEST_LINE):
            out += _line(stream, b"P", rest)
            rest = b""
        self._partial[stream] = rest
        if out:
            self._write(out)

    def close(self) -> None:
        for stream, rest in self._partial.items():
            if rest:
                self._write(_line(stream, b"P", rest))
        os.close(self._fd)

    def _write(self, data: bytes) -> None:
        if self._size > _ROTATE_BYTES:
            os.close(self._fd)
            os.replace(self._path, f"{self._path}.1")
            self._fd, self._size = self._open(), 0
        try:
            os.write(self._fd, data)
            self._size += len(data)
        except OSError:
            return  # a full disk must not stop the container

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)


def _line(stream: str, flag: bytes, text: bytes) -> bytes:
    now = time.time_ns()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 10**9))
    return f"{stamp}.{now % 10**9:09d}Z {stream} ".encode() + flag + b" " + text + b"\n"


def _become_quiet() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    os.chdir("/")


def _all_of(fd: int) -> str:
    data = b""
    while chunk := os.read(fd, _CHUNK):
        data += chunk
    os.close(fd)
    return data.decode(errors="replace")


def _write(path: str, state: dict[str, Any]) -> None:
    temporary = f"{path}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(state, file)
    os.replace(temporary, path)
