"""`moorage node` in a process of its own, with an API server in the test's."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from moorage.host import mountinfo, mounts
from moorage.host.safe_remove import remove_tree
from moorage.kube.api import config as kube_config
from moorage.kube.api.client import Client
from moorage.kube.objects.core import Node
from moorage.node.runtime.cgroups import ContainerCgroups
from moorage.testing import serve
from moorage.testing import until as wait_until

NODE = "e2e-node"


@contextlib.asynccontextmanager
async def run_cluster(directory):
    """A running API server and a client of it."""
    async with serve(directory) as server:
        config = kube_config.from_values(server.insecure_url, server.token)
        async with Client(config) as client:
            yield server, client


@pytest.fixture
def base():
    made = Path("/tmp") / f"moorage-node-e2e-{time.monotonic_ns() % 10**9}"
    made.mkdir()
    yield made
    for state in made.glob("root/pods/*/containers/*/*/state.json"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(json.loads(state.read_text())["shim"], signal.SIGKILL)
    for pod in made.glob("root/pods/*"):
        ContainerCgroups(NODE).remove(pod.name)
    ContainerCgroups(NODE).remove_own()
    left = mountinfo.mounts_below(made)
    for one in reversed(left):
        mounts.unmount(one.target, lazy=True)
    remove_tree(made)
    assert left == []


async def start_agent(base, kubeconfig, client, *more):
    arguments = ("node", "--node-name", NODE, "--root-dir", str(base / "root"), "--kubeconfig", str(kubeconfig), *more)
    with (base / "agent.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "moorage.cli.main", *arguments, stdout=log, stderr=log
        )

    async def ready():
        assert process.returncode is None, (base / "agent.log").read_text()
        text = (base / "agent.log").read_text()
        node = await client.find(Node, NODE)
        return f"agent is ready node={NODE}" in text and node is not None and node.is_ready

    await wait_until(ready, what="agent ready")
    return process


@pytest.fixture
def until():
    return wait_until


@pytest.fixture
def cluster():
    return run_cluster


@pytest.fixture
async def agent():
    """Start an agent below `base`; it is ready when this returns. One that a failed test leaves is ended."""
    started = []

    async def start(*arguments):
        started.append(await start_agent(*arguments))
        return started[-1]

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()
