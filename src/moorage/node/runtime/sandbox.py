"""A container's first process, from its start to its program.

Runs in forks of the supervisor, with the standard library and `host.libc` only. What may hang, such as a volume whose
server is gone, hangs only this process.
Owns: the order of its steps: control groups, root, streams, identity, and the program that is executed.
Start reading at: `become`.
"""

import contextlib
import errno
import os
import resource
import select
import signal
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from moorage.host.libc import AT_FDCWD
from moorage.node.runtime import KEPT_CAPABILITIES, container_state, namespaces, rootfs, seccomp
from moorage.node.runtime.launch import Report, Unusable, step

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LAST_CAPABILITY = 40
_LONGEST_PATH = 4095
_OOM_SCORE = "/proc/self/oom_score_adj"
_SPAWN_IGNORES = (32, 33)  # the C library's own signals, in every process that it spawns, such as the supervisor
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_KEYCTL_JOIN_SESSION_KEYRING = 1
_CAPABILITY_HEAD = struct.pack("=Ii", 0x20080522, 0)  # the version of the sets that follow, and whose: its own
_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)
_LEFT_ALONE = "the process that starts containers went away"


class SupervisorOrigin(NamedTuple):
    """What differs between the supervisor and its containers: it has more files open, ignores signals, and is the last
    process that the kernel kills if memory runs out, because all containers would end with it."""

    processes: int  # a descriptor of its PID namespace
    process: int  # one of itself
    files: tuple[int, int]
    oom_score: bytes
    ignored: tuple[int, ...]  # signals, which would stay ignored in a program

    @classmethod
    def take(cls, open_files: int) -> "SupervisorOrigin":
        """Describe this process. Containers may have `open_files` files open."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with open(_OOM_SCORE, "rb") as file:
            score = file.read().strip()
        with contextlib.suppress(PermissionError), open(_OOM_SCORE, "wb") as file:
            file.write(b"-999")
        _own_capabilities()  # read here, so that no child has to
        for number in _SPAWN_IGNORES:
            namespaces.reset_signal(number)
        processes = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        ignored = [int(one) for one in signal.valid_signals() if signal.getsignal(one) == signal.SIG_IGN]
        return cls(processes, os.pidfd_open(os.getpid()), (open_files, hard), score, tuple(ignored))

    def return_to_processes(self) -> None:
        """Let later children be of the supervisor's own PID namespace again."""
        namespaces.set_namespace(self.processes, namespaces.CLONE_NEWPID)

    def leave(self) -> None:
        """Restore in a child what a program expects."""
        for number in self.ignored:
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.files)
        _write_to(_OOM_SCORE, self.oom_score)


class ContainerFiles(NamedTuple):
    """The descriptors that a container's first process begins with."""

    go: int  # it reads a byte from it once the container is on record
    out: int
    err: int


def check(spec: Mapping[str, Any]) -> None:
    """Raise Unusable for what the kernel could not take, before anything is made."""
    mounts, devices = spec.get("mounts", ()), spec.get("devices", ())
    paths = [spec.get("cwd") or "", *(one["path"] for one in devices)]
    paths += [one.get(key) or "" for one in mounts for key in ("source", "target", "sub_path")]
    for path in paths:
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise Unusable(f"path {path[:40]!r}... is longer than {_LONGEST_PATH} bytes")
    for text in (*paths, *spec["argv"], *spec["env"], *spec["env"].values()):
        if "\0" in text:
            raise Unusable(f"{text[:80]!r} contains a zero byte")


def filter_of(spec: Mapping[str, Any]) -> bytes:
    """Return the filter of system calls for a container; empty for a privileged one. Called before the fork, so that
    it is built once for all containers."""
    return b"" if spec.get("privileged") else seccomp.filter_for(_kept(spec))


def become(
    report: Report, spec: dict[str, Any], template: rootfs.Template, origin: SupervisorOrigin, files: ContainerFiles
) -> None:
    """Become a container: execute its program, or raise. Nothing of the container exists until `files.go` was read."""
    die_with_parent()
    origin.leave()
    join(spec.get("cgroups", []))
    os.umask(0)
    null = rootfs.enter(spec, template)
    if os.read(files.go, 1) != b"g":
        raise OSError(errno.ESRCH, _LEFT_ALONE)
    report.is_created = True
    os.setsid()
    take_streams((null, files.out, files.err))
    namespaces.close_all_but(report.fd, origin.process)  # before /proc is there, which gives open files names
    rootfs.finish(spec)
    take_identity(spec)
    parent = select.poll()
    parent.register(origin.process, select.POLLIN)
    if parent.poll(0):
        raise OSError(errno.ESRCH, _LEFT_ALONE)
    change_to(spec.get("cwd") or "/")
    execute(spec["argv"], {"PATH": PATH, "HOME": "/", **spec["env"]})


def change_to(directory: str) -> None:
    """Change to the working directory of the program, with the rights of the program."""
    with step(f"working directory {directory!r}"):
        fd = rootfs.open_inside(AT_FDCWD, directory, os.O_DIRECTORY)
        os.fchdir(fd)
        os.close(fd)


def die_with_parent() -> None:
    namespaces.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def join(cgroups: Iterable[str]) -> None:
    """Move the process, which has one thread, into control groups, given as directories. Where a thread can be moved
    (v1), that is cheaper: to move a process, the kernel holds up every fork and every change of a group meanwhile."""
    for directory in cgroups:
        name = "tasks" if os.path.exists(f"{directory}/tasks") else "cgroup.procs"
        _write_to(f"{directory}/{name}", b"0")


def take_streams(streams: Sequence[int]) -> None:
    for number, fd in enumerate(streams):
        os.dup2(fd, number)


def take_identity(spec: Mapping[str, Any]) -> None:
    """Take groups, user and capabilities, and die with the parent. Later steps have the rights of the program, but no
    other process with these rights may inspect this one before its program runs."""
    os.umask(0o022)
    kept = _kept(spec)
    with _unless(errno.ENOSYS):  # a new one without a name: the agent's own may hold keys
        namespaces.keyctl(_KEYCTL_JOIN_SESSION_KEYRING)
    if not spec.get("privileged"):
        seccomp.install(filter_of(spec))
        namespaces.prctl(_PR_SET_DUMPABLE, 0)
        for capability in range(_LAST_CAPABILITY + 1):
            if capability not in kept:
                with _unless(errno.EINVAL):  # a kernel may not know every capability
                    namespaces.prctl(_PR_CAPBSET_DROP, capability)
    with step("take groups"):
        os.setgroups(spec.get("groups", []))
    with step("take a group"):
        os.setgid(spec.get("gid", 0))
    with step("take a user"):
        os.setuid(spec.get("uid", 0))
    if not spec.get("privileged"):
        namespaces.capset(_CAPABILITY_HEAD, _capability_sets(kept if not spec.get("uid") else frozenset()))
    if spec.get("no_new_privileges"):
        namespaces.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    die_with_parent()


def execute(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Execute a program, or raise. If none can be executed, the first that exists gives the reason."""
    name = argv[0]
    places = environment["PATH"].split(":") if "/" not in name else [""]
    reason: OSError | None = None
    for place in places:
        try:
            os.execve(f"{place}/{name}" if place else name, list(argv), environment)
        except OSError as error:
            if reason is None or (reason.errno in _NOT_FOUND and error.errno not in _NOT_FOUND):
                reason = error
    with step(f"exec: {name!r}"):
        raise reason or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _kept(spec: Mapping[str, Any]) -> frozenset[int]:
    return frozenset(spec.get("capabilities", KEPT_CAPABILITIES))


@contextlib.contextmanager
def _unless(number: int) -> Iterator[None]:
    """Ignore one error."""
    try:
        yield
    except OSError as error:
        if error.errno != number:
            raise


@lru_cache(maxsize=64)
def _capability_sets(kept: frozenset[int]) -> bytes:
    """Return the effective, permitted and inheritable sets, in halves. The inheritable set is empty."""
    mask = sum(1 << one for one in kept) & _own_capabilities()
    low, high = mask & 0xFFFFFFFF, mask >> 32
    return struct.pack("=6I", low, low, 0, high, high, 0)


@cache
def _own_capabilities() -> int:
    """The permitted capabilities of this process; the machine may not have all."""
    lines = container_state.content_of("/proc/self/status").splitlines()
    return int(next(line for line in lines if line.startswith(b"CapPrm:")).split()[1], 16)


def _write_to(path: str, content: bytes) -> None:
    with step(f"write to {path}"):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.write(fd, content)
        os.close(fd)
