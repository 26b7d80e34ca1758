"""Parts are kept running, named when they fail, and gone when the supervisor is."""

import asyncio
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from moorage.cluster import supervisor as supervise
from moorage.cluster.run import Cluster
from moorage.cluster.settings import UpSettings
from moorage.cluster.supervisor import Part, ProcessSupervisor


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch):
    monkeypatch.setattr(supervise, "_BACKOFF_START_S", 0.01)


async def until(holds):
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_process_that_dies_is_started_again_and_its_end_is_named(tmp_path):
    supervisor = ProcessSupervisor()
    part = Part("sleeper", command=["sleep", "60"], log_file=tmp_path / "log")
    supervisor.start(part)
    await until(lambda: part.pid)
    first = part.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: part.pid not in (0, first))
    assert part.restarts == 1
    assert part.last_failure == "was killed by signal 9"
    await supervisor.stop(["sleeper"])
    assert part.state == "stopped"
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


async def test_a_command_that_is_not_there_is_named_and_tried_again():
    supervisor = ProcessSupervisor()
    part = Part("nothing", command=["/no/such/program"])
    supervisor.start(part)
    await until(lambda: part.restarts >= 2)
    assert "No such file" in part.last_failure
    await supervisor.stop(["nothing"])


async def test_a_coroutine_that_fails_is_started_again():
    supervisor, runs = ProcessSupervisor(), []

    async def fails_once() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise ValueError("the first time")
        await asyncio.sleep(60)

    part = Part("inside", coroutine=fails_once)
    supervisor.start(part)
    await until(lambda: len(runs) == 2)
    assert part.last_failure == "the first time"
    await supervisor.stop(["inside"])


async def test_a_part_that_ignores_sigterm_is_killed(tmp_path):
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    supervisor = ProcessSupervisor()
    part = Part("stubborn", command=[sys.executable, "-c", stubborn], log_file=tmp_path / "log", stop_grace_s=0.2)
    supervisor.start(part)
    await until(lambda: (tmp_path / "log").exists() and "up" in (tmp_path / "log").read_text())
    pid = part.pid
    await supervisor.stop(["stubborn"])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_children_die_with_a_killed_supervisor():
    script = (
        "import asyncio\n"
        "from moorage.cluster.supervisor import Part, ProcessSupervisor\n"
        "async def main():\n"
        "    supervisor = ProcessSupervisor()\n"
        "    part = Part('p', command=['sleep', '60'])\n"
        "    supervisor.start(part)\n"
        "    while not part.pid: await asyncio.sleep(0.01)\n"
        "    print(part.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()

    def is_gone() -> bool:
        try:
            with open(f"/proc/{child}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    await until(is_gone)
    assert is_gone()


async def test_a_driver_that_crashes_is_told_in_events_about_its_node(tmp_path, monkeypatch):
    cluster, told = Cluster(UpSettings(tmp_path)), []
    noting = SimpleNamespace(warning=lambda about, *words: told.append((about.kind, about.name, *words)))
    monkeypatch.setattr(cluster, "_recorder", noting)
    cluster.supervisor.start(Part("node-1-driver", command=["sh", "-c", "exit 3"]))
    cluster.supervisor.start(Part("other", command=["sh", "-c", "exit 4"]))
    await until(lambda: len(told) >= 2)
    assert set(told) == {("Node", "node-1", "DriverExited", "exited with code 3")}
    await cluster.supervisor.stop(["node-1-driver", "other"])


async def test_a_part_that_dies_while_others_are_stopped_is_started_again():
    supervisor = ProcessSupervisor()
    driver, agent = Part("driver", command=["sleep", "60"]), Part("agent", command=["sleep", "60"])
    for part in (driver, agent):
        supervisor.start(part)
    await until(lambda: driver.pid and agent.pid)
    first = driver.pid
    await supervisor.stop(["agent"])
    os.kill(first, signal.SIGKILL)
    await until(lambda: driver.pid not in (0, first))  # the agent of a node cannot unmount without its driver
    await supervisor.stop(["driver"])
    assert (agent.state, driver.state) == ("stopped", "stopped")
