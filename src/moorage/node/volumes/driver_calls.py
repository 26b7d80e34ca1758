"""What goes around asking a driver, for volumes of both kinds: before, meanwhile, and whether its answer is so.

Owns: what may be concluded from a call, and which places were found mounted after a driver had said that they are not.
Start reading at: `call`, `after_asking`, `confirming`, `Undone.check`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from moorage.csi.errors import CsiError
from moorage.errors import MoorageError
from moorage.host import mountinfo, mounts
from moorage.log import get_logger
from moorage.node.plugins.registry import DriverMissing, DriverRegistry, RegisteredDriver
from moorage.node.volumes import rules
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import StepFailure

log = get_logger(__name__)

_SOON_S = 0.01  # an API server that has hundreds of pods to make answers much later, and drivers would idle


async def driver_and_capabilities(
    registry: DriverRegistry, name: str, step: str
) -> tuple[RegisteredDriver, frozenset[str]]:
    """The driver, ready to be asked; failing here means that it was not asked anything that matters."""
    try:
        driver = registry.get(name)
        return driver, await driver.capabilities()
    except (DriverMissing, CsiError) as error:
        raise StepFailed(StepFailure.TRANSIENT, step, str(error)) from error


async def call(step: str, call: Awaitable[object]) -> None:
    """Await one driver call; its error says what may be concluded."""
    with after_asking(step):
        try:
            await call
        except CsiError as error:
            raise StepFailed(rules.failure_from(error), step, str(error)) from error


@contextmanager
def after_asking(step: str) -> Iterator[None]:
    """What goes wrong in here is a failure of ours, of which the driver knows nothing: what it was asked for is there,
    or may be."""
    try:
        yield
    except StepFailed:
        raise
    except (MoorageError, OSError) as error:
        raise StepFailed(StepFailure.UNCERTAIN, step, str(error)) from error


@contextmanager
def clearing_after(refusal: StepFailed, path: Path) -> Iterator[None]:
    """Remove in here what was prepared for a refused call.

    If that fails, the volume becomes UNCERTAIN, so that teardown runs again.
    """
    try:
        yield
    except (MoorageError, OSError) as left:
        log.warning("directory is left behind", path=str(path), reason=str(left))
        refusal.failure = StepFailure.UNCERTAIN


@asynccontextmanager
async def confirming(check: Coroutine[None, None, None] | None) -> AsyncIterator[None]:
    """The check comes first, unless it takes long: then the driver is asked meanwhile for what no process sees before
    both are done. If the check fails after that, what is there is uncertain, and will be undone."""
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
        except (MoorageError, OSError) as error:
            raise StepFailed(StepFailure.UNCERTAIN, "pod", str(error)) from error
    finally:
        task.cancel()  # its error, if it had one meanwhile, is no news either


def uncover(target: Path) -> None:
    """Before a driver undoes its mount: take away what others have mounted over it. Drivers take off one mount,
    then remove the directory with all that is in it, and that would be what is in the volume."""
    while (mount := _covering(target)) is not None:
        text = "something is mounted over a volume; it is unmounted first"
        log.warning(text, path=str(target), fstype=mount.fstype, source=mount.source)
        mounts.unmount(target, lazy=True)


def _covering(target: Path) -> mountinfo.Mount | None:
    """The mount on top, if it is on another one of this place. That there are two says nothing: each mount below a
    directory that was bind-mounted on itself is there twice, and one goes with the other."""
    found = mountinfo.mounts_at(target)
    beneath = {mount.mount_id for mount in found}
    return next((mount for mount in reversed(found) if mount.parent_id in beneath), None)


class Undone:
    """Places of volumes that no pod uses any more, of one agent."""

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
                raise StepFailed(StepFailure.UNCERTAIN, step, message)
            log.warning("the driver does not know what it has mounted; it is unmounted without it", path=str(target))
        mounts.unmount_all(target)
        self._doubted.discard(target)
