"""A container's first process, from its start to its program.

With the standard library and `host.libc` only: used by the process whose children containers are.
Owns: the plan of that process: control groups, streams, identity, and the program that is executed.
May not touch: anything but a plan. What may hang, such as a volume whose server is gone, hangs nobody else.
Start reading at: `write`.
"""

import contextlib
import errno
import os
import resource
import select
import signal
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from moorage.host.libc import AT_FDCWD
from moorage.node.runtime import container_state, namespaces, rootfs, seccomp
from moorage.node.runtime.launch import ANY, Calls, Plan, Result, errors

# What container runtimes leave to a root that is not privileged, without CAP_MKNOD: they let it make devices and use a
# control group to keep it from opening them; here it would read the disks of the host, and so the volumes of others.
KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 29, 31})
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SYS_ADMIN, _LAST_CAPABILITY = 21, 40
_OOM_SCORE = "/proc/self/oom_score_adj"
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_KEYCTL_JOIN_SESSION_KEYRING = 1
_CAPABILITY_HEAD = struct.pack("=Ii", 0x20080522, 0)  # the version of the sets that follow, and whose: its own
_DEFAULT_ACTION = bytes(32)
_SPAWN_IGNORES = (32, 33)  # the C library's own, in whatever it spawns
_NO_WAIT = bytes(16)
_UNKNOWN = errors(errno.EINVAL)
_NO_KEYS = errors(errno.ENOSYS)
_NOT_FOUND = errors(errno.ENOENT, errno.ENOTDIR)
_LEFT_ALONE = "the process that starts containers went away"


class SupervisorOrigin(NamedTuple):
    """What the supervisor is made of and containers are not: it has more files open, ignores signals, and is the last
    process that the kernel ends for want of memory, since all containers would end with it."""

    processes: int  # a descriptor of its PID namespace
    process: int  # one of itself
    files: tuple[int, int]
    oom_score: bytes
    ignored: tuple[int, ...]  # signals, which would stay ignored in a program

    @classmethod
    def take(cls, open_files: int) -> "SupervisorOrigin":
        """Of this process, but that containers may have so many files open."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with open(_OOM_SCORE, "rb") as file:
            score = file.read().strip()
        with contextlib.suppress(PermissionError), open(_OOM_SCORE, "wb") as file:
            file.write(b"-999")
        processes = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        ignored = [int(one) for one in signal.valid_signals() if signal.getsignal(one) == signal.SIG_IGN]
        return cls(processes, os.pidfd_open(os.getpid()), (open_files, hard), score, (*ignored, *_SPAWN_IGNORES))

    def return_to_processes(self) -> None:
        """From now on children are of the supervisor's own PID namespace again."""
        namespaces.set_namespace(self.processes, namespaces.CLONE_NEWPID)

    def leave(self, plan: Plan) -> None:
        """What a program is to find."""
        action = plan.data(_DEFAULT_ACTION)
        for number in self.ignored:
            plan.do("rt_sigaction", number, action, 0, 8, text="reset signals")
        limits = plan.data(struct.pack("=qq", *self.files))
        plan.do("prlimit64", 0, resource.RLIMIT_NOFILE, limits, 0, text="limit open files")
        _write_to(plan, _OOM_SCORE, self.oom_score)


def write(plan: Plan, spec: dict[str, Any], template: rootfs.Template, origin: SupervisorOrigin) -> int:
    """All that the process does. It has `go`, from which it reads once the container is on record, its supervisor as
    `origin`, the `template`, `out` and `err`. Returns the step up to which nothing of the container is there."""
    die_with_parent(plan)
    origin.leave(plan)
    join(plan, spec.get("cgroups", []))
    plan.do("umask", 0, text="umask")
    null = rootfs.enter(plan, spec, template)
    waits = len(plan)
    plan.do("read", plan.at["go"], plan.data(bytes(1)), 1, expect=1, text=_LEFT_ALONE)
    plan.do("setsid", text="setsid")
    take_streams(plan, (null, plan.at["out"], plan.at["err"]))
    plan.keep_only("origin")  # before /proc is there, through which a pod could name whatever else is open
    rootfs.finish(plan, spec)
    take_identity(plan, spec)
    poll = plan.data(struct.pack("=ihh", plan.at["origin"], select.POLLIN, 0))
    plan.do("ppoll", poll, 1, plan.data(_NO_WAIT), 0, 0, expect=0, text=_LEFT_ALONE)
    change_to(plan, spec.get("cwd") or "/")
    execute(plan, spec["argv"], {"PATH": PATH, "HOME": "/", **spec["env"]})
    return waits


def change_to(plan: Plan, directory: str) -> None:
    """The working directory of the program, as the one who runs it may enter it."""
    text = f"working directory {directory!r}"
    plan.do("fchdir", rootfs.open_inside(plan, AT_FDCWD, directory, os.O_DIRECTORY, text), text=text)


def die_with_parent(plan: Plan) -> None:
    plan.do("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0, text="prctl")


def join(plan: Plan, cgroups: Iterable[str]) -> None:
    """Move the process, which has one thread, into control groups, given as directories. Where a thread can be moved
    (v1), that is cheaper: to move a process, the kernel holds up every fork and every change of a group meanwhile."""
    for directory in cgroups:
        name = "tasks" if os.path.exists(f"{directory}/tasks") else "cgroup.procs"
        _write_to(plan, f"{directory}/{name}", b"0")


def take_streams(plan: Plan, streams: Sequence[int | Result]) -> None:
    for number, fd in enumerate(streams):
        plan.do("dup3", fd, number, 0, text="take streams")


def take_identity(plan: Plan, spec: Mapping[str, Any]) -> None:
    """Groups, user, capabilities, and death with the parent. What comes after is done with the rights of the program,
    but nobody else who has these may look at the process before that."""
    plan.do("umask", 0o022, text="umask")
    kept = frozenset(spec.get("capabilities", KEPT_CAPABILITIES))
    # A new one without a name. The agent's own may hold keys, of its login or of filesystems.
    plan.do("keyctl", _KEYCTL_JOIN_SESSION_KEYRING, 0, accept=_NO_KEYS, text="take a keyring")
    if not spec.get("privileged"):
        seccomp.install(plan, may_make_users=_SYS_ADMIN in kept)
        plan.do("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0, text="hide from others")
        plan.do_all(_drops(kept))
    groups = spec.get("groups", [])
    plan.do("setgroups", len(groups), plan.data(struct.pack(f"={len(groups)}I", *groups)), text="take groups")
    plan.do("setgid", spec.get("gid", 0), text="take a group")
    plan.do("setuid", spec.get("uid", 0), text="take a user")
    if not spec.get("privileged"):
        sets = _capability_sets(kept if not spec.get("uid") else frozenset())
        plan.do("capset", plan.data(_CAPABILITY_HEAD), plan.data(sets), text="keep capabilities")
    if spec.get("no_new_privileges"):
        plan.do("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, text="forbid new privileges")
    die_with_parent(plan)


def execute(plan: Plan, argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """The end of a plan."""
    name = argv[0]
    places = environment["PATH"].split(":") if "/" not in name else [""]
    *others, last = [plan.text(f"{place}/{name}" if place else name) for place in places]
    given = (plan.vector(argv), plan.vector(f"{key}={value}" for key, value in environment.items()))
    text = f"exec: {name!r}"
    if others:
        for path in (*others, last):
            plan.do("execve", path, *given, accept=ANY, text=text)
    for path in others:  # none of them: the first that is there and cannot be executed says why
        plan.do("execve", path, *given, accept=_NOT_FOUND, text=text)
    plan.do("execve", last, *given, text=text)


@lru_cache(maxsize=64)
def _capability_sets(kept: frozenset[int]) -> bytes:
    """Effective, permitted and inheritable ones, in halves: what the program gets from the bounding set, and nothing to
    hand on."""
    mask = sum(1 << one for one in kept) & _own_capabilities()
    low, high = mask & 0xFFFFFFFF, mask >> 32
    return struct.pack("=6I", low, low, 0, high, high, 0)


def _own_capabilities() -> int:
    """Nobody can keep more than there is; the machine's may be fewer than all."""
    lines = container_state.content_of("/proc/self/status").splitlines()
    return int(next(line for line in lines if line.startswith(b"CapPrm:")).split()[1], 16)


@lru_cache(maxsize=64)
def _drops(kept: frozenset[int]) -> Calls:
    """From the bounding set; a kernel may not know every capability."""
    dropped = [(_PR_CAPBSET_DROP, one, 0, 0, 0) for one in range(_LAST_CAPABILITY + 1) if one not in kept]
    return Calls.of("prctl", dropped, text="drop capabilities", accept=_UNKNOWN)


def _write_to(plan: Plan, path: str, content: bytes) -> None:
    text = f"write to {path}"
    fd = plan.get("openat", AT_FDCWD, path, os.O_WRONLY | os.O_CLOEXEC, 0, text=text)
    plan.do("write", fd, plan.data(content), len(content), text=text)
    plan.do("close", fd, text=text)
