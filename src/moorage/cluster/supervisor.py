"""Parts that are kept running: started, watched, started again with back-off, stopped in order.

Owns: child processes and in-process parts of `moorage up`, and what is known of each (for the status line).
May not touch: what a part does.
Start reading at: `Supervisor.run_part`, `Supervisor.stop`.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moorage.log import get_logger

log = get_logger(__name__)

_BACKOFF_START_S = 0.5
_BACKOFF_MAX_S = 30.0
_WELL_AFTER_S = 10.0
_PR_SET_PDEATHSIG = 1


@dataclass
class Part:
    """One thing that runs: a command in its own process, or a coroutine in this one."""

    name: str
    command: Sequence[str] = ()
    coroutine: Callable[[], Awaitable[None]] | None = None
    log_file: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()  # descriptors that the command inherits
    stop_grace_s: float = 20.0

    state: str = "new"
    pid: int = 0
    restarts: int = 0
    last_failure: str = ""
    process: asyncio.subprocess.Process | None = None


class ProcessSupervisor:
    """Keeps parts running until told to stop. Nothing that it started outlives it, not even after SIGKILL."""

    def __init__(self, on_change: Callable[[Part], None] = lambda part: None) -> None:
        self.parts: dict[str, Part] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[str] = set()
        self._on_change = on_change

    def start(self, part: Part) -> None:
        """Begin to keep a part running."""
        self.parts[part.name] = part
        self._tasks[part.name] = asyncio.create_task(self.run_part(part), name=f"keep-{part.name}")

    async def run_part(self, part: Part) -> None:
        """Run a part for ever; each end that was not asked for is named, and waited after, longer each time."""
        backoff_s = _BACKOFF_START_S
        while part.name not in self._stopping:
            began = time.monotonic()
            self._set(part, "running")
            part.last_failure = await self._run_once(part)
            if part.name in self._stopping:
                break
            if time.monotonic() - began > _WELL_AFTER_S:
                backoff_s = _BACKOFF_START_S
            part.restarts += 1
            self._set(part, "restarting")
            log.warning("part ended and is started again", part=part.name, why=part.last_failure, seconds=backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
        self._set(part, "stopped")

    async def stop(self, names: Sequence[str]) -> None:
        """Stop these parts, one after the other: SIGTERM, their grace, then SIGKILL."""
        self._stopping.update(names)  # the others are kept running: a node cannot unmount without its driver
        for name in names:
            part, task = self.parts.get(name), self._tasks.get(name)
            if part is None or task is None:
                continue
            self._set(part, "stopping")
            await self._stop_process(part)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._set(part, "stopped")

    def hurry(self) -> None:
        """Ask the parts that are being stopped a second time. A node's agent then kills its containers."""
        for part in self.parts.values():
            if part.state == "stopping" and part.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    part.process.send_signal(signal.SIGTERM)

    async def _run_once(self, part: Part) -> str:
        if part.coroutine is not None:
            return await self._run_coroutine(part)
        return await self._run_process(part)

    async def _run_coroutine(self, part: Part) -> str:
        assert part.coroutine is not None
        try:
            await part.coroutine()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("part failed", part=part.name)
            return str(error) or type(error).__name__
        return "it ended by itself"

    async def _run_process(self, part: Part) -> str:
        output = open(part.log_file, "ab") if part.log_file else None  # noqa: SIM115 - closed below
        try:
            part.process = await asyncio.create_subprocess_exec(
                *part.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output or asyncio.subprocess.DEVNULL,
                stderr=output or asyncio.subprocess.DEVNULL,
                env={**os.environ, **part.env},
                start_new_session=True,  # Ctrl-C is for us: we stop the parts in order
                pass_fds=part.pass_fds,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            return f"{part.command[0]}: {error.strerror}"
        finally:
            if output is not None:
                output.close()
        part.pid = part.process.pid
        self._on_change(part)
        code = await part.process.wait()
        part.pid, part.process = 0, None
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    async def _stop_process(self, part: Part) -> None:
        process = part.process
        if process is None:
            return
        for number, patience_s in ((signal.SIGTERM, part.stop_grace_s), (signal.SIGKILL, 5.0)):
            try:
                process.send_signal(number)
                await asyncio.wait_for(process.wait(), patience_s)
                return
            except ProcessLookupError:
                return
            except TimeoutError:
                log.warning("part does not stop", part=part.name, signal=number.name, seconds=patience_s)

    def _set(self, part: Part, state: str) -> None:
        if part.state != state:
            part.state = state
            self._on_change(part)


def _die_with_parent() -> None:
    """In the child: be killed when the supervisor is, so that a new one finds the sockets free."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
