"""Running checks against a mutant: the reference driver, the planted bug before it, all in this process.

Owns: the start and the end of both, the restart, and what is cleaned up after a bug that leaves mounts or devices.
Start reading at: `check_mutant`.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from moorage.conformance.engine import run_checks
from moorage.conformance.model import CheckConfig, CheckResult
from moorage.csi.client import CsiClient
from moorage.host import loop, mountinfo, mounts
from moorage.sdk import Driver, Environment
from moorage.sdk.process import serve
from tests.support.mutants.proxy import Proxy
from tests.support.mutants.reference import MIB, Reference

FAST = Path("/dev/shm")  # an fsync costs nothing there


class Mutant:
    """The reference driver with one planted bug, on a socket. It is its own restart command."""

    def __init__(self, directory: Path, planted: Any) -> None:
        self.directory = directory
        self.planted = planted
        self.path = directory / "csi.sock"
        self._stack = contextlib.AsyncExitStack()
        self.proxy: Proxy | None = None
        self._memory: dict[str, Any] = {}

    async def start(self) -> None:
        await self._stack.aclose()  # after a crash, the rest of the process goes as well
        self._stack = contextlib.AsyncExitStack()
        driver: Driver = self.planted.driver()
        state = self.directory / "state"
        backend = f"unix://{self.directory}/real.sock"
        environment = Environment("node-1", state)
        await self._stack.enter_async_context(serve(driver, backend, environment, stop_grace_s=5))
        client = await self._stack.enter_async_context(CsiClient(backend))
        self.proxy = Proxy(self.path, client, self.planted.mutation, self.planted.on, self._memory)
        self._stack.push_async_callback(self.proxy.ended)
        await self.proxy.start()

    async def kill(self) -> None:
        await self._stack.aclose()
        self._stack = contextlib.AsyncExitStack()
        if self.planted.on_kill is not None:
            self.planted.on_kill(self.directory / "state")


@contextlib.asynccontextmanager
async def running(planted: Any) -> AsyncIterator[Mutant]:
    """Run a mutant for the length of the block. Whatever its bug left behind is removed."""
    directory = Path(tempfile.mkdtemp(prefix="mut-", dir=FAST))
    mutant = Mutant(directory, planted)
    try:
        await mutant.start()
        yield mutant
    finally:
        await mutant.kill()
        await asyncio.to_thread(_remove, directory)


def _remove(directory: Path) -> None:
    for mount in reversed(mountinfo.mounts_below(directory)):
        mounts.unmount(mount.target)
    for device in loop.attached(below=directory):
        loop.detach(device)
    shutil.rmtree(directory)


async def check_mutant(planted: Any, only: Sequence[str], **changes: Any) -> list[CheckResult]:
    """Run these checks against a mutant and return their results."""
    async with running(planted) as mutant:
        settings = {
            "size_bytes": 16 * MIB,
            "grown_bytes": 32 * MIB,
            "mutable_parameters": {"speed": "1"},
            "timeout_s": 60.0,
            "block": planted.block,
            **planted.settings,
            **changes,
        }
        config = CheckConfig(f"unix://{mutant.path}", mutant.directory / "at", **settings)
        async with aclosing(run_checks(config, only=only, control=mutant)) as results:
            return [result async for result in results]


def no_bug() -> Any:
    """Return what `running` takes for the reference driver itself."""
    from tests.support.mutants.catalogue import Planted, forwarded

    return Planted("none", "no bug", "", forwarded, frozenset(), Reference)
