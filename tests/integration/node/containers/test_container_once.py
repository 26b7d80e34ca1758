"""What runs, runs once, is known again and is ended whole."""

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from moorage.host import mountinfo
from moorage.host.safe_remove import remove_tree
from moorage.node.runtime import ContainerFailed, container_state
from moorage.node.runtime import process_runtime as module
from moorage.node.runtime.orphans import groups_of

pytestmark = pytest.mark.root
CHANGES_USER = ["setpriv", "--reuid=65534", "--clear-groups", "sleep", "1000"]


async def test_a_start_is_heard_while_a_program_that_was_entered_goes_on(bench):
    runtime, first, second, hanging = bench.runtime(), bench.container(), bench.container("b"), bench.hanging()
    await runtime.start(first, bench.spec("sleep", "1000"))
    starting = asyncio.create_task(runtime.start(second, bench.spec("sleep", "1000", cgroups=[str(hanging)])))
    while not (second.directory / "state.json").exists():
        await asyncio.sleep(0.01)
    with open(os.devnull, "r+b") as null:
        session = await runtime.exec(first, {"argv": ["sleep", "1000"], "env": {}}, [null.fileno()] * 3)
    assert "pid" in await session.line()
    with bench.answering(hanging):
        async with asyncio.timeout(10):
            await starting
    assert second.is_running
    session.close()


async def test_a_fork_that_hangs_holds_up_no_other(bench):
    runtime, names = bench.runtime(), ("a", "b")
    hanging = [bench.hanging() for _ in names]
    containers = [bench.container(name) for name in names]
    first, second = [
        asyncio.create_task(runtime.start(one, bench.spec("sleep", "1000", cgroups=[str(where)])))
        for one, where in zip(containers, hanging, strict=True)
    ]
    while not all((one.directory / "state.json").exists() for one in containers):
        await asyncio.sleep(0.01)
    with bench.answering(hanging[0]):
        async with asyncio.timeout(10):
            await first
    assert not second.done()
    with bench.answering(hanging[1]):
        await second


@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_start_that_was_given_up_never_runs(bench, monkeypatch, is_removed):
    runtime, container, hanging = bench.runtime(), bench.container(), bench.hanging()
    await runtime.start(bench.container("before"), bench.spec("true"))  # its supervisor takes time to come up
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.5)
    with pytest.raises(ContainerFailed, match="did not start"):
        await runtime.start(container, bench.spec("sleep", "1000", cgroups=[str(hanging)]))
    pid = bench.pid_of(container)
    if is_removed:  # the pod was deleted
        remove_tree(container.directory)
    with bench.answering(hanging):
        while bench.lives(pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is over since
                assert b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes()
            await asyncio.sleep(0.01)


async def test_starts_that_a_supervisor_comes_to_too_late_are_not_made(bench, monkeypatch, tmp_path):
    """It hangs itself: its disk does, or the whole machine has stood still."""
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.5)
    volume = tmp_path / "v"
    volume.mkdir()
    runtime = bench.runtime()
    await runtime.open()
    supervisor = runtime._supervisors.current.pid
    pidfd = os.pidfd_open(supervisor)
    os.kill(supervisor, signal.SIGSTOP)
    mounts = [{"source": str(volume), "target": "/v"}]
    starts = [
        runtime.start(bench.container(f"c{number}"), bench.spec("mkdir", f"/v/{number}", mounts=mounts))
        for number in range(10)
    ]
    failures = await asyncio.gather(*starts, return_exceptions=True)
    assert all(isinstance(one, ContainerFailed) for one in failures)
    os.kill(supervisor, signal.SIGCONT)
    await asyncio.to_thread(select.select, [pidfd], [], [], 30)  # it ends when it has nothing left to do
    os.close(pidfd)
    assert not bench.lives(supervisor)
    assert os.listdir(volume) == []


async def test_a_process_of_another_boot_is_not_taken_for_a_container(bench):
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        try:
            container = bench.container()
            container.directory.mkdir(parents=True)
            (container.directory / "spec.json").write_text("{}")
            state = {"pid": bystander.pid, "start": container_state.start_ticks(bystander.pid), "boot": "another"}
            container_state.write(str(container.directory / "state.json"), {**state, "shim": 1, "started": 1.0})
            assert bench.runtime().find(container)
            assert container.is_ended
            assert bystander.poll() is None
        finally:
            bystander.kill()


async def test_another_container_that_has_its_number_is_not_taken_for_it(bench):
    first, other, runtime = bench.container(), bench.container("b"), bench.runtime()
    await runtime.start(first, bench.spec("sleep", "1000"))
    other.directory.mkdir(parents=True)
    (other.directory / "spec.json").write_text("{}")
    container_state.write(str(other.directory / "state.json"), {**first.state, "start": first.state["start"] - 1})
    assert bench.runtime().find(other)
    assert other.is_ended
    assert first.is_running


async def test_the_end_of_an_earlier_attempt_ends_nothing_of_the_later_one(bench, monkeypatch):
    ended = []
    monkeypatch.setattr(module.orphans, "end", ended.append)
    for number in (0, 1):
        container = bench.container(number=number)
        container.directory.mkdir(parents=True)
        document = {"host_pid": True, "number": number}
        (container.directory / "spec.json").write_text(json.dumps(document))
        container_state.write(str(container.directory / "state.json"), {"pid": 0, "shim": 1, "started": 1.0})
    for number in (0, 1):
        assert bench.runtime().find(bench.container(number=number))
    assert [one["number"] for one in ended] == [1]


async def test_the_next_agent_does_not_wait_for_a_start_that_was_given_up(bench, monkeypatch):
    runtime, container, hanging = bench.runtime(), bench.container(), bench.hanging()
    await runtime.start(bench.container("before"), bench.spec("true"))  # its supervisor takes time to come up
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.5)
    with pytest.raises(ContainerFailed):
        await runtime.start(container, bench.spec("sleep", "1000", cgroups=[str(hanging)]))
    waited = []
    monkeypatch.setattr(module, "_wait_for_start", lambda *_: waited.append(1))
    found = bench.container()
    assert bench.runtime().find(found)
    assert not waited
    assert not found.is_running
    assert (found.state["reason"], found.exit_code) == ("StartError", 128)


async def test_a_program_that_has_changed_its_user_goes_with_its_supervisor(bench):
    """The kernel forgets then whose death it should die."""
    runtime, container = bench.runtime(), bench.container()
    await runtime.start(container, bench.spec(*CHANGES_USER))
    pid = bench.pid_of(container)
    while b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        await asyncio.sleep(0.01)
    os.kill(runtime._supervisors.current.pid, 9)
    async with asyncio.timeout(10):
        while container.is_running:
            await asyncio.sleep(0.01)
    assert not bench.lives(pid)
    assert (container.exit_code, container.state["reason"]) == (137, "ContainerStatusUnknown")
    assert container.state["finished"] > container.state["started"]


async def test_the_next_agent_ends_one_that_has_lost_its_supervisor(bench, monkeypatch):
    runtime, container = bench.runtime(), bench.container()
    monkeypatch.setattr(runtime, "_lost", lambda _: None)  # this agent is gone as well
    await runtime.start(container, bench.spec(*CHANGES_USER))
    pid = bench.pid_of(container)
    while b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        await asyncio.sleep(0.01)
    os.kill(runtime._supervisors.current.pid, 9)
    while not runtime._supervisors.current.is_over:
        await asyncio.sleep(0.01)
    found = bench.container()
    assert bench.runtime().find(found)
    async with asyncio.timeout(10):
        while found.is_running:  # until then nothing is started beside it
            await asyncio.sleep(0.01)
    assert not bench.lives(pid)


@pytest.fixture(params=["cgroup", "cgroup2"])
async def group(request):
    """A control group of its own, of either version."""
    found = [mount for mount in mountinfo.mounts() if mount.fstype == request.param]
    if not found:
        pytest.skip(f"no {request.param} is mounted")
    made = Path(found[0].target) / f"moorage-test-{uuid.uuid4().hex}"
    made.mkdir()
    yield made
    for directory in reversed(groups_of(str(made))):
        async with asyncio.timeout(10):
            while Path(directory, "cgroup.procs").read_text():
                await asyncio.sleep(0.01)
        os.rmdir(directory)


@pytest.mark.parametrize("is_supervised", [True, False])
@pytest.mark.parametrize("inner", ["", "/a", "/a" * 1100])
async def test_nothing_is_left_of_one_that_sees_the_processes_of_the_host(group, bench, is_supervised, inner):
    """Nor of what it has put into control groups that it has made itself."""
    for depth in range(2, len(inner) + 1, 2):
        os.mkdir(f"{group}{inner[:depth]}")
    runtime, container = bench.runtime(), bench.container()
    script = f"sh -c 'echo 0 > /group{inner}/cgroup.procs; echo $$; exec setsid sleep 1000' & exec sleep 1000"
    mounts = [{"source": str(group), "target": "/group"}]
    document = bench.spec("sh", "-c", script, host_pid=True, privileged=True, cgroups=[str(group)], mounts=mounts)
    await runtime.start(container, document)
    while not container.log.exists() or not container.log.read_text().endswith("\n"):
        await asyncio.sleep(0.01)
    left = int(container.log.read_text().split()[-1])
    bench.pids.add(left)
    assert str(left) in Path(f"{group}{inner}/cgroup.procs").read_text().split()
    if is_supervised:
        runtime.kill(container)
    else:
        os.kill(runtime._supervisors.current.pid, 9)
    while container.is_running:
        await asyncio.sleep(0.01)
    assert not bench.lives(left)


async def test_a_long_environment_is_no_hindrance_to_entering(bench):
    runtime, container = bench.runtime(), bench.container()
    environment = {f"V{number}": "x" * 60_000 for number in range(8)}
    await runtime.start(container, bench.spec("sleep", "1000") | {"env": environment})
    supervisor = runtime._supervisors.current.pid
    read, write = os.pipe()
    request = {"argv": ["sh", "-c", "echo ${#V7}"], "env": environment}
    session = await runtime.exec(container, request, [write, write, write])
    os.close(write)
    assert "pid" in await session.line()
    assert (await session.line())["exit_code"] == 0
    assert os.read(read, 100) == b"60000\n"
    assert runtime._supervisors.current.pid == supervisor
    session.close()
    os.close(read)


async def test_only_the_container_itself_is_entered_whoever_has_its_number_now(bench):
    runtime, container = bench.runtime(), bench.container()
    await runtime.start(container, bench.spec("sleep", "1000"))
    inside = [os.readlink(f"/proc/{container.state['pid']}/ns/{kind}") for kind in ("mnt", "pid", "ipc", "uts")]
    container.state["pid"] = os.getpid()
    read, write = os.pipe()
    link = "cd /proc/self/ns && readlink mnt pid ipc uts"
    session = await runtime.exec(container, {"argv": ["sh", "-c", link], "env": {}}, [write] * 3)
    assert "pid" in await session.line()
    assert await session.line() == {"exit_code": 0}
    assert os.read(read, 1000).decode().split() == inside
    session.close()

    ended = subprocess.Popen(["true"])
    running, container.pidfd = container.pidfd, os.pidfd_open(ended.pid)
    ended.wait()
    session = await runtime.exec(container, {"argv": ["echo", "out"], "env": {}}, [write] * 3)
    os.close(write)
    assert await session.line() == {"error": "the container has ended"}
    assert os.read(read, 1000) == b""
    session.close()
    os.close(container.pidfd)
    os.close(read)
    container.pidfd = running
