"""Plugin registration: one task per socket, from the handshake to its disappearance.

Owns: the handshake and its back-off, re-registration of a replaced socket, de-registration.
May not touch: volumes. A driver that hangs holds up its own task and no other.
Start reading at: `PluginManager.run`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.errors import MoorageError
from moorage.log import get_logger
from moorage.node.plugins.csi_node import DriverNodeInfo, NodeDrivers
from moorage.node.plugins.registry import DriverRegistry, RegisteredDriver
from moorage.node.plugins.socket_watch import SocketIdentity, watch
from moorage.node.plugins.versions import Version, highest_usable
from moorage.node.safe_names import is_driver_name

log = get_logger(__name__)

_DIAL_S = 10.0
_GET_INFO_S = 1.0
_NOTIFY_S = 5.0
_BACKOFF_START_S = 0.5
_BACKOFF_MAX_S = 122.0
_NEVER = -1
RefreshPeriod = Callable[[str], float]


class Refused(MoorageError):
    """A plugin that cannot be registered, and why; the plugin gets the same message."""

    code = "FAILED_PRECONDITION"


class PluginManager:
    """Follows the registration directory and keeps `registry` true to it."""

    def __init__(
        self,
        directory: Path,
        registry: DriverRegistry,
        published: NodeDrivers,
        *,
        refresh_period_s: RefreshPeriod = lambda _driver: 0.0,
    ) -> None:
        self._directory = directory
        self._registry = registry
        self._published = published
        self._refresh_period_s = refresh_period_s
        self._tasks: dict[str, tuple[SocketIdentity, asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._news = 0  # how often everything was to be published again
        self._is_stopping = False
        self._untried: set[str] | None = None  # sockets of the first scan that were not asked yet; None before it
        self._tried = asyncio.Event()
        registry.subscribe(lambda _name: self._changed.set())

    def reconsider(self) -> None:
        """A CSIDriver object changed: how often limits are read again may have changed."""
        self._changed.set()

    def publish_again(self) -> None:
        """The Node was recreated: it knows nothing of the drivers that were here before."""
        self._news += 1
        self._changed.set()

    async def first_round(self, timeout_s: float) -> None:
        """Return when every driver that was there at the start has been asked once, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._tried.wait()
        except TimeoutError:
            log.info("not every driver has answered yet", sockets=len(self._untried or ()))

    async def run(self) -> None:
        """Until cancelled. Drivers stay published then: a restart of the agent is no news for the cluster."""
        try:
            async for sockets in watch(self._directory):
                await self._follow(sockets)
        finally:
            self._is_stopping = True
            tasks = [*(task for _, task in self._tasks.values()), *self._leaving]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._registry.close()

    def _was_tried(self, path: str) -> None:
        if self._untried is not None:
            self._untried.discard(path)
            if not self._untried:
                self._tried.set()

    async def _follow(self, sockets: dict[str, SocketIdentity]) -> None:
        if self._untried is None:
            self._untried = set(sockets)
            self._was_tried("")
        for path, (identity, task) in list(self._tasks.items()):
            if sockets.get(path) != identity and not task.cancelling():  # asked once, it ends in its own time
                task.cancel()
        for path, identity in sockets.items():
            known = self._tasks.get(path)
            if known is not None and known[0] == identity:
                continue
            before = known[1] if known is not None else None
            task = asyncio.create_task(self._attend(path, before), name=f"plugin {path}")
            task.add_done_callback(_report)
            self._tasks[path] = (identity, task)
        for path, (_, task) in list(self._tasks.items()):
            if path not in sockets and task.done():
                del self._tasks[path]

    async def _attend(self, path: str, before: asyncio.Task[None] | None) -> None:
        """One socket's life. The one that had this path before is unregistered first."""
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        delay_s = _BACKOFF_START_S
        while True:
            try:
                driver = await self._register(path)
            except Exception as error:  # whatever is wrong with one plugin, it is asked again
                level = log.warning if isinstance(error, MoorageError) else log.exception
                level("plugin was not registered", socket=path, reason=str(error), seconds=delay_s)
                self._was_tried(path)
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, _BACKOFF_MAX_S)
                continue
            self._was_tried(path)
            await self._stay(driver)
            return

    async def _stay(self, driver: RegisteredDriver) -> None:
        """While the socket is there: what NodeGetInfo says is published again as often as the CSIDriver object asks.

        One that lost its name to a higher version has it again when that one is gone."""
        loop = asyncio.get_running_loop()
        published_at, news, delay_s = loop.time(), self._news, _BACKOFF_START_S
        try:
            while True:
                if self._has_name_back(driver):
                    news = _NEVER
                period_s = self._refresh_period_s(driver.name)
                left_s = published_at + period_s - loop.time() if period_s > 0 else None
                if news == self._news and (left_s is None or left_s > 0):
                    await self._change(left_s)
                    continue
                published_at, seen = loop.time(), self._news
                if await self._refresh(driver):
                    news, delay_s = seen, _BACKOFF_START_S
                elif news != seen:
                    await asyncio.sleep(delay_s)
                    delay_s = min(delay_s * 2, _BACKOFF_MAX_S)
        except asyncio.CancelledError:
            await self._part(driver)
            raise

    def _has_name_back(self, driver: RegisteredDriver) -> bool:
        """The same connection is registered again: what the driver is doing is not disturbed."""
        known = self._registry.find(driver.name)
        if known is not None and known.version >= driver.version:
            return False
        log.info("driver has its name back", driver=driver.name, endpoint=driver.endpoint)
        self._registry.add(driver)
        return True

    async def _change(self, timeout_s: float | None) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _refresh(self, driver: RegisteredDriver) -> bool:
        """The number of volumes that a node can take may change while the driver runs."""
        if self._registry.find(driver.name) is not driver:
            return True  # one of a higher version has taken the name
        try:
            await self._publish(driver)
        except MoorageError as error:
            log.warning("driver's limits could not be read again", driver=driver.name, reason=str(error))
            return False
        return True

    async def _publish(self, driver: RegisteredDriver) -> None:
        info = await _node_info(driver)
        if self._registry.find(driver.name) is driver:  # else what one of a higher version has published stays
            await self._published.publish(info)

    async def _register(self, path: str) -> RegisteredDriver:
        async with CsiClient(path, timeout_s=_DIAL_S) as socket:
            await socket.wait_connected(_DIAL_S)
            info = await socket.registration_info(timeout_s=_GET_INFO_S)
            try:
                version = self._checked(info.type, info.name, list(info.supported_versions))
                driver = RegisteredDriver(info.name, info.endpoint or path, version, self._registry.call_timeout_s)
            except MoorageError as error:
                await _tell(socket, False, str(error))
                raise
            try:
                if self._registry.find(driver.name) is not None:  # it takes another's place when it has shown to work
                    await _node_info(driver)
                    self._checked(info.type, info.name, list(info.supported_versions))
                self._registry.add(driver)
                await self._publish(driver)
                await socket.notify_registration(True, timeout_s=_NOTIFY_S)
            except asyncio.CancelledError:
                await self._part(driver)
                raise
            except Exception as error:
                await self._unregister(driver)
                text = str(error)
                await _tell(socket, False, text if info.name in text else f"driver {info.name}: {text}")
                raise
        log.info("driver registered", driver=driver.name, endpoint=driver.endpoint, version=".".join(map(str, version)))
        return driver

    def _checked(self, kind: str, name: str, versions: list[str]) -> Version:
        if kind != "CSIPlugin":
            raise Refused(f"plugin type {kind!r} is not served by this node; only CSIPlugin is")
        if not name:
            raise Refused("the plugin gave no name")
        if not is_driver_name(name):  # it names directories
            raise Refused(f"{name[:63]!r} is not a valid name for a CSI driver")
        best = highest_usable(versions)
        if best is None:
            raise Refused(f"driver {name} offers versions {', '.join(versions) or 'none'}; one of major 1 is needed")
        known = self._registry.find(name)
        if known is not None and best <= known.version:
            raise Refused(
                f"driver {name} is already registered from {known.endpoint} with version "
                f"{'.'.join(map(str, known.version))}; a second one must be of a higher version"
            )
        return best

    async def _part(self, driver: RegisteredDriver) -> None:
        """Its task was cancelled: its socket has gone, or the agent stops, and then it stays published."""
        if self._is_stopping:
            await driver.close()
        else:
            await self._unregister(driver)

    async def _unregister(self, driver: RegisteredDriver) -> None:
        """Not cut short by a cancellation: half-way, the cluster would be left with a driver that is gone."""
        await asyncio.shield(self._own(self._leave(driver)))

    async def _leave(self, driver: RegisteredDriver) -> None:
        if not await self._registry.remove(driver):
            return  # a newer one has taken the name
        log.info("driver is gone", driver=driver.name)
        if self._registry.find(driver.name) is None and not await self._withdrawn(driver.name):
            self._own(self._withdraw_later(driver.name))

    async def _withdraw_later(self, name: str) -> None:
        delay_s = _BACKOFF_START_S
        while True:
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _BACKOFF_MAX_S)
            if self._registry.find(name) is not None or await self._withdrawn(name):
                return  # a driver that came back meanwhile has an entry of its own

    async def _withdrawn(self, name: str) -> bool:
        try:
            await self._published.withdraw(name)
        except MoorageError as error:
            log.warning("driver's entry could not be removed; it is tried again", driver=name, reason=str(error))
            return False
        return True

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="plugin leaves")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task


async def _node_info(driver: RegisteredDriver) -> DriverNodeInfo:
    answer = await driver.client.NodeGetInfo(pb.NodeGetInfoRequest())
    segments = dict(answer.accessible_topology.segments) if answer.HasField("accessible_topology") else {}
    return DriverNodeInfo(driver.name, answer.node_id, segments, max(0, answer.max_volumes_per_node))


async def _tell(socket: CsiClient, registered: bool, error: str) -> None:
    try:
        await socket.notify_registration(registered, error, timeout_s=_NOTIFY_S)
    except CsiError as failed:
        log.debug("plugin could not be told", reason=str(failed))


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("plugin task ended", task=task.get_name(), reason=repr(task.exception()))
