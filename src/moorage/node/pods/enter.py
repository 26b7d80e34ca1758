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

from moorage.host.libc import AT_FDCWD
from moorage.node.pods import kernel, sandbox
from moorage.node.pods.launch import ANY, Launcher, Plan

_KINDS = (("ipc", kernel.CLONE_NEWIPC), ("uts", kernel.CLONE_NEWUTS), ("mnt", kernel.CLONE_NEWNS))
_GONE = "enter the container"


def run(request: dict[str, Any], streams: list[int], reply: int, launcher: Launcher, origin: sandbox.Origin) -> int:
    """Run the program with these three streams; answer first with its pid, then with its exit code."""
    target = int(request["pid"])
    with open(f"/proc/{target}/ns/pid", "rb") as namespace:
        kernel.set_namespace(namespace.fileno(), kernel.CLONE_NEWPID)
    fail_read, fail_write = os.pipe()
    stdin, stdout, stderr = streams
    plan = launcher.plan(fail_write, stdin=stdin, stdout=stdout, stderr=stderr)
    _write(plan, request, target, origin)
    pid = launcher.launch(plan)
    for fd in (*streams, fail_write):
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


def _write(plan: Plan, request: dict[str, Any], target: int, origin: sandbox.Origin) -> None:
    origin.leave(plan)
    sandbox.join(plan, request.get("cgroups", []))
    namespaces = [
        (plan.get("openat", AT_FDCWD, f"/proc/{target}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC, 0, text=_GONE), kind)
        for name, kind in _KINDS
    ]
    for fd, kind in namespaces:
        plan.do("setns", fd, kind, text=_GONE)
    plan.do("setsid", text="setsid")
    sandbox.take_streams(plan, [plan.at[name] for name in ("stdin", "stdout", "stderr")])
    if request.get("tty"):
        plan.do("ioctl", 0, termios.TIOCSCTTY, 0, text="take the terminal")
    sandbox.take_identity(plan, request)
    plan.do("chdir", request.get("cwd") or "/", accept=ANY, text="working directory")
    environment = {"PATH": sandbox.PATH, **request["env"]}
    if request.get("tty"):
        environment.setdefault("TERM", "xterm")
    sandbox.execute(plan, request["argv"], environment)


def _answer(reply: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(reply, json.dumps(message).encode() + b"\n")
