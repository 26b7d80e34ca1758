"""Running one more program inside a container that runs: `kubectl exec`.

Runs in a fork of the supervisor with the standard library only.
Owns: joining the container's namespaces, and telling how the program ended.
Start reading at: `run`.
"""

import contextlib
import fcntl
import json
import os
import termios
from typing import Any

from moorage.node.pods import kernel, sandbox

_KINDS = (("ipc", kernel.CLONE_NEWIPC), ("uts", kernel.CLONE_NEWUTS), ("mnt", kernel.CLONE_NEWNS))


def run(request: dict[str, Any], streams: list[int], reply: int) -> int:
    """Run the program with these three streams; answer first with its pid, then with its exit code."""
    target = int(request["pid"])
    with open(f"/proc/{target}/ns/pid", "rb") as namespace:
        kernel.set_namespace(namespace.fileno(), kernel.CLONE_NEWPID)
    fail_read, fail_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(fail_read)
        _become(request, target, streams, fail_write)
    for fd in (*streams, fail_write):
        os.close(fd)
    failed = b""
    while chunk := os.read(fail_read, 65536):
        failed += chunk
    if failed:
        os.waitpid(pid, 0)
        _answer(reply, {"error": failed.decode(errors="replace")})
        return 0
    _answer(reply, {"pid": pid})
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    _answer(reply, {"exit_code": code if code >= 0 else 128 - code})
    return 0


def _become(request: dict[str, Any], target: int, streams: list[int], fail: int) -> None:
    try:
        os.set_inheritable(fail, False)
        kernel.reset_signals()
        sandbox.join(request.get("cgroups", []))
        namespaces = [(os.open(f"/proc/{target}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC), kind) for name, kind in _KINDS]
        for fd, kind in namespaces:
            kernel.set_namespace(fd, kind)
        os.setsid()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        if request.get("tty"):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        sandbox.take_identity(request)
        cwd = request.get("cwd") or "/"
        with contextlib.suppress(OSError):
            os.chdir(cwd)
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **request["env"]}
        if request.get("tty"):
            environment.setdefault("TERM", "xterm")
        argv = request["argv"]
        try:
            os.execvpe(argv[0], argv, environment)
        except OSError as error:
            os.write(fail, f"exec: {argv[0]!r}: {error.strerror}".encode())
    except BaseException as error:
        os.write(fail, f"{error}".encode() or repr(error).encode())
    finally:
        os._exit(127)


def _answer(reply: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(reply, json.dumps(message).encode() + b"\n")
