"""The system calls that every container runtime refuses by default do not reach the kernel, and programs run."""

import ctypes
import json
import os
import uuid

import pytest

from moorage.node.runtime import KEPT_CAPABILITIES, ContainerFailed

pytestmark = pytest.mark.root
SYS_ADMIN, SYS_TIME, DAC_READ_SEARCH = 21, 25, 2
REFUSED = (
    "acct", "add_key", "bpf", "clock_settime", "delete_module", "fanotify_init", "finit_module", "fsopen",
    "get_mempolicy", "init_module", "io_uring_setup", "kcmp", "kexec_load", "keyctl", "lookup_dcookie", "mbind",
    "mount", "move_mount", "move_pages", "open_by_handle_at", "open_tree", "perf_event_open", "pidfd_getfd",
    "pivot_root", "process_madvise", "quotactl", "reboot", "request_key", "set_mempolicy", "sethostname", "setns",
    "settimeofday", "swapon", "syslog", "umount2", "unshare", "userfaultfd", "vhangup",
)  # fmt: skip
# Called without valid arguments: a call that reaches the kernel fails in another way.
CALLS = """
import ctypes, errno, json, sys
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for name, number in json.loads(sys.argv[1]).items():
    ctypes.set_errno(0)
    libc.syscall(number, -1, -1, -1, -1, -1, -1)
    found[name] = errno.errorcode.get(ctypes.get_errno())
print(json.dumps(found))
"""
NEW_USER, SIGCHLD = 0x10000000, 17


def number_of(name):
    return ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name(name.encode())


async def ran(bench, runtime, *argv, **more):
    container = bench.container(uuid.uuid4().hex)
    try:
        return "\n".join(await bench.ran(runtime, container, bench.spec(*argv, **more)))
    except ContainerFailed as error:
        return str(error)


async def outcomes(bench, runtime, names, **more):
    numbers = {name: number_of(name) for name in names}
    assert all(number >= 0 for number in numbers.values())
    return json.loads(await ran(bench, runtime, "/usr/bin/python3", "-c", CALLS, json.dumps(numbers), **more))


async def test_calls_that_runtimes_refuse_are_refused(bench):
    found = await outcomes(bench, bench.runtime(), REFUSED)
    assert {name: error for name, error in found.items() if error != "EPERM"} == {}


async def test_refused_calls_are_refused_in_exec_too(bench):
    runtime, container = bench.runtime(), bench.container()
    await runtime.start(container, bench.spec("sleep", "1000"))
    read, write = os.pipe()
    script = f"import ctypes, os; print(ctypes.CDLL(None).syscall({number_of('userfaultfd')}, 0))"
    session = await runtime.exec(container, {"argv": ["/usr/bin/python3", "-c", script], "env": {}}, [write] * 3)
    os.close(write)
    assert "pid" in await session.line()
    await session.line()
    session.close()
    with os.fdopen(read) as said:
        assert said.read() == "-1\n"


async def test_a_capability_brings_its_calls(bench):
    """Here the kernel answers, because the filter lets the call through."""
    runtime = bench.runtime()
    for capability, name in ((SYS_ADMIN, "setns"), (SYS_TIME, "settimeofday"), (DAC_READ_SEARCH, "open_by_handle_at")):
        kept = sorted({*KEPT_CAPABILITIES, capability})
        assert (await outcomes(bench, runtime, [name], capabilities=kept))[name] != "EPERM"
    still = await outcomes(bench, runtime, ["keyctl", "kexec_load"], capabilities=[*KEPT_CAPABILITIES, SYS_ADMIN])
    assert set(still.values()) == {"EPERM"}


async def test_no_call_makes_a_user_namespace(bench):
    script = f"""
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(*call):
    result = libc.syscall(*call)
    if result == 0 and call[0] == {number_of("clone")}:
        os._exit(0)
    return errno.errorcode[ctypes.get_errno()] if result < 0 else "made"
print(tried({number_of("clone")}, {NEW_USER | SIGCHLD}, 0, 0, 0, 0))
print(tried({number_of("clone3")}, 0, 0))
print(tried({number_of("unshare")}, {NEW_USER}))
"""
    assert await ran(bench, bench.runtime(), "/usr/bin/python3", "-c", script) == "EPERM\nENOSYS\nEPERM"


async def test_a_call_that_the_profile_does_not_know_does_not_exist(bench):
    script = "import ctypes, errno; l = ctypes.CDLL(None, use_errno=True); l.syscall(9999); "
    script += "print(errno.errorcode[ctypes.get_errno()])"
    assert await ran(bench, bench.runtime(), "/usr/bin/python3", "-c", script) == "ENOSYS"


PROGRAMS = {
    "threads": ["/usr/bin/python3", "-c", "import threading as t; x = t.Thread(target=print, args=['ok']); x.start()"],
    "processes": ["sh", "-c", "(sleep 0 & wait) && ls / | grep -q usr && echo ok"],
    "sockets": ["/usr/bin/python3", "-c", "import socket; a, b = socket.socketpair(); a.send(b'ok'); "
                "socket.socket().close(); print(b.recv(2).decode())"],
    "asyncio": ["/usr/bin/python3", "-c", "import asyncio as a; print(a.run(a.sleep(0, 'ok')))"],
    "files": ["sh", "-c", "cp -a /etc/passwd /tmp/a && chown 5 /tmp/a && mv /tmp/a /tmp/b && tar cf /tmp/c /tmp/b"
              " 2>/dev/null && sort /tmp/b > /dev/null && echo ok"],
    "users": ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "echo", "ok"],
    "chroot": ["chroot", "/", "echo", "ok"],
    "memory": ["/usr/bin/python3", "-c", "import mmap, os; mmap.mmap(-1, 1 << 20); os.memfd_create('x'); print('ok')"],
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
async def test_ordinary_programs_run(bench, name):
    assert await ran(bench, bench.runtime(), *PROGRAMS[name]) == "ok"


async def test_a_privileged_container_has_no_filter(bench):
    said = await ran(bench, bench.runtime(), "grep", "^Seccomp:", "/proc/self/status", privileged=True)
    assert said == "Seccomp:\t0"
