"""A disk without room: what a container says and how it ended."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from moorage.kube.objects.pods import Pod
from moorage.node.pods import worker
from moorage.node.runtime import ContainerFailed, RunningContainer, container_state
from moorage.node.runtime import log_writer as log_files
from moorage.node.runtime.process_runtime import ProcessRuntime
from moorage.node.serve.logs import LogOptions, stream

pytestmark = pytest.mark.root


@pytest.fixture
def small(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(place):
    with contextlib.suppress(OSError), (place / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


async def printed(path):
    return b"".join([piece async for piece in stream(path, LogOptions(), lambda: False)]).decode().splitlines()


def test_how_a_container_ended_is_kept_on_a_full_disk(small):
    path = str(small / "state.json")
    running = {"shim": 1, "pid": 2, "started": 1.0}
    container_state.write(path, running)
    fill(small)
    container_state.write(path, running | {"exit_code": 3, "finished": 2.0})
    assert json.loads((small / "state.json").read_text())["exit_code"] == 3
    container_state.write(path, {"exit_code": 4})  # a shorter one leaves nothing of the longer
    assert json.loads((small / "state.json").read_text()) == {"exit_code": 4}


def test_a_state_that_was_never_written_is_an_error_on_a_full_disk(small):
    fill(small)
    with pytest.raises(OSError, match="No space"):
        container_state.write(str(small / "state.json"), {"shim": 1})


async def test_lines_after_a_full_disk_are_whole_again(small):
    path = small / "0.log"
    logs = log_files.ContainerLog(str(path))
    logs.add("stdout", b"first\n")
    fill(small)
    for _ in range(200):  # the last page of the file fills up, in the middle of a line
        logs.add("stdout", b"l" * 100 + b"\n")
    (small / "filler").unlink()
    logs.add("stdout", b"after\nlast\n")
    logs.close()
    lines = await printed(path)
    assert (lines[0], lines[-2:]) == ("first", ["after", "last"])
    assert {line.strip("l") for line in lines[1:-2]} == {""}


async def test_a_log_that_could_not_be_rotated_is_written_again_when_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "_ROTATE_BYTES", 100)
    path = tmp_path / "0.log"
    logs = log_files.ContainerLog(str(path))
    logs.add("stdout", b"l" * 200 + b"\n")

    def refused(_self):
        raise OSError("no room")

    with monkeypatch.context() as full:
        full.setattr(log_files.ContainerLog, "_open", refused)
        logs.add("stdout", b"lost\n")
    logs.add("stdout", b"after\n")
    logs.close()
    assert await printed(path) == ["l" * 200, "after"]


async def test_a_container_that_cannot_be_recorded_is_not_left_running(tmp_path):
    directory = tmp_path / "0"
    directory.mkdir()
    (directory / "state.json.new").symlink_to("/dev/full")
    seconds = f"1000.{time.monotonic_ns()}"
    starter = ProcessRuntime(lambda _container: None)
    attempt = RunningContainer("u", "main", 0, directory, tmp_path / "0.log")
    with pytest.raises(ContainerFailed, match="No space"):
        await starter.start(attempt, {"argv": ["sleep", seconds], "env": {}, "hostname": "h", "mounts": []})
    await starter.close()

    def commands():
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                yield path.read_bytes().split(b"\0")

    assert [b"sleep", seconds.encode(), b""] not in list(commands())


async def test_a_pod_that_may_not_restart_outlasts_a_disk_without_room(lab, monkeypatch):
    monkeypatch.setattr(worker, "_CONFIG_RETRY_S", 0.05)
    lab.root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "small", lab.root], check=True)
    try:
        await lab.start_agent()
        fill(lab.root)
        await lab.pod(claim="", restartPolicy="Never")

        async def held():
            found = (await lab.client.get(Pod, "p1", "default")).status
            reasons = [one.state.get("waiting", {}).get("reason") for one in found.container_statuses]
            return found if reasons == ["CreateContainerError"] else None

        found = await lab.until(held, what="CreateContainerError")
        assert (found.phase, found.container_statuses[0].restart_count) == ("Pending", 0)
        assert "No space left" in found.container_statuses[0].state["waiting"]["message"]
        (lab.root / "filler").unlink()
        found = await lab.phase("p1", "Running")
        assert found.status.container_statuses[0].restart_count == 0
        await lab.delete("p1")
        await lab.gone("p1")
        await lab.stop_agent()
    finally:
        subprocess.run(["umount", "-l", lab.root], check=True)


async def test_a_container_is_started_although_the_supervisor_was_killed(lab, monkeypatch):
    monkeypatch.setattr(worker, "_CONFIG_RETRY_S", 0.05)
    agent = await lab.start_agent()
    os.kill(agent.runtime._supervisors.current.pid, signal.SIGKILL)
    await lab.pod(claim="", restartPolicy="Never")
    found = await lab.phase("p1", "Running")
    assert found.status.container_statuses[0].restart_count == 0
    await lab.delete("p1")
    await lab.gone("p1")
    await lab.stop_agent()
