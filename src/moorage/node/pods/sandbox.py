"""A container's first process, from its fork to its program.

Runs in the process forked from the supervisor, with the standard library only.
Owns: control groups, streams, identity, and the program that is executed.
Start reading at: `become`.
"""

import contextlib
import os
import resource
import select
from typing import Any, NamedTuple

from moorage.node.pods import kernel, rootfs

NOT_CREATED = "not created: "  # before the reason, when nothing of the container was there yet
# What container runtimes leave to a root that is not privileged.
KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31})
_LAST_CAPABILITY = 40
_OOM_SCORE = "/proc/self/oom_score_adj"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Origin(NamedTuple):
    """What the supervisor is made of and containers are not: it has more files open, and is the last process that the
    kernel ends for want of memory, since all containers would end with it."""

    processes: int  # a descriptor of its PID namespace
    process: int  # one of itself
    files: tuple[int, int]
    oom_score: bytes

    @classmethod
    def take(cls) -> "Origin":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with open(_OOM_SCORE, "rb") as file:
            score = file.read().strip()
        with contextlib.suppress(PermissionError), open(_OOM_SCORE, "wb") as file:
            file.write(b"-999")
        processes = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        return cls(processes, os.pidfd_open(os.getpid()), (soft, hard), score)

    def return_to_processes(self) -> None:
        """From now on children are of the supervisor's own PID namespace again."""
        kernel.set_namespace(self.processes, kernel.CLONE_NEWPID)

    def restore(self) -> None:
        """In a fork: what a program is to find."""
        resource.setrlimit(resource.RLIMIT_NOFILE, self.files)
        fd = os.open(_OOM_SCORE, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, self.oom_score)
        finally:
            os.close(fd)

    def is_gone(self) -> bool:
        """Whether the supervisor has ended. Only whoever asked to die with it before can rely on it."""
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(0))


def become(spec: dict[str, Any], template: rootfs.Template, origin: Origin, pipes: tuple[int, int, int, int]) -> None:
    """Turn this process into the container: output, errors, why it failed, and leave to go on. Never returns. Whatever
    hangs here, such as a volume whose server is gone, hangs nobody else."""
    out, err, fail, go = pipes
    prefix = NOT_CREATED
    try:
        kernel.die_with_parent()
        kernel.reset_signals()
        origin.restore()
        join(spec.get("cgroups", []))
        os.umask(0)
        rootfs.enter(spec, template)
        if os.read(go, 1) != b"g":  # it is written once the container is on record
            raise OSError("the process that starts containers went away")
        prefix = ""
        rootfs.finish(spec)
        os.setsid()
        _take_streams(out, err)
        take_identity(spec)
        if origin.is_gone():
            os._exit(127)
        _execute(spec)
    except BaseException as error:
        os.write(fail, f"{prefix}{error}".encode() or repr(error).encode())
    finally:
        os._exit(127)


def join(cgroups: list[str]) -> None:
    """Move this process into control groups, given as directories."""
    for directory in cgroups:
        fd = os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        os.write(fd, b"0")
        os.close(fd)


def take_identity(spec: dict[str, Any]) -> None:
    """Groups, user, capabilities, and death with the parent."""
    os.umask(0o022)
    if not spec.get("privileged"):
        kept = spec.get("capabilities", KEPT_CAPABILITIES)
        for capability in range(_LAST_CAPABILITY + 1):
            if capability not in kept:
                kernel.drop_capability(capability)
    os.setgroups(spec.get("groups", []))
    os.setgid(spec.get("gid", 0))
    os.setuid(spec.get("uid", 0))
    if spec.get("no_new_privileges"):
        kernel.forbid_new_privileges()
    kernel.die_with_parent()


def _take_streams(out: int, err: int) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for fd in {null, out, err} - {0, 1, 2}:
        os.close(fd)


def _execute(spec: dict[str, Any]) -> None:
    os.chdir(spec.get("cwd") or "/")
    environment = {"PATH": _PATH, "HOME": "/", **spec["env"]}
    argv = spec["argv"]
    try:
        if "/" in argv[0]:
            os.execve(argv[0], argv, environment)
        else:
            os.execvpe(argv[0], argv, environment)
    except OSError as error:
        raise OSError(f"exec: {argv[0]!r}: {error.strerror}") from error
