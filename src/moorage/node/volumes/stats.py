"""How full volumes are.

Owns: NodeGetVolumeStats for every mounted CSI volume, asked on request and kept for a minute. No caller
waits long for a driver that does not answer: its volumes are left out.
Start reading at: `VolumeStats.read`.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.csi.pending import PendingCall
from moorage.errors import MoorageError
from moorage.kube.volumes import VolumeName
from moorage.log import get_logger
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.plugins.registry import DriverRegistry
from moorage.node.volumes import rules
from moorage.node.volumes.manager import VolumeManager
from moorage.node.volumes.state import CsiSource, MountState, VolumeUse

log = get_logger(__name__)

KEPT_S = 60.0
_TIMEOUT_S = 10.0
_PATIENCE_S = 5.0  # half of what Prometheus gives a whole answer
_AT_ONCE = 16  # calls to one driver


@dataclass(frozen=True, slots=True)
class Usage:
    """One pod's volume, in bytes and inodes."""

    uid: PodUid
    namespace: str
    pod: str
    volumes: tuple[str, ...]  # its names in the pod
    claim: str
    capacity: int = 0
    available: int = 0
    used: int = 0
    inodes: int = 0
    inodes_free: int = 0
    inodes_used: int = 0
    taken_at: float = 0.0  # seconds since the epoch


class VolumeStats:
    """The figures, no older than a minute."""

    def __init__(
        self,
        layout: NodeLayout,
        registry: DriverRegistry,
        volumes: VolumeManager,
        *,
        kept_s: float = KEPT_S,
        patience_s: float = _PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._layout = layout
        self._registry = registry
        self._volumes = volumes
        self._kept_s = kept_s
        self._patience_s = patience_s
        self._clock = clock
        self._wall = wall
        self._known: dict[tuple[PodUid, VolumeName], tuple[float, Usage]] = {}
        self._asking = asyncio.Lock()

    def calls_in_flight(self) -> list[PendingCall]:
        """Return the calls that drivers have not answered yet."""
        return self._registry.calls_in_flight()

    async def read(self) -> list[Usage]:
        """Every mounted CSI volume; one whose driver does not answer is left out."""
        async with self._asking:
            wanted = self._mounted()
            keys = {(use.pod.uid, use.volume) for use in wanted}
            self._known = {key: value for key, value in self._known.items() if key in keys}
            await self._refresh_all([use for use in wanted if not self._is_fresh(use)])
            return [usage for _, usage in self._known.values()]

    def _is_fresh(self, use: VolumeUse) -> bool:
        known = self._known.get((use.pod.uid, use.volume))
        return known is not None and self._clock() - known[0] < self._kept_s

    async def _refresh_all(self, uses: list[VolumeUse]) -> None:
        turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_AT_ONCE))
        tasks = {asyncio.create_task(self._refresh(use, turns[_driver_of(use)])): use for use in uses}
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=self._patience_s)
        finally:
            late = [task for task in tasks if not task.done()]
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for task in late:
            self._known.pop((tasks[task].pod.uid, tasks[task].volume), None)
        if late:
            drivers = sorted({_driver_of(tasks[task]) for task in late})
            log.warning("volume figures did not come in time", volumes=len(late), drivers=", ".join(drivers))

    def _mounted(self) -> list[VolumeUse]:
        world = self._volumes.world
        return [
            use
            for name, uses in world.desired.items()
            for uid, use in uses.items()
            if isinstance(use.source, CsiSource)
            and (actual := world.actual.get(name)) is not None
            and actual.state_of(uid) is MountState.MOUNTED
        ]

    async def _refresh(self, use: VolumeUse, turn: asyncio.Semaphore) -> None:
        key = (use.pod.uid, use.volume)
        try:
            async with turn:
                usage = await self._ask(use)
        except MoorageError as error:
            log.debug("volume figures are missing", volume=use.volume, reason=str(error))
            self._known.pop(key, None)
            return
        if usage is None:
            self._known.pop(key, None)
        else:
            self._known[key] = (self._clock(), usage)

    async def _ask(self, use: VolumeUse) -> Usage | None:
        source = use.source
        assert isinstance(source, CsiSource)
        driver = self._registry.get(source.driver)
        capabilities = await driver.capabilities()
        if rules.STATS not in capabilities:
            return None
        if source.is_block:
            path = self._layout.block_map(source.spec_name, use.pod.uid)
        else:
            path = self._layout.publish_target(use.pod.uid, source.spec_name)
        request = pb.NodeGetVolumeStatsRequest(volume_id=source.handle, volume_path=str(path))
        taken_at = self._wall()
        answer = await driver.client.NodeGetVolumeStats(request, timeout_s=_TIMEOUT_S)
        if not answer.usage:
            raise CsiError("NodeGetVolumeStats", "INTERNAL", f"driver {source.driver} answered without usage")
        return _usage_from(use, source, answer, taken_at)


def _driver_of(use: VolumeUse) -> str:
    return use.source.driver if isinstance(use.source, CsiSource) else ""


def _usage_from(use: VolumeUse, source: CsiSource, answer: pb.NodeGetVolumeStatsResponse, taken_at: float) -> Usage:
    by_unit = {one.unit: one for one in answer.usage}
    size = by_unit.get(pb.VolumeUsage.BYTES, pb.VolumeUsage())
    inodes = by_unit.get(pb.VolumeUsage.INODES, pb.VolumeUsage())
    return Usage(
        uid=use.pod.uid,
        namespace=use.pod.namespace,
        pod=use.pod.name,
        volumes=use.outer_names,
        claim=source.claim.partition("/")[2],
        capacity=size.total,
        available=size.available,
        used=size.used,
        inodes=inodes.total,
        inodes_free=inodes.available,
        inodes_used=inodes.used,
        taken_at=taken_at,
    )
