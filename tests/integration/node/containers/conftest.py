"""Containers and who starts them, without an agent around them."""

import asyncio
import contextlib
import json
import os
import uuid
from pathlib import Path

import pytest

from moorage.node.runtime import RunningContainer
from moorage.node.runtime.process_runtime import ProcessRuntime


class Bench:
    def __init__(self, base):
        self.base = base
        self.runtimes = []
        self.pids = set()

    @staticmethod
    def spec(*argv, **more):
        return {"argv": argv, "env": {}, "hostname": "h", "mounts": [], **more}

    @staticmethod
    def lives(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    def runtime(self):
        self.runtimes.append(ProcessRuntime(lambda _: None))
        return self.runtimes[-1]

    def container(self, name="a", number=0):
        return RunningContainer("u1", name, number, self.base / name / str(number), self.base / "logs" / f"{name}.log")

    def pid_of(self, container):
        self.pids.add(json.loads((container.directory / "state.json").read_text())["pid"])
        return max(self.pids)

    async def ran(self, runtime, container, spec):
        await runtime.start(container, spec)
        while container.is_running:
            await asyncio.sleep(0.01)
        return [line.split(" ", 3)[3] for line in container.log.read_text().splitlines()]

    def hanging(self):
        """A control group that holds up whoever joins it, until it is read."""
        directory = self.base / uuid.uuid4().hex
        directory.mkdir()
        os.mkfifo(directory / "cgroup.procs")
        return directory

    @contextlib.contextmanager
    def answering(self, directory):
        fd = os.open(directory / "cgroup.procs", os.O_RDONLY | os.O_NONBLOCK)
        yield
        os.close(fd)


@pytest.fixture
async def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    for runtime in made.runtimes:
        for container in list(runtime._followed.values()):
            runtime.kill(container)
    for pid in made.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    for runtime in made.runtimes:
        while runtime._followed:
            await asyncio.sleep(0.01)
        await runtime.close()
