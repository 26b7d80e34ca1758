"""What an agent finds that was killed while it was starting containers."""

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from moorage.kube.api.client import PatchType
from moorage.kube.objects.pods import Pod
from moorage.node.layout import NodeLayout
from moorage.node.pods.cleanup import find_containers
from moorage.node.runtime import RunningContainer, container_state, process_runtime
from moorage.node.runtime.process_runtime import ProcessRuntime

pytestmark = pytest.mark.root


@pytest.fixture
def attempt(tmp_path):
    directory = tmp_path / "pods" / "u" / "containers" / "main" / "0"
    directory.mkdir(parents=True)
    (directory / "spec.json").write_text("{}")
    return RunningContainer("u", "main", 0, directory, tmp_path / "0.log")


async def test_a_container_that_is_just_being_started_is_waited_for_and_taken_up(attempt):
    lock = os.open(attempt.directory / "spec.json", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    ours = {"shim": os.getpid(), "shim_start": container_state.start_ticks(os.getpid())}
    with subprocess.Popen(["sleep", "1000"]) as first:
        state = {**ours, "pid": first.pid, "started": 1.0}

        def come_up():
            (attempt.directory / "state.json").write_text(json.dumps(state))
            os.close(lock)

        ended = asyncio.Event()
        found = ProcessRuntime(lambda _container: ended.set())
        starts = threading.Timer(0.2, come_up)
        starts.start()
        assert found.find(attempt)  # the agent does nothing else yet, so this waits
        starts.join()
        assert attempt.is_running
        first.kill()
        await asyncio.sleep(0.1)
        assert not ended.is_set()  # it has ended, but how is about to be written
        container_state.write(str(attempt.directory / "state.json"), state | {"exit_code": 5})
        async with asyncio.timeout(30):
            await ended.wait()
        assert attempt.exit_code == 5
        await found.close()


async def test_an_end_that_is_written_after_the_process_is_gone_is_waited_for(attempt, monkeypatch):
    """As by the process beside each container that an earlier version started."""
    monkeypatch.setattr(process_runtime, "_END_LAST_S", 60.0)
    with subprocess.Popen(["sleep", "1000"]) as first:
        state = {
            "shim": os.getpid(),
            "shim_start": container_state.start_ticks(os.getpid()),
            "pid": first.pid,
            "started": 1.0,
        }
        container_state.write(str(attempt.directory / "state.json"), state)
        ended = asyncio.Event()
        found = ProcessRuntime(lambda _container: ended.set())
        assert found.find(attempt)
        first.kill()
    await asyncio.sleep(0.1)
    assert not ended.is_set()
    container_state.write(str(attempt.directory / "state.json"), state | {"exit_code": 5})
    async with asyncio.timeout(30):
        await ended.wait()
    assert attempt.exit_code == 5
    await found.close()


async def test_a_container_that_was_never_started_is_no_attempt(lab):
    """The agent went between writing down what to start and starting it."""
    agent = await lab.start_agent()
    pod = await lab.pod(claim="", restartPolicy="Never", container={"image": "nginx"})
    await lab.until(lambda: pod.uid in agent.pods.workers, what="seen")
    await lab.crash_agent()
    directory = lab.root / "pods" / pod.uid / "containers" / "main" / "0"
    directory.mkdir(parents=True)
    (directory / "spec.json").write_text(json.dumps({"argv": ["true"]}))
    image = {"spec": {"containers": [{"name": "main", "image": "host"}]}}
    await lab.client.patch(Pod, "p1", image, "default", how=PatchType.STRATEGIC)
    await lab.start_agent()
    found = await lab.phase("p1", "Running")
    (one,) = found.status.container_statuses
    assert (one.restart_count, one.last_state) == (0, {})
    await lab.end("p1")


async def test_a_pod_that_goes_on_as_before_is_not_written_to_by_the_next_agent(lab):
    await lab.start_agent()
    await lab.pod(claim="")
    before = await lab.phase("p1", "Running")
    await lab.crash_agent()
    agent = await lab.start_agent()
    await lab.until(lambda: agent.statuses.last(before.uid), what="a status")
    found = await lab.client.get(Pod, "p1", "default")
    assert found.version == before.version
    assert agent.statuses.is_echo(found)  # nothing is on its way either
    await lab.end("p1")


async def test_a_container_whose_state_cannot_be_read_is_over(attempt):
    (attempt.directory / "state.json").write_text("{ nonsense")
    ended = []
    assert ProcessRuntime(ended.append).find(attempt)
    assert (attempt.is_running, attempt.exit_code, attempt.state["reason"]) == (False, 137, "ContainerStatusUnknown")
    assert ended == [attempt]


def test_stray_files_among_the_records_are_passed_over(tmp_path, attempt):
    containers = tmp_path / "pods" / "u" / "containers"
    for path in (tmp_path / "pods" / "notes.txt", containers / "core", containers / "main" / "1"):
        path.touch()
    (containers / "main" / "old").mkdir()
    found = find_containers(NodeLayout(tmp_path))
    assert list(found) == ["u"]
    assert [(one.name, one.attempt) for every in found["u"].values() for one in every] == [("main", 0)]


async def test_a_start_that_hangs_does_not_hold_the_agent_up_for_good(attempt, monkeypatch):
    monkeypatch.setattr(process_runtime, "_START_TIMEOUT_S", 0.05)
    lock = os.open(attempt.directory / "spec.json", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    assert not ProcessRuntime(lambda _container: None).find(attempt)
    os.close(lock)


def is_locked(attempt):
    spec = os.open(attempt.directory / "spec.json", os.O_RDONLY)
    try:
        fcntl.flock(spec, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(spec)


async def test_the_specification_is_locked_until_the_state_is_there(lab, attempt):
    ended = asyncio.Event()
    starter = ProcessRuntime(lambda _container: ended.set())
    start, let_go = await held_start(lab, attempt, starter)
    assert not start.done()
    with let_go():
        await start
    assert attempt.is_running
    await lab.until(lambda: not is_locked(attempt), what="the lock given back")
    starter.kill(attempt)
    async with asyncio.timeout(30):
        await ended.wait()
    await starter.close()


async def held_start(lab, attempt, starter):
    """A start whose process waits before it can become the container; and what lets it go on."""
    (attempt.directory / "spec.json").unlink()
    group = attempt.directory.parent / "group"
    group.mkdir()
    os.mkfifo(group / "cgroup.procs")
    spec = {"argv": ["sleep", "1000"], "env": {}, "hostname": "h", "mounts": [], "cgroups": [str(group)]}
    start = asyncio.create_task(starter.start(attempt, spec))
    await lab.until(lambda: (attempt.directory / "state.json").exists() and is_locked(attempt), what="the lock")
    return start, lambda: (group / "cgroup.procs").open("r+b", buffering=0)


async def test_a_container_comes_up_although_its_agent_went_meanwhile(lab, attempt):
    starter = ProcessRuntime(lambda _container: None)
    start, let_go = await held_start(lab, attempt, starter)
    start.cancel()  # as when the agent is killed or stopped: nobody waits for the answer any more
    await asyncio.gather(start, return_exceptions=True)
    with let_go():
        await lab.until(lambda: not is_locked(attempt), what="the lock given back")
    ended = asyncio.Event()
    following = ProcessRuntime(lambda _container: ended.set())
    following.find(attempt)
    assert attempt.is_running
    following.kill(attempt)
    async with asyncio.timeout(30):
        await ended.wait()
    assert attempt.exit_code == 137
    assert "finished" in attempt.state  # the supervisor was there to the end: nothing but the signal has ended it
    for one in (starter, following):
        await one.close()


async def test_a_container_that_comes_up_too_late_is_ended(lab, attempt, monkeypatch):
    starter = ProcessRuntime(lambda _container: None)
    monkeypatch.setattr(process_runtime, "_START_TIMEOUT_S", 1.0)
    start, let_go = await held_start(lab, attempt, starter)
    with pytest.raises(process_runtime.ContainerFailed, match="did not start"):
        await start
    assert not attempt.is_ended
    with let_go():
        state = await lab.until(lambda: ended_state(attempt), what="end")
    assert state["signal"] == signal.SIGKILL
    assert not os.path.exists(f"/proc/{state['pid']}")
    await starter.close()


def ended_state(attempt):
    state = process_runtime.read_state(attempt.directory)
    return state if "exit_code" in state and not os.path.exists(f"/proc/{state['pid']}") else None


async def test_a_start_that_hangs_holds_up_no_other(lab, attempt, tmp_path):
    ended = asyncio.Event()
    starter = ProcessRuntime(lambda container: ended.set() if container.uid == "v" else None)
    start, let_go = await held_start(lab, attempt, starter)
    other = RunningContainer("v", "main", 0, tmp_path / "pods" / "v" / "containers" / "main" / "0", tmp_path / "v.log")
    spec = {"argv": ["sh", "-c", "echo said; exit 4"], "env": {}, "hostname": "h", "mounts": []}
    await starter.start(other, spec)
    async with asyncio.timeout(30):
        await ended.wait()
    assert other.exit_code == 4
    assert other.log.read_text().endswith("stdout F said\n")
    assert not start.done()
    with let_go():
        await start
    starter.kill(attempt)
    await lab.until(lambda: attempt.is_ended, what="end")
    await starter.close()


async def test_one_that_fails_before_it_is_on_record_says_why_and_leaves_no_record(lab, attempt):
    starter = ProcessRuntime(lambda _container: None)
    await starter.open()
    on_record = attempt.directory / "state.json.new"
    os.mkfifo(on_record)  # the supervisor waits here, and its child goes on
    spec = {"argv": ["true"], "env": {}, "hostname": "h", "mounts": [{"source": "/none", "target": "/x"}]}
    start = asyncio.create_task(starter.start(attempt, spec))
    children = f"/proc/{starter._supervisors.current.pid}/task/{starter._supervisors.current.pid}/children"

    def has_failed():
        with open(children) as file:
            pids = file.read().split()
        return pids and all(" Z " in container_state.content_of(f"/proc/{pid}/stat").decode() for pid in pids)

    await lab.until(has_failed, what="a child that has ended")
    with (
        on_record.open("r+b", buffering=0),
        pytest.raises(process_runtime.NotCreated, match="No such file or directory"),
    ):
        await start
    assert not (attempt.directory / "state.json").exists()
    await starter.close()


async def test_a_supervisor_that_hangs_is_left_for_another(lab, attempt, tmp_path, monkeypatch):
    starter = ProcessRuntime(lambda _container: None)
    await starter.open()
    spec = {"argv": ["sleep", "1000"], "env": {}, "hostname": "h", "mounts": []}
    hangs = starter._supervisors.current.pid
    os.kill(hangs, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(process_runtime, "_START_TIMEOUT_S", 0.5)
        with pytest.raises(process_runtime.ContainerFailed, match="did not start"):
            await starter.start(attempt, spec)
    other = RunningContainer("v", "main", 0, tmp_path / "pods" / "v" / "containers" / "main" / "0", tmp_path / "v.log")
    await starter.start(other, spec)
    assert other.is_running
    assert other.state["shim"] != hangs
    os.kill(hangs, signal.SIGCONT)
    await lab.until(lambda: not os.path.exists(f"/proc/{hangs}"), what="the one that was left gone, and no zombie")
    assert not (attempt.directory / "state.json").exists()  # what it came to too late it has not begun
    starter.kill(other)
    await lab.until(lambda: other.is_ended, what="end")
    await starter.close()


async def test_a_supervisor_goes_on_without_its_agent_for_as_long_as_it_has_containers(lab, attempt):
    starter = ProcessRuntime(lambda _container: None)
    command = "trap 'echo last words; exit 6' TERM; echo up; while :; do sleep 0.05; done"
    await starter.start(attempt, {"argv": ["sh", "-c", command], "env": {}, "hostname": "h", "mounts": []})
    await lab.until(attempt.log.exists, what="output")
    supervisor = attempt.state["shim"]
    assert supervisor == starter._supervisors.current.pid
    await starter.close()
    assert os.path.exists(f"/proc/{supervisor}")
    ended = asyncio.Event()
    following = ProcessRuntime(lambda _container: ended.set())
    again = RunningContainer("u", "main", 0, attempt.directory, attempt.log)
    assert following.find(again)
    following.stop(again)
    async with asyncio.timeout(30):
        await ended.wait()
    assert again.exit_code == 6
    assert attempt.log.read_text().endswith("stdout F last words\n")
    await following.close()
    status = await asyncio.to_thread(os.waitpid, supervisor, 0)
    assert status == (supervisor, 0)  # its last container has ended, and so has it


_AGENT = """
import asyncio, sys
from pathlib import Path
from moorage.node.runtime import RunningContainer
from moorage.node.runtime.process_runtime import ProcessRuntime

async def main():
    runtime = ProcessRuntime(lambda container: None)
    await runtime.open()
    print(runtime._supervisors.current.pid, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    place = Path(sys.argv[1])
    spec = {"argv": ["sleep", "1000"], "env": {}, "hostname": "h", "mounts": []}
    task = asyncio.create_task(runtime.start(RunningContainer("u", "main", 0, place, place / "log"), spec))
    while not (place / "spec.json").exists():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    print("asked", flush=True)
    await task

asyncio.run(main())
"""


async def test_nothing_is_started_for_an_agent_that_is_gone(lab, attempt):
    """What it had asked for may still be in the socket; the next agent would start it a second time."""
    (attempt.directory / "spec.json").unlink()
    pipe = asyncio.subprocess.PIPE
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _AGENT, str(attempt.directory), stdin=pipe, stdout=pipe
    )
    supervisor = int(await agent.stdout.readline())
    pidfd = os.pidfd_open(supervisor)
    ready = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ready.set)
    try:

        def is_up():
            # The last thing before it serves. Stopped earlier it would hold the agent's output open, and that a
            # process has ended is told when its pipes have as well.
            return os.readlink(f"/proc/{supervisor}/fd/1") == os.devnull

        await lab.until(is_up, what="supervisor serving")
        os.kill(supervisor, signal.SIGSTOP)  # busy, with a request in the socket
        agent.stdin.write(b"go\n")
        assert await agent.stdout.readline() == b"asked\n"
        agent.kill()
        await agent.wait()
        os.kill(supervisor, signal.SIGCONT)
        async with asyncio.timeout(30):
            await ready.wait()
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        if not ready.is_set():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
    assert [one.name for one in attempt.directory.iterdir()] == ["spec.json"]
    assert not is_locked(attempt)
