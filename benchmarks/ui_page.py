"""What the live page costs in a full cluster: 5,000 claims, each with volume, pod, attachment and events.

Run: python benchmarks/ui_page.py [--claims 5000] [--seconds 10] [--rate 100]
API server and page each run in a process of their own. Measured: the first answer of the overview; how long a new stuck
claim takes to reach an open page while `--rate` claims change each second; what one change costs the page, against a
cluster of a tenth of the size; its memory; and its processor time while nothing changes and one page is open.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from apiserver_common import Server
from figures import record
from insight_explain import fill

from moorage.kube.api.client import Client
from moorage.kube.api.config import from_kubeconfig
from moorage.kube.objects import PersistentVolumeClaim

HZ = os.sysconf("SC_CLK_TCK")


class Page:
    """`moorage ui` in its own process, and a signed-in session."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._link = folder, ""

    async def __aenter__(self) -> "Page":
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "moorage.cli.main", "ui", "--port", "0", "--token-file", str(self._folder / "token"),
            "--kubeconfig", str(self._folder / "kubeconfig"), stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        while "token=" not in self._link:
            self._link = (await self._process.stdout.readline()).decode().strip()
        self.session = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
        self.base = self._link.partition("/?")[0]
        async with self.session.get(self._link) as answer:
            assert answer.status == 200
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        self._process.terminate()
        await self._process.wait()

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / HZ

    @property
    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 2**20

    async def answer_s(self) -> float:
        began = time.perf_counter()
        async with self.session.get(self.base + "/") as answer:
            await answer.read()
        return time.perf_counter() - began


async def changes(client: Client, rate: float, seconds: float) -> int:
    """Change claims at a steady rate; returns how many were changed."""
    end, count = time.monotonic() + seconds, 0
    while (now := time.monotonic()) < end:
        name = f"data-{count % 500}"
        await client.patch(PersistentVolumeClaim, name, {"metadata": {"labels": {"n": str(count)}}}, "default")
        count += 1
        await asyncio.sleep(max(0.0, 1 / rate - (time.monotonic() - now)))
    return count


async def arrivals(page: Page, client: Client, seconds: float) -> list[float]:
    """Create a claim every quarter of a second; returns how long each took to be part of the open page."""
    created: dict[str, float] = {}
    took: list[float] = []

    async def look() -> None:
        async with page.session.get(page.base + "/live?path=/", timeout=aiohttp.ClientTimeout()) as stream:
            async for line in stream.content:
                shown = [name for name in created if name.encode() in line]
                took.extend(time.monotonic() - created.pop(name) for name in shown)

    looking = asyncio.create_task(look())
    end, at = time.monotonic() + seconds, 0
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "resources": {"requests": {"storage": "1Gi"}}}
    while time.monotonic() < end:
        name = f"arrival-{at}-end"
        await client.create(PersistentVolumeClaim, {"metadata": {"name": name}, "spec": spec}, "default")
        created[name] = time.monotonic()
        at += 1
        await asyncio.sleep(0.25)
        await client.delete(PersistentVolumeClaim, name, "default")
    await asyncio.sleep(1)
    looking.cancel()
    return took


async def measure(claims: int, rate: float, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as text:
        folder = Path(text)
        server = Server(folder)
        await server.start()
        try:
            async with Client(from_kubeconfig(folder / "kubeconfig")) as client:
                await fill(client, claims, 10)
                async with Page(folder) as page:
                    first = statistics.median([await page.answer_s() for _ in range(5)])
                    before, began = page.cpu_s, time.monotonic()
                    looking = asyncio.create_task(arrivals(page, client, seconds))
                    count = await changes(client, rate, seconds)
                    took = sorted(await looking)
                    spent = page.cpu_s - before
                    print(
                        f"  {claims} claims: {count / (time.monotonic() - began):.0f} changes/s, {len(took)} arrivals"
                    )
                    await asyncio.sleep(5)
                    idle = asyncio.create_task(arrivals_none(page, 10.0))
                    before = page.cpu_s
                    await idle
                    return {
                        "first": first,
                        "p99": took[int(len(took) * 0.99)] if took else float("inf"),
                        "change": spent / count,
                        "idle": (page.cpu_s - before) / 10.0 * 100,
                        "memory": page.resident_mib,
                    }
        finally:
            await server.stop()


async def arrivals_none(page: Page, seconds: float) -> None:
    """Keep one page open while nothing changes."""
    timeout = aiohttp.ClientTimeout(total=seconds)
    try:
        async with page.session.get(page.base + "/live?path=/", timeout=timeout) as stream:
            async for _ in stream.content:
                pass
    except TimeoutError:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=100.0)
    options = parser.parse_args()
    small = asyncio.run(measure(options.claims // 10, options.rate, options.seconds))
    full = asyncio.run(measure(options.claims, options.rate, options.seconds))
    growth = full["change"] / small["change"]
    for promise, value, text, bound in (
        ("live page, 5,000 claims: first page", full["first"], f"{full['first'] * 1000:.0f} ms", 0.3),
        (
            "live page, 5,000 claims, 100 changes/s: a change reaches an open page, p99",
            full["p99"],
            f"{full['p99'] * 1000:.0f} ms",
            0.3,
        ),
        ("live page: cost of a change with 10 times the objects", growth, f"{growth:.2f} times", 1.5),
        ("live page, 5,000 claims: memory", full["memory"], f"{full['memory']:.0f} MiB", 120),
        ("live page, 5,000 claims: idle with a page open", full["idle"], f"{full['idle']:.2f} %", 0.5),
    ):
        print(f"{promise}: {text}{'' if value <= bound else '  MISSED'}")
        record(promise, text, value <= bound)


if __name__ == "__main__":
    main()
