"""Running one more program inside a container that runs: `kubectl exec`.

Runs in a fork of the supervisor with the standard library only.
Owns: joining the container's namespaces, and telling how the program ended.
Start reading at: `run`.
"""

import contextlib
import json
import os
import termios
from typing import Any

from moorage.node.runtime import namespaces as kernel
from moorage.node.runtime import sandbox
from moorage.node.runtime.launch import Launcher, Plan

_KINDS = kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNS


def run(
    request: dict[str, Any], given: list[int], reply: int, launcher: Launcher, origin: sandbox.SupervisorOrigin
) -> int:
    """Run the program with the three streams that are given, in the container whose first process the fourth
    descriptor is: its number may be somebody else's by now, even one of the host's. Answer first with the program's
    pid, then with its exit code."""
    stdin, stdout, stderr, container = given
    try:
        kernel.set_namespace(container, kernel.CLONE_NEWPID)
    except ProcessLookupError:
        _answer(reply, {"error": "the container has ended"})
        return 0
    fail_read, fail_write = os.pipe()
    plan = launcher.plan(fail_write, stdin=stdin, stdout=stdout, stderr=stderr, container=container)
    _write(plan, request, origin)
    pid = launcher.launch(plan)
    for fd in (*given, fail_write):
        os.close(fd)
    failed = b""
    while chunk := os.read(fail_read, 65536):
        failed += chunk
    if failed:
        os.waitpid(pid, 0)
        _answer(reply, {"error": plan.failure(failed).text})
        return 0
    _answer(reply, {"pid": pid})
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    _answer(reply, {"exit_code": code if code >= 0 else 128 - code})
    return 0


def _write(plan: Plan, request: dict[str, Any], origin: sandbox.SupervisorOrigin) -> None:
    origin.leave(plan)
    sandbox.join(plan, request.get("cgroups", []))
    plan.do("setns", plan.at["container"], _KINDS, text="enter the container")
    plan.do("setsid", text="setsid")
    sandbox.take_streams(plan, [plan.at[name] for name in ("stdin", "stdout", "stderr")])
    plan.keep_only()
    if request.get("tty"):
        plan.do("ioctl", 0, termios.TIOCSCTTY, 0, text="take the terminal")
    sandbox.take_identity(plan, request)
    sandbox.change_to(plan, request.get("cwd") or "/")
    environment = {"PATH": sandbox.PATH, **request["env"]}
    if request.get("tty"):
        environment.setdefault("TERM", "xterm")
    sandbox.execute(plan, request["argv"], environment)


def _answer(reply: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(reply, json.dumps(message).encode() + b"\n")
