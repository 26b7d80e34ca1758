"""A container's first process, from its fork to its program.

Runs in the process forked from the shim, in the container's namespaces, with the standard library only. The root is
there already (`rootfs.py`).
Owns: control groups, streams, identity, and the program that is executed.
Start reading at: `become`.
"""

import os
from typing import Any

from moorage.node.pods import kernel, rootfs

# What container runtimes leave to a root that is not privileged.
KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31})
_LAST_CAPABILITY = 40
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def become(spec: dict[str, Any], groups: list[int], out: int, err: int, fail: int) -> None:
    """Turn this process into the container; on any failure write why to `fail` and exit."""
    try:
        kernel.reset_signals()
        for group in groups:
            os.write(group, b"0")
        rootfs.finish(spec)
        _take_streams(out, err)
        take_identity(spec)
        _execute(spec)
    except BaseException as error:
        os.write(fail, f"{error}".encode() or repr(error).encode())
    finally:
        os._exit(127)


def open_groups(cgroups: list[str]) -> list[int]:
    """Descriptors of control groups, given as directories. Writing 0 moves the process that writes."""
    return [os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for directory in cgroups]


def join(cgroups: list[str]) -> None:
    """Move this process into control groups."""
    for fd in open_groups(cgroups):
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
