"""The process beside each container: starts it, keeps its log, records how it ended.

Runs in a fork of the zygote with the standard library only. It outlives the agent: whatever the agent must know is in
`state.json` beside the container's specification, written whole.
Owns: the container's first process, its log file, its state file.
Start reading at: `run`.

Signals go from the agent to the container's first process. If the shim dies, the kernel kills the container.
Every page that is written to here is copied from the zygote, so whatever is done in few steps is.
"""

import errno
import json
import os
import select
import time
from typing import Any

from moorage.node.pods import kernel, rootfs, sandbox

_CHUNK = 65536
_LONGEST_LINE = 16384
_ROTATE_BYTES = 10 * 1024 * 1024
_SIGKILL = 9
ABANDONED = "abandoned"  # a file beside the specification: the agent does not wait for this start any more


def run(spec: dict[str, Any], template: rootfs.Template, reply: int, lock: int) -> int:
    """Start the container that is described and stay until it has ended. The lock is let go of once its state can be
    read."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    fail_read, fail_write = os.pipe()
    pid, failed = _fork(spec, template, (out_write, err_write, fail_write))
    for fd in (out_write, err_write, fail_write):
        os.close(fd)
    _become_quiet()
    if failed:  # nothing was created, so there is no state of it either
        os.write(reply, json.dumps({"error": failed}).encode())
        return 0
    state: dict[str, Any] = {
        "shim": os.getpid(),
        "shim_start": start_ticks(os.getpid()),
        "pid": pid,
        "started": time.time(),
    }
    try:
        _write(spec["state"], state)
    except OSError:  # without a record nobody would ever end it
        os.kill(pid, _SIGKILL)
        os.waitpid(pid, 0)
        raise
    os.close(lock)
    failed = _all_of(fail_read)
    if failed:
        os.waitpid(pid, 0)
        state |= {"exit_code": 128, "finished": time.time(), "reason": "StartError", "message": failed}
        _write(spec["state"], state)
        os.write(reply, json.dumps({"error": failed, "state": state}).encode())
        return 0
    try:
        os.write(reply, json.dumps({"state": state}).encode())
    except BrokenPipeError:  # the agent is gone, and the next one takes this up; unless it has given up waiting
        if os.path.exists(f"{os.path.dirname(spec['state'])}/{ABANDONED}"):
            raise
    os.close(reply)
    logs = _Logs(spec["log"])
    status = _attend(pid, {out_read: "stdout", err_read: "stderr"}, logs)
    ended: dict[str, Any] = {"finished": time.time(), "exit_code": os.waitstatus_to_exitcode(status)}
    if ended["exit_code"] < 0:
        ended["signal"] = -ended["exit_code"]
        ended["exit_code"] = 128 + ended["signal"]
    logs.close()
    _write(spec["state"], state | ended)
    return 0


def _fork(spec: dict[str, Any], template: rootfs.Template, streams: tuple[int, int, int]) -> tuple[int, str]:
    """The container's first process, and why there is none. All that can be done before it is there is done here: each
    page that the new process touches before its program would be copied for it alone."""
    host = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    groups: list[int] = []
    mask = os.umask(0)
    try:
        groups = sandbox.open_groups(spec.get("cgroups", []))
        if not spec.get("host_pid"):
            kernel.unshare(kernel.CLONE_NEWPID)
        rootfs.enter(spec, template)
        pid = os.fork()
        if pid == 0:
            sandbox.become(spec, groups, *streams)
        return pid, ""
    except OSError as error:
        return 0, str(error)
    finally:
        kernel.set_namespace(host, kernel.CLONE_NEWNS)
        os.umask(mask)
        for fd in (host, template.namespace, *groups):
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


def _attend(pid: int, streams: dict[int, str], logs: "_Logs") -> int:
    poll = select.poll()
    first = os.pidfd_open(pid)
    for fd in (*streams, first):
        poll.register(fd, select.POLLIN)
    status: int | None = None
    while status is None or streams:
        # Once the first process is gone everything in its PID namespace is: what is in the pipes is all there is.
        found = poll.poll(None if status is None else 200)
        if status is not None and not found:
            break
        for fd, _ in found:
            if fd == first:
                poll.unregister(first)
                _, status = os.waitpid(pid, 0)
                continue
            data = os.read(fd, _CHUNK)
            logs.add(streams[fd], data)
            if not data:
                poll.unregister(fd)
                os.close(fd)
                del streams[fd]
    return status


class _Logs:
    """One log file in the format of container runtimes: time, stream, F(ull) or P(artial), text."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._partial = {"stdout": b"", "stderr": b""}
        self._fd = -1  # opened with the first line: most containers that run for long say little
        self._size = 0
        self._is_cut = False

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
        if self._fd >= 0:
            os.close(self._fd)

    def _write(self, data: bytes) -> None:
        try:
            if self._size > _ROTATE_BYTES:
                os.close(self._fd)
                self._fd, self._size = -1, 0
                os.replace(self._path, f"{self._path}.1")
            if self._fd < 0:
                self._fd = self._open()
                self._size = os.fstat(self._fd).st_size
            text = b"\n" + data if self._is_cut else data
            written = os.write(self._fd, text)
            self._is_cut = written < len(text)  # the disk is full: what comes next must not look like the rest of it
            self._size += written
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
