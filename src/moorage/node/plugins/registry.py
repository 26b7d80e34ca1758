"""The drivers that are registered now, and the connection to each.

Owns: name to driver, one client per driver, what each driver can do.
May not touch: the API, the registration directory; `manager.py` fills it.
Start reading at: `Registry.get`, `Driver.capabilities`.
"""

import asyncio
from collections.abc import Callable

from moorage.csi.capabilities import node_capabilities
from moorage.csi.client import CsiClient
from moorage.csi.pending import PendingCall
from moorage.errors import MoorageError

CALL_TIMEOUT_S = 120.0


class DriverMissing(MoorageError):
    """No driver of this name has announced itself on this node."""

    code = "UNAVAILABLE"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"driver name {name} not found in the list of registered CSI drivers; is its node plugin running here?"
        )


class RegisteredDriver:
    """One registered driver: its name, its socket, and its capabilities, asked for once per registration."""

    def __init__(self, name: str, endpoint: str, version: tuple[int, ...], timeout_s: float) -> None:
        self.name = name
        self.endpoint = endpoint
        self.version = version
        self.client = CsiClient(endpoint, timeout_s=timeout_s, on_connection_lost=self._forget_capabilities)
        self.client.calls.driver = name
        self._question: asyncio.Task[frozenset[str]] | None = None  # which holds the answer, once it has come
        self._asking: set[asyncio.Task[frozenset[str]]] = set()

    async def capabilities(self) -> frozenset[str]:
        """Names such as STAGE_UNSTAGE_VOLUME; asked again after the driver was restarted. All who wait share one
        question, so that a driver that hangs costs each of them one timeout; who gives up leaves it to the others."""
        if self._question is None:
            self._question = asyncio.create_task(self._ask(), name=f"capabilities of {self.name}")
            self._asking.add(self._question)
            self._question.add_done_callback(self._asked)
        return await asyncio.shield(self._question)

    async def _ask(self) -> frozenset[str]:
        return await node_capabilities(self.client)

    def _asked(self, question: "asyncio.Task[frozenset[str]]") -> None:
        self._asking.discard(question)
        has_failed = question.cancelled() or question.exception() is not None
        if has_failed and question is self._question:
            self._question = None

    def _forget_capabilities(self) -> None:
        """From now on another process answers. Late answers of the one before are ignored."""
        self._question = None

    async def close(self) -> None:
        """Calls are ended, a question among them: those who wait hear that the driver is gone."""
        await self.client.close()
        if self._asking:
            await asyncio.wait(self._asking)


class DriverRegistry:
    """Name to driver. Handlers are told the name of every driver that comes or goes."""

    def __init__(self, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.call_timeout_s = call_timeout_s
        self._drivers: dict[str, RegisteredDriver] = {}
        self._handlers: list[Callable[[str], None]] = []

    def get(self, name: str) -> RegisteredDriver:
        """The driver, or DriverMissing."""
        driver = self._drivers.get(name)
        if driver is None:
            raise DriverMissing(name)
        return driver

    def find(self, name: str) -> RegisteredDriver | None:
        return self._drivers.get(name)

    def calls_in_flight(self) -> list[PendingCall]:
        """Return the calls that registered drivers have not answered yet."""
        return [call for driver in self._drivers.values() for call in driver.client.calls.pending]

    def names(self) -> list[str]:
        return sorted(self._drivers)

    def subscribe(self, handler: Callable[[str], None]) -> None:
        self._handlers.append(handler)

    def add(self, driver: RegisteredDriver) -> None:
        self._drivers[driver.name] = driver
        self._tell(driver.name)

    async def remove(self, driver: RegisteredDriver) -> bool:
        """Take a driver out, if it is still the one registered under its name; its calls are ended."""
        was_there = self._drivers.get(driver.name) is driver
        if was_there:
            del self._drivers[driver.name]
        await driver.close()
        if was_there:
            self._tell(driver.name)
        return was_there

    async def close(self) -> None:
        for driver in list(self._drivers.values()):
            await driver.close()
        self._drivers.clear()

    def _tell(self, name: str) -> None:
        for handler in self._handlers:
            handler(name)
