"""A plugin in a process of its own, for walks, tests and benchmarks.

Owns: starting `moorage plugin`, waiting until it is ready, ending it gently or not.
May not touch: how the plugin works inside.
Start reading at: `PluginProcess`.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.errors import MoorageError


class PluginDied(MoorageError):
    """The process ended while it was waited for; the message carries the end of its log."""


class PluginProcess:
    """`async with PluginProcess(pools) as plugin:` and then `plugin.client`."""

    def __init__(
        self,
        pools: Mapping[str, Path],
        *,
        directory: Path | None = None,
        node_id: str = "node-1",
        flags: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, "-m", "moorage.cli.main", "plugin"),
    ) -> None:
        self._owned = tempfile.TemporaryDirectory(prefix="moorage-plugin-") if directory is None else None
        self.directory = Path(self._owned.name) if self._owned is not None else Path(str(directory))
        self.endpoint = f"unix://{self.directory}/csi.sock"
        self.log_path = self.directory / "plugin.log"
        pool_flags = [f"--pool={name}={path}" for name, path in pools.items()]
        self._argv = [*program, f"--endpoint={self.endpoint}", f"--node-id={node_id}", *pool_flags, *flags]
        self._process: asyncio.subprocess.Process | None = None
        self._client: CsiClient | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise PluginDied("the plugin has not been started")
        return self._process.pid

    @property
    def client(self) -> CsiClient:
        if self._client is None:
            raise PluginDied("the plugin has not been started")
        return self._client

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    async def start(self, timeout_s: float = 60.0, environment: Mapping[str, str] | None = None) -> None:
        """Start the process and wait until it says that it is ready."""
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, stdout=log, stderr=log, env={**os.environ, **(environment or {})}
            )
        if self._client is None:
            self._client = CsiClient(self.endpoint, timeout_s=120)
        ended = asyncio.create_task(self._process.wait())
        ready = asyncio.create_task(self._client.wait_ready(timeout_s))
        try:
            await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
            if ended.done():
                raise PluginDied(f"the plugin ended with {ended.result()}: {self.log[-2000:]}")
            await ready
        finally:
            for task in (ended, ready):
                task.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)

    async def kill(self) -> None:
        """End it in the middle of whatever it does."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        """End it gently; returns its exit status."""
        return await self._end(signal.SIGTERM)

    async def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for the process to end by itself."""
        if self._process is None:
            return 0
        return await asyncio.wait_for(self._process.wait(), timeout_s)

    async def is_answering(self) -> bool:
        try:
            await self.client.wait_ready(1.0)
        except (CsiError, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.stop()
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._owned is not None:
            self._owned.cleanup()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self._process.wait()
