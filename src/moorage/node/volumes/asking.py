"""What goes around asking a driver, for volumes of both kinds: before, meanwhile, and whether its answer is so.

Owns: what may be concluded from a call, and which places were found mounted after a driver had said that they are not.
Start reading at: `called`, `confirming`, `Undone.check`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

from moorage.csi.errors import CsiError
from moorage.host import mountinfo, mounts
from moorage.log import get_logger
from moorage.node.plugins.registry import Driver, DriverMissing, Registry
from moorage.node.volumes import rules
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.world import Failure

log = get_logger(__name__)

_SOON_S = 0.01  # an API server that has hundreds of pods to make answers much later, and drivers would idle


async def driver_and_capabilities(registry: Registry, name: str, step: str) -> tuple[Driver, frozenset[str]]:
    """The driver, ready to be asked; failing here means that it was not asked anything that matters."""
    try:
        driver = registry.get(name)
        return driver, await driver.capabilities()
    except (DriverMissing, CsiError) as error:
        raise StepFailed(Failure.TRANSIENT, step, str(error)) from error


async def called(step: str, call: Awaitable[object]) -> None:
    """Await one driver call; its error says what may be concluded."""
    try:
        await call
    except CsiError as error:
        raise StepFailed(rules.failure_from(error), step, str(error)) from error


@asynccontextmanager
async def confirming(check: Coroutine[None, None, None] | None) -> AsyncIterator[None]:
    """The check comes first, unless it takes long: then the driver is asked meanwhile for what no process sees before
    both are done. If the check fails after that, what is there is nobody's: it is uncertain, and will be undone."""
    if check is None:
        yield
        return
    task = asyncio.create_task(check)
    try:
        await asyncio.wait((task,), timeout=_SOON_S)
        if task.done():
            task.result()
        yield
        try:
            await task
        except StepFailed as error:
            raise StepFailed(Failure.UNCERTAIN, error.step, str(error)) from error
    finally:
        task.cancel()  # its error, if it had one meanwhile, is no news either


class Undone:
    """Places of volumes that nobody uses any more, of one agent."""

    def __init__(self) -> None:
        self._doubted: set[Path] = set()

    def check(self, target: Path, step: str) -> None:
        """After a driver has said that it has unmounted it. A dead mount is taken away. Of a live one the driver is
        asked again; one that says the same again was killed before it wrote down what it had mounted, and will never
        unmount it: then it is unmounted here, which takes no data with it."""
        if mountinfo.mount_at(target) is None:
            self._doubted.discard(target)
            return
        if not mounts.is_corrupted(target):
            if target not in self._doubted:
                self._doubted.add(target)
                message = f"the driver reported success, but {target} is still mounted; it is asked again"
                raise StepFailed(Failure.UNCERTAIN, step, message)
            log.warning("the driver does not know what it has mounted; it is unmounted without it", path=str(target))
        mounts.unmount_all(target)
        self._doubted.discard(target)
