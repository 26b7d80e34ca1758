"""A server process for real clients."""

import asyncio
import os
import subprocess
import threading
from shutil import which

import pytest

from moorage.apiserver.run import ApiServer, Config


class Cluster:
    """The server in a thread of its own, so that blocking clients can talk to it."""

    def __init__(self, directory):
        self._ready = threading.Event()
        self._directory = directory
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="apiserver")

    async def _run(self):
        self.server = ApiServer(Config(self._directory, in_memory=True))
        await self.server.start()
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        await self.server.stop()

    def start(self):
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    @property
    def kubeconfig(self):
        return self.server.kubeconfig


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    running = Cluster(tmp_path_factory.mktemp("cluster"))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def kubectl(cluster, tmp_path):
    if which("kubectl") is None:
        pytest.skip("there is no kubectl on the PATH")
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(tmp_path)}

    def run(*arguments, stdin=None, fails=False, timeout=60, env=None):
        done = subprocess.run(
            ["kubectl", *arguments], input=stdin, capture_output=True, text=True, timeout=timeout,
            env={**environment, **(env or {})}, check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, f"kubectl {arguments}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr if fails else done.stdout

    run.environment = environment
    return run
