"""Running one more program inside a running container: `kubectl exec`.

Runs in a fork of the supervisor with the standard library only.
Owns: joining the container's namespaces, and reporting how the program ended.
Start reading at: `run`.
"""

import contextlib
import fcntl
import json
import os
import termios
from typing import Any

from moorage.node.runtime import launch, namespaces, sandbox

_KINDS = namespaces.CLONE_NEWIPC | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWNS


def run(request: dict[str, Any], given: list[int], reply: int, origin: sandbox.SupervisorOrigin) -> int:
    """Run the program with the three given streams, in the container whose first process the fourth descriptor is. A
    pid would not do: it may be another process by now, even one of the host. Answer first with the program's pid, then
    with its exit code."""
    sandbox.check(request)
    container = given[3]
    try:
        namespaces.set_namespace(container, namespaces.CLONE_NEWPID)
    except ProcessLookupError:
        _answer(reply, {"error": "the container has ended"})
        return 0
    fail_read, fail_write = os.pipe()
    pid = launch.fork(lambda report: _become(report, request, given, origin), launch.Report(fail_write))
    for fd in (*given, fail_write):
        os.close(fd)
    failed = b""
    while chunk := os.read(fail_read, 65536):
        failed += chunk
    if failed:
        os.waitpid(pid, 0)
        _answer(reply, {"error": launch.failure_from(failed).text})
        return 0
    _answer(reply, {"pid": pid})
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    _answer(reply, {"exit_code": code if code >= 0 else 128 - code})
    return 0


def _become(report: launch.Report, request: dict[str, Any], given: list[int], origin: sandbox.SupervisorOrigin) -> None:
    *streams, container = given
    origin.leave()
    sandbox.join(request.get("cgroups", []))
    with launch.step("enter the container"):
        namespaces.set_namespace(container, _KINDS)
    os.setsid()
    sandbox.take_streams(streams)
    namespaces.close_all_but(report.fd)
    if request.get("tty"):
        with launch.step("take the terminal"):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sandbox.take_identity(request)
    sandbox.change_to(request.get("cwd") or "/")
    environment = {"PATH": sandbox.PATH, **request["env"]}
    if request.get("tty"):
        environment.setdefault("TERM", "xterm")
    sandbox.execute(request["argv"], environment)


def _answer(reply: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(reply, json.dumps(message).encode() + b"\n")
