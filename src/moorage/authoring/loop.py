"""The loop of a driver author: the driver runs under a cluster, is restarted when its file is saved, and is watched.

Owns: the driver's process, the files that are watched, and what is printed.
Start reading at: `DriverLoop.run`.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moorage.authoring.contract import ContractWatch
from moorage.authoring.proxy import ObservedCall, ObservingProxy
from moorage.cluster.run import Cluster
from moorage.cluster.settings import UpSettings
from moorage.csi.endpoint import is_live
from moorage.errors import UsageError
from moorage.host import loop, mountinfo

NODE = "node-1"
_POLL_S = 0.2
_START_S = 30.0
_STOP_S = 15.0
_QUIET = ("Probe", "GetCapabilities", "GetPluginInfo", "GetPluginCapabilities", "NodeGetInfo", "NodeGetVolumeStats")

Say = Callable[[str, str], None]
"""Print a line in a style: "", "dim", "bold", "yellow" or "red"."""


@dataclass(frozen=True)
class LoopSettings:
    """What is run, and where."""

    script: Path
    data_dir: Path
    options: Sequence[str] = ()
    check_flags: Sequence[str] = ()
    has_cluster: bool = True
    shows_all: bool = False

    @property
    def driver_socket(self) -> Path:
        return self.data_dir / "driver.sock"

    @property
    def proxy_socket(self) -> Path:
        return self.data_dir / "csi.sock"


class DriverLoop:
    """One run of `moorage driver run`. Keys: c checks the driver, r restarts it, q ends."""

    def __init__(self, settings: LoopSettings, say: Say, stop: asyncio.Event) -> None:
        self._settings = settings
        self._say = say
        self._stop = stop
        self._watch = ContractWatch()
        self._keys: asyncio.Queue[str] = asyncio.Queue()
        self._driver: asyncio.subprocess.Process | None = None
        self._readers: set[asyncio.Task[None]] = set()

    def press(self, key: str) -> None:
        """Do what a key asks for, soon."""
        self._keys.put_nowait(key)

    async def run(self) -> None:
        """Run until `stop` is set or q is pressed; nothing is left mounted."""
        settings = self._settings
        if not settings.script.is_file():
            raise UsageError(f"there is no file {settings.script}")
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        async with ObservingProxy(settings.proxy_socket, settings.driver_socket, self._observe):
            try:
                await self._restart()
                if settings.has_cluster:
                    await self._run_in_cluster()
                else:
                    self._say(f"The driver answers on unix://{settings.proxy_socket}", "bold")
                    await self._follow()
            finally:
                await self._end_driver()
                self._report_leaks()

    async def _run_in_cluster(self) -> None:
        """Run the cluster once the driver works for the first time, because it asks the driver for its name."""
        if not await self._wait_for_driver():
            return
        data = self._settings.data_dir / "cluster"
        cluster = Cluster(UpSettings(data_dir=data, driver=f"unix://{self._settings.proxy_socket}").checked())
        try:
            report = await cluster.start()
            self._say(f"A cluster runs with {report.driver} after {report.seconds:.1f} s", "bold")
            self._say(f"  export KUBECONFIG={report.kubeconfig}", "")
            self._say("  kubectl apply -f examples/claim-and-pod.yaml", "")
            self._say("c checks the driver, r restarts it, q ends", "dim")
            await self._follow()
        finally:
            self._say("Stopping: pods end, volumes are unmounted …", "dim")
            await cluster.stop()

    async def _wait_for_driver(self) -> bool:
        """Follow the file until the driver answers. Returns False if the author ended the loop before."""
        while not is_live(self._settings.driver_socket):
            if not await self._turn():
                return False
        return True

    async def _follow(self) -> None:
        while await self._turn():
            pass

    async def _turn(self) -> bool:
        """Wait a moment, then do what the file or a key asks for. Returns False at the end."""
        seen = self._stamp
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._stop.wait()
                return False
        if self._stamped() != seen:
            await self._reload()
        while not self._keys.empty():
            match self._keys.get_nowait():
                case "q":
                    return False
                case "r":
                    await self._restart()
                case "c":
                    await self._check()
        return True

    async def _reload(self) -> None:
        """Restart the driver, unless its file is no Python: then the running one stays."""
        self._stamp = self._stamped()
        try:
            compile(self._settings.script.read_text(), str(self._settings.script), "exec")
        except (SyntaxError, ValueError, OSError) as error:
            where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
            self._say(f"{self._settings.script.name}{where}: {error}", "red")
            self._say("The driver from before runs on; save the file again.", "dim")
            return
        self._say(f"{self._settings.script.name} was saved; the driver is restarted", "bold")
        await self._restart()

    def _stamped(self) -> tuple[tuple[str, int], ...]:
        """Return the times of the Python files beside the script."""
        found = []
        for path in sorted(self._settings.script.parent.glob("*.py")):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.name, path.stat().st_mtime_ns))
        return tuple(found)

    async def _restart(self) -> None:
        await self._end_driver()
        self._stamp = self._stamped()
        settings = self._settings
        command = [sys.executable, str(settings.script), "--endpoint", f"unix://{settings.driver_socket}"]
        command += ["--state-dir", str(settings.data_dir / "state"), "--node-id", NODE, "--log-level", "warning"]
        command += [word for option in settings.options for word in ("--option", option)]
        driver = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self._driver = driver
        reader = asyncio.create_task(self._show_output(driver), name="driver-output")
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                while driver.returncode is None and not is_live(settings.driver_socket):
                    await asyncio.sleep(_POLL_S / 4)
        if driver.returncode is not None:
            await reader
            self._say(f"The driver ended with status {driver.returncode}; save the file to start it again.", "red")
        elif not is_live(settings.driver_socket):
            self._say(f"The driver does not answer on its socket after {_START_S:.0f} s.", "red")

    async def _show_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._say(f"  {line.decode(errors='replace').rstrip()}", "dim")

    async def _end_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None and driver.returncode is None:
            driver.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(driver.wait(), _STOP_S)
            if driver.returncode is None:
                self._say(f"The driver did not stop in {_STOP_S:.0f} s and was killed.", "yellow")
                driver.kill()
                await driver.wait()
        if self._readers:
            await asyncio.wait(self._readers)

    async def _check(self) -> None:
        """Run `moorage check` on the driver itself, not through the proxy."""
        self._say("moorage check …", "bold")
        command = [sys.executable, "-m", "moorage.cli.main", "check", "--endpoint"]
        command += [f"unix://{self._settings.driver_socket}", *self._settings.check_flags]
        check = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        await self._show_output(check)
        failed = await check.wait()
        self._say(
            "The driver failed a check." if failed else "The driver passed every check.", "red" if failed else "bold"
        )

    def _observe(self, call: ObservedCall) -> None:
        # While the driver is restarted, callers try again all the time.
        is_usual = call.code in ("OK", "UNAVAILABLE") and call.method.endswith(_QUIET)
        if not is_usual or self._settings.shows_all:
            took = f"{call.seconds:.3f} s"
            line = f"{call.caller:<15}{call.method:<28}{call.code:<20}{took:>9}  {call.subject}"
            self._say(line.rstrip(), "" if call.code == "OK" else "yellow")
            if call.message:
                self._say(f"{'':<15}{call.message}", "yellow")
        for warning in self._watch.warnings_of(call):
            self._say(f"Contract: {warning}", "red")

    def _report_leaks(self) -> None:
        below = self._settings.data_dir
        left = [f"{mount.target} is still mounted" for mount in mountinfo.mounts_below(below)]
        left += [f"{device.path} still holds {device.backing_file}" for device in loop.attached(below=below)]
        for text in left:
            self._say(f"Contract: a leak: {text}", "red")
