"""What `moorage controllers` tells probes and scrapes: ready when it leads or stands by, and who leads."""

import asyncio
import re
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
from tests.integration.controllers.replay import Stage

from moorage.controllers.run import ControllerSettings, LeaseOptions, checks, run
from moorage.errors import UsageError
from moorage.kube.control.election import ElectionConfig, Elector
from moorage.kube.control.probes import address_from


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def page(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def until(port: int, path: str, pattern: str) -> str:
    async with asyncio.timeout(60):
        while True:
            try:
                status, text = await page(port, path)
            except aiohttp.ClientConnectionError:
                status, text = 0, ""
            if status == 200 and re.search(pattern, text, re.M):
                return text
            await asyncio.sleep(0.05)


async def test_the_leader_and_the_one_that_stands_by_are_ready_and_say_which_they_are(
    stage: Stage, tmp_path: Path
) -> None:
    """Two processes: the metrics are those of a whole process."""
    ports, processes = (free_port(), free_port()), []
    words = ["controllers", "snapshots", "--leader-election", "--leader-election-namespace", "default"]
    words += ["--leader-election-retry-period", "0.2", "--kubeconfig", str(stage.server.kubeconfig)]
    with (tmp_path / "log").open("wb") as log:
        try:
            for port, leads in zip(ports, ("1.0", "0.0"), strict=True):
                command = ("-m", "moorage.cli.main", *words, "--http-endpoint", f"127.0.0.1:{port}")
                processes.append(await asyncio.create_subprocess_exec(sys.executable, *command, stderr=log))
                await until(port, "/healthz", "^ok$")
                status = f'^leader_election_master_status{{name="moorage-controllers"}} {leads}$'
                await until(port, "/metrics", status)
            await until(ports[0], "/metrics", r"^workqueue_depth\{name=")
            await until(ports[0], "/healthz/leader-election", "^ok$")
            processes[0].terminate()
            await asyncio.wait_for(processes[0].wait(), 30)  # a second signal would meet it while it ends
            await until(ports[1], "/metrics", '^leader_election_master_status{name="moorage-controllers"} 1.0$')
        finally:
            for process in processes:
                if process.returncode is None:
                    process.terminate()
            ended = [await asyncio.wait_for(process.wait(), 30) for process in processes]
    assert ended == [0, 0], (tmp_path / "log").read_text()


async def test_who_cannot_read_the_lease_is_not_ready(stage: Stage) -> None:
    port = free_port()
    lease = LeaseOptions(enabled=True, namespace="no-such-namespace", retry_s=0.05)
    settings = ControllerSettings(("binder",), stage.options, lease, f"127.0.0.1:{port}")
    working = asyncio.create_task(run(stage.client, settings))
    assert await until(port, "/healthz/leader-election", "ok") == "ok"  # it lives: starting it again would not help
    assert await page(port, "/healthz") == (503, "the lease could not be read yet")
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


async def test_a_leader_that_does_not_renew_is_unwell(stage: Stage) -> None:
    now = [0.0]
    elector = Elector(stage.client, ElectionConfig("one", "default", "me"), clock=lambda: now[0])
    asked = checks(elector)
    done = asyncio.Event()

    async def work() -> None:
        await done.wait()

    leading = asyncio.create_task(elector.lead(work))
    async with asyncio.timeout(60):
        while not elector.is_leader:
            await asyncio.sleep(0.01)
    assert await asked["/healthz"]() == (200, "ok")
    now[0] = 36.0  # longer than the lease of 15 s and the tolerance
    for check in asked.values():
        assert await check() == (500, "the lease was not renewed in time")
    done.set()
    await leading


async def test_without_a_lease_it_is_ready_as_it_is() -> None:
    assert [await check() for check in checks(None).values()] == [(200, "ok"), (200, "ok")]


def test_a_wrong_address_is_told() -> None:
    with pytest.raises(UsageError, match="'8080x': want an address such as :8080"):
        address_from("8080x")
