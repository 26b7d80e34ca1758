"""kill -9 under load: every acknowledged write is there afterwards, with the revision that was acknowledged."""

import asyncio
import json
import signal
import sys

import aiohttp
import pytest

MAPS = "/api/v1/namespaces/default/configmaps"
SECRETS = "/api/v1/namespaces/default/secrets"  # the server itself makes none


class Process:
    """`moorage apiserver` as a process that can be killed."""

    def __init__(self, directory):
        self.directory = directory

    async def start(self):
        config = self.directory / "kubeconfig"
        config.unlink(missing_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "moorage.cli.main", "--log-level", "warning", "apiserver",
            "--data-dir", str(self.directory), "--port", "0", "--insecure-port", "0",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(60):
            await self.process.stdout.readline()
            line = (await self.process.stdout.readline()).decode()
            self.url = line.removeprefix("Serving ").strip()
            await self.process.stdout.readline()
        self.token = json.loads(config.read_text())["users"][0]["user"]["token"]

    async def kill(self, number=signal.SIGKILL):
        if self.process.returncode is None:
            self.process.send_signal(number)
        await self.process.wait()
        self.process._transport.close()

    def client(self):
        return aiohttp.ClientSession(self.url, headers={"Authorization": f"Bearer {self.token}"})


@pytest.fixture
async def server(tmp_path):
    process = Process(tmp_path / "data")
    await process.start()
    yield process
    await process.kill()


async def write_until_killed(client, worker, acknowledged):
    """Create, change and delete; remember only what was answered."""
    try:
        for n in range(10_000):
            name = f"w{worker}-{n}"
            async with client.post(MAPS, json={"metadata": {"name": name}, "data": {"n": "0"}}) as response:
                made = await response.json()
                acknowledged[name] = made["metadata"]["resourceVersion"]
            if n % 3 == 0:
                headers = {"Content-Type": "application/merge-patch+json"}
                acknowledged[name] = None  # in doubt until the answer is here
                async with client.patch(f"{MAPS}/{name}", data='{"data":{"n":"1"}}', headers=headers) as response:
                    acknowledged[name] = (await response.json())["metadata"]["resourceVersion"]
            if n % 5 == 0:
                acknowledged[name] = None
                async with client.delete(f"{MAPS}/{name}") as response:
                    assert response.status == 200
                    acknowledged[name] = "deleted"
    except aiohttp.ClientError:
        return


@pytest.mark.parametrize("after_writes", [20, 150])
async def test_no_acknowledged_write_is_lost(server, after_writes):
    acknowledged = {}
    async with server.client() as client:
        workers = [asyncio.create_task(write_until_killed(client, n, acknowledged)) for n in range(8)]
        async with asyncio.timeout(60):
            while len(acknowledged) < after_writes:
                await asyncio.sleep(0.01)
        await server.kill()
        await asyncio.gather(*workers)
    await server.start()
    async with server.client() as client, client.get(MAPS) as response:
        listed = await response.json()
    found = {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in listed["items"]}
    checked = 0
    for name, version in acknowledged.items():
        if version == "deleted":
            assert name not in found
        elif version is not None:
            assert found[name] == version
        checked += version is not None
    assert checked >= after_writes // 2
    highest = max(int(v) for v in acknowledged.values() if v not in (None, "deleted"))
    assert int(listed["metadata"]["resourceVersion"]) >= highest, "revisions never go back"


async def test_a_restart_serves_the_same_revisions_and_watches_resume(server):
    async with server.client() as client:
        async with client.post(SECRETS, json={"metadata": {"name": "a"}}) as response:
            made = await response.json()
        async with client.get(SECRETS) as response:
            version = (await response.json())["metadata"]["resourceVersion"]
    await server.kill(signal.SIGTERM)
    await server.start()
    async with server.client() as client:
        async with client.get(f"{SECRETS}/a") as response:
            assert (await response.json()) == made
        async with client.get(f"{SECRETS}?watch=1&resourceVersion={version}&timeoutSeconds=1") as response:
            assert b'"ERROR"' not in await response.read(), "nothing changed since, so nothing was lost"
