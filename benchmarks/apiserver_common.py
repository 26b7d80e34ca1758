"""A server process and a client for the API server's benchmarks."""

import asyncio
import json
import os
import signal
import ssl
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"


def claim(name):
    return {
        "metadata": {"name": name, "labels": {"app": "bench"}},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "fast",
        },
    }


class Server:
    """`moorage apiserver` in its own process."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.process = None
        self.url = ""
        self.token = ""

    async def start(self):
        began = time.perf_counter()
        (self.directory / "kubeconfig").unlink(missing_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "moorage.cli.main", "--log-level", "warning", "apiserver",
            "--data-dir", str(self.directory), "--port", "0",
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        while not (self.directory / "kubeconfig").exists():
            await asyncio.sleep(0.005)
        config = json.loads((self.directory / "kubeconfig").read_text())
        self.url = config["clusters"][0]["cluster"]["server"]
        self.token = config["users"][0]["user"]["token"]
        async with self.client() as client, client.get("/readyz") as response:
            assert response.status == 200
        return time.perf_counter() - began

    def client(self, limit=0):
        context = ssl.create_default_context(cafile=str(self.directory / "pki" / "ca.crt"))
        return aiohttp.ClientSession(
            self.url,
            headers={"Authorization": f"Bearer {self.token}"},
            connector=aiohttp.TCPConnector(ssl=context, limit=limit),
            timeout=aiohttp.ClientTimeout(total=600),
        )

    def rss_bytes(self):
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def cpu_seconds(self):
        """What the server used so far; on a busy machine it says more than the clock."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def stop(self):
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            await self.process.wait()


@asynccontextmanager
async def server(directory=None):
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as made:
        running = Server(Path(directory or made))
        await running.start()
        try:
            yield running
        finally:
            await running.stop()


async def create(client, name):
    async with client.post(CLAIMS, json=claim(name)) as response:
        body = await response.read()
        assert response.status == 201, body


async def fill(client, count, prefix="c"):
    """Create many claims, 64 at a time."""
    names = iter(f"{prefix}-{n:06d}" for n in range(count))

    async def worker():
        for name in names:
            await create(client, name)

    await asyncio.gather(*(worker() for _ in range(64)))
