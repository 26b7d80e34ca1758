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

from moorage.kube.client import PatchType
from moorage.kube.objects.core import Pod
from moorage.node.layout import Layout
from moorage.node.pods import runtime
from moorage.node.pods.housekeeping import find_containers
from moorage.node.pods.runtime import Container, Runtime
from moorage.node.pods.shim import start_ticks

pytestmark = pytest.mark.root


@pytest.fixture
def attempt(tmp_path):
    directory = tmp_path / "pods" / "u" / "containers" / "main" / "0"
    directory.mkdir(parents=True)
    (directory / "spec.json").write_text("{}")
    return Container("u", "main", 0, directory, tmp_path / "0.log")


async def test_a_container_that_is_just_being_started_is_waited_for_and_taken_up(attempt):
    lock = os.open(attempt.directory / "spec.json", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    with subprocess.Popen(["sleep", "1000"]) as shim:

        def come_up():
            state = {"shim": shim.pid, "shim_start": start_ticks(shim.pid), "pid": shim.pid, "started": 1.0}
            (attempt.directory / "state.json").write_text(json.dumps(state))
            os.close(lock)

        ended = asyncio.Event()
        found = Runtime(lambda _container: ended.set())
        starts = threading.Timer(0.2, come_up)
        starts.start()
        assert found.find(attempt)  # the agent does nothing else yet, so this waits
        starts.join()
        assert attempt.is_running
        shim.kill()
        async with asyncio.timeout(30):
            await ended.wait()
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
    await lab.delete("p1")
    await lab.gone("p1")
    await lab.stop_agent()


async def test_a_container_whose_state_cannot_be_read_is_over(attempt):
    (attempt.directory / "state.json").write_text("{ nonsense")
    ended = []
    assert Runtime(ended.append).find(attempt)
    assert (attempt.is_running, attempt.exit_code, attempt.state["reason"]) == (False, 137, "ContainerStatusUnknown")
    assert ended == [attempt]


def test_stray_files_among_the_records_are_passed_over(tmp_path, attempt):
    containers = tmp_path / "pods" / "u" / "containers"
    for path in (tmp_path / "pods" / "notes.txt", containers / "core", containers / "main" / "1"):
        path.touch()
    (containers / "main" / "old").mkdir()
    found = find_containers(Layout(tmp_path))
    assert list(found) == ["u"]
    assert [(one.name, one.attempt) for every in found["u"].values() for one in every] == [("main", 0)]


async def test_a_start_that_hangs_does_not_hold_the_agent_up_for_good(attempt, monkeypatch):
    monkeypatch.setattr(runtime, "_START_TIMEOUT_S", 0.05)
    lock = os.open(attempt.directory / "spec.json", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    assert not Runtime(lambda _container: None).find(attempt)
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
    starter = Runtime(lambda _container: ended.set())
    start, let_go = await held_start(lab, attempt, starter)
    assert not start.done()
    let_go()
    await start
    assert attempt.is_running
    await lab.until(lambda: not is_locked(attempt), what="the lock given back")
    starter.kill(attempt)
    async with asyncio.timeout(30):
        await ended.wait()
    await starter.close()


async def held_start(lab, attempt, starter):
    """A start whose shim waits before it can say that it is up; and what lets it go on."""
    (attempt.directory / "spec.json").unlink()
    os.mkfifo(attempt.directory / "state.json.new")
    spec = {"argv": ["sleep", "1000"], "env": {}, "hostname": "h", "mounts": []}
    start = asyncio.create_task(starter.start(attempt, spec))
    await lab.until(lambda: (attempt.directory / "spec.json").exists() and is_locked(attempt), what="the lock")

    def let_go():
        reader = os.open(attempt.directory / "state.json.new", os.O_RDONLY | os.O_NONBLOCK)

        def read():
            try:
                return os.read(reader, 65536)
            except BlockingIOError:
                return b""

        return read

    return start, let_go


async def test_a_container_comes_up_although_its_agent_went_meanwhile(lab, attempt):
    starter = Runtime(lambda _container: None)
    start, let_go = await held_start(lab, attempt, starter)
    start.cancel()  # as when the agent is killed or stopped: nobody waits for the answer any more
    await asyncio.gather(start, return_exceptions=True)
    read = let_go()
    state = json.loads(await lab.until(read, what="state"))
    await lab.until(lambda: not is_locked(attempt), what="the lock given back")
    (attempt.directory / "state.json").unlink()  # the pipe
    runtime.write_state(attempt.directory, state)
    ended = asyncio.Event()
    following = Runtime(lambda _container: ended.set())
    following.find(attempt)
    assert attempt.is_running
    following.kill(attempt)
    async with asyncio.timeout(30):
        await ended.wait()
    assert attempt.exit_code == 137
    assert "finished" in attempt.state  # the shim was there to the end: nothing but the signal has ended it
    for one in (starter, following):
        await one.close()


async def test_a_container_that_comes_up_too_late_is_ended(lab, attempt, monkeypatch):
    starter = Runtime(lambda _container: None)
    monkeypatch.setattr(runtime, "_START_TIMEOUT_S", 1.0)
    start, let_go = await held_start(lab, attempt, starter)
    with pytest.raises(runtime.ContainerFailed, match="did not start"):
        await start
    read = let_go()
    state = json.loads(await lab.until(read, what="state"))
    for pid in (state["shim"], state["pid"]):
        await lab.until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), what="end")
    await starter.close()


_AGENT = """
import asyncio, sys
from moorage.node.pods.runtime import Runtime

async def main():
    runtime = Runtime(lambda container: None)
    await runtime.open()
    print(runtime._process.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_nothing_is_started_for_an_agent_that_is_gone(lab):
    """What it had asked for may still be in the socket; the next agent would start it a second time."""
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", _AGENT, stdout=asyncio.subprocess.PIPE)
    zygote = int(await agent.stdout.readline())
    pidfd = os.pidfd_open(zygote)
    ready = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ready.set)
    try:

        def is_up():
            with open(f"/proc/{zygote}/stat") as stat:
                return stat.read().split()[5] == str(zygote)  # it has made a session of its own: it serves

        await lab.until(is_up, what="zygote serving")
        os.kill(zygote, signal.SIGSTOP)  # busy, with requests in the socket
        agent.kill()
        await agent.wait()
        async with asyncio.timeout(30):
            await ready.wait()
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        if not ready.is_set():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
    assert ready.is_set()
