"""What the services of one plugin process share.

Owns: the container of shared parts, and the threads in which storage and host calls run.
Start reading at: `Parts`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from moorage.csi.inflight import InFlight
from moorage.plugin.io_limits import IoCgroups
from moorage.plugin.settings import PluginSettings
from moorage.storage import Pool, Pools, errors

P = ParamSpec("P")
T = TypeVar("T")

_MOST_THREADS = 32


class BlockingCalls:
    """Runs blocking calls in threads; a call that has begun always runs to its end."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="work")

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(call, *args, **kwargs))

    def close(self) -> None:
        self._threads.shutdown(wait=True)


@dataclass(frozen=True)
class PluginContext:
    """One object for the services to be made from."""

    settings: PluginSettings
    pools: Pools
    in_flight: InFlight = field(default_factory=InFlight)
    work: BlockingCalls = field(default_factory=BlockingCalls)
    cgroups: IoCgroups = field(default_factory=IoCgroups)
    copies: "Counter[str]" = field(default_factory=Counter)  # by the way they were made
    # Volumes with I/O limits that were seen here: a hint for `tuning`, found again after a restart.
    limited: set[str] = field(default_factory=set)

    @property
    def pool_directories(self) -> list[Path]:
        return [pool.directory for pool in self.pools]

    def pool_of_volume(self, volume_id: str) -> Pool:
        """The pool that has the volume; VolumeNotFound for an unknown id."""
        return _found(self.pools.of_volume(volume_id), errors.VolumeNotFound(volume_id))

    def pool_of_snapshot(self, snapshot_id: str) -> Pool:
        return _found(self.pools.of_snapshot(snapshot_id), errors.SnapshotNotFound(snapshot_id))

    def pool_of_group(self, group_id: str) -> Pool:
        return _found(self.pools.of_group(group_id), errors.GroupNotFound(group_id))


def _found(pool: Pool | None, otherwise: errors.NoSuchObject) -> Pool:
    if pool is None:
        raise otherwise
    return pool


def volume_key(volume_id: str) -> str:
    return f"volume {volume_id}"


def snapshot_key(snapshot_id: str) -> str:
    return f"snapshot {snapshot_id}"


def group_key(group_id: str) -> str:
    return f"group snapshot {group_id}"
